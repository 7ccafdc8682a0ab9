"""Training's implementations on a CPU: their gradients against the float64 oracle, in both benchmarks of training."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import backward, fa4, forward, training_impls
from benchmarks.backward import RACE as BACKWARD_RACE
from benchmarks.backward import main
from benchmarks.forward_backward import RACE as BOTH_RACE
from benchmarks.forward_backward import main as main_both
from benchmarks.impls import STANDARD_LIMIT_BYTES, Call, Impl, results_of, standard_bytes
from benchmarks.problems import TrainingInputs, forward_of, problem, training_inputs
from benchmarks.provenance import Provenance
from benchmarks.race import Pace, Result, race
from benchmarks.results import RACE_COLUMNS, read_rows
from benchmarks.suites import BOTH_PASSES, backward_grid, paper_grid, work_of
from benchmarks.training_impls import BACKWARD, FORWARD_BACKWARD
from flashgen.core.device import CATALOGUE
from flashgen.core.workload import Workload
from flashgen.measure.inputs import Inputs
from tests.benchmarks.races import FakeGpu
from tests.benchmarks.rows import SHARED
from tests.tiers import first

CPU = torch.device("cpu")
SQUARE = Workload(direction="backward", batch=2, nheads=2, seqlen_q=96, head_dim=32, causal=True)
GROUPED = Workload(direction="backward", batch=1, nheads=4, nheads_k=2, seqlen_q=40, seqlen_k=70, head_dim=32)
DEVICE = replace(CATALOGUE[0], l2_bytes=2**18)
"""So small a cache that few sets of inputs are rotated."""

NAMES = ["flashgen", "flashgen-deterministic", "sdpa-flash", "sdpa-cudnn", "flex", "fa4", "standard"]


def impl(name: str, among: tuple[Impl, ...] = BACKWARD) -> Impl:
    return next(each for each in among if each.name == name)


def close(call: Call, workload: Workload) -> None:
    """The second of two sets of inputs gives what the oracle says of it."""
    whole = problem(workload, copies=2, where=CPU)
    with call.context():
        found = call.run(0)
    assert isinstance(found, tuple)
    shapes = [tuple(result.shape[1:]) for result in found]
    w = workload
    assert shapes[:3] == [
        (w.nheads, w.seqlen_q, w.head_dim),
        (w.nheads_k, w.seqlen_k, w.head_dim),
        (w.nheads_k, w.seqlen_k, w.head_dim_v),
    ]
    for result, right in zip(found, whole.expected, strict=False):
        part = result[:1, -right.shape[1] :].double()
        assert float((part - right).norm() / right.norm()) < 0.02


@pytest.mark.parametrize("workload", [SQUARE, replace(SQUARE, causal=False), GROUPED], ids=lambda w: w.key)
@pytest.mark.parametrize("among", [BACKWARD, FORWARD_BACKWARD], ids=["backward", "both"])
def test_standard_attention_has_the_right_gradients(workload: Workload, among: tuple[Impl, ...]) -> None:
    standard = impl("standard", among)
    assert standard.unsupported(workload) is None
    with torch.no_grad():  # as the memory benchmark calls it
        call = standard.prepare(workload, training_inputs(workload, copies=2, where=CPU))
        close(call, workload)
        close(call, workload)  # a graph that is kept can be gone through again, and one that is not is made anew
        with call.context():
            assert len(call.run(1)) == (3 if among is BACKWARD else 4)


def test_names_and_reasons() -> None:
    assert [each.name for each in BACKWARD] == [each.name for each in FORWARD_BACKWARD] == NAMES
    for each in (*BACKWARD, *FORWARD_BACKWARD):
        assert each.unsupported(forward_of(SQUARE)) == "a forward pass is not training"
    for name in ("flashgen", "sdpa-flash", "sdpa-cudnn", "flex", "standard"):
        assert impl(name).unsupported(SQUARE) is None, name


def test_standard_attention_is_asked_as_far_as_both_passes_fit() -> None:
    longest = [w for w in backward_grid() if w.seqlen_q == 16384]
    assert {w.head_dim: standard_bytes(w) >> 30 for w in longest} == {64: 64, 128: 32, 256: 16}
    assert all(impl("standard").unsupported(w) is None for w in longest)
    twice = longest[0].with_shape(batch=2)
    assert standard_bytes(twice) == 2 * STANDARD_LIMIT_BYTES
    reason = "its scores, probabilities and gradients take 128 GiB, the limit is 64 GiB"
    assert impl("standard").unsupported(twice) == reason


def test_the_grid_and_its_work() -> None:
    assert [forward_of(w) for w in backward_grid()] == list(paper_grid())
    workload = backward_grid()[-1]
    forward = forward_of(workload)
    assert work_of("backward", workload)[0] == pytest.approx(2.5 * forward.flops)
    flops, moved = work_of(BOTH_PASSES, workload)
    assert flops == pytest.approx(3.5 * forward.flops)
    assert moved == workload.bytes + forward.bytes


class FakeFa4:
    """The functions of FlashAttention-4, on a CPU and in its layout: they refuse what its kernels would copy."""

    def __init__(self) -> None:
        self.module = types.ModuleType(fa4.MODULE)
        self.interface = types.ModuleType(f"{fa4.MODULE}.interface")
        self.module.__spec__ = self.interface.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
        self.module.flash_attn_func = self.flash_attn_func  # type: ignore[attr-defined]
        self.interface._flash_attn_fwd = self.forward  # type: ignore[attr-defined]
        self.interface._flash_attn_bwd = self.backward  # type: ignore[attr-defined]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
        monkeypatch.setitem(sys.modules, fa4.MODULE, self.module)
        monkeypatch.setitem(sys.modules, f"{fa4.MODULE}.interface", self.interface)

    def flash_attn_func(self, q: Any, k: Any, v: Any, *, causal: bool) -> Any:
        assert all(tensor.is_contiguous() and tensor.shape[1] == 96 for tensor in (q, k, v))
        views = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*views, is_causal=causal)
        return out.transpose(1, 2), None

    def forward(self, q: Any, k: Any, v: Any, *, causal: bool, return_lse: bool) -> Any:
        assert return_lse
        return self.flash_attn_func(q, k, v, causal=causal)[0], "lse", None, None, None

    def backward(self, q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, *, causal: bool) -> Any:
        assert lse == "lse"
        assert dout.is_contiguous()
        assert dout.shape == out.shape == (2, 96, 2, 32)
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        with torch.enable_grad():
            return torch.autograd.grad(self.flash_attn_func(*leaves, causal=causal)[0], leaves, dout)


@pytest.mark.parametrize("among", [BACKWARD, FORWARD_BACKWARD], ids=["backward", "both"])
def test_fa4_is_called_in_its_own_layout(among: tuple[Impl, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert impl("fa4", among).unsupported(SQUARE) == "flash_attn.cute is not installed"
    FakeFa4().install(monkeypatch)
    theirs = impl("fa4", among)
    assert theirs.unsupported(SQUARE) is None
    assert theirs.unsupported(replace(SQUARE, dtype="fp32")) == "it computes in bf16 and fp16, not fp32"
    assert theirs.unsupported(replace(SQUARE, softcap=True)) == "it is timed without features here"
    close(theirs.prepare(SQUARE, training_inputs(SQUARE, copies=2, where=CPU)), SQUARE)


@pytest.mark.parametrize("name", ["sdpa-flash", "sdpa-cudnn"])
def test_torchs_backward_ops_take_these_arguments(name: str) -> None:
    plain = replace(SQUARE, head_dim=64, head_dim_v=64)
    meta = training_inputs(plain, copies=1, where=CPU)
    groups = {field: tuple(tensor.to("meta") for tensor in getattr(meta, field)) for field in ("q", "k", "v", "dout")}
    found = results_of(impl(name).prepare(plain, replace(meta, **groups)).run(0))
    assert [tensor.shape for tensor in found] == [groups[field][0].shape for field in ("q", "k", "v")]
    assert all(tensor.device.type == "meta" for tensor in found)


@pytest.mark.parametrize("deterministic", [False, True])
def test_flashgen_is_called_by_its_own_op(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op's schema takes what is passed; the forward and the backward pass themselves are stood in for."""
    asked: list[dict[str, Any]] = []
    theirs: Any = training_impls._backward_op()

    def attention(q: Any, k: Any, v: Any, *, causal: bool, return_lse: bool = False) -> Any:
        assert not torch.is_grad_enabled()
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return out, torch.zeros(q.shape[:3])

    def op(*arguments: Any, **named: Any) -> Any:
        names = [argument.name for argument in theirs._schema.arguments]
        given = dict(zip(names, arguments, strict=False)) | named
        assert given.keys() <= set(names)
        asked.append(given)
        leaves = [given[name].detach().requires_grad_() for name in ("q", "k", "v")]
        with torch.enable_grad():
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=given["causal"])
            return *torch.autograd.grad(out, leaves, given["dout"]), torch.empty(0), torch.empty(0)

    monkeypatch.setattr(training_impls.flashgen, "attention", attention)
    monkeypatch.setattr(training_impls, "_backward_op", lambda: op)
    mine = impl("flashgen-deterministic" if deterministic else "flashgen")
    close(mine.prepare(SQUARE, training_inputs(SQUARE, copies=2, where=CPU)), SQUARE)
    assert (asked[0]["dlse"], asked[0]["deterministic"]) == (None, deterministic)
    assert asked[0]["lse"].shape == (2, 2, 96)


def slow(gpu: FakeGpu, right: Impl, factor: float = 1.0) -> Impl:
    """`right`, taking 1 ms a call on a fake device, with its last gradient off by a factor."""

    def prepare(workload: Workload, inputs: Inputs) -> Call:
        call = right.prepare(workload, inputs)

        def run(n: int) -> tuple[torch.Tensor, ...]:
            gpu.running = right.name
            gpu.now_ms += 1.0
            found = call.run(n)
            assert isinstance(found, tuple)
            return (*found[:2], factor * found[2], *found[3:])

        return replace(call, run=run)

    return replace(right, prepare=prepare)


@pytest.mark.parametrize("among", first(1, map(pytest.param, [BACKWARD, FORWARD_BACKWARD])), ids=["backward", "both"])
def test_a_race_checks_every_gradient(among: tuple[Impl, ...]) -> None:
    gpu, pace = FakeGpu(), Pace(warm_ms=1.0, window_ms=2.0, rounds=2, settle_ms=0.0)
    entrants = [slow(gpu, impl("standard", among)), slow(gpu, impl("standard", among), 1.1)]
    entrants[1] = replace(entrants[1], name="wrong")
    good, wrong = race(SQUARE, entrants, device=DEVICE, where=CPU, stopwatch=gpu, pace=pace)
    assert good.reason is None
    assert good.median_ms == pytest.approx(1.0)
    assert wrong.reason is not None
    assert wrong.reason.startswith("it computes something else (relative error 0.1")


def test_leaves_lie_in_memory_as_they_are_wanted() -> None:
    inputs = training_inputs(SQUARE, copies=1, where=CPU)
    assert isinstance(inputs, TrainingInputs)
    plain, other = inputs.leaves(), inputs.leaves("bshd")
    for leaves, is_contiguous in ((plain, True), (other, False)):
        assert leaves.q[0].is_leaf
        assert leaves.q[0].requires_grad
        assert leaves.q[0].is_contiguous() is is_contiguous
        assert torch.equal(leaves.q[0], inputs.q[0])
    assert other.q[0].transpose(1, 2).is_contiguous()
    assert other.dout[0].transpose(1, 2).is_contiguous()
    assert not other.dout[0].requires_grad
    assert not inputs.q[0].requires_grad


@pytest.mark.parametrize(("run", "suite", "work"), first(1, [(main, "backward", 2.5), (main_both, BOTH_PASSES, 3.5)]))
def test_a_run_writes_its_rows(
    run: Callable[[list[str]], int], suite: str, work: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a run but the device: the command line, the look at what serves, races and rows."""
    monkeypatch.setattr(Provenance, "here", lambda commit: replace(SHARED, commit=commit))
    monkeypatch.setattr(forward, "current_device", lambda: DEVICE)
    monkeypatch.setattr(forward.gpu, "other_processes", list)
    monkeypatch.setattr(forward, "CudaStopwatch", lambda clock: FakeGpu())
    monkeypatch.setattr(forward, "served_by", lambda workload: f"rung 1 serves {workload.key}")
    monkeypatch.setattr(backward, "backward_grid", lambda: (SQUARE,))
    watch = FakeGpu()

    def quick_race(*asked: Any, pace: Pace, **named: Any) -> list[Result]:
        """No clock of a CPU has to settle, for which a race makes thousands of calls."""
        return race(*asked, **(named | {"where": CPU, "stopwatch": watch, "pace": replace(pace, settle_ms=0.0)}))

    monkeypatch.setattr(forward, "race", quick_race)
    entrants = tuple(slow(watch, impl("standard", which.impls)) for which in [BACKWARD_RACE if work < 3 else BOTH_RACE])
    monkeypatch.setattr(backward, "chosen", lambda names, among: entrants)
    arguments = ["--results", str(tmp_path), "--commit", "abc", "--warm", "0.001", "--window", "0.002", "--rounds", "2"]
    assert run([*arguments, "--limit-seconds", "60"]) == 0
    (row,) = read_rows(tmp_path / SHARED.slug / f"{suite}.csv", RACE_COLUMNS)
    assert (row.suite, row.workload, row.impl, row.commit) == (suite, SQUARE.key, "standard", "abc")
    assert row.median_ms == pytest.approx(1.0)
    assert row.tflops == pytest.approx(work * forward_of(SQUARE).flops / 1e9, abs=0.05)


@pytest.mark.parametrize("run", [main, main_both], ids=["backward", "both"])
def test_command_lines(run: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        run(["--help"])
    assert done.value.code == 0
    assert "--limit-seconds" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(["--impls", "fa3", "--commit", "x"])
    assert "an implementation is one of flashgen, flashgen-deterministic" in capsys.readouterr().err
    assert (BACKWARD_RACE.suite, BOTH_RACE.suite) == ("backward", BOTH_PASSES)
