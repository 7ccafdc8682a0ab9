"""Environment variables and directories: the only place of flashgen that reads `os.environ`.

| variable | meaning |
|---|---|
| FLASHGEN_DB | tuning databases, searched first to last, separated by `os.pathsep`; the first one is written to |
| FLASHGEN_CACHE_DIR | generated sources, their binaries and other files that may be deleted at any time |
| FLASHGEN_POLICY | `fastest` (default: SDPA where it was measured faster) or `generated` (always a generated kernel) |
| FLASHGEN_BINARIES | `trusted`: kernels of bundles that `flashgen db import --with-binaries` took over may be loaded |
| FLASHGEN_SIGNATURES | `required`: databases and bundles of others are used only if a trusted key signed them |
| FLASHGEN_TRUSTED_KEYS | public keys of minisign's for that: a file, or a folder of files whose names end in `.pub` |
| FLASHGEN_NO_COMPILE | `1`: a compile while serving is an error (zero-JIT serving after `warmup`); binaries are read |
| FLASHGEN_QUIET | `1`: no one-line notice on the first call without a record |
| FLASHGEN_RECORD | the file that the workloads which processes call are counted in (`flashgen.record`) |
| FLASHGEN_CHECKS | `1`: calls over caches and packed ones wait for the GPU and check lengths and page ids |
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from flashgen.core.errors import SettingError
from flashgen.core.folders import make_private, own_subfolder, private_temporary, why_not_private
from flashgen.core.names import meant
from flashgen.core.quoting import printable

APP = "flashgen"
USER_DB_NAME = "tuning.sqlite3"
POLICIES = ("fastest", "generated")
VARIABLES = (
    "FLASHGEN_DB",
    "FLASHGEN_CACHE_DIR",
    "FLASHGEN_POLICY",
    "FLASHGEN_BINARIES",
    "FLASHGEN_SIGNATURES",
    "FLASHGEN_TRUSTED_KEYS",
    "FLASHGEN_NO_COMPILE",
    "FLASHGEN_QUIET",
    "FLASHGEN_RECORD",
    "FLASHGEN_CHECKS",
)
"""The table above, for who looks for misspelt ones."""

TRUSTED = "trusted"
REQUIRED = "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment asked for, checked once."""

    db_layers: tuple[Path, ...]
    cache_dir: Path
    policy: str
    no_compile: bool
    quiet: bool
    trust_binaries: bool
    signatures: bool
    trusted_keys: Path | None
    checks: bool = False
    record: Path | None = None


@functools.cache
def settings() -> Settings:
    """The settings of this process; `settings.cache_clear()` reads the environment again.

    Raises:
        SettingError: a variable holds a value that is not declared above.
    """
    policy = os.environ.get("FLASHGEN_POLICY", "fastest")
    if policy not in POLICIES:
        raise SettingError(f"FLASHGEN_POLICY is one of {', '.join(POLICIES)}, got {policy!r}{meant(policy, POLICIES)}")
    return Settings(
        db_layers=_db_layers(),
        cache_dir=_private(
            os.environ.get("FLASHGEN_CACHE_DIR"), _usual(platformdirs.user_cache_path), "FLASHGEN_CACHE_DIR"
        ),
        policy=policy,
        no_compile=_flag("FLASHGEN_NO_COMPILE"),
        quiet=_flag("FLASHGEN_QUIET"),
        trust_binaries=_chosen("FLASHGEN_BINARIES", TRUSTED),
        signatures=_chosen("FLASHGEN_SIGNATURES", REQUIRED),
        trusted_keys=_path("FLASHGEN_TRUSTED_KEYS"),
        checks=_flag("FLASHGEN_CHECKS"),
        record=_path("FLASHGEN_RECORD"),
    )


def unknown_variables() -> list[str]:
    """Variables of the environment that begin as flashgen's do and are none, in order of their names."""
    return sorted(name for name in os.environ if name.startswith("FLASHGEN_") and name not in VARIABLES)


def child_environment(**extra: str) -> dict[str, str]:
    """The environment for a child process: this one's, with `extra` on top."""
    return {**os.environ, **extra}


def set_unless_given(**values: str) -> None:
    """Set variables that another library reads when it is imported, where the user has not."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def compiler_environment() -> dict[str, str]:
    """The variables that Triton's compiler reads, by name; those that only say where its files lie are left out."""
    found = {name: value for name, value in os.environ.items() if name.startswith(_COMPILER_PREFIXES)}
    return {name: found[name] for name in sorted(found.keys() - _PLACES)}


_COMPILER_PREFIXES = (
    *("TRITON_", "LLVM_", "MLIR_", "NVPTX_", "PTXAS_", "USE_IR_LOC", "ALLOW_LHS_TMEM"),
    *("DISABLE_LLVM_", "DISABLE_MMA_", "DISABLE_PTXAS_"),
)
_PLACES = {"TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR"}


def triton_cache() -> Path | None:
    """Where Triton can keep its binaries if its own place, `~/.triton`, cannot be written; else None."""
    if os.environ.get("TRITON_CACHE_DIR") or os.environ.get("TRITON_HOME"):
        return None
    try:
        home = _expanded("~/.triton", "TRITON_HOME")
        home.mkdir(exist_ok=True)
        usable = os.access(home, os.W_OK)
    except (OSError, SettingError):
        usable = False
    return None if usable else cache_folder("triton")


def cache_folder(name: str) -> Path:
    """A folder for one kind of files in the cache directory, of mode 0700; a fallback where others could write to it.

    Raises:
        OSError: it cannot be created.
    """
    folder = settings().cache_dir
    try:
        reason = own_subfolder(folder, name)
    except FileNotFoundError:  # files of a cache may be deleted at any time, and so may their folder
        make_private(folder)
        reason = why_not_private(folder) or own_subfolder(folder, name)
    return folder / name if reason is None else _other_cache_folder(folder / name, reason)


@functools.cache
def _other_cache_folder(path: Path, reason: str) -> Path:
    """In place of a folder that cannot be trusted; said once."""
    return _fallback(path, reason, "FLASHGEN_CACHE_DIR", subfolder=path.name)


def shipped(folder: str) -> Path:
    """A folder that ships with flashgen (`templates`, `tuning_db`): the checkout's, else the wheel's.

    An editable install may leave a stale copy inside the package, so the checkout comes first.
    """
    package = Path(__file__).resolve().parent.parent
    checkout = package.parent / folder
    if (package.parent / "pyproject.toml").is_file() and checkout.is_dir():
        return checkout
    return package / "_data" / folder


def _db_layers() -> tuple[Path, ...]:
    listed = os.environ.get("FLASHGEN_DB", "")
    paths = tuple(_expanded(part, "FLASHGEN_DB") for part in listed.split(os.pathsep) if part)
    if paths:
        return paths
    return (_private(None, _usual(platformdirs.user_data_path), "FLASHGEN_DB") / USER_DB_NAME,)


def _usual(place: Callable[[str], Path]) -> Path:
    """Where the platform keeps files of a kind; a relative path if nobody knows the home directory."""
    try:
        return place(APP)
    except RuntimeError:
        return Path("~") / APP


def _expanded(path: str, variable: str) -> Path:
    """The absolute path that the text of a variable names, whose first part may be `~` or `~user`.

    Raises:
        SettingError: nobody knows that home directory, or the present one is gone.
    """
    home = os.environ.get("HOME")
    if path.partition("/")[0] == "~" and home is not None and not home.startswith("/"):
        raise SettingError(f"{variable} begins with ~ only where HOME is an absolute path, got {path!r} and {home!r}")
    try:
        return Path(path).expanduser().absolute()
    except (OSError, RuntimeError) as error:
        raise SettingError(f"{variable} is a path that can be found, got {path!r}: {error}") from error


def _path(variable: str) -> Path | None:
    path = os.environ.get(variable, "")
    return _expanded(path, variable) if path else None


def _chosen(name: str, word: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", word):
        raise SettingError(f"{name} is {word} or not set, got {value!r}")
    return value == word


def _flag(name: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise SettingError(f"{name} is 0 or 1, got {value!r}")
    return value == "1"


def _private(asked: str | None, usual: Path, variable: str) -> Path:
    """`asked` or `usual`, created, where nobody else can change what lies there; else a fallback, which is said."""
    path = _expanded(asked, variable) if asked else usual
    try:
        if not path.is_absolute():  # it would be another folder after the next change of directory
            raise OSError(f"HOME is an absolute path, got {os.environ.get('HOME')!r}")
        make_private(path)
        reason = why_not_private(path)
        if reason is None and os.access(path, os.W_OK | os.X_OK):
            return path
        reason = reason or "it is not writable"
    except OSError as error:
        reason = str(error)
    return _fallback(path, reason, variable)


def _fallback(path: Path, reason: str, variable: str, *, subfolder: str = "") -> Path:
    """A private folder under the temporary directory, in place of one that cannot be used."""
    try:
        found = private_temporary(APP, subfolder)
    except OSError as error:
        raise SettingError(
            f"{variable} is a folder that this user can write to and nobody else can; {path}: {reason}; and the "
            f"temporary directory has no place for one: {error}"
        ) from error
    message = f"{path} cannot be used ({reason}); using {found} (set {variable} to choose)"
    warnings.warn(printable(message), stacklevel=2)
    return found
