"""What launchers that stand alone refuse: every rule with its message, and every rule removed in turn."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from flashgen.codegen.families import FAMILIES
from flashgen.codegen.render import render, render_standalone
from tests.codegen.goldens import GOLDENS, OTHERS, kernel
from tests.codegen.refusals import (
    ANY,
    BATCH,
    HEADS,
    QUERIES,
    TEXTS,
    Printed,
    fitting,
    printed,
    refusals,
    shifted,
    wider,
)
from tests.tiers import only


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors may lie anywhere, as under Triton's interpreter, and a GPU has 132 SMs."""
    for name in TEXTS:
        printed(name)  # kernels are defined before, not to be interpreted
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))


@pytest.mark.parametrize("title", TEXTS)
@pytest.mark.usefixtures("on_a_gpu")
def test_a_call_that_fits_is_launched(title: str) -> None:
    text, call = printed(title), printed(title).function()
    for launches in text.launches:
        launches.clear()
    call(**fitting(title), softmax_scale=0.5)
    assert [len(launches) for launches in text.launches] == [1] * len(text.launches)


@pytest.mark.parametrize("title", TEXTS)
def test_every_refusal_states_its_rule_and_the_value(title: str) -> None:
    call, cases = printed(title).function(), list(refusals(title))
    assert len(cases) > 15
    for case in cases:
        with pytest.raises(ValueError, match=case.message):
            call(**case.given)


def test_every_family_is_looked_at() -> None:
    assert {family_id for family_id, _ in TEXTS.values()} == {row.id for row in FAMILIES}


NEEDS_A_GPU = ("_check_gpu", "current GPU", "compute capability", "without queries or keys")
"""What stands in rules that have tests of their own below, or are met behind all others."""


def is_safeguard(node: ast.AST) -> bool:
    """Whether a statement raises by a rule, or calls what does."""
    if isinstance(node, ast.If):
        return any(isinstance(each, ast.Raise) for each in node.body)
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id.startswith("_check")


def without_each_safeguard(tree: ast.Module) -> Iterator[tuple[str, ast.Module]]:
    """The text without one of its rules, for each of them."""
    count = sum(map(is_safeguard, ast.walk(tree)))
    for number in range(count):
        changed = copy.deepcopy(tree)
        found = [node for node in ast.walk(changed) if is_safeguard(node)][number]
        removed = ast.unparse(found)
        for field in ("test", "value"):
            if hasattr(found, field):
                setattr(found, field, ast.Constant(value=False))
        yield removed, changed


@pytest.mark.parametrize("title", only(TEXTS, "forward", "backward, fused", "Hopper"))
@pytest.mark.usefixtures("on_a_gpu")
def test_a_safeguard_that_is_removed_is_missed(title: str) -> None:
    """Whichever it is, something that it refused gets through, or is told something else."""
    text, cases = printed(title), list(refusals(title))
    for removed, tree in without_each_safeguard(text.tree):
        if any(words in removed for words in NEEDS_A_GPU):
            continue
        call = text.function(tree)
        assert not all(case.is_told(call) for case in cases), f"nothing here needs {removed}"


@pytest.mark.parametrize("title", TEXTS)
def test_tensors_elsewhere_than_on_the_current_gpu_are_refused(title: str) -> None:
    with pytest.raises(ValueError, match=r"tensors are on the current GPU, got cpu; torch\.cuda.set_device changes it"):
        printed(title).function()(**fitting(title))


def test_the_gpu_is_the_current_one_and_can_run_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for title in TEXTS:
        text = printed(title)
        names = dict(text.names)
        exec(compile(text.tree, "printed", "exec"), names)
        capability = ((9, 0),) if "Hopper" in title else ()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        names["_check_gpu"](torch.device("cuda", 1), *capability)
        with pytest.raises(ValueError, match="current GPU, got cuda:0"):
            names["_check_gpu"](torch.device("cuda", 0), *capability)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
        if capability:
            with pytest.raises(ValueError, match=r"for GPUs of compute capability \(9, 0\), got \(8, 0\)"):
                names["_check_gpu"](torch.device("cuda", 1), *capability)
        else:
            names["_check_gpu"](torch.device("cuda", 1))


@pytest.mark.parametrize("title", ["backward", "backward, fused"])
def test_a_backward_pass_without_rows_is_refused(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    given = fitting(title)
    given |= {name: given[name][:, :, :0] for name in ("q", "out", "dout", "bias") if name in given}
    given["lse"] = torch.zeros(BATCH, HEADS, 0)
    with pytest.raises(ValueError, match=r"without queries or keys every gradient is 0, got q \(2, 4, 0, 64\)"):
        printed(title).function()(**given)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_kernel_of_other_tensors_takes_them() -> None:
    given = fitting("forward of plain calls")
    bias, mask = torch.zeros(1, 1, QUERIES, 77), torch.ones(BATCH, 1, 1, 2 * 77, dtype=torch.bool)[..., ::2]
    given |= {name: shifted(wider(given[name], 68)) for name in ("k", "v")}
    given |= {"k": given["k"][:, :, :77], "v": given["v"][:, :, :77], "bias": bias.half(), "mask": mask}
    text = Printed.of("portable_forward", ANY["unaligned"])
    text.function()(**given)
    assert len(text.launches[0]) == 1
    with pytest.raises(ValueError, match="k starts at"):
        Printed.of("portable_forward", ANY["packed"]).function()(**given)


@pytest.mark.parametrize("name", [*GOLDENS, *OTHERS])
def test_only_the_launcher_differs_from_what_flashgen_imports(name: str) -> None:
    """So no digest of a record depends on what is checked."""
    spec, config = kernel(name)
    plain, alone = render(spec, config).text, render_standalone(spec, config).text
    kernels, launcher = plain.split(f"def {config.family}_call(")
    assert alone.startswith(kernels)
    assert "_check_" not in plain
    rest = alone.removeprefix(kernels)
    assert rest.startswith("def _check_tensor(")
    assert "jit" not in rest, "no kernel lies behind"
    assert rest.splitlines()[-1] == launcher.splitlines()[-1]
