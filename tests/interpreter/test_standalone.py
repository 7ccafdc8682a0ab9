"""What `flashgen render` prints, run from its file: shapes of which packed tensors are not aligned, and odd strides."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flashgen.cli.main import app
from tests.interpreter.backward import TOLERANCE
from tests.interpreter.dense import Rules, attention, gradients
from tests.interpreter.forward import compare, tensors

Print = Callable[..., tuple[ModuleType, str]]
SMALL = "portable_forward:block_m=32,block_n=32,num_warps=2,num_stages=2,loads=pointer"


@pytest.fixture
def printed(tmp_path: Path) -> Print:
    """Run `flashgen render`, import what it prints from a file, and return it with what was noted."""

    def run(*arguments: str) -> tuple[ModuleType, str]:
        result = CliRunner().invoke(app, ["render", *arguments, "--target", "h100"])
        assert result.exit_code == 0, result.stderr
        path = tmp_path / "printed.py"
        path.write_text(result.stdout)
        found = importlib.util.spec_from_file_location("printed", path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        return module, result.stderr

    return run


def wider(x: torch.Tensor, columns: int) -> torch.Tensor:
    """The same values in rows that lie `columns` elements apart."""
    return torch.nn.functional.pad(x, (0, columns - x.shape[-1]))[..., : x.shape[-1]]


@pytest.mark.parametrize("head_dim", [17, 100])
def test_heads_whose_rows_are_not_aligned(printed: Print, head_dim: int) -> None:
    module, noted = printed(f"fp16-b1-h2-hk1-sq40-sk50-d{head_dim}-causal", "--config", SMALL)
    assert "so this is about unaligned ones" in noted
    q, k, v = tensors((1, 2, 1, 40, 50), head_dim, head_dim, torch.float16, "bshd")
    compare(module.portable_forward_call(q, k, v), attention(q, k, v, Rules(causal=True)))


def test_a_bias_of_77_keys(printed: Print) -> None:
    module, noted = printed("fp16-b1-h2-sq40-sk77-d64-bias", "--config", SMALL)
    assert "so this is about others" in noted
    q, k, v = tensors((1, 2, 2, 40, 77), 64, 64, torch.float16, "bhsd")
    bias = torch.randn(1, 2, 40, 77, generator=torch.Generator().manual_seed(0)).half()
    compare(module.portable_forward_call(q, k, v, bias), attention(q, k, v, Rules(bias=bias)))


def test_rows_of_68_elements(printed: Print) -> None:
    given = [wider(x, 68) for x in tensors((1, 2, 1, 40, 50), 64, 64, torch.float16, "bhsd")]
    line = ("fp16-b1-h2-hk1-sq40-sk50-d64", "--config", SMALL)
    aligned, noted = printed(*line)
    assert noted == ""
    with pytest.raises(ValueError, match=r"strides of q are multiples of 8 elements, .*, got .*; .* --unaligned"):
        aligned.portable_forward_call(*given)
    unaligned, noted = printed(*line, "--unaligned")
    assert noted == ""
    compare(unaligned.portable_forward_call(*given), attention(*given))


@pytest.mark.parametrize("case", ["d100", "d17", "d64 rows of 68", "d64 bias of 77"])
def test_backward_passes(printed: Print, case: str) -> None:
    head_dim, *more = case.removeprefix("d").split(" ", 1)
    dim, keys = int(head_dim), 77
    knobs = "block_m=32,block_n=32,num_warps=4,num_stages=2,loads=pointer"
    line = [f"bwd-fp16-b1-h2-hk1-sq40-sk{keys}-d{dim}" + ("-bias" if "77" in case else "")]
    line += ["--config", f"portable_backward_fused:{knobs}", *(["--unaligned"] if "68" in case else [])]
    module, noted = printed(*line)
    assert bool(noted) is (more != ["rows of 68"])
    q, k, v = (
        wider(x, 68 if "68" in case else dim) for x in tensors((1, 2, 1, 40, keys), dim, dim, torch.float16, "bhsd")
    )
    rules, host = Rules(), {}
    if "77" in case:
        host = {"bias": torch.randn(1, 2, 40, 77, generator=torch.Generator().manual_seed(0)).half()}
        rules = Rules(bias=host["bias"])
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).half()
    expected = gradients(q, k, v, dout, None, rules)
    call: Any = module.portable_backward_fused_call
    dq, dk, dv, _, *rest = call(q, k, v, expected["out"].half(), expected["lse"].float(), dout, **host)
    got = dict(zip(("dq", "dk", "dv", "dbias"), (dq, dk, dv, *rest), strict=False))
    assert ("dbias" in got) is bool(host)
    for name, gradient in got.items():
        atol = TOLERANCE[torch.float16] * max(1.0, float(expected[name].abs().max()))
        torch.testing.assert_close(gradient.double(), expected[name], atol=atol, rtol=0)
