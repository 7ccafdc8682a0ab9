"""`flashgen.record`: what is counted, that it is counted once, and that nothing is left of it afterwards."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashgen
from flashgen.core import files
from flashgen.core.calls import CallRecord, add_calls, read_calls, usual_ms
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.settings import settings
from flashgen.core.workload import Workload
from flashgen.runtime.decode.open_calls import OPEN
from flashgen.runtime.ops import recording, serve
from tests.db.samples import H200
from tests.decoding import Case, make
from tests.fakes.driver import FakeDriver
from tests.fakes.gpu import FakeGpu, qkv
from tests.runtime.decode_calls import run
from tests.runtime.ladders import Ladder, faster, measured

SHAPE = Workload.parse("b1-h4-hk2-sq48-sk64-d64")


def counts(path: Path) -> dict[str, int]:
    return {one.workload.key: one.calls for one in read_calls(path)}


def test_calls_of_both_passes_are_counted_and_the_path_of_a_call_is_as_before(gpu: FakeGpu, tmp_path: Path) -> None:
    flashgen.attention(*qkv())
    path = tmp_path / "calls.json"
    with flashgen.record(path):
        for _ in range(3):
            flashgen.attention(*qkv())
        for _ in range(2):
            for length in (48, 80, 96, 112):  # no length is served past the counting
                flashgen.attention(*qkv(seqlen_q=length), causal=True)
        trained = [tensor.requires_grad_() for tensor in qkv()]
        flashgen.attention(*trained).sum().backward()
        held = [run for run in serve.MEMO.values() if run.__module__ == recording.__name__]
        assert len(held) == len(serve.MEMO)
    assert not serve.MEMO
    flashgen.attention(*qkv())
    assert [run.__module__ for run in serve.MEMO.values()] != [recording.__name__]
    found = counts(path)
    assert found.pop(SHAPE.key) == 4
    assert found.pop("bwd" + SHAPE.key[3:]) == 1
    assert sorted(found.values()) == [2, 2, 2, 2]
    assert {one.rung for one in read_calls(path)} == {8}


def test_times_are_those_of_the_record_that_serves(gpu: FakeGpu, ladder: Ladder, tmp_path: Path) -> None:
    exact = Workload.parse("b2-h4-hk4-s512-d128-causal")
    ladder.user(measured(exact), measured(exact.with_shape(seqlen_q=64, seqlen_k=64), baselines=faster("sdpa-flash")))
    path = tmp_path / "calls.json"
    with flashgen.record(path):
        flashgen.attention(*qkv(2, 4, 4, 512, 512, 128), causal=True)
        flashgen.attention(*qkv(2, 4, 4, 64, 64, 128), causal=True)
        flashgen.attention(*qkv(4, 4, 4, 512, 512, 128), causal=True)
    found = {one.workload: one for one in read_calls(path)}
    one, torch_served = found[exact], found[exact.with_shape(seqlen_q=64, seqlen_k=64)]
    near = found[Workload.parse("b4-h4-hk4-s512-d128-causal")]
    assert (one.rung, one.server, one.time_from) == (3, "portable_forward", "record")
    assert one.config is not None
    assert (torch_served.server, torch_served.config) == ("sdpa-flash", None)
    assert torch_served.call_ms == pytest.approx(one.call_ms / 2)
    assert (near.rung, near.time_from) == (5, "nearest")
    assert near.call_ms == pytest.approx(one.call_ms * usual_ms(near.workload, H200) / usual_ms(exact, H200))


def test_decode_steps_of_any_sizes_are_counted(driver: FakeDriver, tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    with flashgen.record(path):
        for lens in ((300, 0, 64), (300, 64), (300, 0, 64, 3), (300, 64), (300, 64)):
            run(driver, make(Case(lens=lens, page=16, options={"window": (100, 0)})))
    assert not OPEN
    found = read_calls(path)
    assert sorted((one.workload.batch, one.calls) for one in found) == [(2, 3), (3, 1), (4, 1)]
    assert {(one.workload.direction, one.workload.page_size, one.workload.window_left) for one in found} == {
        ("decode", 16, 100)
    }


def test_what_no_kernel_serves_is_counted_each_time(tmp_path: Path) -> None:
    path, inputs = tmp_path / "calls.json", [torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)] * 3
    with flashgen.record(path):
        for _ in range(2):
            with pytest.raises(UnsupportedError):
                flashgen.attention(*inputs)
        with pytest.raises(WorkloadError):
            flashgen.attention(inputs[0], inputs[0], inputs[0][0])
    (one,) = read_calls(path)
    assert (one.calls, one.rung, one.server, one.device, one.call_ms) == (2, 0, "", "", None)


def test_a_program_is_recorded_by_its_environment(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, outer = tmp_path / "inner.json", tmp_path / "outer.json"
    written = []
    monkeypatch.setattr(recording.atexit, "register", written.append)
    monkeypatch.setenv("FLASHGEN_RECORD", str(outer))
    settings.cache_clear()
    flashgen.attention(*qkv())
    with flashgen.record(inner):
        flashgen.attention(*qkv())
    assert counts(outer) == {}
    written[0]()
    assert (counts(inner), counts(outer)) == ({SHAPE.key: 1}, {SHAPE.key: 2})
    recording._of_environment.cache_clear()


def test_counts_are_written_while_a_program_runs_and_kept_where_that_fails(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "calls.json"
    with flashgen.record(path):
        flashgen.attention(*qkv())
        monkeypatch.setattr(recording, "WRITE_EVERY_S", -1.0)
        flashgen.attention(*qkv())
        assert counts(path) == {SHAPE.key: 2}
        good = path.read_text()
        path.write_text("[]")
        with pytest.warns(UserWarning, match="could not be written"):
            flashgen.attention(*qkv())
        path.write_text(good)
    assert counts(path) == {SHAPE.key: 3}


def _add(path: Path) -> None:
    for _ in range(20):
        add_calls(path, [CallRecord(workload=SHAPE, device="", rung=0, server="", calls=1)])


def test_processes_add_to_the_same_file(tmp_path: Path) -> None:
    path, context = tmp_path / "calls.json", multiprocessing.get_context("fork")
    processes = [context.Process(target=_add, args=(path,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert counts(path) == {SHAPE.key: 80}


def test_counts_of_64_bits_are_read_again_and_end_at_the_most(tmp_path: Path) -> None:
    path, one = tmp_path / "calls.json", CallRecord(workload=SHAPE, device="", rung=0, server="", calls=2**31)
    add_calls(path, [one])
    assert counts(path) == {SHAPE.key: 2**31}
    for _ in range(2):
        add_calls(path, [replace(one, calls=2**62)])
    assert counts(path) == {SHAPE.key: 2**63 - 1}
    path.write_text(path.read_text().replace(str(2**63 - 1), str(2**63)))
    with pytest.raises(WorkloadError, match=f"calls must be at most {2**63 - 1}"):
        read_calls(path)


def test_a_forked_child_does_not_count_its_parents_calls(gpu: FakeGpu, tmp_path: Path) -> None:
    recorder = recording.Recorder(tmp_path / "calls.json")
    recorder.count(recorder.cell(CallRecord(workload=SHAPE, device="", rung=0, server="", calls=1)))
    child = multiprocessing.get_context("fork").Process(target=recorder.write)
    child.start()
    child.join()
    assert counts(tmp_path / "calls.json") == {}
    recorder.write()
    assert counts(tmp_path / "calls.json") == {SHAPE.key: 1}


def _call_what_no_kernel_serves() -> None:
    with pytest.raises(UnsupportedError):
        flashgen.attention(*[torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)] * 3)


def _in_a_forked_child() -> None:
    child = multiprocessing.get_context("fork").Process(target=_call_what_no_kernel_serves)
    child.start()
    child.join()


def test_forked_children_write_what_they_counted_when_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end without `atexit` before Python 3.12, and without what was registered before the fork since then."""
    inner, outer = tmp_path / "inner.json", tmp_path / "outer.json"
    with flashgen.record(inner):
        _call_what_no_kernel_serves()
        _in_a_forked_child()
    (found,) = read_calls(inner)
    assert found.calls == 2
    monkeypatch.setenv("FLASHGEN_RECORD", str(outer))
    settings.cache_clear()
    _in_a_forked_child()  # whose first call begins the recording
    (found,) = read_calls(outer)
    assert found.calls == 1
    _call_what_no_kernel_serves()
    _in_a_forked_child()
    (found,) = read_calls(outer)
    assert found.calls == 2  # that of this process is not written yet
    recording._of_environment.cache_clear()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"version": 2}, "has version 1, got 2"),
        ({"calls": 3}, "list of calls"),
        ({"calls": [{"workload": "b1"}]}, r"calls\[0\]: server"),
        ({"calls": [["fwd"]]}, "a call is a mapping"),
    ],
)
def test_another_file_is_refused_and_stays(tmp_path: Path, change: dict[str, object], rule: str) -> None:
    path = tmp_path / "calls.json"
    text = json.dumps({"format": "flashgen calls", "version": 1, "calls": [], **change})
    path.write_text(text)
    with pytest.raises(WorkloadError, match=rule), flashgen.record(path):
        pass
    assert path.read_text() == text


def test_a_file_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="can be written"), flashgen.record(tmp_path / "none" / "calls.json"):
        pass
    with pytest.raises(WorkloadError, match="path names, got 3"), flashgen.record(3):  # type: ignore[arg-type]
        pass


def test_a_file_that_cannot_be_written_at_the_end_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    recording_of_it = flashgen.record(folder / "calls.json")
    recording_of_it.__enter__()
    _call_what_no_kernel_serves()
    shutil.rmtree(folder)
    with pytest.raises(WorkloadError, match=r"can be written, got .*calls\.json"):
        recording_of_it.__exit__(None, None, None)


def _fifo(lock: Path, tmp_path: Path) -> None:
    os.mkfifo(lock)


def _link(lock: Path, tmp_path: Path) -> None:
    lock.symlink_to(tmp_path / "made through a link")


def _folder(lock: Path, tmp_path: Path) -> None:
    lock.mkdir()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("plant", [_fifo, _link, _folder])
def test_what_is_planted_for_a_lock_is_refused_and_not_waited_for(
    plant: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    plant(tmp_path / ".calls.json.lock", tmp_path)
    with pytest.raises(WorkloadError, match="file that can be written"), flashgen.record(tmp_path / "calls.json"):
        pass
    assert not (tmp_path / "made through a link").exists()


@pytest.mark.timeout(20)
def test_a_child_that_was_forked_meanwhile_keeps_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the descriptor, too, as long as it lives."""
    monkeypatch.setattr(files, "LOCK_WAIT_S", 0.05)
    with files.locked(tmp_path / "lock"):
        held = os.dup(max(int(name) for name in os.listdir("/proc/self/fd") if _leads_to(name, tmp_path / "lock")))
    try:
        with files.locked(tmp_path / "lock"):
            pass
    finally:
        os.close(held)


def _leads_to(descriptor: str, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") == str(path)
    except OSError:
        return False


@pytest.mark.timeout(20)
def test_a_lock_that_another_process_keeps_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOCK_WAIT_S", 0.05)
    with (
        files.locked(tmp_path / ".calls.json.lock"),
        pytest.raises(WorkloadError, match="held for moments"),
        flashgen.record(tmp_path / "calls.json"),
    ):
        pass
