"""The torch.library ops of training: a forward pass that has a gradient, and the backward pass that it asks for.

torch.compile, modes and tensor subclasses see these; a call without any of them goes by `flashgen.runtime.training`,
one under transforms of functions by `flashgen.runtime.transforms`.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.core.errors import UnsupportedError
from flashgen.runtime.gradients import empty_gradient
from flashgen.runtime.ops import LIBRARY, PLAIN_FEATURES, SCHEMA
from flashgen.runtime.runs import empty_lse, empty_output
from flashgen.runtime.training_kernels import attention_backward_kernel, attention_train_kernel

Tensor = torch.Tensor

_TRAIN = f"attention_train({SCHEMA}, {PLAIN_FEATURES}, bool deterministic=False) -> (Tensor, Tensor)"
_INPUTS, _OPTIONS = SCHEMA.split(", bool causal")
_BACKWARD = (
    f"attention_backward(Tensor dout, Tensor? dlse, {_INPUTS}, Tensor out, Tensor lse, bool causal{_OPTIONS}, "
    f"{PLAIN_FEATURES}, bool deterministic=False, bool needs_bias_grad=False, bool needs_sink_grad=False)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
NO_DOUBLE_BACKWARD = (
    "flashgen.attention has first derivatives only, and a gradient of its gradient is asked for; "
    "call backward or torch.autograd.grad without create_graph for what goes through it"
)


def _attention_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """The op, which always returns five tensors: an empty one for what was not asked for."""
    gradients, lse = attention_backward_kernel(*arguments), arguments[6]
    return tuple(lse.new_empty(0) if one is None else one for one in gradients)


def _fake_train(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    *others: Any,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    return empty_output(q, v, bshd=bshd), empty_lse(q, bshd=bshd)


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    _, _, q, k, v, _, lse, *_ = arguments
    given = dict(zip(_NAMES, arguments, strict=False))
    bias = given.get("bias") if given.get("needs_bias_grad") else None
    sinks = given.get("sinks") if given.get("needs_sink_grad") else None
    return (
        *(empty_gradient(tensor) for tensor in (q, k, v)),
        lse.new_empty(0) if bias is None else bias.new_empty(bias.shape),
        lse.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape),
    )


def save(
    ctx: Any,
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    options: tuple[Any, ...],
    flat_features: tuple[Any, ...],
    deterministic: bool,
) -> None:
    """Keep what the backward pass needs, every tensor by way of torch's hooks for saved tensors.

    Args:
        ctx: of the autograd function.
        inputs: q, k and v.
        outputs: output and LSE.
        options: causal, softmax_scale, bshd, q_offset and its tensor.
        flat_features: window_left, window_right, softcap, alibi_slopes, sinks, bias and mask.
        deterministic: as the call said.
    """
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *outputs, options[4], *flat_features[3:])
    ctx.numbers = (*options[:4], *flat_features[:3], deterministic)


def differentiate(
    saved: tuple[Any, ...],
    numbers: tuple[Any, ...],
    gradients: tuple[Tensor | None, Tensor | None],
    backward: Any,
    *,
    needs_bias: bool,
    needs_sinks: bool,
) -> Any:
    """The gradients of q, k, v, bias and sinks.

    Args:
        saved: the tensors that `save` kept, unpacked (which torch's checkpoints allow once).
        numbers: what else it kept.
        gradients: of the output and of the LSE; None is 0.
        backward: the op or its kernel.
        needs_bias: whether the gradient of the bias is asked for.
        needs_sinks: whether that of the sinks is.
    """
    q, k, v, out, lse, offset_tensor, *tensors = saved
    dout, dlse = gradients
    causal, scale, bshd, offset, left, right, softcap, deterministic = numbers
    if dout is None:
        dout = torch.zeros_like(out)
    options = (causal, scale, bshd, offset, offset_tensor)
    asked = (deterministic, needs_bias, needs_sinks)
    return backward(dout, dlse, q, k, v, out, lse, *options, left, right, softcap, *tensors, *asked)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    save(ctx, inputs[:3], output, inputs[3:8], inputs[8:15], inputs[15])


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    # trailing arguments that equal their defaults are not among these
    needs_sinks, needs_bias = (*ctx.needs_input_grad, *(False,) * 16)[12:14]
    dq, dk, dv, dbias, dsinks = differentiate(
        ctx.saved_tensors,
        ctx.numbers,
        (dout, dlse),
        attention_backward_op,
        needs_bias=needs_bias,
        needs_sinks=needs_sinks,
    )
    absent = (None,) * 9
    return (dq, dk, dv, *absent, dsinks if needs_sinks else None, dbias if needs_bias else None, None, None)


def _refuse(ctx: Any, *gradients: Tensor | None) -> None:
    raise UnsupportedError(NO_DOUBLE_BACKWARD)


for _schema in (_TRAIN, _BACKWARD):
    LIBRARY.define(_schema)  # type: ignore[no-untyped-call]
for _key in ("CPU", "CUDA"):  # the CPU's raises the error that lists every family
    LIBRARY.impl("attention_train", attention_train_kernel, _key)  # type: ignore[no-untyped-call]
    LIBRARY.impl("attention_backward", _attention_backward, _key)  # type: ignore[no-untyped-call]
attention_train_op = torch.ops.flashgen.attention_train.default
attention_backward_op = torch.ops.flashgen.attention_backward.default
_NAMES = [argument.name for argument in attention_backward_op._schema.arguments]
torch.library.register_fake("flashgen::attention_train", _fake_train, lib=LIBRARY)
torch.library.register_fake("flashgen::attention_backward", _fake_backward, lib=LIBRARY)
torch.library.register_autograd("flashgen::attention_train", _differentiate, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd("flashgen::attention_backward", _refuse, lib=LIBRARY)
