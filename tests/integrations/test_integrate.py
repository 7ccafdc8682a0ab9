"""`flashgen.integrate`: what it counts by layer and says of it, what it tunes, and that it proves what it claims."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import flashgen
from flashgen import reference
from flashgen.core.calls import CallRecord, usual_ms
from flashgen.core.errors import DatabaseError, DeviceError, TuningError, UnsupportedError, WorkloadError
from flashgen.core.settings import settings
from flashgen.core.workload import Workload
from flashgen.db.layers import Layers
from flashgen.db.packages import FILE
from flashgen.db.store import Store
from flashgen.integrations import transformers as door
from flashgen.integrations.model import Integration, LayerRow, integrate
from flashgen.integrations.model.layers import LayerRecorder
from flashgen.integrations.model.misses import Misses, served_on
from flashgen.integrations.model.proof import compared
from flashgen.integrations.model.report import named
from flashgen.integrations.torch import sdpa_arguments
from flashgen.runtime.ops import recording, serve
from flashgen.tuning import runs
from tests.db.samples import H200
from tests.fakes.gpu import EmulatedGpu
from tests.runtime import conftest as runtime
from tests.runtime.ladders import Ladder, measured
from tests.tiers import EXHAUSTIVE
from tests.tiny_models import MODELS
from tests.tuning.fakes import FakeCompiler, FakeExecutor, true_ms

emulated, fresh_process, ladder = runtime.emulated, runtime.fresh_process, runtime.ladder

pytestmark = [pytest.mark.xdist_group("transformers"), pytest.mark.filterwarnings("ignore::FutureWarning")]

TINY = {model.name: model for model in MODELS}


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    yield
    with contextlib.suppress(WorkloadError):  # most tests register nothing
        door.unregister("fgen_reference")


class Block(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(32, 96, bias=False), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)


def small(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(True), Block(True), Block(False)).to(dtype)


def example(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_a_model_of_transformers_is_served_and_said_to_be_as_exact(tmp_path: Path) -> None:
    model = TINY["llama"]
    made, inputs = model.made("eager", torch.float32), model.called(torch.float32)
    inputs["labels"] = inputs["input_ids"]  # of which the loss predicts the first from padding
    for weight in made.parameters():
        weight.grad = torch.ones_like(weight)
    state = torch.get_rng_state()
    found = integrate(made, inputs, training=True, reference=True, target="h200")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(bool((weight.grad == 1).all()) for weight in made.parameters())
    assert (found.door, found.is_routed, found.by_reference) == ("transformers", True, True)
    assert made.config._attn_implementation == "fgen_reference"
    layers = ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert [(row.layers, row.record.calls, row.record.rung) for row in found.rows] == [(layers, 2, 8)] * 2
    assert {row.record.workload.direction for row in found.rows} == {"forward", "backward"}
    assert (found.proof.status, found.proof.exact_dtype) == ("equal", "float64")
    assert ([one.name for one in found.proof.outputs], len(found.proof.gradients)) == (["logits"], 21)
    for name in ("report.json", "report.md", "report.txt"):
        found.write(tmp_path / name)
    read = json.loads((tmp_path / "report.json").read_text())
    assert read["rows"][0]["layers"] == list(layers)
    assert "| model.layers.0-1.self_attn | bwd-fp32" in (tmp_path / "report.md").read_text()
    assert "estimate" in (tmp_path / "report.txt").read_text()
    found.undo()
    found.undo()
    assert made.config._attn_implementation == "eager"
    assert not found.is_routed


def test_a_model_of_transformers_needs_no_inputs() -> None:
    made = TINY["llama"].made("eager", torch.float32)
    found = flashgen.integrate(made, reference=True, target="h200")
    assert (found.is_routed, found.has_shapes, found.proof.status) == (True, False, "equal")
    assert [row.record.workload.seqlen_q for row in found.rows] == [5]
    assert "integrate(model, inputs) with the shapes of real calls" in str(found)
    given = flashgen.integrate(made, made.dummy_inputs, reference=True)
    assert given.has_shapes
    assert "No inputs were given" not in str(given)
    for other in (TINY["vit"].made("eager", torch.float32), small()):
        with pytest.raises(WorkloadError, match=f"give inputs to {type(other).__name__}"):
            flashgen.integrate(other, reference=True)


def test_a_module_is_routed_by_its_calls_of_sdpa_and_a_copy_of_it_is_routed_on_its_own() -> None:
    model, x = small(), example()
    own = model(x)
    found = integrate(model, x, reference=True)
    by_workload = {row.record.workload.causal: (row.layers, row.record.calls) for row in found.rows}
    assert by_workload == {True: (("0", "1"), 2), False: (("2",), 1)}
    assert (found.proof.status, found.device, found.rows[0].miss_ms) == ("equal", None, None)
    routed, twin = model(x), copy.deepcopy(model)
    with torch.no_grad():
        twin[0].qkv.weight.zero_()
    assert not torch.equal(twin(x), routed)
    found.undo()
    assert torch.equal(model(x), own)
    assert "forward" not in vars(model)


def test_what_torch_serves_is_said_with_its_reason() -> None:
    model = small(torch.float64)
    found = integrate(model, example(torch.float64), reference=True)
    assert not found.rows
    assert list(found.passed_on) == ["dtype is bfloat16, float16 or float32, got torch.float64"]
    assert "Served by torch" in str(found)


def test_modules_of_torch_are_layers_and_a_model_without_attention_is_told_so() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    found = integrate(encoder, torch.randn(2, 7, 32), reference=True)
    assert [(row.layers, row.record.calls) for row in found.rows] == [(("self_attn",), 1)]
    assert found.proof.status == "equal"
    assert "No call of attention" in str(integrate(nn.Linear(4, 4), torch.ones(1, 4), reference=True))


def test_a_model_that_is_not_as_exact_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = reference.attention
    monkeypatch.setattr(reference, "attention", lambda *given, **named: exact(*given, **named) * 1.1)
    model = small()
    found = integrate(model, example(), reference=True)
    (output,) = found.proof.outputs
    assert (found.proof.status, found.is_routed, output.holds) == ("differs", False, False)
    assert output.error > output.allowed >= 2 * output.plain_error > 0
    assert "NOT as exact" in str(found)
    assert "forward" not in vars(model)
    monkeypatch.setattr(reference, "attention", lambda *given, **named: exact(*given, **named) * float("nan"))
    assert integrate(small(), example(), reference=True).proof.status == "differs"


def test_the_error_of_a_single_number_is_judged_by_those_of_all_others() -> None:
    """A sum that its own attention happens to round to nearly nothing says little of what rounding may do."""
    exact = {"weight": torch.ones(9, dtype=torch.float64), "scale": torch.tensor(2.0, dtype=torch.float64)}

    def off(weight: float, scale: float) -> dict[str, torch.Tensor]:
        return {"weight": exact["weight"] + weight, "scale": exact["scale"] + scale}

    def allowed(plain: dict[str, torch.Tensor], **asked: dict[str, torch.Tensor]) -> dict[str, float]:
        found = compared(off(0.0, 0.0), plain, {}, asked.get("exact", exact), torch.float32, 3)
        return {one.name: one.allowed for one in found}

    rounding = 2 * torch.finfo(torch.float32).eps
    assert allowed(off(1e-4, 0.0)) == pytest.approx({"weight": 3e-4 + rounding, "scale": 6e-4})
    assert allowed(off(1e-4, 1e-3)) == pytest.approx({"weight": 3e-4 + rounding, "scale": 3e-3 + 2 * rounding})
    alone = {"scale": exact["scale"]}
    assert allowed(off(1e-4, 0.0), exact=alone) == pytest.approx({"scale": 2 * rounding})


def test_what_cannot_be_compared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small(), example()
    found = integrate(model, lambda model: model(x).argmax(), reference=True)
    assert (found.proof.status, found.is_routed) == ("not run", True)
    assert "no tensors of floats" in found.proof.reason
    inner = small()
    inner[1].forward = inner[0].forward  # as hooks of other libraries do
    assert "replaced in the model (1)" in integrate(inner, x, reference=True).proof.reason
    assert integrate(small(), x, reference=True, compare=False).proof.reason == "nobody asked for it"


def test_nothing_is_computed_by_the_reference_unless_a_program_asks() -> None:
    model = small()
    with pytest.raises(DeviceError, match="reference=True"):
        integrate(model, example())
    with pytest.raises(TuningError, match="where the reference computes"):
        integrate(model, example(), target="h200")
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("given", "error", "rule"),
    [
        ({"model": nn.Identity()}, WorkloadError, "has parameters"),
        ({"model": 3}, WorkloadError, "must be a Module"),
        ({"inputs": 3}, WorkloadError, "inputs are a tensor"),
        ({"limit_s": -1.0}, TuningError, "not below 0"),
        ({"target": "abacus"}, DeviceError, "abacus"),
        ({"training": True, "inputs": lambda model: None}, WorkloadError, "gave no tensor"),
    ],
)
def test_wrong_arguments_are_refused_and_leave_the_model(
    given: dict[str, Any], error: type[Exception], rule: str
) -> None:
    model = small()
    with pytest.raises(error, match=rule):
        integrate(**{"model": model, "inputs": example(), "reference": True, **given})
    assert "forward" not in vars(model)
    assert not recording.RECORDERS


def test_a_model_that_asks_nobody_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=8, hidden_size=16, n_layer=1, n_head=2)
    with pytest.raises(UnsupportedError, match="BloomAttention"):
        integrate(transformers.BloomModel(config), torch.zeros(1, 3, dtype=torch.long), reference=True)


@pytest.fixture
def tuned_here(emulated: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    """An H200 that computes in torch, with a search that times by a formula."""
    monkeypatch.setattr(sdpa_arguments, "DEVICES", ("cpu",))
    monkeypatch.setenv("FLASHGEN_POLICY", "generated")  # torch's kernels are none of this machine's
    settings.cache_clear()
    executor = FakeExecutor(time_ms=lambda *given: 0.01 + true_ms(*given))
    monkeypatch.setattr(runs, "make_executor", lambda index: executor)
    monkeypatch.setattr(runs, "make_compiler", lambda device, jobs: contextlib.nullcontext(FakeCompiler()))
    return emulated


@EXHAUSTIVE
def test_it_tunes_what_is_called_and_says_what_that_gained(tuned_here: EmulatedGpu, tmp_path: Path) -> None:
    model, x = small()[:2], example()
    found = flashgen.integrate(model, lambda model: model(x), limit_s=60.0, budget="3")
    assert [row.record.rung for row in found.before] == [8]
    assert [(row.layers, row.record.rung, row.miss_ms) for row in found.rows] == [(("0", "1"), 3, 0.0)]
    assert {gain.workload for gain in found.gains} == {row.record.workload for row in found.rows}
    assert (found.device, found.by_reference, found.proof.status) == (H200, False, "equal")
    assert "as measured" in str(found)
    folder = found.write_package("mine", tmp_path / "package")
    with Store.open(folder / "flashgen_records_mine" / FILE, read_only=True) as store:
        assert {record.workload for record in store.all_records()} == {row.record.workload for row in found.rows}
    untuned = integrate(small(), example()[:1], training=True, limit_s=0)
    assert (untuned.gains, untuned.proof.status) == ((), "equal")
    # a backward pass belongs to the layers of its forward pass
    assert sorted(row.layers for row in untuned.rows) == [("0", "1"), ("0", "1"), ("2",), ("2",)]
    assert {row.record.workload.direction for row in untuned.rows} == {"forward", "backward"}
    with pytest.raises(DatabaseError, match="there are none"):
        untuned.write_package("other", tmp_path / "other")


def test_a_miss_costs_what_the_best_of_the_nearest_records_would_save(ladder: Ladder) -> None:
    asked = Workload.parse("b4-h32-hk8-s2048-d128-causal")
    assert Misses(H200).cost_ms(_called(asked)) is None
    near = measured()
    ladder.user(near)
    serve.reload()
    share = usual_ms(near.workload, H200) / (near.time_ms or 0.0)
    expected = usual_ms(asked, H200) / share
    misses = Misses(H200)
    assert misses.cost_ms(_called(asked, 3 * expected)) == pytest.approx(5 * 2 * expected)
    assert misses.cost_ms(_called(asked, expected / 2)) == 0.0
    assert misses.cost_ms(_called(asked, 3 * expected, rung=4)) == 0.0
    assert misses.cost_ms(_called(asked, None)) is None
    assert misses.cost_ms(_called(Workload.parse("b4-h32-hk8-s2048-d96-causal"), 1.0)) is None


def test_layers_are_looked_up_for_a_gpu_that_is_not_there() -> None:
    with Layers.open() as layers:
        shipped = next(one for one, _ in layers.records(device=H200) if one.workload.direction == "forward")
    for training in (False, True):
        found = served_on(_called(shipped.workload, None, rung=0), H200, training=training)
        assert (found.rung, found.calls, found.time_from) == (4, 5, "record")
        assert found.server == shipped.config.family or not training
    few = served_on(_called(Workload.parse("b1-h32-hk8-sq1-sk65536-d128"), None, rung=0), H200)
    step = served_on(_called(Workload.parse("dec-b4-h32-hk8-sk8192-d128-page16"), None, rung=0), H200)
    assert {few.server, step.server} == {"portable_decode"}
    none = _called(Workload.parse("b1-h1-s64-d1024"), None, rung=0)
    assert served_on(none, H200) is none


def _called(workload: Workload, call_ms: float | None = 1.0, rung: int = 8) -> CallRecord:
    return CallRecord(workload=workload, device=H200.identity, rung=rung, server="x", calls=5, call_ms=call_ms)


def test_calls_are_of_the_innermost_module_also_after_an_error() -> None:
    model = small()
    recorder = LayerRecorder(model)
    record = _called(Workload.parse("b1-h1-s1-d16"))

    def fails(x: torch.Tensor) -> None:
        recorder.count(recorder.cell(record))
        raise KeyError

    model[1].qkv.forward = fails
    with recorder.listening(), pytest.raises(KeyError):
        model(example())
    del model[1].qkv.forward
    recorder.count(recorder.cell(record))  # outside of any module
    (one,) = recorder.calls()
    assert (one.layers, one.record.calls) == (("1.qkv",), 2)
    with torch.no_grad():
        model(example())
    assert len(recorder.calls()) == 1


def test_layers_are_named_together() -> None:
    assert named([f"h.{number}.attn" for number in range(12)]) == "h.0-11.attn"
    assert named(["a.0.x", "a.1.x", "b.0.x", "c"]) == "a.0-1.x, b.0.x, c"
    assert named(["h2.0.a1", "h2.0.a1"]) == "h2.0.a1"
    assert named(()) == "(the model)"


def test_a_report_has_no_numbers_that_json_has_not() -> None:
    row = LayerRow(layers=("a",), record=_called(Workload.parse("b1-h1-s1-d16"), None, rung=0))
    found = integrate(small(), example(), reference=True)
    changed = Integration(**{name: getattr(found, name) for name in found.__dataclass_fields__} | {"rows": (row,)})
    assert json.loads(changed.to_json())["rows"][0]["call_ms"] is None
    assert "no kernel" in str(changed)
