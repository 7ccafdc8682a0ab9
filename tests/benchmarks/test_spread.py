"""How far repeats lie apart, without a GPU: kernels are stood in for by torch, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import report, spread, spread_tables
from benchmarks.provenance import Provenance
from benchmarks.results import SPREAD_COLUMNS, read_rows
from benchmarks.spread import compared, grid, jobs_of, measured
from flashgen.core.device import find_device
from flashgen.core.workload import Workload
from flashgen.launch.backward import BackwardTensors
from tests.benchmarks.rows import SHARED

CPU = torch.device("cpu")
SMALL = Workload(direction="backward", batch=1, nheads=2, seqlen_q=48, head_dim=64, causal=True)
FUSED, SPLIT = "hopper_backward_fused", "hopper_backward_split"


def standing_in(change: Callable[[int, BackwardTensors], None]) -> Any:
    """A launch that computes the gradients; `change` may then write other ones, and is told the number of the call."""

    def bind(workload: Workload, tensors: BackwardTensors) -> Any:
        calls = iter(range(1000))

        def launch(given: BackwardTensors) -> None:
            assert not given.dk.isfinite().any(), "what the call before wrote is gone"
            leaves = [tensor.detach().float().requires_grad_() for tensor in (given.q, given.k, given.v)]
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=workload.causal)
            assert (out - given.out.float()).abs().max() < 0.02
            found = torch.autograd.grad(out, leaves, given.dout.float())
            for gradient, values in zip((given.dq, given.dk, given.dv), found, strict=True):
                gradient.copy_(values)
            change(next(calls), given)

        return launch

    return bind


def test_equal_calls_have_no_spread_and_an_error() -> None:
    found = measured(SMALL, standing_in(lambda number, given: None), where=CPU, repeats=3)
    assert (found.differing, found.spread_max, found.ulps_max, found.others_differing) == (0, 0, 0, 0)
    assert 2**-11 < found.error_max < 2**-8, "bf16 rounds to 8 bits"
    assert 0 < found.error_mean < found.error_max


def test_what_a_repeat_changes_is_found() -> None:
    def change(number: int, given: BackwardTensors) -> None:
        if number == 1:
            given.dq[0, 0, 5, :4] += 0.5
        if number == 2:
            given.dq[0, 0, 5, :4] -= 0.5
            given.dk[0, 1, 7, 3] += 1.0

    found = measured(SMALL, standing_in(change), where=CPU, repeats=4)
    assert found.differing == pytest.approx(4 / (2 * 48 * 64))
    assert found.others_differing == 1
    assert found.spread_mean == pytest.approx(found.spread_max * found.differing, rel=0.05)


def test_distances_are_in_steps_of_the_dtype() -> None:
    first = torch.tensor([1.0, 1.5, 2.0, 0.0], dtype=torch.bfloat16).view(1, 1, 4, 1)
    high = torch.tensor([1.0 + 2**-7, 1.5, 2.0 + 2**-5, 0.0], dtype=torch.bfloat16).view(1, 1, 4, 1)
    right = first.double() + torch.tensor([0.0, 0.1, 0.0, 0.0]).view(1, 1, 4, 1)
    found = compared(first, first, high, first != high, right, 0)
    assert (found.ulps_max, found.ulps_mean) == (2.0, 0.75)
    assert (found.differing, found.spread_max) == (0.5, 2**-5 / 2)
    assert found.spread_mean == pytest.approx((2**-5 + 2**-7) / 4 / 2)
    assert (found.error_max, found.error_mean) == (pytest.approx(0.05), pytest.approx(0.0125))


def test_every_backward_family_is_asked_in_every_shape() -> None:
    jobs = jobs_of(grid(), find_device("h200"))
    assert len(grid()) == 8
    assert len(jobs) == 8 * 4
    assert {config.family for _, config in jobs_of(grid(), find_device("a100"))} == {
        "portable_backward_fused",
        "portable_backward_split",
    }


@pytest.mark.parametrize(("family", "expected"), [(FUSED, 0), (SPLIT, 1)])
def test_a_run_writes_rows_and_refuses_a_broken_promise(
    family: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a run but the device: bits of dq differ, which only one of the families may do."""

    def change(number: int, given: BackwardTensors) -> None:
        given.dq[0, 0, 0, 0] += number

    monkeypatch.setattr(Provenance, "here", lambda commit: replace(SHARED, commit=commit))
    monkeypatch.setattr(spread, "current_device", lambda: find_device("h200"))
    monkeypatch.setattr(spread, "WHERE", CPU)
    monkeypatch.setattr(spread, "grid", lambda: (SMALL,))
    monkeypatch.setattr(spread, "BACKWARD", (family,))
    monkeypatch.setattr(spread, "compile_ahead", lambda jobs, device: None)
    monkeypatch.setattr(spread, "launcher", lambda config, device: standing_in(change))
    assert spread.main(["--results", str(tmp_path), "--commit", "abc", "--repeats", "3"]) == expected
    (row,) = read_rows(tmp_path / SHARED.slug / "spread.csv", SPREAD_COLUMNS)
    assert (row.suite, row.workload, row.impl, row.commit, row.repeats) == ("spread", SMALL.key, family, "abc", 3)
    assert row.differing == pytest.approx(1 / (2 * 48 * 64), rel=1e-3)
    page = spread_tables.page(report.load(tmp_path))
    assert (f"| `{family}` | 64 | 48 | yes | 0.016% |" in page) is (family == FUSED)


def test_the_page_says_what_the_rows_say(tmp_path: Path) -> None:
    base = SHARED.row("spread", SMALL, FUSED, "1.0")
    numbers = {"repeats": 100, "spread_max": 2e-3, "spread_mean": 1e-6, "error_max": 4e-3, "error_mean": 1e-5}
    varying = replace(base, **numbers, differing=0.31, ulps_max=3.0, ulps_mean=0.25, others_differing=0)
    fixed = replace(base, impl=SPLIT, **(numbers | {"spread_max": 0.0}), differing=0.0, others_differing=0)
    text = spread_tables.page({"test_gpu": [varying, fixed]})
    assert f"| `{FUSED}` | 64 | 48 | yes | 31% | 2.0e-03 | 1.0e-06 | 50% | 10% | 2.5e-01 |" in text
    assert f"(`{SPLIT}`) gave other bits in 0 of 1 shapes; 0 elements of dk and dv differed" in text
    assert "up to 2.0e-03 of the largest |dq| apart, which is 50% of the largest rounding error" in text
    page = f"# Page\n{spread_tables.START}\nold\n{spread_tables.END}\nmore\n"
    marks = (spread_tables.START, spread_tables.END)
    assert report.insert(page, text, marks) == f"# Page\n{marks[0]}\n{text}{marks[1]}\nmore\n"
    assert spread_tables.page({"test_gpu": [replace(base, suite="forward")]}) == ""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "attention.md").write_text(page)
    (tmp_path / "README.md").write_text(f"{report.START}\n{report.END}\n")
    arguments = ["--results", str(tmp_path / "results"), "--readme", str(tmp_path / "README.md")]
    assert [report.main([*arguments, *more]) for more in (["--check"], [], ["--check"])] == [1, 0, 0]
    assert "old" not in (tmp_path / "docs" / "attention.md").read_text()
