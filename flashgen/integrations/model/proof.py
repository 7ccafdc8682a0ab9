"""Is it the same model? Errors of flashgen's and of the model's own attention against the same model in float64.

The rule is that of FlashAttention's tests: an error is at most twice that of the attention written out in the model's
own dtype, of gradients three times, and two units in the last place of the largest number more. The backward pass of
FlashAttention (Dao et al., 2022) takes the sum of a row's dout * out from the rounded output, in place of the sum of
its weights' gradients: where these nearly cancel, gradients of queries and keys err several times more than written
out, in every fused kernel. So that of torch's fused attention counts, too, where a model can be run with it.

What has a single number (SigLIP's `logit_scale`) has a single error, which is as small as chance has it: the relative
error that its own attention has in the median of all others counts there, where that is larger.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashgen.core.quoting import printable
from flashgen.integrations.model.routes import Route
from flashgen.integrations.model.runs import Examples, dtype_of, left_as_it_is, widened

Tensor = torch.Tensor

FACTOR, GRADIENT_FACTOR, ULPS = 2, 3, 2

EQUAL, DIFFERS, NOT_RUN = "equal", "differs", "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One output, or the gradient of one parameter: the largest errors against the exact model.

    Attributes:
        name: of the output, or of the parameter.
        error: of the model with flashgen; NaN where something is not finite.
        plain_error: of the model with its own attention.
        fused_error: of a gradient, with torch's fused attention; None where it was not run.
        allowed: what the rule allows.
        largest: the largest number of the exact one.
    """

    name: str
    error: float
    plain_error: float
    allowed: float
    largest: float
    fused_error: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the rule holds."""
        return self.error <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Whether a model with flashgen is as exact as with its own attention.

    Attributes:
        status: "equal", "differs" or "not run".
        exact_dtype: of the model that both are compared with; empty where none was run.
        outputs: what was compared, the one nearest to its limit first.
        gradients: of parameters, likewise.
        reason: why nothing was compared.
    """

    status: str
    exact_dtype: str = ""
    outputs: tuple[Comparison, ...] = ()
    gradients: tuple[Comparison, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Results:
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def prove(model: torch.nn.Module, examples: Examples, route: Route, *, training: bool) -> Proof:
    """Run copies of a routed model: exact, with its own attention, and with flashgen; in evaluation mode.

    The exact one is in float64, or in float32 where a narrower model does not run in that.
    """
    why_none = _why_not_copied(model, route)
    if why_none:
        return Proof(status=NOT_RUN, reason=why_none)
    dtype = dtype_of(model)
    wide = [torch.float64] if dtype in (torch.float64, torch.float32) else [torch.float64, torch.float32]
    exact = _first(wide, lambda used: _results(model, examples, route, training=training, dtype=used))
    if isinstance(exact, str):
        return Proof(status=NOT_RUN, reason=exact)
    used, results = exact
    if not results.outputs:
        return Proof(status=NOT_RUN, reason="the examples give no tensors of floats to compare")
    try:
        plain = _results(model, examples, route, training=training, by=_plainly)
        found = _results(model, examples, route, training=training)
    except (RuntimeError, TypeError, ValueError) as error:
        return Proof(status=NOT_RUN, reason=_said("a copy of the model does not run", error))
    fused = _fused_gradients(model, examples, route) if training else {}
    outputs = compared(found.outputs, plain.outputs, {}, results.outputs, dtype, FACTOR)
    gradients = compared(found.gradients, plain.gradients, fused, results.gradients, dtype, GRADIENT_FACTOR)
    return Proof(
        status=EQUAL if all(one.holds for one in (*outputs, *gradients)) else DIFFERS,
        exact_dtype=str(used).removeprefix("torch."),
        outputs=outputs,
        gradients=gradients,
    )


def _first(dtypes: list[torch.dtype], run: Callable[[torch.dtype], _Results]) -> tuple[torch.dtype, _Results] | str:
    """The results in the first dtype that a model runs in, or why it runs in none."""
    try:
        with _softmax_in_float64():
            return dtypes[0], run(dtypes[0])
    except (RuntimeError, TypeError, ValueError) as error:  # memory, and operations without such a kernel
        if dtypes[1:]:
            return _first(dtypes[1:], run)
        return _said(f"the model does not run in {dtypes[0]}", error)


def _said(what: str, error: Exception) -> str:
    return printable(f"{what}: {type(error).__name__}: {str(error)[:300]}")


def _why_not_copied(model: torch.nn.Module, route: Route) -> str:
    """Why copies of a model would not be the same model; empty where nothing speaks against it."""
    own = vars(model).get("forward")
    before = getattr(getattr(own, "__func__", None), "before", None)
    replaced = [name for name, each in model.named_modules() if each is not model and "forward" in vars(each)]
    if replaced or before is not None or (own is not None and route.door == "transformers"):
        where = replaced[0] if replaced else "the model itself"
        return f"forward passes were replaced in the model ({where}), and a copy would run those of the original"
    return ""


def _plainly(route: Route, twin: torch.nn.Module) -> None:
    route.plain(twin)


def _fused_gradients(model: torch.nn.Module, examples: Examples, route: Route) -> dict[str, Tensor]:
    """Those of a copy with torch's fused attention; none where it has no such attention, or no kernel for it."""

    def fused(route: Route, twin: torch.nn.Module) -> None:
        if not route.fused(twin):
            raise RuntimeError("not a model of SDPA")

    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            return _results(model, examples, route, training=True, by=fused).gradients
    except (RuntimeError, TypeError, ValueError):
        return {}


def _results(
    model: torch.nn.Module,
    examples: Examples,
    route: Route,
    *,
    training: bool,
    dtype: torch.dtype | None = None,
    by: Callable[[Route, torch.nn.Module], None] | None = None,
) -> _Results:
    """What a copy of the model gives; in a wider dtype always with its own attention."""
    twin = copy.deepcopy(model).eval()
    if by is not None or dtype is not None:
        (by or _plainly)(route, twin)
    if dtype is not None:
        twin = widened(twin, dtype)
        of_experts: Any = getattr(twin, "set_experts_implementation", None)
        if of_experts is not None:
            of_experts("eager")  # grouped products are not there in float64
    with left_as_it_is(twin), torch.set_grad_enabled(training):
        found = examples.run(twin)
        outputs = {name: one.detach() for name, one in examples.results(found).items()}
        gradients = {}
        if training:
            examples.loss(found).backward()  # type: ignore[no-untyped-call]
            gradients = {name: one.grad for name, one in twin.named_parameters() if one.grad is not None}
    return _Results(outputs=outputs, gradients=gradients)


def compared(
    found: dict[str, Tensor],
    plain: dict[str, Tensor],
    fused: dict[str, Tensor],
    exact: dict[str, Tensor],
    dtype: torch.dtype,
    factor: int,
) -> tuple[Comparison, ...]:
    """Every tensor of the exact model by the rule of this module, the one nearest to its limit first."""
    rows = [
        _comparison(name, found.get(name), plain.get(name), fused.get(name), value, dtype, factor)
        for name, value in exact.items()
        if value.numel()
    ]
    usual = [one.plain_error / one.largest for one in rows if exact[one.name].numel() > 1 and one.largest]
    if usual:
        least = factor * statistics.median(usual)
        rows = [one if exact[one.name].numel() > 1 else _of_a_number(one, least) for one in rows]
    return tuple(sorted(rows, key=lambda one: (one.holds, -one.error / one.allowed if one.allowed else 0.0, one.name)))


def _comparison(
    name: str,
    found: Tensor | None,
    plain: Tensor | None,
    fused: Tensor | None,
    exact: Tensor,
    dtype: torch.dtype,
    factor: int,
) -> Comparison:
    largest = float(exact.abs().max())
    if found is None or plain is None or found.shape != exact.shape or plain.shape != exact.shape:
        return Comparison(name=name, error=float("nan"), plain_error=float("nan"), allowed=0.0, largest=largest)
    error, plain_error = (_error(one, exact) for one in (found, plain))
    fused_error = None if fused is None or fused.shape != exact.shape else _error(fused, exact)
    eps = max(torch.finfo(dtype).eps, torch.finfo(found.dtype).eps)
    return Comparison(
        name=name,
        error=error,
        plain_error=plain_error,
        allowed=factor * max(plain_error, fused_error or 0.0) + ULPS * eps * largest,
        largest=largest,
        fused_error=fused_error,
    )


def _of_a_number(one: Comparison, least: float) -> Comparison:
    """With a relative error of `least` allowed at least, where there is something to compare."""
    return replace(one, allowed=max(one.allowed, least * one.largest)) if one.allowed else one


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).abs().max())


@contextlib.contextmanager
def _softmax_in_float64() -> Iterator[None]:
    """Eager attention of transformers computes its softmax in float32, whatever the model is in; here it does not."""
    plain: Any = torch.nn.functional.softmax

    def softmax(
        input: Tensor,
        dim: int | None = None,
        _stacklevel: int = 3,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        kept = None if input.dtype == torch.float64 else dtype
        made: Tensor = plain(input, dim=dim, _stacklevel=_stacklevel, dtype=kept)
        return made

    torch.nn.functional.softmax = softmax
    try:
        yield
    finally:
        torch.nn.functional.softmax = plain
