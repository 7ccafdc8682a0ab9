"""A PostgreSQL server of the tests' own: on a socket in a folder of its own, without any port; gone with the tests."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

USER = "flashgen"


def why_none() -> str:
    """What is missing for a server; empty if nothing is."""
    if _program("postgres") is None or _program("initdb") is None:
        return "no PostgreSQL server is installed (Debian: apt-get install postgresql)"
    if os.geteuid() == 0 and not _other_user():
        return "PostgreSQL does not run as root, and there is no other user"
    return ""


@contextmanager
def server() -> Iterator[str]:
    """The URL of an empty database."""
    folder = Path(tempfile.mkdtemp(prefix="pg"))  # sockets have short names
    user = _other_user() if os.geteuid() == 0 else None
    who = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []} if user else {}
    if user:
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
    data = folder / "data"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": "/", **who}
    process = None
    try:
        made = [_program("initdb"), "-D", data, "-U", USER, "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]
        subprocess.run(made, check=True, timeout=60, **quiet)
        settings = ("listen_addresses=", f"unix_socket_directories={folder}", "fsync=off", "shared_buffers=16MB")
        given = [part for setting in settings for part in ("-c", setting)]
        process = subprocess.Popen([_program("postgres"), "-D", data, *given], **quiet)
        yield f"postgresql+psycopg://{USER}@/postgres?host={quote(str(folder))}"
    finally:
        if process is not None:
            process.send_signal(signal.SIGINT)  # which does not wait for connections
            try:
                process.wait(20)
            finally:
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _program(name: str) -> str | None:
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    return shutil.which(name, path=os.pathsep.join(map(str, versions[-1:]))) or shutil.which(name)


def _other_user() -> str | None:
    """Whom to be instead of root: PostgreSQL's own user, or the one who has nothing."""
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in ("postgres", "nobody") if name in known), None)
