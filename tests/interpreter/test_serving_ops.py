"""What torch is told of the ops that serve: which arguments change, and what torch.compile makes of that."""

from __future__ import annotations

import pytest
import torch

import flashgen
from flashgen.core.errors import WorkloadError
from flashgen.runtime.ops.append import append_op, append_q_op

LENGTHS = torch.tensor([1, 2], dtype=torch.int32)
TABLE = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)


def new(seed: int) -> torch.Tensor:
    return torch.randn(2, 3, 2, 16, generator=torch.Generator().manual_seed(seed))


def test_schemas_say_what_changes() -> None:
    for op in (append_op, append_q_op):
        written = [
            each.name for each in op._schema.arguments if each.alias_info is not None and each.alias_info.is_write
        ]
        assert written == ["k_cache", "v_cache"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_functions_keep_the_order_of_writes() -> None:
    def step(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flashgen.append_kv(k * 2, v, cache[:, 0], cache[:, 1], lengths, block_table=TABLE)
        between = cache.sum()
        outs, lses = k.transpose(1, 2).contiguous(), k[..., 0].mT.contiguous()
        out, lse = flashgen.merge_states([outs, outs], [lses, lses + 1])
        flashgen.append_kv(k * 3, v, cache[:, 0], cache[:, 1], lengths + 1, block_table=TABLE)
        return between, out, lse

    caches = [torch.zeros(4, 2, 8, 2, 16) for _ in range(2)]
    expected = step(new(0), new(1), caches[0], LENGTHS)
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(new(0), new(1), caches[1], LENGTHS)
    assert torch.equal(caches[0], caches[1])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_length_is_refused_without_a_new_token_also_behind_a_call_that_is_right() -> None:
    cache, none = torch.zeros(2, 8, 2, 16), torch.zeros(2, 0, 2, 16)
    flashgen.append_kv(none, none, cache, cache.clone(), 3)
    for wrong in (100, -4):
        with pytest.raises(WorkloadError, match=rf"seqlens is from 0 to .*got {wrong}|must be at least 0, got {wrong}"):
            flashgen.append_kv(none, none, cache, cache.clone(), wrong)


def test_a_position_beside_slots_is_one_that_a_kernel_can_hold() -> None:
    cache, new, slots = torch.zeros(2, 8, 2, 16), torch.ones(2, 1, 2, 16), torch.zeros(2, 1, dtype=torch.int64)
    slots[1] = 9
    for wrong in (2**31, 2**40):
        with pytest.raises(WorkloadError, match=f"seqlens is from 0 to 2147483647, got {wrong}"):
            flashgen.append_kv(new, new, cache, cache.clone(), wrong, slot_mapping=slots)
    flashgen.append_kv(new, new, cache, cache.clone(), 2**31 - 1, slot_mapping=slots)
