"""All benchmarks on all GPUs: who does what, and going on after a limit, a failure or a kill."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import everything
from benchmarks.everything import Done, main, run, runner_of
from benchmarks.exit_codes import MISSING, STOPPED
from benchmarks.jobs import BENCHMARKS, Benchmark, Job, divided, needed, planned
from benchmarks.peers import FA3, FA4, PEERS, VLLM, ZSTANDARD
from benchmarks.training_tasks import TASKS
from tests.processes import alive, eventually

WITHOUT = ["--without", FA3, "--without", FA4]
"""What a machine that runs tests may lack."""


def no_done(tmp_path: Path, shards: int = 2) -> Done:
    return Done(tmp_path / "done.json", commit="abc", shards=shards)


def test_each_gpu_has_a_shard_of_every_race_and_some_of_the_rest() -> None:
    lists = planned(2)
    names = [[job.name for job in jobs] for jobs in lists]
    races = [each.name for each in BENCHMARKS if each.is_sharded]
    for gpu, mine in enumerate(names):
        assert mine[: len(races)] == [f"{name}.{gpu}" for name in races]
    alone = names[0][len(races) :] + names[1][len(races) :]
    assert sorted(alone) == sorted(each.name for each in BENCHMARKS if not each.is_sharded)
    seconds = [sum(job.seconds for job in jobs) for jobs in lists]
    assert max(seconds) - min(seconds) <= 150


def test_a_benchmark_is_in_the_same_list_whatever_else_is_asked_for() -> None:
    for shards in (1, 2, 8):
        lists = planned(shards)
        for one in BENCHMARKS:
            alone = [[job for job in jobs if job.benchmark is one] for jobs in lists]
            assert planned(shards, [one.name]) == alone


def test_what_two_gpus_began_one_goes_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, str]] = []

    def runner_of(out: Path, gpu: str, commit: str | None, beside: int, _: object) -> everything.Runner:
        assert beside == 1

        def runner(job: Job, limit_s: float) -> int:
            ran.append((job.name, gpu))
            return STOPPED if job.name == "backward.1" and gpu == "7" else 0

        return runner

    monkeypatch.setattr(everything, "runner_of", runner_of)
    only = ["--only", "forward", "--only", "backward", "--only", "memory"]
    given = ["--out", str(tmp_path), "--commit", "abc", *only, *WITHOUT]
    assert main([*given, "--gpus", "4,7"]) == STOPPED
    assert sorted(ran) == [
        *(("backward.0", "4"), ("backward.1", "7"), ("forward.0", "4"), ("forward.1", "7"), ("memory", "4"))
    ]
    ran.clear()
    assert main([*given, "--gpus", "2", "--shards", "2"]) == 0
    assert ran == [("backward.1", "2")]
    alone = [job.name for job in divided(planned(2, ["forward", "backward", "memory"]), 1)[0]]
    assert alone == ["forward.0", "forward.1", "backward.0", "backward.1", "memory"]
    with pytest.raises(SystemExit):
        main([*given, "--shards", "0"])


def test_a_list_that_breaks_off_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def runner_of(out: Path, gpu: str, *_: object) -> everything.Runner:
        def runner(job: Job, limit_s: float) -> int:
            ran.append(job.name)
            if gpu == "1":
                raise OSError("no space is left")
            return 0

        return runner

    monkeypatch.setattr(everything, "runner_of", runner_of)
    given = ["--out", str(tmp_path), "--commit", "abc", "--gpus", "0,1", "--only", "forward", "--only", "backward"]
    assert main([*given, *WITHOUT]) == STOPPED
    said = "forward.1, backward.1: the list broke off: OSError: no space is left\n"
    assert capsys.readouterr().out.endswith(said)
    assert sorted(ran) == ["backward.0", "forward.0", "forward.1"]


@pytest.mark.parametrize(("lacks", "only"), [(VLLM, "decode"), (ZSTANDARD, "overhead"), (FA3, "forward")])
def test_a_run_does_not_begin_without_what_it_races(
    lacks: str, only: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in PEERS:
        monkeypatch.setitem(PEERS, name, replace(PEERS[name], is_here=lambda name=name: name != lacks))
    ran: list[str] = []

    def runner_of(*_: object) -> everything.Runner:
        def runner(job: Job, limit_s: float) -> int:
            ran.append(job.name)
            return 0

        return runner

    monkeypatch.setattr(everything, "runner_of", runner_of)
    given = ["--out", str(tmp_path), "--commit", "abc"]
    with pytest.raises(SystemExit, match="2"):
        main([*given, "--only", only])
    said = capsys.readouterr().err
    assert f"left out with --without {lacks}: {lacks} needs {PEERS[lacks].what}\n" in said
    assert ran == []
    assert main([*given, "--only", "spread"]) == 0
    assert main([*given, "--only", only, "--without", lacks]) == 0
    assert main([*given, "--only", only]) == 0, "what is done needs nothing any more"
    assert [name.split(".")[0] for name in ran] == ["spread", only]


def test_what_a_benchmark_needs_is_told() -> None:
    assert needed(planned(1, ["decode", "overhead", "spread"])[0]) == sorted((FA3, FA4, VLLM, ZSTANDARD))
    assert needed(planned(1, ["spread"])[0]) == []


def test_every_task_of_training_is_there_once() -> None:
    trained = [each.options[0] for each in BENCHMARKS if each.module == "training"]
    assert sorted(trained) == sorted(TASKS)


class Parsed(Exception):
    """Ends a benchmark's main as soon as its arguments are read."""


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda each: each.name)
def test_every_command_is_one_that_its_benchmark_takes(
    benchmark: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
        raise Parsed(parse(parser, arguments))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
    words = Job(benchmark=benchmark, shard=1, shards=2).command(tmp_path, "abc", 60.0)
    with pytest.raises(Parsed) as ended:
        importlib.import_module(f"benchmarks.{benchmark.module}").main(words[3:])
    (options,) = ended.value.args
    assert (options.append, options.results, options.commit) == (True, tmp_path, "abc")
    assert getattr(options, "shard", "0/1") == ("1/2" if benchmark.is_sharded else "0/1")
    assert getattr(options, "limit_seconds", None) == (60.0 if benchmark.has_limit else None)


def test_what_is_done_is_not_done_again_and_what_was_stopped_is(tmp_path: Path) -> None:
    jobs, ran = planned(1, ["forward", "backward", "memory", "spread"])[0], []
    codes = {"forward.0": 0, "backward.0": STOPPED, "memory": 1, "spread": MISSING}

    def runner(job: Job, _: float) -> int:
        ran.append(job.name)
        return codes[job.name]

    wrong = run(jobs, no_done(tmp_path), runner, limit_s=1e6)
    limit, crash, lacks = "backward.0: ended with 3, the time limit", "memory: ended with 1", "spread: ended with 4"
    assert wrong == [limit, crash, lacks]
    codes |= {"backward.0": 0, "memory": 0}
    assert run(jobs, no_done(tmp_path), runner, limit_s=1e6) == []
    assert ran == ["forward.0", "backward.0", "memory", "spread", "backward.0", "memory"]


def test_a_benchmark_that_cannot_stop_by_itself_starts_only_where_it_fits(tmp_path: Path) -> None:
    now, started = [0.0], []

    def runner(job: Job, limit_s: float) -> int:
        started.append((job.name, limit_s))
        now[0] += 60
        return 0

    wrong = run(planned(1, ["forward", "memory"])[0], no_done(tmp_path), runner, limit_s=100, clock=lambda: now[0])
    assert started == [("forward.0", 100)]
    assert wrong == ["memory: not started, 40 s were left"]


def test_a_folder_of_another_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    no_done(tmp_path, shards=1).add("forward.0")
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path), "--gpus", "0,1", "--commit", "abc"])
    assert "give another --out" in capsys.readouterr().err


def test_a_process_sees_its_gpu_and_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    seen = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); "
    hangs = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    monkeypatch.setattr(Job, "command", lambda *_: [everything.sys.executable, "-c", seen + hangs])
    job = planned(2, ["forward"])[1][0]
    assert runner_of(tmp_path, "7", None)(job, 1.0) == STOPPED
    assert (tmp_path / "logs" / "forward.1.txt").read_text() == "7\n"


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_no_process_behind(
    which: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the one that measures nor the one that stands still meanwhile, which would do so for ever."""
    measures = "\n".join(
        (
            "import os, time",
            "from benchmarks.gpu_turns import VARIABLE, my_turn",
            "while sum(map(str.isdecimal, os.listdir(os.environ[VARIABLE]))) < 2:",
            "    time.sleep(0.01)",
            "with my_turn():",
            "    print(os.getpid(), flush=True)",
            "    time.sleep(60)",
        )
    )
    monkeypatch.setattr(Job, "command", lambda *_: [everything.sys.executable, "-c", measures])
    logs = [tmp_path / "logs" / f"forward.{n}.txt" for n in (0, 1)]
    before, groups = signal.getsignal(which), list[int]()

    def stop() -> None:
        assert eventually(lambda: any(log.exists() and log.read_text() for log in logs))
        groups.extend(int(path.name) for path in (tmp_path / "turns/0").iterdir() if path.name.isdecimal())
        os.kill(os.getpid(), which)

    stopping = threading.Thread(target=stop)
    stopping.start()
    given = ["--out", str(tmp_path), "--gpus", "0,0", "--commit", "abc", "--only", "forward", *WITHOUT]
    assert main(given) == STOPPED
    stopping.join()
    assert len(groups) == 2
    assert not any(map(alive, groups))
    assert signal.getsignal(which) is before
    assert "forward.0: ended with 3, stopped\nforward.1: ended with 3, stopped" in capsys.readouterr().out


def test_the_list_of_what_is_done_is_whole_at_any_time(tmp_path: Path) -> None:
    done = no_done(tmp_path)
    for name in ("a", "b"):
        done.add(name)
    assert json.loads((tmp_path / "done.json").read_text()) == {
        "run": {"commit": "abc", "shards": 2},
        "done": ["a", "b"],
    }
