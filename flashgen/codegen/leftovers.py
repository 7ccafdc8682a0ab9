"""Files that killed processes left behind, deleted by the first compile of a later one.

Those of flashgen have names of their own. Triton's have names that every program uses: in its cache they are told by
their folder, in the temporary directory by the kernel that is in them.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flashgen.codegen.append_kv import ID as APPEND_KV
from flashgen.codegen.block_mask import ENTRY as BLOCK_MASK
from flashgen.codegen.families import DECODE_FAMILIES, FAMILIES
from flashgen.codegen.inspect import SCRATCH_PREFIX
from flashgen.codegen.merge_states import ID as MERGE_STATES
from flashgen.core.folders import ABANDONED_SECONDS, is_own, remove_abandoned

_STAMP = "swept"
_PTXAS_FILE = re.compile(r"tmp[a-z0-9_]{8}\.(ptx|ptx\.o|log)")
HELPERS = (BLOCK_MASK, APPEND_KV, MERGE_STATES)
_OWN_NAMES = (*(row.id for row in (*FAMILIES, *DECODE_FAMILIES)), *HELPERS)
_OWN_KERNEL = re.compile(rf"(\.entry |entry function ')({'|'.join(_OWN_NAMES)})".encode())
_HEAD_BYTES = 2**14
_SAME_COMPILE_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    path: Path
    seen: os.stat_result


def sweep(folder: Path, triton_cache: Path) -> None:
    """Delete what killed processes left in the folder of sources, in Triton's cache and in the temporary directory.

    Triton's cache has a folder for every kernel, so the last two are searched once an hour.
    """
    remove_abandoned(folder)
    if _is_due(folder / _STAMP):
        with contextlib.suppress(OSError):
            for entry in os.scandir(triton_cache):
                if entry.is_dir(follow_symlinks=False):
                    remove_abandoned(entry.path, lambda name: name.startswith("tmp.pid_"))
        place = tempfile.gettempdir()
        remove_abandoned(place, _starts_with(SCRATCH_PREFIX, ".cubin"))
        remove_ptxas_files(Path(place))


def remove_ptxas_files(folder: Path) -> None:
    """Delete what Triton gave ptxas and got from it, where a kernel of flashgen is in it and its process is gone."""
    found = list(_abandoned(folder))
    sources = [each for each in found if each.path.suffix == ".ptx" and _names_own_kernel(each.path)]
    times = [each.seen.st_mtime for each in sources]
    for each in found:
        own = each.path.name.removesuffix(".o") in {source.path.name for source in sources}
        if each.path.suffix == ".log" and not own:
            own = _names_own_kernel(each.path) if each.seen.st_size else _is_near(each.seen.st_mtime, times)
        if own:
            with contextlib.suppress(OSError):
                os.unlink(each.path)


def _is_near(moment: float, times: list[float]) -> bool:
    """Whether an empty log was made by the compile of one of the sources, which come in pairs."""
    return any(abs(moment - each) < _SAME_COMPILE_SECONDS for each in times)


def _abandoned(folder: Path) -> Iterator[_Found]:
    limit = time.time() - ABANDONED_SECONDS
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if _PTXAS_FILE.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    seen = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(seen.st_mode) and is_own(seen) and seen.st_mtime < limit:
                        yield _Found(path=Path(entry.path), seen=seen)


def _names_own_kernel(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return _OWN_KERNEL.search(file.read(_HEAD_BYTES)) is not None
    except OSError:
        return False


def _starts_with(prefix: str, suffix: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(prefix) and name.endswith(suffix)


def _is_due(stamp: Path) -> bool:
    """Whether the last search is long ago; if so, this one is the last."""
    try:
        if stamp.stat().st_mtime > time.time() - ABANDONED_SECONDS:
            return False
    except OSError:
        pass
    with contextlib.suppress(OSError):
        stamp.touch()
    return True
