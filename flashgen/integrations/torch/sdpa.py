"""`scaled_dot_product_attention` by flashgen's kernels: for a block of code, or for a process."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.jit import _builtins
from torch.nn import functional
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import flashgen
import flashgen.runtime.ops.runs  # which takes torch's own function before `enable` replaces it
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.integrations.torch.sdpa_arguments import CLASSES, arguments, shaped_like, why_not

Tensor = torch.Tensor
Attend = Callable[..., Tensor]

TORCHS_OWN: Attend = torch._C._nn.scaled_dot_product_attention
"""Torch's function, which `enable` replaces where programs look it up."""

_BIAS: Any = vars(CausalBias)["__torch_function__"]
"""How a causal bias finds its attention: it compares with the function that programs look up."""


class Calls:
    """What became of the calls of `scaled_dot_product_attention` while they were routed.

    Calls inside of a graph of torch.compile are traced once and run often: they are not counted.

    Attributes:
        served: calls that flashgen served.
        passed_on: for each reason why flashgen does not take a call, the calls that torch served.
    """

    def __init__(self) -> None:
        self.served = 0
        self.passed_on: Counter[str] = Counter()

    def clear(self) -> None:
        """Begin to count from 0."""
        self.served = 0
        self.passed_on.clear()

    def __str__(self) -> str:
        lines = [f"{self.served} calls served by flashgen, {self.passed_on.total()} passed on to torch"]
        return "\n".join([*lines, *(f"  {count}: {reason}" for reason, count in self.passed_on.most_common())])


class route_sdpa(TorchFunctionMode):
    """Serve every call of `scaled_dot_product_attention` in a block of code by `flashgen.attention`.

        with route_sdpa() as calls:
            model(batch)
        print(calls)

    Wherever a program has the function from, calls in this thread are seen, those of `nn.MultiheadAttention` as well,
    and those that torch.compile traces. Every function of torch takes some microseconds longer in the block: for a
    whole program, `enable` is quicker. It is a decorator of plain functions, too; blocks may be nested, and the
    innermost one counts, but what that passes on to torch comes by the outer one.

    A causal mask is torch's, aligned to the top left, whatever the lengths. Gradients are those of
    `flashgen.attention`: the first, of query, key, value and a mask of numbers. What flashgen does not take goes on to
    torch, and `calls` says why.

    Args:
        strict: raise instead of passing a call on.
        reference: serve by `flashgen.reference` on whatever device the tensors are: exact, slow, and the only way on a
            CPU.

    Raises:
        UnsupportedError: in the block, a call is not taken and `strict` is True.
    """

    def __init__(self, *, strict: bool = False, reference: bool = False) -> None:
        super().__init__()
        self.strict = strict
        self.reference = reference
        self.calls = Calls()

    def __enter__(self) -> Calls:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self.calls

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose calls are such blocks.

        Raises:
            UnsupportedError: it is a generator or a coroutine, whose body runs after its call has ended.
        """
        if any(is_one(function) for is_one in (isgeneratorfunction, iscoroutinefunction, isasyncgenfunction)):
            raise UnsupportedError(
                "route_sdpa decorates functions that run when they are called, and no generators and coroutines: enter "
                f"a block of it in the body, got {getattr(function, '__qualname__', function)!r}"
            )

        @functools.wraps(function)
        def routed(*given: Any, **named: Any) -> Any:
            with self:
                return function(*given, **named)

        return routed

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is TORCHS_OWN:
            return _attend(self, *args, **named)
        if func is functional.multi_head_attention_forward and CLASSES.issuperset(types):
            return _heads_of(self)(*args, **named)
        return func(*args, **named)


_enabled: route_sdpa | None = None

_ENABLING = threading.RLock()
"""Around a change of torch, which has several parts."""


def enable(*, strict: bool = False) -> Calls:
    """Serve `torch.nn.functional.scaled_dot_product_attention` by `flashgen.attention` in this process, in all threads.

    The function is replaced where programs look it up, which costs other functions of torch nothing. A program that has
    taken it before (`from torch.nn.functional import scaled_dot_product_attention`) keeps torch's own, and so do graphs
    that torch.compile has made before, and those of `torch.jit.script`. Enabling twice counts in the same place.

    Args:
        strict: as in `route_sdpa`.

    Returns:
        What becomes of the calls.
    """
    global _enabled  # noqa: PLW0603 - it stands for a change of torch, which there is once in a process
    with _ENABLING:
        if _enabled is None:
            _enabled = route_sdpa()
            CausalBias.__torch_function__ = _bias_of_torch()  # type: ignore[method-assign]
            routed = _routed(_enabled)
            _builtins._get_builtin_table()[id(routed)] = _builtins._find_builtin(TORCHS_OWN)  # for TorchScript
            functional.scaled_dot_product_attention = routed
        _enabled.strict = strict
        return _enabled.calls


def disable() -> None:
    """Undo `enable`; without it, nothing happens."""
    global _enabled  # noqa: PLW0603 - as above
    with _ENABLING:
        if _enabled is None:
            return
        _builtins._get_builtin_table().pop(id(functional.scaled_dot_product_attention), None)
        _enabled = None
        functional.scaled_dot_product_attention = TORCHS_OWN
        CausalBias.__torch_function__ = _BIAS  # type: ignore[method-assign]


def _attend(
    routing: route_sdpa,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """SDPA by flashgen, or by torch with the reason counted."""
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    named = {"scale": scale, "enable_gqa": enable_gqa}
    calls = routing.calls
    reason = why_not(*given, **named, on_any_device=routing.reference)  # type: ignore[arg-type]
    if reason is None:
        found = _served(arguments(*given, **named), routing.reference)  # type: ignore[arg-type]
        if isinstance(found, Tensor):
            if not is_compiling():
                calls.served += 1
            return shaped_like(found, query)
        reason = found
    if routing.strict:
        raise UnsupportedError(f"flashgen does not take this call of scaled_dot_product_attention: {reason}")
    if not is_compiling():
        calls.passed_on[reason] += 1
    return TORCHS_OWN(*given, **named)


def _served(call: dict[str, Any], by_reference: bool) -> Tensor | str:
    """The output, or why no kernel computes it; a graph of torch.compile says so when it runs."""
    attend: Attend = flashgen.attention
    if by_reference:
        from flashgen.reference import attention as attend
    if is_compiling():
        return attend(**call)
    try:
        return attend(**call)
    except (UnsupportedError, WorkloadError) as error:
        return str(error)


def _routed(routing: route_sdpa) -> Attend:
    """A function in the place of torch's own; that of the whole process leaves calls in a block to the block."""

    @functools.wraps(TORCHS_OWN)
    def scaled_dot_product_attention(*given: Any, **named: Any) -> Tensor:
        if routing is _enabled and not is_compiling() and torch._C._is_torch_function_mode_enabled():
            stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
            if any(isinstance(mode, route_sdpa) for mode in stack):
                return TORCHS_OWN(*given, **named)
        return _attend(routing, *given, **named)

    return scaled_dot_product_attention


def _bias_of_torch() -> Any:
    """How a causal bias finds torch's attention once another function stands in its place.

    Without it torch would take the empty tensor that such a bias is for the mask.
    """
    own = ModuleType(functional.__name__)
    vars(own).update(vars(functional))
    dispatch = CausalBias._dispatch
    names = {**dispatch.__globals__, "F": own}
    attend = FunctionType(dispatch.__code__, names, dispatch.__name__, dispatch.__defaults__)

    def found(cls: type, func: Attend, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is TORCHS_OWN:
            return attend(*args, **(kwargs or {}))
        return _BIAS.__get__(None, cls)(func, types, args, kwargs)

    return classmethod(found)


def _heads_of(routing: route_sdpa) -> Callable[..., Any]:
    """`multi_head_attention_forward` with a routed SDPA: this mode would not see what it calls itself.

    For plain tensors it need not ask who overrides it; an outer mode (`torch.device`, say) would call torch's own.
    """
    whole = functional.multi_head_attention_forward
    own = {"scaled_dot_product_attention": _routed(routing), "has_torch_function": lambda tensors: False}
    names = {**whole.__globals__, **own}
    return FunctionType(whole.__code__, names, whole.__name__, whole.__defaults__)
