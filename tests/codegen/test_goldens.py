"""Whole kernels that people read, and others with the branches that those do not take."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.codegen.build import compile_kernel
from flashgen.codegen.families import DECODE_FAMILIES, FAMILIES, family
from flashgen.codegen.render import render, render_standalone
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from flashgen.launch.parameters import ptx_sizes, trailing_pointers
from scripts.crosscompile_jobs import FEATURES, TARGETS, few_jobs, jobs, serving
from tests.codegen.branches import Branch, Branches
from tests.codegen.goldens import COMPILED_BY_OTHERS, COMPILED_HERE, GOLDEN, GOLDENS, OTHERS, kernel
from tests.codegen.ruff import FORMAT, assert_passes
from tests.tiers import EXHAUSTIVE

H200 = find_device("h200")


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens(name: str, update_golden: bool) -> None:
    text = render(*kernel(name)).text
    path = GOLDEN / f"{name}.py"
    if update_golden:
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; look at it, then rewrite it with --update-golden"


def test_there_is_no_golden_without_a_test() -> None:
    assert {path.stem for path in GOLDEN.glob("*.py")} == set(GOLDENS)
    assert not set(GOLDENS) & set(OTHERS)


def test_every_family_has_a_golden_and_few_have_many() -> None:
    assert {golden.family for golden in GOLDENS.values()} == {row.id for row in FAMILIES}
    assert len(GOLDENS) < 2 * len(FAMILIES)


def test_all_are_formatted(tmp_path: Path) -> None:
    for name in (*GOLDENS, *OTHERS):
        (tmp_path / f"{name}.py").write_text(render(*kernel(name)).text)
        (tmp_path / f"{name}_alone.py").write_text(render_standalone(*kernel(name)).text)
    assert_passes(tmp_path, *FORMAT)


LEFT_OUT = COMPILED_BY_OTHERS | COMPILED_HERE.keys()
COMPILED = [name for name in (*GOLDENS, *OTHERS) if name not in LEFT_OUT]


BY_LARGE_TILES = 12
"""How many branches features have in defaults alone, of which no text in small tiles has the conditions."""


@EXHAUSTIVE
def test_what_is_not_compiled_here_is_compiled_under_the_oldest_and_the_newest_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that a text has of the templates, each in some kernel of its family.

    The newest has what the oldest has, but for plain shapes of families for wgmma, and the oldest what features have in
    the defaults of any target: `make crosscompile-all` makes machine code of all of it, by either.
    """
    branches = Branches(monkeypatch)
    rows = [*FAMILIES, *DECODE_FAMILIES]
    oldest, newest = (
        frozenset[Branch]().union(*(branches.of(job.spec, job.config) for job in each))
        for each in (jobs(rows, list(TARGETS)), few_jobs(rows))
    )
    assert sorted(newest - oldest) == []
    assert {branch.family for branch in oldest - newest} <= {
        "hopper_forward",
        "hopper_backward_fused",
        "hopper_backward_split",
    }
    for name in COMPILED_BY_OTHERS:
        assert sorted(branches.of(*kernel(name)) - (oldest & newest)) == [], name
    every = set[Branch]()
    for spec in map(Specialization.parse, FEATURES):
        for device in map(find_device, TARGETS):
            for row in serving(rows, spec, device):
                every.update(branches.of(spec, row.default(spec, device)))
    assert len(every - oldest) <= BY_LARGE_TILES, sorted(every - oldest)


def test_of_every_family_one_is_compiled() -> None:
    assert {kernel(name)[1].family for name in COMPILED} == {row.id for row in FAMILIES}


@EXHAUSTIVE
@pytest.mark.parametrize("name", COMPILED)
def test_all_compile_for_sm90(name: str) -> None:
    """Whatever device they are the default of: sm90 has the loads and the products of the others, too."""
    spec, config = kernel(name)
    kernels = family(config.family).kernels(spec, config)
    compiled = compile_kernel(spec, config, H200)
    for part, known in zip(compiled.parts, kernels, strict=True):
        assert trailing_pointers(ptx_sizes(part.handle.asm["ptx"]), known.parameters) == 2
