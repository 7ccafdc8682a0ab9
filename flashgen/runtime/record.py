"""The public call `record`: a file of the workloads that a process calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from flashgen.core.errors import WorkloadError
from flashgen.core.quoting import shown
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.recording import RECORDERS, Counting, Recorder


@contextlib.contextmanager
def record(path: str | Path) -> Iterator[None]:
    """Count the workloads that this process calls inside of the block, and add the counts to a file.

    Counted are calls of `attention`, its backward passes, `attention_varlen` and `attention_decode`, whoever makes
    them, with what served each (rung, kernel family or torch's backend) and its share of the time. That is not
    measured: a call counts with the time of the record that serves it, scaled where that is of other sizes, or with
    what the data sheet says. No contents of tensors are read. A replay of a CUDA graph calls nothing: what was captured
    counts once. `FLASHGEN_RECORD=<file>` does the same for a whole program. `flashgen tune --from-calls` reads the
    file.

    All threads are counted; begin before other threads call. What calls cost outside of the block does not change, but
    that the first call of each shape, inside and after, is looked up anew.

    Args:
        path: the file, which may be there: counts are added to it, those of other processes, too.

    Raises:
        WorkloadError: what is there is no file of calls, or it cannot be written.
    """
    if not isinstance(path, (str, Path)):
        raise WorkloadError(f"calls are recorded in a file that a path names, got {shown(path)}")
    recorder = Recorder(Path(path).absolute())
    try:
        with counted_by(recorder):
            yield
    finally:
        recorder.write()


@contextlib.contextmanager
def counted_by(recorder: Counting) -> Iterator[None]:
    """Let something count the calls of a block."""
    _changed(lambda: RECORDERS.append(recorder))
    try:
        yield
    finally:
        _changed(lambda: RECORDERS.remove(recorder))


def _changed(change: Callable[[], None]) -> None:
    """Change what counts, between memos that know it and memos that do not."""
    with serve.LOCK:
        change()
        serve.forget_runs()
