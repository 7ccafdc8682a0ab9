"""Tiles of several CTAs on an SM that all run at once: the long ones lie beside the short ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashgen.codegen.common_order import ALL_HEADS
from flashgen.codegen.common_wgmma import NUM_SMS
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.codegen.render import render
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from tests.codegen.gluon_machine import Machine, kernel_of

H200 = find_device("h200")
CAUSAL = Specialization.parse("fwd-bf16-d64-causal")
SMALL: dict[str, KnobValue] = {
    "warpgroups": 1,
    "block_n": 64,
    "blocks_per_sm": 4,
    "v_stages": 2,
    "q_stages": 1,
    "ping_pong": False,
    "qk_prefetch": "none",
    "masked_blocks": "branch",
    "hidden_blocks": "computed",
}


def config(heads: int, **changes: KnobValue) -> Config:
    return HOPPER_FORWARD.default(CAUSAL, H200).replace(**{**SMALL, "heads_per_group": heads, **changes})


def places(found: Config, batch: int, nheads: int, blocks: int) -> Iterator[tuple[int, int, int]]:
    """The first row, the batch and the head of each tile, in the order of CTAs."""
    schedule = kernel_of(render(CAUSAL, found).text, "_schedule", Machine(1))
    tiles = batch * nheads * blocks
    for tile in range(tiles):
        row, b, h = schedule(tile, tiles, nheads, 64 * blocks)  # type: ignore[misc]
        yield int(row), int(b), int(h)


def loads(found: Config, nheads: int, blocks: int) -> list[int]:
    """The blocks of keys that the tiles of each SM see, which gets one CTA a round."""
    total = [0] * NUM_SMS
    for tile, (row, _, _) in enumerate(places(found, 1, nheads, blocks)):
        total[tile % NUM_SMS] += row // 64 + 1
    return total


@pytest.mark.parametrize(
    ("batch", "nheads", "blocks"),
    [(1, 3, 5), (1, 12, 11), (2, 6, 16), (1, 8, 33), (3, 9, 17), (1, 16, 33), (4, 12, 16)],
)
def test_every_tile_is_somebodys(batch: int, nheads: int, blocks: int) -> None:
    for per_sm in (2, 3, 4):
        found = list(places(config(ALL_HEADS, blocks_per_sm=per_sm), batch, nheads, blocks))
        assert len(set(found)) == batch * nheads * blocks
        assert {row for row, _, _ in found} == set(range(0, 64 * blocks, 64))


@pytest.mark.parametrize(("nheads", "blocks"), [(12, 16), (8, 32), (16, 16), (12, 26), (16, 32), (8, 64)])
def test_sms_have_tiles_of_much_the_same_length_together(nheads: int, blocks: int) -> None:
    turned, descending = (loads(config(heads), nheads, blocks) for heads in (ALL_HEADS, 32))
    assert sum(turned) == sum(descending) == nheads * blocks * (blocks + 1) // 2
    # one tile alone may be longer than what an SM has in the mean
    assert max(turned) <= max(blocks, 1.25 * sum(turned) / NUM_SMS)
    assert max(turned) < 0.85 * max(descending)


def test_launches_of_more_tiles_than_ctas_begin_with_the_longest() -> None:
    rows = [row for row, _, _ in places(config(ALL_HEADS), 1, 40, 16)]
    assert len(rows) > 4 * NUM_SMS
    assert rows == sorted(rows, reverse=True)


@pytest.mark.parametrize("changes", [{"heads_per_group": 32}, {"split_keys": True}, {"blocks_per_sm": 1}])
def test_kernels_of_other_orders_are_as_they_were(changes: dict[str, KnobValue]) -> None:
    assert "_turned" not in render(CAUSAL, config(ALL_HEADS).replace(**changes)).text
    assert "_turned" in render(CAUSAL, config(ALL_HEADS)).text
