"""Folders that nobody but this user can change: what flashgen reads again, and loads into a GPU, lies in no other.

Such a folder belongs to this user, and so does, or to root, every folder and link on the way to it; nobody else can
write to it, or rename what lies on the way. Then nothing can be exchanged between a check and a use.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

CAN_TELL_OWNERS = hasattr(os, "geteuid")
"""Not on Windows, where folders of a user are private by default."""

ABANDONED_SECONDS = 3600
"""A draft of this age belongs to a process that was killed: writing one takes less than a second."""

MOST_LINKS = 40
"""On the way to one folder, as Linux has it."""

DRAFT_SUFFIX = ".tmp"
"""Of a file that is not finished; it gets its name when it is."""

PUBLIC_PREFIX = ".flashgen-file-"
"""Of the folder of an unfinished file beside its place (`write_public`)."""

ROOT = 0


def make_private(folder: Path) -> None:
    """Create a folder, and what is missing on the way to it, for this user alone; what is there is left as it is.

    Raises:
        OSError: it cannot be created, or something else is there.
    """
    for path in reversed([folder, *folder.parents]):
        if not os.path.lexists(path):
            with contextlib.suppress(FileExistsError):  # another process was faster; the caller checks whose it is
                path.mkdir(mode=0o700)


def why_not_private(folder: Path, *, may_be_link: bool = True) -> str | None:
    """The reason why others could change what lies in a folder, or None.

    Raises:
        OSError: it does not exist, or cannot be looked at.
    """
    if not CAN_TELL_OWNERS:
        return None
    seen = os.lstat(folder)
    if stat.S_ISLNK(seen.st_mode) and not may_be_link:
        return f"{folder} is a link"
    reason = _why_replaceable(folder)
    if reason is not None:
        return reason
    return _why_not_own_folder(folder, os.stat(folder))


def own_subfolder(folder: Path, name: str) -> str | None:
    """Make the folder `name` in a private folder, with mode 0700; the reason why it cannot be used, or None.

    Raises:
        OSError: it cannot be created.
    """
    path = folder / name
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not CAN_TELL_OWNERS:
        return None
    seen = os.lstat(path)
    reason = _why_not_own_folder(path, seen)
    if reason is None and stat.S_IMODE(seen.st_mode) != 0o700:  # an earlier flashgen left this to the umask
        with contextlib.suppress(OSError):  # nobody else could write to it, so it serves either way
            path.chmod(0o700)
    return reason


def private_temporary(name: str, subfolder: str = "") -> Path:
    """A private folder under the temporary directory, or `subfolder` in it.

    It is the same for every process of this user, unless somebody was there first; then it is one of this process.

    Raises:
        OSError: the temporary directory has no place for one.
    """
    place = Path(tempfile.gettempdir())
    shared = place / f"{name}-{os.geteuid() if CAN_TELL_OWNERS else 'user'}"
    make_private(shared)
    if why_not_private(shared, may_be_link=False) is None:
        shared.chmod(0o700)
        if not subfolder or own_subfolder(shared, subfolder) is None:
            return shared / subfolder
    own = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=place))
    atexit.register(_remove, own, os.getpid())
    reason = why_not_private(own)  # of the temporary directory itself
    if reason is None and subfolder:
        reason = own_subfolder(own, subfolder)
    if reason is not None:
        raise OSError(reason)
    return own / subfolder


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a child that was forked has this hook, too
        shutil.rmtree(folder, ignore_errors=True)


def is_own(seen: os.stat_result) -> bool:
    """Whether this user owns a file and nobody else can write to it."""
    return not CAN_TELL_OWNERS or (seen.st_uid == os.geteuid() and not seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def is_own_file(path: Path) -> bool:
    """Whether there is such a file, no link, that this user owns and nobody else can write to."""
    try:
        seen = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(seen.st_mode) and is_own(seen)


def is_draft(name: str) -> bool:
    """Whether this is the name of a file that is not finished."""
    return name.endswith(DRAFT_SUFFIX)


def why_others_change(path: Path) -> str | None:
    """The reason why a file or folder is not in the hands of this user or of root alone, or None.

    Raises:
        OSError: it does not exist, or cannot be looked at.
    """
    if not CAN_TELL_OWNERS:
        return None
    reason = _why_replaceable(path)
    if reason is not None:
        return reason
    seen = os.stat(path)
    if seen.st_uid not in (ROOT, os.geteuid()):
        return f"{path} belongs to user {seen.st_uid}"
    return f"others can write to {path}" if _others_write(seen) else None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all, whoever writes the same one at the time.

    Raises:
        OSError: there is no room, or it cannot be written; nothing is left behind.
    """
    write_stream(path, (content,))


def write_stream(path: Path, chunks: Iterable[bytes]) -> None:
    """As `write_whole`, in pieces; if one of them fails to come, nothing is left behind either.

    Raises:
        OSError: as `write_whole`.
    """
    descriptor, draft = tempfile.mkstemp(suffix=DRAFT_SUFFIX, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(chunks)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def write_public(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all, with the rights that files usually have, to give away.

    Raises:
        OSError: as `write_whole`; what was there before stays.
    """
    with scratch_beside(path, PUBLIC_PREFIX) as scratch:
        draft = scratch / path.name
        draft.write_bytes(content)
        draft.replace(path)


def is_replaceable(path: Path, head: bytes) -> bool:
    """Whether writing to `path` costs no file of others: there is none, an empty one, or one that begins with `head`.

    Raises:
        OSError: it cannot be read.
    """
    if not path.exists():
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(head)) in (b"", head)


@contextlib.contextmanager
def scratch_beside(path: Path, prefix: str) -> Iterator[Path]:
    """A folder beside `path` for what shall take its place as a whole, with the rights that files usually have.

    Those that killed processes have left, which have the same prefix, are cleared away.
    """
    remove_abandoned(path.parent, lambda name: name.startswith(prefix) and is_draft(name))
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix, suffix=DRAFT_SUFFIX) as scratch:
        yield Path(scratch)


def remove_abandoned(folder: Path | str, matches: Callable[[str], bool] = is_draft) -> None:
    """Delete files and folders of this user whose names match and that nobody has changed for long."""
    limit = time.time() - ABANDONED_SECONDS
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if matches(entry.name):
                _remove_if_abandoned(entry, limit)


def _remove_if_abandoned(entry: os.DirEntry[str], limit: float) -> None:
    with contextlib.suppress(OSError):  # another process clears away, too
        seen = entry.stat(follow_symlinks=False)
        if seen.st_mtime > limit or (CAN_TELL_OWNERS and seen.st_uid != os.geteuid()):
            return
        if stat.S_ISDIR(seen.st_mode):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _why_not_own_folder(path: Path, seen: os.stat_result) -> str | None:
    if not stat.S_ISDIR(seen.st_mode):
        return f"{path} is {'a link' if stat.S_ISLNK(seen.st_mode) else 'no folder'}"
    if seen.st_uid != os.geteuid():
        return f"{path} belongs to user {seen.st_uid}"
    return f"others can write to {path}" if _others_write(seen) else None


def _why_replaceable(path: Path) -> str | None:
    """The first folder or link on the way to `path` that others could put another in place of, or None."""
    trusted, links = (ROOT, os.geteuid()), 0
    here = Path(path.anchor or Path.cwd())
    pending = list(reversed(path.parts[1:] if path.anchor else path.parts))
    while pending:
        part = pending.pop()
        there = here.parent if part == ".." else here / part
        seen = os.lstat(there)
        if seen.st_uid not in trusted:
            return f"{there} belongs to user {seen.st_uid}"
        if stat.S_ISLNK(seen.st_mode):
            links += 1
            target = Path(os.readlink(there))
            here = Path(target.anchor) if target.anchor else here
            pending.extend(reversed(target.parts[1:] if target.anchor else target.parts))
            if links > MOST_LINKS:
                return f"{path} has more than {MOST_LINKS} links on the way"
            continue
        # in a folder with the sticky bit, as /tmp is, nobody renames what belongs to another
        if pending and _others_write(seen) and not seen.st_mode & stat.S_ISVTX:
            return f"others can rename what lies in {there}"
        here = there
    return None


def _others_write(seen: os.stat_result) -> bool:
    if seen.st_mode & stat.S_IWOTH:
        return True
    return bool(seen.st_mode & stat.S_IWGRP) and not _is_own_group(seen.st_gid)


@functools.cache
def _is_own_group(number: int) -> bool:
    """Whether a group has this user alone in it: some systems give everyone one, and a umask of 002."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}
