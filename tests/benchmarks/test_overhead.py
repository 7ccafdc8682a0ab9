"""The overhead benchmark without a GPU: turns, lengths that never repeat, and records that serve all of them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import first_call, overhead, overhead_cases
from benchmarks.overhead import MOST_LOOPS, time_cases
from benchmarks.overhead_cases import MOST_NEW_SEQLENS, SMALL, Arguments, Case, new_seqlens, write_records
from benchmarks.overhead_decode import decode_cases, new_batches
from flashgen.core.device import find_device
from flashgen.db.layers import Layers
from flashgen.db.store import Store
from flashgen.runtime.lookup.ladder import resolve
from flashgen.runtime.lookup.records import Records
from tests.tiers import EXHAUSTIVE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def frozen_again() -> Iterator[None]:
    """What `tests/conftest.py` has frozen, and a benchmark unfreezes, is not searched for garbage by later tests."""
    yield
    gc.freeze()


def case(name: str, most_calls: int = 1024) -> Case:
    return Case(
        name=name, version="1", call=lambda q, k, v: None, arguments=lambda loop, calls: [], most_calls=most_calls
    )


def test_cases_take_turns_and_a_failing_one_gets_a_reason() -> None:
    seen: list[str] = []

    def loop(which: Case, arguments: Sequence[Arguments]) -> float:
        if which.name == "bad":
            raise RuntimeError("no\nway")
        seen.append(which.name)
        return float(len(seen))

    good, bad, other = time_cases([case("good"), case("bad"), case("other")], loop, calls=5, loops=4)
    assert bad.reason == "RuntimeError: no"
    assert seen[:2] == ["good", "other"]
    assert sorted(seen[2:]) == ["good"] * 4 + ["other"] * 4
    assert {tuple(seen[2 + 2 * n : 4 + 2 * n]) for n in range(4)} == {("good", "other"), ("other", "good")}
    assert len(good.loops_us) == len(other.loops_us) == 4
    assert good.best_us <= good.median_us


@EXHAUSTIVE
def test_slow_calls_have_fewer_loops_and_garbage_is_collected_again() -> None:
    def loop(which: Case, arguments: Sequence[Arguments]) -> float:
        assert gc.get_freeze_count() > 0 or not seen[which.name]
        seen[which.name] += 1
        return 1e4 if which.name == "slow" else 1.0

    gc.unfreeze()  # what the test run itself has frozen
    seen = dict.fromkeys(("fast", "slow"), 0)
    fast, slow = time_cases([case("fast"), case("slow", most_calls=20)], loop, calls=100, loops=9)
    assert (len(fast.loops_us), len(slow.loops_us)) == (9, 5)
    assert seen == {"fast": 10, "slow": 6}
    assert gc.get_freeze_count() == 0


def test_every_new_length_is_new() -> None:
    arguments = new_seqlens()
    lengths = [q.shape[2] for loop in range(MOST_LOOPS + 1) for q, _, _ in arguments(loop, MOST_NEW_SEQLENS)]
    assert len(lengths) == len(set(lengths))
    q, k, v = arguments(3, 2)[1]
    assert q.shape == k.shape == v.shape
    assert q.stride(3) == 1


@pytest.mark.parametrize("loads", ["pointer", "descriptor", overhead_cases.HOPPER])
def test_every_length_is_served_by_the_kernel_under_test(loads: str, tmp_path: Path) -> None:
    device = find_device("h200")
    config = overhead_cases.config_of(loads, device)
    assert config is not None
    write_records(tmp_path / "records.sqlite3", config, device)
    records = Records(Layers.open([tmp_path / "records.sqlite3"]))
    lengths = [SMALL.seqlen_q, *(q.shape[2] for n in (0, 40, MOST_LOOPS) for q, _, _ in new_seqlens()(n, 20))]
    shapes = [SMALL.with_shape(seqlen_q=seqlen, seqlen_k=seqlen) for seqlen in lengths]
    found = [resolve(shape, SMALL.specialization, device, records).config for shape in shapes]
    assert found[0] == config
    assert set(found) <= overhead_cases.serving(config, device)
    assert (len(set(found)) > 1) is (loads == overhead_cases.HOPPER), "whose tiles suit the sizes"


def test_what_serves_other_lengths_is_compiled_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = find_device("h200")
    config = overhead_cases.config_of(overhead_cases.HOPPER, device)
    assert config is not None
    some, strange = sorted(overhead_cases.serving(config, device) - {config}, key=str)[:2], config.replace(q_stages=2)
    called, reloads = list[int](), list[None]()

    def explained(q: torch.Tensor, *others: torch.Tensor, causal: bool) -> SimpleNamespace:
        length = q.shape[2]
        served = config if length == SMALL.seqlen_q else wrong if length == 300 else some[length > 200]
        return SimpleNamespace(served=SimpleNamespace(config=served, rung=5))

    wrong = some[1]
    monkeypatch.setattr(overhead_cases.flashgen, "explain", explained)
    monkeypatch.setattr(overhead_cases.flashgen, "reload", lambda: reloads.append(None))
    monkeypatch.setattr(overhead_cases, "_attention", lambda q, k, v: called.append(q.shape[2]))
    overhead_cases.make_ready(config, device)
    assert (called, len(reloads)) == ([SMALL.seqlen_q, 65, 201], 1)
    wrong = strange
    with pytest.raises(RuntimeError, match="the records made for this benchmark must serve"):
        overhead_cases.make_ready(config, device)


@pytest.mark.parametrize("argument", ["--calls=0", "--calls=1000", "--loops=1000"])
def test_the_launch_queue_never_fills(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        overhead.main([argument])
    assert argument.split("=", maxsplit=1)[0] in capsys.readouterr().err


def test_calls_of_training_have_gradients_and_do_not_fill_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(overhead_cases, "_attention", lambda q, k, v: attend(q, k, v, is_causal=True))
    cases = overhead_cases.training_cases()
    names = [case.name for case in cases]
    assert names[:2] == ["flashgen/train-forward", "flashgen/train-forward-backward"]
    assert len(names) == 6
    assert all(case.most_calls * 6 < 1024 for case in cases)
    q, k, v = cases[0].arguments(0, 1)[0]
    with torch.no_grad(), cases[0].context():
        out = cases[0].call(q, k, v)
        dq, dk, dv = cases[1].call(q, k, v)  # type: ignore[misc]
    assert isinstance(out, torch.Tensor)
    assert out.requires_grad
    assert q.grad is None
    assert [tensor.shape for tensor in (dq, dk, dv)] == [q.shape] * 3


def test_batches_of_decode_calls_are_new_and_of_known_classes() -> None:
    arguments = new_batches()
    found = [
        (q.shape[0], table.shape[1], len(lens))
        for loop in range(MOST_LOOPS + 1)
        for q, table, lens in arguments(loop, MOST_NEW_SEQLENS)
    ]
    assert len(found) == len(set(found))
    classes = [((batch - 1).bit_length(), (columns - 1).bit_length()) for batch, columns, _ in found]
    assert set(classes) == set(classes[:MOST_NEW_SEQLENS])  # the loop that does not count has compiled them


def test_a_decode_call_is_timed_beside_sdpa_on_as_many_keys() -> None:
    *_, new, sdpa = cases = decode_cases()
    assert [case.name for case in cases] == [
        "flashgen-decode/contiguous",
        "flashgen-decode/paged",
        "flashgen-decode/new-batch",
        "sdpa/decode",
    ]
    assert new.most_calls * 2 < 1024
    q, k, v = sdpa.arguments(0, 1)[0]
    assert sdpa.call(q[:1], k[:1], v[:1]).shape == (1, 32, 1, 128)  # type: ignore[attr-defined]
    assert k.shape[2] == sdpa.workload.seqlen_k


def test_the_hopper_family_is_a_case_where_there_is_one() -> None:
    config = overhead_cases.config_of(overhead_cases.HOPPER, find_device("h200"))
    assert config is not None
    assert config.family == "hopper_forward"
    assert overhead_cases.config_of(overhead_cases.HOPPER, find_device("a100")) is None
    assert overhead_cases.config_of("pointer", find_device("a100")) is not None


def test_first_calls_are_of_new_processes_with_the_caches_that_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], str, str]] = []
    bytecode = set[str]()

    def run(command: list[str], *, env: dict[str, str], **others: object) -> SimpleNamespace:
        seen.append((command[2:], env["FLASHGEN_CACHE_DIR"], env["TRITON_CACHE_DIR"]))
        bytecode.add(env["PYTHONPYCACHEPREFIX"])
        assert "PYTHONDONTWRITEBYTECODE" not in env
        return SimpleNamespace(stdout=f"{len(seen)}.5\n")

    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(first_call.subprocess, "run", run)
    assert first_call.times_ms(first_call.WARM, 3) == [2.5, 3.5, 4.5]  # the first one fills the caches
    assert len({(flashgen, triton) for _, flashgen, triton in seen}) == 1
    assert seen[0][0] == ["benchmarks.first_call_worker", "flashgen", "1", "8", "128", "128"]
    seen.clear()
    assert first_call.times_ms(first_call.COLD, 3) == [2.5, 3.5, 4.5]  # the first one leaves the bytecode
    assert len({folder for _, folder, _ in seen}) == 4
    assert len(bytecode) == 2, "one for each case"


def test_a_first_call_from_a_bundle_has_nothing_else_to_take_its_kernel_from(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], *, env: dict[str, str], **others: object) -> SimpleNamespace:
        seen.append((command[2:], env))
        if "export" in command:
            with Store.open(env["FLASHGEN_DB"], read_only=True) as store:
                (record,) = store.records()
            assert (record.workload, record.config.family) == (SMALL, "hopper_forward")
        return SimpleNamespace(stdout=f"{len(seen)}.5\n")

    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    monkeypatch.setattr(first_call.subprocess, "run", run)
    monkeypatch.setattr(first_call, "current_device", lambda: find_device("h200"))
    assert first_call.times_ms(first_call.BUNDLE, 3) == [4.5, 5.5, 6.5]
    (exported, maker), (imported, taker), *calls = seen
    assert [*exported[1:3], *exported[4:]] == ["db", "export", "--with-binaries", "--jobs", "1"]
    assert imported == ["flashgen", "db", "import", exported[3], "--with-binaries"]
    assert len({maker["FLASHGEN_CACHE_DIR"], taker["FLASHGEN_CACHE_DIR"]}) == 2, "what the maker compiled is not there"
    for command, env in calls:
        assert command == ["benchmarks.first_call_worker", "flashgen-without-compiler", "1", "8", "128", "128"]
        assert (env["FLASHGEN_CACHE_DIR"], env["FLASHGEN_DB"]) == (taker["FLASHGEN_CACHE_DIR"], taker["FLASHGEN_DB"])
        assert (env["FLASHGEN_BINARIES"], env["FLASHGEN_NO_COMPILE"]) == ("trusted", "1")
        assert env["PATH"] not in os.environ["PATH"]
    assert not any("TRITON_DISABLE_LINE_INFO" in env for _, env in seen), "no bundle is made under it"


@EXHAUSTIVE
def test_a_worker_without_a_compiler_cannot_import_triton() -> None:
    script = (
        "import runpy, sys, torch; torch.randn = None\n"
        "sys.argv = ['worker', 'flashgen-without-compiler', '1']\n"
        "try: runpy.run_module('benchmarks.first_call_worker', run_name='__main__')\n"
        "except TypeError: import triton"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert "import of triton halted" in done.stderr


@EXHAUSTIVE
def test_a_first_call_imports_nothing_before_the_clock_starts() -> None:
    script = "import sys, benchmarks.first_call_worker; print([name for name in sys.modules if 'flashgen' in name])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"
