"""Training without a GPU: the example on a tiny model, and what its benchmark writes, compares and skips."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import curves, training, training_worker
from benchmarks.exit_codes import MISSING, STOPPED
from benchmarks.results import TRAINING_COLUMNS, ResultsFile, read_rows
from benchmarks.training import CrashError, Job, jobs_of, run
from benchmarks.training_tables import compared
from benchmarks.training_tasks import COMPILED_SUITE, EAGER_SUITE, LONG, TASKS
from benchmarks.training_worker import train_gpt2
from tests.benchmarks.rows import SHARED

TINY = train_gpt2.Options(
    attention="standard",
    seqlen=32,
    steps=14,
    device="cpu",
    tokens=64,
    shape=train_gpt2.Shape(layers=1, nheads=2, width=32, vocabulary=256, seqlen=32),
)


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.Tensor]:
    """A short text, and one thread: more of them take turns with those of other tests at every tiny product."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = torch.arange(4096).mul(7).remainder(251).to(torch.uint8)
    monkeypatch.setattr(train_gpt2, "load_text", lambda: found)
    monkeypatch.setattr(train_gpt2, "RATE", 1e-2)
    monkeypatch.setattr(train_gpt2, "RATE_STEPS", 1)
    yield found
    torch.set_num_threads(threads)


def test_a_model_learns_and_its_attention_does_not_matter(text: torch.Tensor) -> None:
    said: list[str] = []
    standard = train_gpt2.train(TINY, say=said.append)
    torchs = train_gpt2.train(replace(TINY, attention="sdpa"))
    for result in (standard, torchs):
        assert result.outcome == "done"
        assert len(result.losses) == 14
        assert len(result.steps_ms) == 14 - 14 // 3
        assert result.losses[0] == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=0.2)
        assert result.losses[-1] < result.losses[0] - 0.1
    assert 0 < (curves.deviation(standard.losses, torchs.losses) or 0) < 0.01
    assert [said[0][:10], said[-1][:10]] == ["step    0:", "step   13:"]
    assert torchs.backend in ("flash_attention", "math", "efficient_attention")


def test_runs_of_one_seed_see_the_same_batches(text: torch.Tensor) -> None:
    one, two, other = (train_gpt2.batches(text, 64, 4, seed) for seed in (1, 1, 2))
    inputs, targets = next(one)
    assert inputs.shape == targets.shape == (4, 64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, next(two)[0])
    assert not torch.equal(inputs, next(other)[0])
    assert not torch.equal(inputs, next(one)[0])


def test_the_sizes_are_gpt2s() -> None:
    with torch.device("meta"):
        model = train_gpt2.Gpt2(train_gpt2.Shape(), train_gpt2.CAUSAL["standard"])
    # GPT-2 has 124,439,808 parameters; the padded vocabulary adds 47 rows
    assert sum(p.numel() for p in model.parameters()) == 124_439_808 + 47 * 768
    workload = TASKS["1024"].workload
    assert (workload.batch, workload.nheads * workload.head_dim) == (16, train_gpt2.Shape().width)
    assert {train_gpt2.tokens_of(task.workload.seqlen_q) for task in TASKS.values() if task.name.isdigit()} == {
        TASKS["1024"].tokens,
        LONG.tokens,
    }


def test_a_run_ends_early_with_what_it_has(text: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = train_gpt2.train(replace(TINY, limit_s=0.0, steps=100))
    assert stopped.outcome == "stopped after 1 steps"
    assert len(stopped.losses) == 1
    assert stopped.tokens_per_s is None

    def exhausted(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory\nmore")

    monkeypatch.setattr(train_gpt2, "_training", exhausted)
    assert train_gpt2.train(replace(TINY, recompute=True)).outcome == "out of memory"

    def refused(*_: Any) -> None:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(train_gpt2, "_training", refused)
    assert train_gpt2.train(TINY).outcome == "no kernel"


def test_attention_that_is_recomputed_gives_the_same_losses(text: torch.Tensor) -> None:
    kept, computed_again = (train_gpt2.train(replace(TINY, steps=4, recompute=again)) for again in (False, True))
    assert kept.losses == computed_again.losses
    assert (kept.outcome, computed_again.outcome) == ("done", "done, attention recomputed")


def test_the_warm_up_is_ten_steps_or_a_third() -> None:
    assert [train_gpt2.loop.warm_up(steps) for steps in (1, 2, 6, 16, 30, 100)] == [1, 1, 2, 5, 10, 10]


def test_the_host_looks_at_slow_steps_one_by_one() -> None:
    look = train_gpt2.loop._next_look
    assert [look(0, 0.0), look(1, 0.05), look(1, 0.25), look(4, 4.8), look(50, 0.1)] == [1, 20, 4, 1, 20]


def result(job: Job, *, shift: float = 0.0, outcome: str = "done") -> dict[str, Any]:
    losses = [10.0 - step + shift for step in range(3)] if outcome == "done" else []
    return {
        "attention": job.impl,
        "backend": job.impl,
        "seqlen": job.task.workload.seqlen_q,
        "compiled": job.mode == "compiled",
        "outcome": outcome,
        "losses": losses,
        "accuracies": [0.5 for _ in losses] if job.task.name == "paths" else [],
        "steps_ms": [],
        "step_ms": 50.0 if losses else None,
        "tokens_per_s": 16384 / 0.05 if losses else None,
        "peak_gib": 12.5,
    }


def trainer(jobs: Sequence[Job], limit_s: float) -> Iterator[dict[str, Any]]:
    """cuDNN is 0.01 from the reference, flashgen 0.02; standard attention runs out of memory, and crashes at 16k."""
    for job in jobs:
        if (job.impl, job.task.name) == ("standard", "16384"):
            raise CrashError("its process ended with 9")
        shift = {"sdpa-flash": 0.0, "sdpa-cudnn": 0.01}.get(job.impl, 0.02)
        yield result(job, shift=shift, outcome="out of memory" if job.impl == "standard" else "done")


def runs(folder: Path, train: training.Trainer = trainer, *, append: bool = False, **options: Any) -> int:
    file = ResultsFile(folder / "training.csv", TRAINING_COLUMNS, append=append)
    return run(jobs_of(["1024", "16384"]), train, file, SHARED, **({"say": print} | options))


def test_rows_have_speed_memory_and_the_distance_of_losses(tmp_path: Path) -> None:
    said: list[str] = []
    assert runs(tmp_path, say=said.append) == 0
    rows = read_rows(tmp_path / "training.csv", TRAINING_COLUMNS)
    assert len(rows) == 2 * 2 * 3 + 2
    assert [line for line in said if "no row" in line] == [
        f"16384:standard:{mode} has no row: its process ended with 9" for mode in ("eager", "compiled")
    ]
    found = curves.read(tmp_path / "training_loss.csv")
    by_subject = {row.subject: row for row in compared(rows, found, {})}
    key = TASKS["1024"].workload.key
    mine = by_subject[EAGER_SUITE, key, "flashgen"]
    assert (mine.median_ms, mine.tokens_per_s, mine.peak_gib, mine.steps) == (50.0, 327680, 12.5, 3)
    assert (mine.loss_first, mine.loss_last, mine.outcome) == (10.02, 8.02, "done")
    assert mine.loss_deviation == pytest.approx(0.02)
    assert by_subject[COMPILED_SUITE, key, "sdpa-cudnn"].loss_deviation == pytest.approx(0.01)
    assert by_subject[EAGER_SUITE, key, "sdpa-flash"].loss_deviation is None
    exhausted = by_subject[EAGER_SUITE, key, "standard"]
    assert (exhausted.outcome, exhausted.tokens_per_s, exhausted.loss_last) == ("out of memory", None, None)
    assert found[mine.subject] == [10.02, 9.02, 8.02]


def test_another_process_goes_on_behind_a_crash(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def fragile(jobs: Sequence[Job], limit_s: float) -> Iterator[dict[str, Any]]:
        asked.append([str(job) for job in jobs])
        for job in jobs:
            if str(job) == "1024:flashgen:compiled":
                raise CrashError("gone")
            yield result(job)

    assert runs(tmp_path, fragile) == MISSING, "flashgen has no time"
    assert [(len(jobs), jobs[0]) for jobs in asked] == [(16, "1024:sdpa-flash:eager"), (10, "1024:standard:eager")]
    assert len(read_rows(tmp_path / "training.csv")) == 15


def test_a_later_run_goes_on_where_a_limit_ended_the_first(tmp_path: Path) -> None:
    limits: list[float] = []

    def limited(jobs: Sequence[Job], limit_s: float) -> Iterator[dict[str, Any]]:
        limits.append(limit_s)
        yield from map(result, jobs[:3])

    ticks = iter(range(0, 10_000, 10))
    said: list[str] = []
    assert runs(tmp_path, limited, limit_s=45, clock=lambda: float(next(ticks)), say=said.append) == STOPPED
    assert limits == [25.0]
    assert said[-2] == "stopped at the time limit, 13 runs left: run again with --append"
    seen: list[Job] = []

    def watched(jobs: Sequence[Job], limit_s: float) -> Iterator[dict[str, Any]]:
        seen.extend(jobs)
        yield from map(result, jobs)

    assert runs(tmp_path, watched, append=True) == 0
    assert str(seen[0]) == "1024:sdpa-cudnn:compiled"
    assert len(seen) == 13


def test_flashgen_without_a_time_is_an_error(tmp_path: Path) -> None:
    def exhausted(jobs: Sequence[Job], limit_s: float) -> Iterator[dict[str, Any]]:
        for job in jobs:
            yield result(job, outcome="out of memory" if job.impl == "flashgen" else "done")

    assert runs(tmp_path, exhausted) == MISSING


def test_curves_are_read_as_they_were_written(tmp_path: Path) -> None:
    path, subject = tmp_path / "training_loss.csv", ("training", "w", "flashgen")
    curves.append(path, subject, "old", [3.0, 2.0, 1.0])
    curves.append(path, subject, "new", [3.5, 2.5])
    curves.append(path, ("training", "w", "standard"), "new", [4.0])
    found = curves.read(path)
    with pytest.raises(ValueError, match=r"must have the columns .*,accuracy"):
        curves.read(path, curves.ACCURACY)
    assert found[subject] == [3.5, 2.5]
    assert curves.of_workload(found, "training", "w") == {"flashgen": [3.5, 2.5], "standard": [4.0]}
    assert curves.deviation([3.5, 2.5], [3.0]) == 0.5
    assert curves.deviation([], [3.0]) is None
    path.write_text(path.read_text() + "training,w,standard,new,7,1.0\n")
    with pytest.raises(ValueError, match="step 7 of standard follows step 0"):
        curves.read(path)


def test_a_process_makes_the_runs_that_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []
    may_fuse: list[bool] = []
    inductor: Any = importlib.import_module("torch._inductor.config")
    ticks = iter((0, 0, 50, 50, 60, 60))

    def train(options: Any, say: Any) -> Any:
        asked.append(options)
        may_fuse.append(inductor.pattern_matcher)
        say("step 1")
        return train_gpt2.Result(attention="flashgen", backend="flashgen", seqlen=4096, compiled=options.compile)

    command = ["4096:flashgen:eager", "1024:standard:compiled", "1024:flashgen:eager", "--limit-seconds", "105"]
    command += ["--steps", "9", "--compiled-steps", "4", "--run-seconds", "30"]
    assert training_worker.main(command, train, clock=lambda: float(next(ticks))) == 0
    assert [(o.attention, o.compile, o.steps, o.shape.seqlen, o.limit_s) for o in asked] == [
        ("flashgen", False, 9, 4096, 30.0),
        ("standard", True, 4, 1024, 30.0),
    ], "a third one as long as the first would end too late"
    assert [o.tokens for o in asked] == [16384, 16384]
    assert may_fuse == [True, False], "standard attention is not to become torch's fused kernel"
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["compiled"] for line in lines if line.startswith("{")] == [False, True]
    assert lines.count("    step 1") == 2


START = training.subprocess.Popen
CHILD = """
import sys, time
print('    step 1'); print('{"losses": []}', flush=True)
time.sleep(float(sys.argv[1])); sys.exit(int(sys.argv[2]))
"""


def child(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Iterator[dict[str, Any]]:
    """What the parent gets of a process that reports one run, waits and ends with a code."""

    def standing_in(command: list[str], **options: Any) -> Any:
        assert command[3:5] == ["1024:flashgen:eager", "1024:flashgen:compiled"]
        assert command[5:] == ["--run-seconds", "0.1", "--limit-seconds", "280.0"], "all else is the task's"
        return START([training.sys.executable, "-c", CHILD, *arguments], **options)

    monkeypatch.setattr(training.subprocess, "Popen", standing_in)
    return training._in_a_process(
        jobs_of(["1024:flashgen"]), 280.0, training._parser().parse_args(["--run-seconds=0.1"])
    )


def test_a_child_that_fails_has_the_runs_that_it_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(child(monkeypatch, "0", "0")) == [{"losses": []}]
    assert "    step 1" in capsys.readouterr().out
    results = child(monkeypatch, "0", "3")
    assert next(results) == {"losses": []}
    with pytest.raises(CrashError, match="its process ended with 3"):
        next(results)


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "START_SECONDS", 0.4)
    results = child(monkeypatch, "60", "0")
    assert next(results) == {"losses": []}
    with pytest.raises(CrashError, match="its process ended with -9"):
        next(results)


def test_caches_are_filled_side_by_side_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each child writes what it was told; the second one fails, which nobody minds."""
    fake = "import sys, pathlib; runs = [a for a in sys.argv[2:] if ':' in a]; "
    fake += "pathlib.Path(sys.argv[1], runs[0]).write_text(' '.join(sys.argv[2:])); sys.exit(len(runs) < 2)"
    monkeypatch.setattr(training, "WORKER", (training.sys.executable, "-c", fake, str(tmp_path)))
    said: list[str] = []
    training.prepare(jobs_of(["1024", "4096:standard", "16384:standard"]), 3, said.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"1024:{impl}:compiled" for impl in ("flashgen", "sdpa-cudnn", "sdpa-flash")
    ]
    told = (tmp_path / "1024:sdpa-flash:compiled").read_text()
    assert told == "1024:sdpa-flash:compiled 1024:standard:compiled --compiled-steps=1 --limit-seconds=120"
    assert said[0].startswith("compiled 5 runs in 3 processes")


def test_a_command_line_names_runs() -> None:
    names = [str(job) for job in jobs_of(["4096:flashgen,standard", "1024"], ["eager"])]
    assert names[:2] == ["4096:flashgen:eager", "4096:standard:eager"]
    assert names[2:] == [f"1024:{impl}:eager" for impl in TASKS["1024"].accepted]
    assert [str(job) for job in jobs_of(["4096:standard:eager"])] == ["4096:standard:eager"]
    assert len(jobs_of([])) == 4 * 4 * 2 + (4 + 6) + (2 + 6) + 3
    assert [str(job) for job in jobs_of(["bert-padded:flex,flashgen:eager"])] == [
        "bert-padded:flex:eager",
        "bert-padded:flashgen:eager",
    ], "what is named is run, as default or not"
    for wrong in ("512", "flashgen", "1024:flashgen:fast"):
        with pytest.raises(ValueError, match=r"a run is one of 1024, 4096, 16384, 65536, bert, .*, got"):
            jobs_of([wrong])
    for wrong in ("1024:fa3", "bert-padded:sdpa-flash"):
        with pytest.raises(ValueError, match=r"the attentions of .* are sdpa-.*, got"):
            jobs_of([wrong])


def test_scores_that_do_not_fit_are_recomputed() -> None:
    h200 = 139.7 * 2**30
    wanted = {
        (name, mode)
        for name, task in TASKS.items()
        for mode in ("eager", "compiled")
        if task.recomputes("standard", mode, h200)
    }
    assert wanted == {(name, mode) for name in ("16384", "65536") for mode in ("eager", "compiled")}
    assert not any(task.recomputes("flashgen", "eager", 1.0) for task in TASKS.values())
    given = training_worker._parser().parse_args(["16384:standard:eager", "--limit-seconds", "9"])
    assert training_worker.run_of("16384:standard:eager", given, h200).recompute
    assert not training_worker.run_of("16384:standard:eager", given, 3 * h200).recompute


@pytest.mark.parametrize("arguments", [["--seqlen", "3"], ["--attention", "none"]])
def test_the_command_line_of_the_example(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_gpt2.main(arguments)
    assert arguments[0] in capsys.readouterr().err
