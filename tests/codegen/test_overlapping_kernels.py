"""Kernels that may be scheduled before the kernel in front of them has ended wait for it before anything else."""

from __future__ import annotations

import ast
import re

import pytest

from flashgen.codegen.families import FAMILIES, default_config, family, invalid, unsupported
from flashgen.codegen.family import KernelSpec
from flashgen.codegen.render import render
from flashgen.core.config import KnobValue
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization

H200 = find_device("h200")
WAIT, TRIGGER = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"
TOUCHES_MEMORY = re.compile(r"\b(load|store|atomic_\w+|copy_in|copy_out|warp_specialize|return)\b|_rows_of_block")
CASES: tuple[tuple[str, str, dict[str, KnobValue]], ...] = (
    ("bwd-bf16-d64", "hopper_backward_fused", {}),
    ("bwd-bf16-d128-causal", "hopper_backward_fused", {"heads_per_tile": 1}),
    ("bwd-bf16-d128-causal", "hopper_backward_fused", {"dq_conversion": "tiles"}),
    ("bwd-bf16-d64-causal-varlen", "hopper_backward_fused", {"heads_per_tile": 1}),
    ("bwd-bf16-d128-causal-softcap-alibi-window", "hopper_backward_fused", {}),
    ("bwd-bf16-d128-causal", "hopper_backward_split", {"heads_per_tile": 1}),
    ("bwd-bf16-d256", "hopper_backward_split", {}),
    ("bwd-bf16-d64-causal-varlen", "hopper_backward_split", {}),
)


def bodies(key: str, family_id: str, changes: dict[str, KnobValue]) -> list[tuple[KernelSpec, list[str]]]:
    """Each kernel of a config, and the statements of its function."""
    spec, row = Specialization.parse(key), family(family_id)
    config = row.default(spec, H200).replace(**changes)
    assert invalid(config, spec, H200) is None
    functions = {
        node.name: [ast.unparse(statement) for statement in node.body]
        for node in ast.parse(render(spec, config).text).body
        if isinstance(node, ast.FunctionDef)
    }
    return [(kernel, functions[kernel.entry]) for kernel in row.kernels(spec, config)]


@pytest.mark.parametrize(("key", "family_id", "changes"), CASES)
def test_what_overlaps_waits_before_it_touches_memory(key: str, family_id: str, changes: dict[str, KnobValue]) -> None:
    (first, begin), *later = bodies(key, family_id, changes)
    assert (first.overlaps, WAIT in begin) == (False, False)
    assert begin[0] == TRIGGER, "the next kernel's CTAs begin while the last of these end"
    assert later
    for kernel, statements in later:
        assert kernel.overlaps
        before = statements[: statements.index(WAIT)]
        assert not [line for line in before if TOUCHES_MEMORY.search(line) or line == TRIGGER], kernel.entry


def test_only_these_overlap() -> None:
    """Any other kernel is launched behind the one in front of it: where its text does not wait, nothing else does."""
    for row in FAMILIES:
        for key in ("fwd-bf16-d128-causal", "bwd-bf16-d128-causal", "bwd-bf16-d64-causal-varlen"):
            spec = Specialization.parse(key)
            if row.direction != spec.direction or unsupported(row, spec, H200) is not None:
                continue
            config = row.default(spec, H200)
            text = render(spec, config).text
            overlapping = [kernel.entry for kernel in row.kernels(spec, config) if kernel.overlaps]
            assert text.count(WAIT) == len(overlapping)
            assert bool(overlapping) == row.id.startswith("hopper_backward")


def test_a_forward_pass_has_no_kernel_in_front_of_it() -> None:
    spec = Specialization.parse("fwd-bf16-d128")
    config = default_config(spec, H200)
    assert not any(kernel.overlaps for kernel in family(config.family).kernels(spec, config))
