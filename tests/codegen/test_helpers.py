"""Helper kernels: read as if hand-written, and compiled for every generation without a register spilled."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.codegen import build_key
from flashgen.codegen.append_kv import PLACES, AppendSpec, append_kernel
from flashgen.codegen.build import compile_helper
from flashgen.codegen.helper import HelperKernel, render_helper
from flashgen.codegen.merge_states import MergeSpec, merge_kernel
from flashgen.codegen.usual_helpers import usual_helpers
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from flashgen.launch.parameters import ptx_sizes, trailing_pointers
from tests.codegen.ruff import FORMAT, assert_passes
from tests.codegen.templates import used
from tests.tiers import every

GIVEN_TO_HELPERS = {"entry", "command", "parameters", "do_not_specialize", "num_warps", "rows"}
WIDE = {"dtype": "bf16", "head_dim": 128, "head_dim_v": 128}
LLAMA = {"rotary": "halves", "rotary_dim": 128, "table_dtype": "bf16"}
APPENDS = (
    AppendSpec(place="rows", **WIDE),
    AppendSpec(place="pages", **WIDE, **LLAMA),
    AppendSpec(place="pages", **WIDE, rotary="interleaved", rotary_dim=64, table_dtype="fp32"),
    AppendSpec(place="slots", dtype="fp32", head_dim=80, head_dim_v=72, **LLAMA | {"rotary_dim": 48}, aligned16=False),
)
MERGES = (
    MergeSpec(dtype="bf16", out_dtype="bf16", head_dim=128),
    MergeSpec(dtype="fp32", out_dtype="fp16", head_dim=80, separate=2),
    MergeSpec(dtype="fp16", out_dtype="fp16", head_dim=36, separate=4, aligned16=False),
)
HELPERS = [*map(append_kernel, APPENDS), *map(merge_kernel, MERGES)]


def named(helper: HelperKernel) -> str:
    return f"{helper.id}-{helper.key}"


def test_all_are_formatted_and_lint_finds_nothing(tmp_path: Path) -> None:
    for helper in HELPERS:
        (tmp_path / f"{helper.id}_{helper.key.replace('-', '_')}.py").write_text(render_helper(helper).text)
    assert_passes(tmp_path, *FORMAT)
    assert_passes(tmp_path, "check", "--line-length", "120")


@pytest.mark.parametrize("helper", every(5, HELPERS), ids=named)
def test_they_compile_without_spills(helper: HelperKernel) -> None:
    """For one generation each, in turn; `scripts/crosscompile_jobs.py` has some for both."""
    compiled = compile_helper(helper, find_device(("h200", "a100")[HELPERS.index(helper) % 2]))
    assert compiled.spills == 0
    assert trailing_pointers(ptx_sizes(compiled.handle.asm["ptx"]), helper.parameters) == 2


@pytest.mark.parametrize("spec", [APPENDS[1], MERGES[0]], ids=lambda spec: spec.key)
def test_aligned_rows_move_16_bytes_at_a_time(spec: AppendSpec | MergeSpec) -> None:
    helper = append_kernel(spec) if isinstance(spec, AppendSpec) else merge_kernel(spec)
    ptx = compile_helper(helper, find_device("h200")).handle.asm["ptx"]
    for access in ("ld.global", "st.global"):
        assert f"{access}.v4" in ptx
        assert f"{access}.b16" not in ptx


def test_equal_keys_are_equal_texts_and_what_differs_has_another() -> None:
    specs = [AppendSpec(place=place, **WIDE, **rotary) for place in PLACES for rotary in ({}, LLAMA)]
    specs += [AppendSpec(place="rows", **WIDE | {"head_dim_v": 64}), AppendSpec(place="rows", **WIDE, aligned16=False)]
    assert len({append_kernel(spec) for spec in specs}) == len(specs)
    assert len({render_helper(append_kernel(spec)).digest for spec in specs}) == len(specs)
    assert append_kernel(APPENDS[1]) == append_kernel(AppendSpec(place="pages", **WIDE, **LLAMA))
    h200, a100 = find_device("h200"), find_device("a100")
    keys = {build_key.helper_build_key(append_kernel(spec), device) for spec in specs for device in (h200, a100)}
    assert len(keys) == 2 * len(specs)
    assert build_key.helper_build_key(HELPERS[0], find_device("gfx942")) is None


@pytest.mark.parametrize("number", [0, 1], ids=["append_kv", "merge_states"])
def test_templates_are_given_what_they_use_and_nothing_else(number: int) -> None:
    helpers = (HELPERS[: len(APPENDS)], HELPERS[len(APPENDS) :])[number]
    given = GIVEN_TO_HELPERS | set(dict(helpers[0].values))
    names, needed = used(f"{helpers[0].id}/{helpers[0].id}.py.jinja")
    assert needed <= given <= names
    assert all(set(dict(helper.values)) == set(dict(helpers[0].values)) for helper in helpers)


def test_what_a_model_usually_needs_follows_from_its_heads() -> None:
    helpers = usual_helpers(Specialization.parse("fwd-bf16-d192-dv128-causal"))
    assert [named(helper) for helper in helpers[::4]] == [
        "append_kv-bf16-d192-dv128-rows",
        "append_kv-bf16-d192-dv128-rows-interleaved192-bf16",
        "merge_states-bf16-d128-2-states",
    ]
    assert len(helpers) == len(set(helpers)) == 9
    assert usual_helpers(Specialization.parse("bwd-bf16-d128")) == ()
    assert {helper.key.split("-")[0] for helper in usual_helpers(Specialization.parse("fwd-tf32-d8"))} == {"fp32"}
