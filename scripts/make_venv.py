"""Create or refresh the virtual environment that every make target uses. Needs nothing but Python 3.10 or newer.

Two set-ups, chosen by what this interpreter has:

- torch with a usable GPU: the environment sees the interpreter's packages, keeps its torch and triton, and gets only
  what is missing. Without a network, point pip at wheels with PIP_NO_INDEX=1 and PIP_FIND_LINKS=<folder>.
- anything else: torch alone first (so that nothing else decides which build of it is taken), then the rest, all by
  constraints/cpu.txt.

Usage: make_venv.py <folder>
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints" / "cpu.txt"
OLDEST_PYTHON = (3, 10)
IMPORTED_BY_TESTS = (
    "torch, torch._dynamo, torch._inductor.compile_fx, triton.compiler, optuna, sqlalchemy.orm, alembic, rich, pytest"
)


def main() -> int:
    """Build the environment named on the command line and stamp it."""
    if sys.version_info < OLDEST_PYTHON:
        print(f"flashgen needs Python 3.10 or newer, this is {sys.version.split()[0]}: run `make PYTHON=python3.11`")
        return 1
    folder = Path(sys.argv[1])
    with_gpu = has_gpu_torch()
    print(f"{folder}: {'the torch and triton of ' + sys.executable if with_gpu else CONSTRAINTS.relative_to(ROOT)}")
    venv.EnvBuilder(with_pip=True, system_site_packages=with_gpu, symlinks=True).create(folder)
    python = folder / "bin" / "python"
    try:
        (install_beside_gpu_torch if with_gpu else install_pinned)(python)
    except subprocess.CalledProcessError as error:
        print(f"error: {' '.join(map(str, error.cmd))} failed; nothing was stamped, run make again")
        return 1
    write_bytecode(python)
    (folder / ".stamp").touch()
    return 0


def has_gpu_torch() -> bool:
    """Whether this interpreter's own torch sees a GPU; asked in a child, so that torch is not loaded here."""
    if importlib.util.find_spec("torch") is None:
        return False
    code = "import torch, triton, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def install_pinned(python: Path) -> None:
    """Torch first and alone, then flashgen (editable) with every extra."""
    torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    pip(python, "-c", str(CONSTRAINTS), torch)
    pip(python, "-c", str(CONSTRAINTS), "-e", f"{ROOT}[dev]")


def install_beside_gpu_torch(python: Path) -> None:
    """Paths to the checkout and to this interpreter's packages, then what flashgen needs beyond them.

    The checkout comes by a path file and not as an editable install: that would need a build back end, hence a network.
    """
    own = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]  # not inherited where this is an environment
    Path(site_packages(python), "flashgen-checkout.pth").write_text("\n".join([str(ROOT), *own, ""]))
    keep = [f"{name}=={version}" for name in ("torch", "triton") if (version := installed(name))]
    project = read_project()
    pip(python, *keep, *project["dependencies"])
    try:
        pip(python, *keep, *project["optional-dependencies"]["test"])
    except subprocess.CalledProcessError:
        print("the test extra could not be installed: `make tune` works, `make gpu-test` needs it")


def site_packages(python: Path) -> str:
    """The folder that `python` installs packages into."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def installed(name: str) -> str | None:
    """The version of a distribution that this interpreter has, else None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_project() -> dict:
    """The `project` table of pyproject.toml."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def write_bytecode(python: Path) -> None:
    """Import once what every test process imports, with bytecode written even where the environment forbids it.

    Without it each process compiles the sources of torch anew, 3 s of CPU. All that is installed would take far longer.
    """
    allowed = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([python, "-c", f"import {IMPORTED_BY_TESTS}"], check=False, env=allowed, stderr=subprocess.DEVNULL)


def pip(python: Path, *arguments: str) -> None:
    """Install into the environment of `python`; bytecode is written when a module is imported, and not for all."""
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([python, *install, *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())
