"""Packed training of GPT-2: documents of a step keep to themselves, and a run is a row of the page."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen
from benchmarks import packed_training, report
from benchmarks.exit_codes import MISSING, STOPPED
from benchmarks.provenance import Provenance
from benchmarks.results import TRAINING_COLUMNS, read_rows
from benchmarks.varlen_tables import varlen_parts
from tests.benchmarks.rows import SHARED

sys.path.insert(0, str(packed_training.EXAMPLE.parent))
import packed_gpt2

ROOT = Path(__file__).resolve().parents[2]
UNFUSED = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")

TINY = packed_gpt2.Options(
    attention="reference",
    seqlen=32,
    steps=8,
    device="cpu",
    tokens=96,
    shape=packed_gpt2.Shape(layers=1, nheads=2, width=32, vocabulary=256, seqlen=32),
)


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.Tensor]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = torch.arange(4096).mul(7).remainder(251).to(torch.uint8)
    monkeypatch.setattr(packed_gpt2, "load_text", lambda: found)
    monkeypatch.setattr(packed_gpt2, "RATE", 1e-2)
    monkeypatch.setattr(packed_gpt2, "RATE_STEPS", 1)
    yield found
    torch.set_num_threads(threads)


def test_documents_fill_a_step_and_keep_to_themselves(text: torch.Tensor) -> None:
    data = packed_gpt2.batches(text, 32, 96, seed=3)
    for _ in range(20):
        inputs, targets, positions, ends = next(data)
        assert inputs.shape == targets.shape == positions.shape == (96,)
        assert (int(ends[0]), int(ends[-1]), ends.dtype) == (0, 96, torch.int32)
        for first, last in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            assert positions[first:last].tolist() == list(range(last - first))
            assert 0 < last - first <= 32
            assert torch.equal(targets[first : last - 1], inputs[first + 1 : last])


def test_a_model_learns_and_its_attention_does_not_matter(text: torch.Tensor) -> None:
    results = [packed_gpt2.train(replace(TINY, attention=name)) for name in ("reference", "padded")]
    for result in results:
        assert (result.outcome, len(result.losses), result.tokens) == ("done", 8, 96)
        assert result.losses[-1] < result.losses[0] - 0.05
        assert result.losses == pytest.approx(results[0].losses, abs=0.02)


@UNFUSED
def test_a_mask_of_documents_gives_the_same_loss(text: torch.Tensor) -> None:
    batch = next(packed_gpt2.batches(text, 32, 96, seed=3))
    losses = []
    for kind in (packed_gpt2.Reference, packed_gpt2.Flex):
        torch.manual_seed(0)
        with torch.no_grad():
            losses.append(float(packed_gpt2.PackedGpt2(TINY.shape, kind(32))(*batch)))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_document_does_not_see_the_one_before(text: torch.Tensor) -> None:
    torch.manual_seed(0)
    attention = packed_gpt2.Reference(32)
    model = packed_gpt2.PackedGpt2(TINY.shape, attention)
    inputs, targets, positions, ends = next(packed_gpt2.batches(text, 32, 96, seed=3))
    second = slice(int(ends[1]), int(ends[2]))

    def loss(start: torch.Tensor) -> torch.Tensor:
        given = torch.cat([start, inputs[int(ends[1]) :]])
        attention.begin(ends)
        x = (model.tokens(given) + model.positions(positions))[None]
        for block in model.blocks:
            x = block(x)
        return model.loss(x[:, second], targets[None, second])

    assert torch.equal(loss(inputs[: int(ends[1])]), loss(inputs[: int(ends[1])].flip(0)))


FOUND = {"losses": [5.0, 4.0], "step_ms": 100.0, "tokens_per_s": 163840.0, "peak_gib": 12.0, "outcome": "done"}


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(Provenance, "here", lambda commit=None: SHARED)
    monkeypatch.setattr(packed_training, "serve_generated", lambda db, scratch: None)
    return ["--results", str(tmp_path), "--append"]


def test_a_run_is_a_row_and_a_part_of_the_page(recorded: list[str], tmp_path: Path) -> None:
    seen = []

    def train(attention: str, steps: int, run_seconds: float) -> dict[str, Any]:
        seen.append((attention, steps, run_seconds))
        return FOUND

    for names in ("flashgen,padded", "flashgen,padded,flex"):
        assert packed_training.main([*recorded, "--attentions", names, "--run-seconds", "9"], train) == 0
    assert seen == [(name, 100, 9.0) for name in ("flashgen", "padded", "flex")]
    rows = read_rows(tmp_path / SHARED.slug / "packed_training.csv", TRAINING_COLUMNS)
    assert [(row.impl, row.tokens_per_s) for row in rows] == [(name, 163840) for name in ("flashgen", "padded", "flex")]
    assert (rows[0].steps, rows[0].loss_first, rows[0].loss_last, rows[0].peak_gib) == (2, 5.0, 4.0, 12.0)
    assert (rows[0].impl_version, rows[1].impl_version) == (flashgen.__version__, torch.__version__)
    title, table = varlen_parts(rows)
    assert title == "### Packed GPT-2"
    assert "| flashgen | 163840 | 100.0 | 12.0 |" in table
    (tmp_path / "README.md").write_text(f"{report.START}\n{report.END}\n")
    given = ["--results", str(tmp_path), "--readme", str(tmp_path / "README.md")]
    assert report.main(given) == 0
    assert table in (tmp_path / report.PAGE).read_text()


def test_a_run_that_ends_badly_costs_its_own_row_alone(recorded: list[str], tmp_path: Path) -> None:
    def train(attention: str, steps: int, run_seconds: float) -> dict[str, Any] | str:
        return {"flashgen": FOUND, "padded": FOUND | {"tokens_per_s": None, "step_ms": None, "losses": []}}.get(
            attention, "its process ended with 1"
        )

    ticks = itertools.count(0.0, 10.0)
    limited = [*recorded, "--limit-seconds", "15"]
    assert packed_training.main(limited, train, clock=lambda: next(ticks)) == STOPPED
    assert packed_training.main(recorded, train) == 0
    rows = read_rows(tmp_path / SHARED.slug / "packed_training.csv", TRAINING_COLUMNS)
    assert [(row.impl, row.tokens_per_s, row.steps) for row in rows] == [("flashgen", 163840, 2), ("padded", None, 0)]
    given = ["--results", str(tmp_path / "other"), "--attentions", "flashgen"]
    assert packed_training.main(given, lambda *_: "why") == MISSING


def test_the_example_is_told_and_reports_what_a_row_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        """The example in this process, as a model that needs no second."""
        commands.append(command)
        return subprocess.CompletedProcess(command, packed_gpt2.main(command[2:]))

    monkeypatch.setattr(packed_training.subprocess, "run", run)
    monkeypatch.setattr(packed_gpt2, "Shape", functools.partial(packed_gpt2.Shape, width=48, vocabulary=256))
    small_run = ("--device", "cpu", "--tokens", "32", "--longest", "16", "--layers", "1")
    found = packed_training.train("reference", 1, 60.0, more=small_run)
    assert commands[0][:2] == [sys.executable, str(ROOT / "examples/packed_gpt2.py")]
    assert not isinstance(found, str), found
    assert (found["outcome"], len(found["losses"]), found["attention"]) == ("done", 1, "reference")
    assert packed_training.row_of("padded", found, SHARED).steps == 1


def test_the_example_runs_in_a_process_that_may_fail_or_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "example.py"
    monkeypatch.setattr(packed_training, "EXAMPLE", script)
    script.write_text(
        "import json, sys; open(sys.argv[sys.argv.index('--report') + 1], 'w').write(json.dumps(sys.argv))"
    )
    found = packed_training.train("reference", 7, 60.0, more=["--tokens", "9"])
    words = ["--attention", "reference", "--steps", "7", "--limit-seconds", "60.0"]
    assert (found[1:7], found[-2:]) == (words, ["--tokens", "9"])  # type: ignore[index]
    script.write_text("import flashgen; raise SystemExit(2)")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert packed_training.train("reference", 1, 60.0) == "its process ended with 2", "it finds flashgen"
    script.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(packed_training, "START_SECONDS", 0.5)
    assert packed_training.train("flex", 1, 0.5) == "its process took longer than 1 s"


@pytest.mark.parametrize("wrong", [["--tokens", "0"], ["--compile"], ["--attention", "flashgen"]])
def test_the_example_refuses_what_it_cannot_do(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        packed_gpt2.main(["--device", "cpu", "--attention", "reference", *wrong])
