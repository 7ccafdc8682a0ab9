"""What the keys of the memo and the ops of both directions share: flags, torch's switches, and when an op is saved."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import forward_ad, profiler

from flashgen.core.errors import UnsupportedError
from flashgen.core.features import table
from flashgen.core.features.functions import LISTS, QUERY_LISTS
from flashgen.core.features.values import Features
from flashgen.runtime.ops.generated import feature_key_function

WITH_LSE, EXPLICIT_OFFSET, OFFSET_TENSOR, BSHD, CAUSAL, TF32 = 16, 32, 64, 128, 256, 512
"""Bits of a key's flags, above the four of the pointers' alignment."""

TRAINS, BACKWARD, DETERMINISTIC = 1024, 2048, 4096
"""More of them: a forward pass whose gradients will be asked for, a backward pass, and one of the same bits."""

DOUT_SHIFT = 16
"""Where the alignment of the output's gradient lies, which may be copied where it alone is odd."""

GRADIENT_BITS = {gradient.field: 1 << 20 + number for number, gradient in enumerate(table.gradients())}
"""Above them: which gradients of features are asked for."""

ANY_GRADIENT = sum(GRADIENT_BITS.values())

AUX_GRADIENT_SHIFT = 32
"""Above these: which aux tensors are to have a gradient, one bit each."""

WITHOUT_TRAINING = (1 << AUX_GRADIENT_SHIFT) - 1 & ~(TRAINS | DETERMINISTIC | ANY_GRADIENT)
"""What of the flags a forward pass has that is the same with and without gradients to come."""


def asked_gradients(flags: int) -> frozenset[str]:
    """The fields of features whose gradients are asked for, and the names of aux tensors (`aux_gradient`)."""
    found = {field for field, bit in GRADIENT_BITS.items() if flags & bit}
    numbers = range((flags >> AUX_GRADIENT_SHIFT).bit_length())
    return frozenset(found | {aux_gradient(n) for n in numbers if flags >> AUX_GRADIENT_SHIFT + n & 1})


def aux_gradient(number: int) -> str:
    """How a call names the gradient of an aux tensor."""
    return f"aux{number}"


def layout_of(tensor: Any) -> tuple[Any, ...]:
    """What of a tensor chooses code or a rule."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


FLOAT32 = torch.float32


def allows_tf32() -> bool:
    """Whether torch may round the factors of float32 products to TF32 (`torch.backends.cuda.matmul`)."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def can_bypass_dispatcher(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    # in variables of its own, because a look-up costs a third of each question
    tensor: type = torch.Tensor,
    dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack,
    function_mode: Callable[[], bool] = torch._C._is_torch_function_mode_enabled,
    transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack,
    trace: Callable[[], object] = torch._C._get_tracing_state,
) -> bool:
    """Whether torch's dispatcher would do nothing but call the op, so that the call may save it (2 to 3 us).

    It has more to do for subclasses of tensors, under modes, transforms (`vmap`, `grad`), traces and a profiler, and
    for tensors without data; dual numbers of forward-mode derivatives are refused where it is not saved.
    """
    return (
        type(q) is tensor
        and type(k) is tensor
        and type(v) is tensor
        and not q.is_meta
        and not dispatch_modes()
        and not function_mode()
        and transform() is None
        and trace() is None
        and not profiler._is_profiler_enabled
        and forward_ad._current_level < 0
    )


def are_plain(
    tensors: tuple[torch.Tensor | None, ...],
    tensor: type = torch.Tensor,
    parameter: type = torch.nn.Parameter,
) -> bool:
    """Whether none of these is of a class that does more than to hold data, or a view that is to be negated yet.

    Such views are imaginary parts of conjugates: of stride 2, which q, k and v never have.
    """
    for one in tensors:
        if one is None:
            continue
        if (type(one) is not tensor and type(one) is not parameter) or one.is_neg():
            return False
    return True


def is_plain_offset(q_offset: int | torch.Tensor) -> bool:
    """Whether a query offset is a number, or a tensor that only holds data."""
    return type(q_offset) is int or are_plain((q_offset,))  # type: ignore[arg-type]


def have_plain_functions(features: Features) -> bool:
    """Whether what functions of the caller load from, and their block mask, are plain tensors without a gradient."""
    if not are_plain(features.aux) or any(tensor.requires_grad for tensor in features.aux):
        return False
    return features.block_mask is None or are_plain(_lists_of(features.block_mask))


def is_transformed() -> bool:
    """Whether a transform of `torch.func` is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def refuse_tangents(function: str, tensors: tuple[torch.Tensor | None, ...]) -> None:
    """Refuse calls whose tensors have tangents, which kernels would leave out, whether autograd is on or off.

    Args:
        function: which is called.
        tensors: those of a call that does not bypass the dispatcher.

    Raises:
        UnsupportedError: a forward-mode derivative is asked for.
    """
    asked = _is_jvp()
    if not asked and not is_transformed() and forward_ad._current_level >= 0:
        dual: Any = forward_ad.unpack_dual
        asked = any(dual(one).tangent is not None for one in tensors if one is not None)
    if asked:
        instead = "" if function in ("attention_decode", "append_kv") else "; use torch.func.vjp or grad"
        raise UnsupportedError(f"flashgen.{function} has no forward-mode derivative{instead}")


def refuse_lists_mapped_alone(function: str, tensors: tuple[torch.Tensor | None, ...], features: Features) -> None:
    """Refuse calls that `vmap` maps by what functions of the caller load from, or by a block mask, and by nothing else.

    Those are optional lists of an op, in which torch does not look for mapped tensors.

    Args:
        function: which is called.
        tensors: all others of a call that does not bypass the dispatcher.
        features: of that call.

    Raises:
        UnsupportedError: it is mapped so.
    """
    lists = features.aux if features.block_mask is None else (*features.aux, *_lists_of(features.block_mask))
    if lists and is_transformed() and not _mapped(lists) <= _mapped(tensors):
        raise UnsupportedError(
            f"vmap maps flashgen.{function} over aux tensors and block masks only together with q, k or v, got them "
            "alone: map q, too, expanded to as many"
        )


def _mapped(tensors: tuple[torch.Tensor | None, ...]) -> set[int]:
    """The levels of `vmap` that map these."""
    functorch, found = torch._C._functorch, set()
    for tensor in tensors:
        inner = tensor
        while inner is not None and functorch.is_functorch_wrapped_tensor(inner):
            if functorch.is_batchedtensor(inner):
                found.add(functorch.maybe_get_level(inner))
            inner = functorch.get_unwrapped(inner)
    return found


def refuse_traced_transforms(function: str) -> None:
    """Refuse a call that torch.compile traces inside a transform of `torch.func` which may ask for its gradient.

    There tensors do not say that a gradient is asked for, and the op without one would be traced: gradients of 0.

    Raises:
        UnsupportedError: it is traced so.
    """
    if is_transformed() and (torch.is_grad_enabled() or _is_jvp()):
        raise UnsupportedError(
            f"flashgen.{function} inside torch.compile has no gradient under transforms of torch.func (grad, vjp, jvp, "
            "or vmap while gradients are on): leave the transform uncompiled, or map under torch.no_grad()"
        )


def refuse_hidden_derivatives(function: str, tensors: tuple[torch.Tensor | None, ...], *, is_traced: bool) -> None:
    """Refuse a call that does not bypass the dispatcher where a derivative may be asked for that nobody would compute.

    Raises:
        UnsupportedError: as `refuse_traced_transforms` where torch.compile traces it, else as `refuse_tangents`.
    """
    if is_traced:
        refuse_traced_transforms(function)
    else:
        refuse_tangents(function, tensors)


def _is_jvp() -> bool:
    functorch = torch._C._functorch
    return any(one.key() == functorch.TransformType.Jvp for one in functorch.get_interpreter_stack() or ())


# asked once, when Dynamo traces: it enters the transforms then, and its code is guarded by them. What sets this by its
# name, torch.compiler.assume_constant_result, would import Dynamo
for _asked in (is_transformed, _is_jvp):
    _asked._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_tracked(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether a transform of `torch.func`, or autograd around it, asks for a gradient of one of these.

    The tensors of `vmap` alone do not tell.
    """
    functorch = torch._C._functorch
    for tensor in tensors:
        inner = tensor
        while inner is not None:
            if inner.requires_grad:
                return True
            inner = functorch.get_unwrapped(inner) if functorch.is_functorch_wrapped_tensor(inner) else None
    return False


def fields_reader(names: tuple[str, ...]) -> Callable[[Features], tuple[Any, ...]]:
    """What reads these fields of `Features`, in the order of their names."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda features: tuple(getattr(features, name) for name in names)


_lists_of = attrgetter(*LISTS, *QUERY_LISTS)

tensors_of = fields_reader(tuple(value.name for value in table.values() if value.is_tensor))
"""The tensors of a call's features, None for those that it has not; without those of functions."""

feature_key = feature_key_function()
