"""The derivative of a score_mod as source: against differences in float64, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.codegen.score_mod_gradient import gradient_source, why_no_gradient
from flashgen.core.score_mods import UserFunction

Tensor = torch.Tensor


def _pair(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda x, y: function(*(torch.as_tensor(one, dtype=torch.float64) for one in (x, y)))


TL = SimpleNamespace(
    **{name: getattr(torch, name) for name in ("exp", "exp2", "log", "log2", "sqrt", "sigmoid", "abs", "where", "sin")},
    maximum=_pair(torch.maximum),
    minimum=_pair(torch.minimum),
    load=lambda pointer: pointer,
    zeros_like=torch.zeros_like,
    float32=torch.float64,  # as exact as the differences
)
POINTS = torch.linspace(-3.0, 3.0, 41, dtype=torch.float64) + 0.013  # at none of these has a function a corner
AUX = torch.linspace(0.5, 2.0, 41, dtype=torch.float64)


def function(*lines: str, arguments: str = "score, b, h, q_idx, k_idx, aux") -> UserFunction:
    body = "".join(f"    {line}\n" for line in lines)
    return UserFunction(name="score_mod", source=f"def score_mod({arguments}):\n{body}")


def called(source: str, name: str, *arguments: Tensor) -> Tensor:
    names: dict[str, Any] = {"tl": TL}
    exec(source, names)
    result: Tensor = names[name](*arguments)
    return torch.as_tensor(result, dtype=torch.float64).expand(POINTS.shape)


@pytest.mark.parametrize(
    "lines",
    [
        ("return score * aux - score / aux",),
        ("return aux / (score * score + 1.0) - (2.0 - score)",),
        ("return score / (1.0 + tl.abs(score))",),
        ("e = tl.exp(-2.0 * score)", "return 3.0 * ((1.0 - e) / (1.0 + e))"),
        ("return tl.exp2(score) + tl.log(score * score + 1.0) * tl.log2(tl.exp(score) + 2.0)",),
        ("return tl.sqrt(score * score + aux) * tl.sigmoid(aux * score)",),
        ("return tl.maximum(score, 0.5 * score * score) - tl.minimum(aux, +score)",),
        ("return tl.where((score > 1.0) | (score < -2.0), tl.exp(score), -score)",),
        ("return tl.where(score < 0.0, 7.0, score.to(tl.float32) * tl.load(aux))",),
        ("score *= score", "score -= aux", "grad = score", "tangent: float = grad * aux", "return tangent * grad"),
        ("x = score", "score = aux", "x = x * score", "y = score + (x > 0.0)", "return x + y"),
        ("if 1 > 0:", "    c = aux * 2.0", "return c * score"),
        ("x = score * score", "x = aux", "return x"),
    ],
)
def test_it_agrees_with_differences(lines: tuple[str, ...]) -> None:
    mod, step = function(*lines), 1e-6
    places = [torch.zeros(()).double()] * 4
    below, above = (called(mod.source, "score_mod", POINTS + d, *places, AUX) for d in (-step, step))
    grad = torch.linspace(-1.0, 2.0, 41, dtype=torch.float64)
    found = called(gradient_source(mod), "score_mod_bwd", grad, POINTS, *places, AUX)
    torch.testing.assert_close(found, grad * (above - below) / (2 * step), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    "line", ["return score + aux", "return tl.load(aux) + score - 2.0", "x = score", "return score.to(tl.float32)"]
)
def test_a_score_with_a_bias_has_the_gradient_itself(line: str) -> None:
    lines = (line, "x += aux", "return x") if line.startswith("x") else (line,)
    assert gradient_source(function(*lines)).splitlines()[-1].strip() in ("return grad", "return tangent")
    grad = torch.full_like(POINTS, math.inf)  # no product makes it NaN
    found = called(gradient_source(function(*lines)), "score_mod_bwd", grad, POINTS, *[POINTS] * 4, AUX)
    assert torch.equal(found, grad)


def test_a_side_that_is_not_chosen_leaves_no_nan() -> None:
    mod = function("return tl.where(score > 0.0, tl.sqrt(score) + tl.log(score), float('-inf'))")
    found = called(gradient_source(mod), "score_mod_bwd", torch.ones_like(POINTS), POINTS, *[POINTS] * 4, AUX)
    assert torch.all(torch.where(POINTS > 0, found > 0, found == 0))


def test_equal_sides_share_the_gradient_as_in_torch() -> None:
    zero = torch.zeros_like(POINTS)
    for line in ("tl.maximum(score, 0.0)", "tl.minimum(0.0, score)", "tl.abs(score)"):
        leaf = zero.clone().requires_grad_()
        right = torch.autograd.grad(
            called(function(f"return {line}").source, "score_mod", leaf, *[zero] * 5).sum(), leaf
        )
        source = gradient_source(function(f"return {line}"))
        torch.testing.assert_close(called(source, "score_mod_bwd", zero + 1.0, zero, *[zero] * 5), right[0])


@pytest.mark.parametrize(
    ("lines", "operation"),
    [
        (("x = score * 2.0", "return tl.sin(x)"), r"through tl.sin of .* in line 3 .* 'return tl.sin\(x\)'"),
        (("return score ** 2",), r"through \*\* "),
        (("return score % 2.0",), "through % "),
        (("return score.to(tl.float16)",), r"through score.to\(tl.float16\) "),
        (("return score.abs()",), "through score.abs "),
        (("return tl.sum(score, 0)",), "through tl.sum "),
        (("return score[:, None]",), "through subscript "),
        (("if b > 0:", "    score = score * 2.0", "return score"), "through if .* line 2 .*'if b > 0:'"),
        (("if b > 0:", "    return aux", "return score"), "through if "),
        (("x, y = score, score", "return x"), "through tuple "),
        (("x = y = score", "return x"), "through an assignment to several names "),
        (("return (x := score) + x",), "through := "),
        (("return score if b > 0 else aux",), "through ifexp "),
        (("x = score",), "ends with a return"),
    ],
)
def test_what_is_not_derived_is_named_with_its_line(lines: tuple[str, ...], operation: str) -> None:
    found = why_no_gradient(function(*lines))
    assert found is not None
    assert re.search(operation, found), found


def test_names_of_the_user_stay_his() -> None:
    mod = function("return grad * s", arguments="s, b, h, q_idx, k_idx, grad")
    assert gradient_source(mod).startswith("def score_mod_bwd(grad1, s, b, h, q_idx, k_idx, grad):")
    assert why_no_gradient(mod) is None
