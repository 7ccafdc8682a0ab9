"""User functions in the portable forward family: text of all variants, compiles, and what cannot be walked."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.codegen.build import compile_kernel
from flashgen.codegen.families import default_config, family, invalid
from flashgen.codegen.family import KernelFamily
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.codegen.portable_forward.family import PORTABLE_FORWARD
from flashgen.codegen.render import render
from flashgen.core.device import find_device
from flashgen.core.errors import BuildError
from flashgen.core.score_mods import ScoreMods, UserFunction
from flashgen.core.workload import Specialization
from tests.codegen.goldens import DOCUMENT, SLOPED, kernel
from tests.codegen.ruff import FORMAT, assert_passes
from tests.tiers import EXHAUSTIVE, first, only

H200 = find_device("h200")
AUX = ("i32", "fp32")
MODS = {
    "score": ScoreMods(score_mod=SLOPED, aux=AUX),
    "mask": ScoreMods(mask_mod=DOCUMENT, aux=AUX),
    "blocks": ScoreMods(mask_mod=DOCUMENT, aux=AUX, block_mask=True),
    "both": ScoreMods(score_mod=SLOPED, mask_mod=DOCUMENT, aux=AUX, block_mask=True),
}
TOLERATED_SPILLS = 256
"""Bytes of a thread, in the pass that runs where hidden rows held NaN alone."""

PLAIN = Specialization.parse("fwd-bf16-d64")


def test_the_functions_are_in_the_text_as_they_are() -> None:
    text = render(*kernel("portable_forward_mods")).text
    for function in (DOCUMENT, SLOPED):
        assert text.count(f"@triton.jit\n{function.source}") == 1
    assert "flashgen render" not in text, "no command line can give a user's function"
    assert render(*kernel("mods_d64_a100")).text.count("score_mod") == 0


def test_what_a_function_is_called_is_no_part_of_the_text() -> None:
    spec, config = kernel("mods_d64_a100")
    renamed = replace(spec, mods=replace(spec.mods, mask_mod=replace(DOCUMENT, label="another name")))
    assert render(renamed, config).text == render(spec, config).text


def test_every_variant_is_formatted(tmp_path: Path) -> None:
    keys = ("fwd-bf16-d64", "fwd-fp16-d80-causal-bias-sink", "fwd-bf16-d64-mask-window", "fwd-fp32-d32-causal-window")
    for key, (name, mods), loads in itertools.product(keys, MODS.items(), ("pointer", "descriptor")):
        spec = replace(Specialization.parse(key), mods=mods)
        source = render(spec, PORTABLE_FORWARD.default(spec, H200).replace(loads=loads))
        compile(source.text, "kernel", "exec")
        (tmp_path / f"{name}_{source.module}.py").write_text(source.text)
    assert_passes(tmp_path, *FORMAT)
    assert len(list(tmp_path.glob("*.py"))) == 32


# each function alone with one kind of loads; the lists of a block mask with either, by tensor maps with both functions
@EXHAUSTIVE
@pytest.mark.parametrize(
    ("loads", "name"),
    only(
        [
            ("pointer", "mask"),
            ("pointer", "blocks"),
            ("descriptor", "score"),
            ("descriptor", "both"),
        ],
        ("descriptor", "both"),
    ),
)
def test_compiles_for_sm90_with_a_pipeline(name: str, loads: str) -> None:
    """As much shared memory as without functions: the stages of K and V are there, loops over lists included."""
    spec = replace(PLAIN, mods=MODS[name])
    config = PORTABLE_FORWARD.default(spec, H200).replace(loads=loads)
    compiled = compile_kernel(spec, config, H200)
    assert compiled.spills <= TOLERATED_SPILLS
    assert compiled.shared_bytes >= compile_kernel(PLAIN, config, H200).shared_bytes


@pytest.mark.parametrize("target", first(1, ["mi300x", "sm120"]))
def test_compiles_elsewhere(target: str) -> None:
    """What `scripts/crosscompile_jobs.py` has for no target, or with the smallest tiles alone.

    It compiles functions for sm86, whose products are those of sm80 and sm89.
    """
    device = find_device(target)
    spec = replace(PLAIN, mods=MODS["both"])
    assert compile_kernel(spec, default_config(spec, device), device).spills <= TOLERATED_SPILLS


def test_parameters_come_in_the_order_of_the_launch() -> None:
    spec, config = kernel("portable_forward_mods")
    names = [parameter.name for parameter in family(config.family).parameters(spec, config)]
    start = names.index("Aux0")
    assert names[start : start + 9] == [
        "Aux0",
        "Aux1",
        "PartialCounts",
        "PartialIndices",
        "FullCounts",
        "FullIndices",
        "stride_block_b",
        "stride_block_h",
        "num_k_blocks",
    ]
    types = {parameter.name: parameter.type for parameter in family(config.family).parameters(spec, config)}
    assert (types["Aux0"], types["Aux1"], types["FullIndices"]) == ("*i32", "*fp32", "*i32")


def test_tiles_divide_the_blocks_of_a_block_mask() -> None:
    spec = replace(PLAIN, mods=MODS["blocks"])
    config = PORTABLE_FORWARD.default(spec, H200)
    assert invalid(config, spec, H200) is None
    reason = invalid(config.replace(block_m=256, num_warps=16), spec, H200)
    assert reason == "block_m 256 does not divide the 128 of a block mask"
    assert "block_n 256 does not divide" in str(invalid(config.replace(block_n=256), spec, H200))
    without = replace(PLAIN, mods=MODS["mask"])
    assert invalid(config.replace(block_m=256, num_warps=16, block_n=32), without, H200) is None


def test_functions_need_registers() -> None:
    config = PORTABLE_FORWARD.default(PLAIN, H200).replace(block_n=256)
    reason = invalid(config, replace(PLAIN, mods=MODS["mask"]), H200)
    assert reason == "beside user functions a thread has 128 registers for scores, not 256"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("q_idx - k_idx", r"mask_mod returns booleans \(at `"),
        ("tl.foo(q_idx) < 3", r"no attribute 'foo'.* \(at `return tl\.foo\(q_idx\) < 3`\)"),
    ],
)
@pytest.mark.parametrize("row", [PORTABLE_FORWARD, HOPPER_FORWARD], ids=lambda row: row.id)
def test_an_error_shows_the_line_of_the_function(row: KernelFamily, body: str, message: str) -> None:
    wrong = UserFunction(name="mask_mod", source=f"def mask_mod(b, h, q_idx, k_idx):\n    return {body}\n")
    spec = replace(PLAIN, mods=ScoreMods(mask_mod=wrong))
    with pytest.raises(BuildError, match=message):
        compile_kernel(spec, row.default(spec, H200), H200)
