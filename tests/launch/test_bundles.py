"""Bundles: kernels that others have compiled serve where their user trusts them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen.codegen import build_key as keys
from flashgen.codegen.families import default_config
from flashgen.core.device import find_device
from flashgen.core.errors import DatabaseError, SettingError
from flashgen.core.folders import ABANDONED_SECONDS
from flashgen.core.score_mods import ScoreMods, UserFunction
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization
from flashgen.launch import binaries, bundles
from tests.launch.bundle_files import CONFIG, FRESH, H200, OTHER, SPEC, entry, kept, read, remade, version
from tests.tiers import EXHAUSTIVE

pytestmark = pytest.mark.usefixtures("plain_compiler")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.usefixtures("trusted")
def test_a_kernel_of_a_bundle_is_the_one_that_was_compiled(bundle: Path) -> None:
    assert read() is None
    contents = bundles.install(bundle, target="sm90")
    assert (len(contents.sizes), contents.triton, contents.targets) == (2, version(), ("sm90",))
    found = read()
    assert (found.source, found.device) == (FRESH.source, FRESH.device)
    assert [part.handle.asm["cubin"] for part in found.parts] == [part.handle.asm["cubin"] for part in FRESH.parts]
    assert not (settings().cache_dir / binaries.FOLDER).exists() or not os.listdir(settings().cache_dir / "binaries")


def test_equal_kernels_are_equal_bundles(bundle: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.kernels"
    bundles.write(again, [entry(*OTHER), entry()], ["sm90", "sm90"], version())
    assert again.read_bytes() == bundle.read_bytes()
    whole = sum(size for size, _ in bundles.install(bundle).sizes.values())
    assert bundle.stat().st_size < whole / 2


def test_what_is_not_trusted_is_not_loaded(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles.install(bundle)
    assert read() is None
    monkeypatch.setenv("FLASHGEN_BINARIES", "1")
    settings.cache_clear()
    with pytest.raises(SettingError, match="FLASHGEN_BINARIES is trusted or not set, got '1'"):
        settings()


@pytest.mark.usefixtures("trusted")
def test_kernels_of_another_device_are_not_found(bundle: Path) -> None:
    with pytest.raises(DatabaseError, match=r"for the GPU that it is imported for, sm100; .* is for sm90"):
        bundles.install(bundle, target="sm100")
    assert kept() == []
    bundles.install(bundle)
    assert binaries.read(SPEC, CONFIG, find_device("b200")) is None
    assert binaries.read(SPEC, CONFIG, find_device("a100")) is None


@pytest.mark.usefixtures("trusted")
def test_kernels_of_another_triton_are_not_found(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles.install(bundle)
    monkeypatch.setattr(keys, "_compiler", lambda: ("3.99.0", "files"))
    assert read() is None
    monkeypatch.setattr(keys, "_compiler", lambda: None)
    assert read() is not None, "where there is no Triton, that of the bundle is meant"


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("variable", ["DISABLE_PTXAS_OPT", "TRITON_PTXAS_PATH", *keys.ALWAYS_COMPILE])
def test_under_variables_of_the_compiler_no_bundle_serves(
    bundle: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles.install(bundle)
    monkeypatch.setenv(variable, "1")
    assert read() is None
    assert keys.bundle_key(SPEC, CONFIG, H200, version()) is None


def test_what_makes_another_kernel_makes_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    function = UserFunction(name="f", source="def f(score, b, h, q, k):\n    return score\n")
    seen = {
        keys.bundle_key(SPEC, CONFIG, H200, "3.6.0"),
        keys.bundle_key(SPEC, CONFIG, H200, "3.7.0"),
        keys.bundle_key(SPEC, CONFIG, find_device("b200"), "3.6.0"),
        keys.bundle_key(replace(SPEC, aligned16=False), CONFIG, H200, "3.6.0"),
        keys.bundle_key(SPEC, OTHER[1], H200, "3.6.0"),
    }
    same = keys.bundle_key(SPEC, CONFIG, find_device("h100"), "3.6.0")
    assert same in seen
    assert keys.build_key(SPEC, CONFIG, H200) not in seen
    monkeypatch.setattr(keys, "_sources", lambda: "other templates")
    seen.add(keys.bundle_key(SPEC, CONFIG, H200, "3.6.0"))
    assert len(seen) == 6
    assert None not in seen
    assert keys.bundle_key(replace(SPEC, mods=ScoreMods(score_mod=function)), CONFIG, H200, "3.6.0") is None
    assert keys.bundle_key(SPEC, CONFIG, find_device("mi300x"), "3.6.0") is None


@pytest.mark.usefixtures("trusted")
def test_a_machine_takes_its_own_of_the_kernels_for_two_architectures(bundle: Path) -> None:
    other = replace(entry(*OTHER), target="sm80")
    bundles.write(bundle, [replace(entry(), target="sm90"), other], ["sm80", "sm90"], version())
    contents = bundles.install(bundle, target="sm90")
    assert (list(contents.sizes), contents.targets) == ([entry().key], ("sm90",))
    assert [name for name in kept() if name.endswith(binaries.SUFFIX)] == [f"{entry().key[:32]}{binaries.SUFFIX}"]
    assert read() is not None
    with pytest.raises(DatabaseError, match=r"imported for, sm100; .* is for sm80, sm90"):
        bundles.install(bundle, target="sm100")
    assert len(bundles.install(bundle).sizes) == 2


@pytest.mark.usefixtures("trusted")
def test_of_a_bundle_that_does_not_say_what_each_kernel_is_for_all_are_taken(bundle: Path) -> None:
    remade(bundle, lambda head, entries: [each.pop("target") for each in head["entries"]])
    remade(bundle, lambda head, entries: head["targets"].append("sm80"))
    assert len(bundles.install(bundle, target="sm90").sizes) == 2
    assert read() is not None


def test_drafts_of_killed_imports_are_cleared_away(bundle: Path) -> None:
    bundles.install(bundle)
    old, new = (settings().cache_dir / binaries.BUNDLES / f"{name}.tmp" for name in ("old", "new"))
    for draft in (old, new):
        draft.write_bytes(b"half")
    long_ago = time.time() - 2 * ABANDONED_SECONDS
    os.utime(old, (long_ago, long_ago))
    bundles.install(bundle)
    assert (old.exists(), new.exists()) == (False, True)


# --- a process without a compiler ---------------------------------------------------------------------------------


@EXHAUSTIVE
def test_a_process_without_a_compiler_makes_its_first_call(own_settings: Path, tmp_path: Path) -> None:
    """Neither Triton nor ptxas nor Jinja: importing the first fails, nothing is in PATH."""
    a100 = find_device("a100")
    spec = Specialization(direction="forward", dtype="bf16", head_dim=128, head_dim_v=128, causal=True)
    made = bundles.entry_of(spec, default_config(spec, a100), a100)
    assert made is not None
    path = tmp_path / "a100.kernels"
    bundles.write(path, [made], ["sm80"], version())
    bundles.install(path, target="sm80")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"FLASHGEN_QUIET": "1", "PATH": str(tmp_path), "PYTHONPATH": str(ROOT), "FLASHGEN_NO_COMPILE": "1"}
    code = (
        "import sys; sys.modules['triton'] = None; sys.argv = ['first_call', 'a100']\n"
        "import runpy; runpy.run_module('tests.fakes.first_call', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**environment, "FLASHGEN_BINARIES": "trusted"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    imported = {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    assert "flashgen" in imported
    assert not {"triton", "jinja2", "zstandard", "sqlalchemy"} & imported


# --- signatures ------------------------------------------------------------------------------------------------------


@pytest.fixture
def signer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trusted key, under the policy that asks for signatures."""
    minisign = pytest.importorskip("tests.fakes.minisign")
    found = minisign.Signer()
    monkeypatch.setenv("FLASHGEN_SIGNATURES", "required")
    monkeypatch.setenv("FLASHGEN_TRUSTED_KEYS", str(found.publish(tmp_path / "keys" / "ours.pub")))
    settings.cache_clear()
    return found


@pytest.mark.usefixtures("trusted")
def test_a_bundle_that_is_signed_serves(bundle: Path, signer: Any) -> None:
    with pytest.raises(DatabaseError, match=r"h200\.kernels\.minisig is missing"):
        bundles.install(bundle)
    signer.sign(bundle)
    assert len(bundles.install(bundle, target="sm90").sizes) == 2
    assert read() is not None
    assert not list((settings().cache_dir / "signed").glob("*")), "the copy is not kept"
    content = bundle.read_bytes()
    bundle.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DatabaseError, match="was changed since"):
        bundles.install(bundle)


@pytest.mark.usefixtures("trusted")
def test_kernels_that_came_without_a_signature_are_not_loaded(
    bundle: Path, signer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHGEN_SIGNATURES")
    settings.cache_clear()
    bundles.install(bundle)
    assert read() is not None
    monkeypatch.setenv("FLASHGEN_SIGNATURES", "required")
    settings.cache_clear()
    assert read() is None
    signer.sign(bundle)
    bundles.install(bundle)
    assert read() is not None
    monkeypatch.delenv("FLASHGEN_SIGNATURES")
    settings.cache_clear()
    shutil.rmtree(settings().cache_dir / binaries.BUNDLES)
    assert read() is not None, "signed ones serve anywhere"


@pytest.mark.usefixtures("trusted")
def test_a_bundle_that_is_exchanged_while_it_is_taken_over_is_what_was_signed(
    bundle: Path, signer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: Path) -> Any:
        bundle.write_bytes(b"exchanged")
        return real(path)

    real = bundles._opened
    monkeypatch.setattr(bundles, "_opened", opened)
    signer.sign(bundle)
    assert len(bundles.install(bundle).sizes) == 2
