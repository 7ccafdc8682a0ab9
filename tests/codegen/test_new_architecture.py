"""A new architecture is a row in core/architecture.py: families ask what it can do, and not what it is called."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from flashgen.codegen.common_wgmma import why_not_wgmma
from flashgen.codegen.families import FAMILIES, applicable, invalid, unsupported
from flashgen.codegen.family import KernelFamily
from flashgen.codegen.space import search_space
from flashgen.core.architecture import ARCHITECTURES, Architecture
from flashgen.core.device import Device, find_device
from flashgen.core.workload import Specialization
from tests.tiers import EXHAUSTIVE

ROOT = Path(__file__).parents[2]
SPECS = tuple(map(Specialization.parse, ("fwd-bf16-d128-causal", "bwd-bf16-d128-causal", "fwd-tf32-d64")))
H200 = find_device("h200")
FOR_WGMMA = tuple(row for row in FAMILIES if unsupported(row, SPECS[row.direction == "backward"], find_device("a100")))


def made_up(monkeypatch: pytest.MonkeyPatch, **values: object) -> Device:
    """A GPU of an architecture that was described a moment ago, as large as an H200."""
    row = Architecture(name="sm150", **values)  # type: ignore[arg-type]
    monkeypatch.setitem(ARCHITECTURES, row.name, row)
    return dataclasses.replace(H200, name="NVIDIA X1", arch=row.name)


def serving(device: Device) -> set[KernelFamily]:
    return {row for spec in SPECS for row in FAMILIES if unsupported(row, spec, device) is None}


@pytest.mark.parametrize("mma", ["mma", "tcgen05"])
def test_families_for_any_gpu_serve_it_with_valid_defaults(monkeypatch: pytest.MonkeyPatch, mma: str) -> None:
    device = made_up(monkeypatch, mma=mma, has_async_copy=True, has_tma=True, has_tf32=True)
    assert serving(device) == set(FAMILIES) - set(FOR_WGMMA)
    for spec in SPECS:
        for row in applicable(spec, device):
            assert invalid(row.default(spec, device), spec, device) is None


@EXHAUSTIVE
def test_families_for_wgmma_serve_it_where_its_row_says_wgmma_and_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FOR_WGMMA
    without = made_up(monkeypatch, mma="wgmma", has_async_copy=True, has_tf32=True)
    assert why_not_wgmma(without) == "it needs sm90, not sm150"
    assert not serving(without) & set(FOR_WGMMA)
    device = made_up(monkeypatch, mma="wgmma", has_async_copy=True, has_tma=True, has_tf32=True)
    assert serving(device) == set(FAMILIES)
    for spec in SPECS[:2]:
        twins = [search_space(row, spec, each) for row in applicable(spec, device) for each in (device, H200)]
        assert twins[::2] == twins[1::2]


@pytest.mark.parametrize(
    ("lacking", "spec", "reason"),
    [
        ("has_async_copy", SPECS[0], "it needs sm80 or newer, not sm150"),
        ("has_tf32", SPECS[2], "multiply no TF32"),
    ],
)
def test_what_its_row_denies_is_refused(
    monkeypatch: pytest.MonkeyPatch, lacking: str, spec: Specialization, reason: str
) -> None:
    values = {"has_async_copy": True, "has_tma": True, "has_tf32": True, lacking: False}
    device = made_up(monkeypatch, mma="mma", **values)
    assert all(
        reason in str(unsupported(row, spec, device))
        for row in set(FAMILIES) - set(FOR_WGMMA)
        if row.direction == "forward"
    )


@EXHAUSTIVE
def test_tensor_memory_and_shared_operands_follow_from_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spaces differ by what a device can do; those of equal capabilities are equal."""
    twin = {"mma": "tcgen05", "has_async_copy": True, "has_tma": True, "has_tensor_memory": True, "has_tf32": True}
    b200 = find_device("b200")
    for row in set(FAMILIES) - set(FOR_WGMMA):
        spec = SPECS[row.direction == "backward"]
        expected = search_space(row, spec, b200)
        same = dataclasses.replace(b200, arch=made_up(monkeypatch, **twin).arch)
        assert search_space(row, spec, same) == expected
        other = dataclasses.replace(b200, arch=made_up(monkeypatch, **{**twin, "mma": "mma"}).arch)
        assert search_space(row, spec, other) != expected


def test_no_file_of_codegen_compares_the_name_of_an_architecture() -> None:
    """`device.arch` is for messages and for the compiler's target; decisions ask capabilities."""
    for path in (*(ROOT / "flashgen/codegen").rglob("*.py"), *(ROOT / "flashgen/tuning").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                constants = [each.value for side in sides for each in ast.walk(side) if isinstance(each, ast.Constant)]
                assert not ARCHITECTURES.keys() & set(constants), f"{path.name}:{node.lineno}"
                assert not any(
                    isinstance(each, ast.Attribute) and each.attr == "capability"
                    for side in sides
                    for each in ast.walk(side)
                ), f"{path.name}:{node.lineno}"
