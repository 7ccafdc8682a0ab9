"""References of the softmax in the Hopper family: which one a default has, and when a tile is settled or recomputed."""

from __future__ import annotations

import math
import re
import struct
from typing import Any

import pytest

from flashgen.codegen import families
from flashgen.codegen.hopper_forward import resources as hopper_resources
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.codegen.render import render
from flashgen.codegen.space import search_space
from flashgen.core.device import find_device
from flashgen.core.errors import ConfigError
from flashgen.core.workload import Specialization
from tests.tiers import first

H200 = find_device("h200")


@pytest.mark.parametrize(
    ("key", "reference"),
    first(
        5,
        [
            ("bf16-d128-causal-window", "row_sums"),
            ("fp16-d64-softcap", "row_sums"),
            ("bf16-d64-keymask", "row_sums"),
            ("bf16-d64-softcap-keymask", "first_block"),
            ("bf16-d64-mask", "running"),
            ("bf16-d64-causal", "row_sums"),
            ("fp16-d128-causal", "row_sums"),
            ("bf16-d64-softcap-alibi", "row_sums"),
            ("bf16-d64-softcap", "first_block"),
        ],
    ),
)
def test_defaults_take_the_same_time_on_all_data(key: str, reference: str) -> None:
    spec = Specialization.parse(f"fwd-{key}")
    default = HOPPER_FORWARD.default(spec, H200)
    assert default["softmax_reference"] == reference
    searched = {config["softmax_reference"] for config in search_space(HOPPER_FORWARD, spec, H200)}
    assert searched == {reference, "running"}


@pytest.mark.parametrize(
    ("key", "reference", "successor"),
    [
        ("bf16-d64-causal", "first_block", "row_sums"),
        ("bf16-d64-causal", "row_sums", "row_sums"),
        ("bf16-d64-causal", "running", "running"),
        ("bf16-d64-causal-softcap", "first_block", "first_block"),  # no sum overflows
        ("fp16-d64-softcap", "first_block", "row_sums"),
    ],
)
def test_references_that_stay_have_a_successor_that_follows(key: str, reference: str, successor: str) -> None:
    spec = Specialization.parse(f"fwd-{key}")
    config = HOPPER_FORWARD.default(spec, H200).replace(softmax_reference=reference)
    assert families.successor(config, spec) == config.replace(softmax_reference=successor)


def test_no_text_lets_sums_overflow() -> None:
    spec = Specialization.parse("fwd-bf16-d64")
    config = HOPPER_FORWARD.default(spec, H200).replace(softmax_reference="first_block")
    with pytest.raises(ConfigError, match="softcap bounds"):
        render(spec, config)


def test_configs_of_other_families_are_their_own_successors() -> None:
    for row in families.FAMILIES:
        spec = Specialization.parse(f"{'fwd' if row.direction == 'forward' else 'bwd'}-bf16-d64")
        if row is not HOPPER_FORWARD:
            assert families.successor(row.default(spec, H200), spec) == row.default(spec, H200)


def test_under_a_softcap_no_tile_is_recomputed() -> None:
    """What bounds scores bounds weights: from the lowest first key to the highest later one fp32 has room."""
    capped, open_ended = (Specialization.parse(f"fwd-bf16-{key}") for key in ("d256-softcap", "d256-softcap-alibi"))
    for spec, again in ((capped, False), (open_ended, True), (Specialization.parse("fwd-fp16-d256-softcap"), True)):
        config = HOPPER_FORWARD.default(spec, H200)
        assert config["softmax_reference"] == ("row_sums" if again else "first_block")
        assert hopper_resources.may_recompute(spec, config) == again
        text = render(spec, config).text
        assert ("overflow_flags" in text) == again
        assert ("> LARGEST_SCALE" in text) != again
    weight = hopper_resources.CAPPED_BITS - hopper_resources.CAPPED_HEADROOM_BITS
    keys, values, fp32 = 17, 14, 127
    assert weight + keys + values <= fp32
    gemma = 50.0
    assert 2 * gemma / math.log(2) < hopper_resources.CAPPED_BITS


@pytest.mark.parametrize("early_settle", [False, True])
def test_fp16_settles_by_what_a_step_adds(early_settle: bool) -> None:
    """Sums of all steps grow with the number of keys, though no weight comes near the largest number of fp16."""
    spec = Specialization.parse("fwd-fp16-d96-causal")
    text = render(spec, HOPPER_FORWARD.default(spec, H200).replace(early_settle=early_settle)).text
    assert re.search(r"l_i = .* \+ sums$", text, re.MULTILINE)
    assert re.search(r" _settle\(p, .*m_i, l_i, sums\)$", text, re.MULTILINE)
    found: dict[str, Any] = {}
    body = text[text.index("def _settle_asm(") : text.index("SETTLE_ASM =")]
    exec(body, found)
    acc, weights = (32 if early_settle else 16), 32
    operands = found["_settle_constraints"](acc, weights).split(",")
    asm = found["_settle_asm"](acc, weights, "0f40C00000")
    (limit,) = {int(bits, 16) for bits in re.findall(r"setp\.gt\S* p, \$\d+, 0f([0-9A-F]{8})", asm)}
    assert struct.unpack("<f", struct.pack("<I", limit)) == (65504.0,), "the largest number of fp16"
    tested = {int(number) for number in re.findall(r"(?:setp\.gt\S* p,|mov\.f32 x,) \$(\d+)", asm)}
    assert tested == {min(tested), min(tested) + 2}, "two rows of one operand"
    assert set(operands[min(tested) :]) == {"f"}, "which is an input"
    assert max(int(number) for number in re.findall(r"\$(\d+)", asm)) == max(tested), "and the last one"


@pytest.mark.parametrize("key", ["d64", "d128-causal", "d64-causal-window", "d64-keymask", "d64-causal-keymask"])
def test_rows_of_fp16_have_seen_many_keys_before_the_maximum_is_left(key: str) -> None:
    """A key may be more than 127 bits below the next block's largest, and fp16 has no room for headroom against it."""
    for dtype, many in (("fp16", True), ("bf16", False)):
        spec = Specialization.parse(f"fwd-{dtype}-{key}")
        text = render(spec, HOPPER_FORWARD.default(spec, H200)).text
        seen = "visible_end" if "keymask" in key else "seqlen_k"
        seen = f"gl.minimum(first_row + offset + 1, {seen})" if spec.causal else seen
        assert (f"followed_from = {seen} - FOLLOWED_KEYS" in text) == many
        assert ("FEW_KEYS" in text) == (spec.causal and not many)
