"""FlashAttention's own tests with flashgen in its place, on a checkout that is none: samples, counts, the limit."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import flash_attn_tests as harness
from tests.tiers import EXHAUSTIVE

TESTS = """
import pytest, torch
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.layers.rotary import apply_rotary_emb

assert torch.cuda.get_device_capability("cuda") == (9, 0)

@pytest.mark.parametrize("d", [16, 32])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(n, 8) for n in range(1, 40)] + [(1000, 1000)])
def test_right(seqlen_q, seqlen_k, d):
    if seqlen_q == 3:
        pytest.skip("not this one")
    q = torch.randn(1, seqlen_q, 1, d, device="cuda")
    assert flash_attn_func(q, q, q).shape == q.shape

@pytest.mark.parametrize("seqlen", [4, 5])
def test_refused(seqlen):
    q = torch.randn(1, seqlen, 1, 16, device="cuda")
    ends = torch.tensor([0, seqlen], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    flash_attn_varlen_func(q[0], q, q, ends, ends, seqlen, seqlen, dropout_p=0.5, block_table=table)

def test_wrong():
    raise ValueError("this is wrong")

@pytest.mark.parametrize("d", [512])
def test_large(d):
    raise AssertionError("left out")

def test_flash_attn_generator_arg_must_be_none():
    raise AssertionError("left out")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    path = tmp_path / "flash-attention"
    (path / "tests").mkdir(parents=True)
    (path / "tests/test_flash_attn.py").write_text(TESTS)
    return path


def run(capsys: pytest.CaptureFixture[str], checkout: Path, *options: str) -> tuple[int, list[str]]:
    code = harness.main([str(checkout), "--device", "cpu", "--jobs", "1", *options])
    return code, capsys.readouterr().out.splitlines()


@EXHAUSTIVE
def test_a_sample_of_each_test_is_counted(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run(capsys, checkout, "--sample", "100")
    assert code == 1
    assert [line.split() for line in lines[:5]] == [
        ["test", "passed", "refused", "failed", "skipped", "not", "ended", "not", "started"],
        ["test_refused", "0", "2", "0", "0", "0", "0"],
        ["test_right", "76", "0", "0", "2", "0", "0"],
        ["test_wrong", "0", "0", "1", "0", "0", "0"],
        ["all", "76", "2", "1", "2", "0", "0"],
    ]
    why = "flashgen's flash_attn_varlen_func with a block_table does not support dropout_p"
    assert lines[5].startswith(f"refused 2: UnsupportedError: {why} (test_flash_attn_2.py::test_refused[")
    assert lines[6:] == ["failed 1: ValueError: this is wrong (test_flash_attn_2.py::test_wrong)"]


@EXHAUSTIVE
def test_a_git_directory_will_do_and_what_a_limit_leaves_is_counted(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "tests"]):
        subprocess.run(["git", "-C", str(checkout), *words], check=True)
    code, lines = run(capsys, checkout / ".git", "--sample", "3", "--limit-seconds", "0", "--only", "right")
    assert (code, lines[-1].split()) == (0, ["all", "0", "0", "0", "0", "0", "3"])


VERSION_3 = """
import pytest, torch
from flash_attn_interface import flash_attn_func

@pytest.mark.parametrize("has_qv", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_three(dtype, has_qv, seqlen_k=8):
    q = torch.randn(1, 4, 1, 16, device="cuda")
    for attention_chunk in [torch.randint(1, seqlen_k * 2, (1,)).item(), 0]:
        flash_attn_func(q, q, q, attention_chunk=attention_chunk)
"""


@EXHAUSTIVE
def test_of_version_3_what_is_refused_is_left_out_unless_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hopper").mkdir()
    for name, text in (("test_flash_attn.py", VERSION_3), ("test_util.py", ""), ("padding.py", "")):
        (tmp_path / "hopper" / name).write_text(text)
    code, lines = run(capsys, tmp_path, "--version", "3")
    assert (code, lines[-1].split()) == (0, ["all", "1", "0", "0", "0", "0", "0"])
    code, lines = run(capsys, tmp_path, "--version", "3", "--all")
    assert lines[2].split() == ["all", "0", "4", "0", "0", "0", "0"]
    assert lines[3].startswith(
        "refused 4: UnsupportedError: flashgen's flash_attn_func does not support attention_chunk ("
    )


def test_what_is_no_checkout_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert harness.main([str(tmp_path), "--version", "3"]) == 2
    assert "it has no hopper/test_flash_attn.py" in capsys.readouterr().err


def test_what_its_tests_need_is_said(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    (checkout / "tests/test_flash_attn.py").write_text("from einops import rearrange\n")
    assert harness.main([str(checkout)]) == 2
    assert "imports einops, which is not installed" in capsys.readouterr().err


@EXHAUSTIVE
def test_a_seed_draws_the_same_cases_again(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of the harness those that the plugin draws here, and other ones with another seed."""
    monkeypatch.setenv("FLASH_ATTN_TESTS", "{}")
    plugin = importlib.import_module("scripts.flash_attn_plugin")

    def drawn(seed: int) -> list[str]:
        sizes = [*((n, 8) for n in range(1, 40)), (1000, 1000)]
        every = [{"seqlen_q": n, "seqlen_k": keys, "d": d} for n, keys in sizes for d in (16, 32)]
        calls = [SimpleNamespace(params=params) for params in every]
        monkeypatch.setattr(plugin, "OPTIONS", {"seed": seed, "sample": 4, "device": "cpu", "all": False})
        plugin.pytest_generate_tests(SimpleNamespace(function=SimpleNamespace(__name__="test_right"), _calls=calls))
        return ["-".join(str(value) for value in call.params.values()) for call in calls]

    read, noted = harness.read, list[harness.Found]()
    monkeypatch.setattr(harness, "read", lambda log: noted.extend(found := read(log)) or found)
    run(capsys, checkout, "--sample", "4", "--seed", "1", "--only", "right")
    cases = [re.findall(r"\[(.*)\]", one.case)[0] for one in noted]
    assert len(cases) == 4
    assert sorted(cases) == sorted(drawn(1)) != sorted(drawn(0))
