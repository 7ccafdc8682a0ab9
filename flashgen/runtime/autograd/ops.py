"""The torch.library ops of training: a forward pass that has a gradient, and the backward pass that it asks for.

torch.compile, modes and tensor subclasses see these; a call without any of them goes by
`flashgen.runtime.autograd.training`, one under transforms of functions by `flashgen.runtime.autograd.transforms`.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.core.errors import UnsupportedError
from flashgen.core.features import table
from flashgen.core.features.values import Features
from flashgen.runtime.ops.backward import attention_backward_kernel, is_deterministic
from flashgen.runtime.ops.backward_calls import check_outputs
from flashgen.runtime.ops.batching import map_one_by_one
from flashgen.runtime.ops.calls import check_lse
from flashgen.runtime.ops.fakes import backward_fake, forward_fake
from flashgen.runtime.ops.forward import LIBRARY, attention_features_kernel, attention_kernel
from flashgen.runtime.ops.keys import AUX_GRADIENT_SHIFT, DETERMINISTIC, GRADIENT_BITS, TRAINS, WITH_LSE
from flashgen.runtime.ops.schemas import DIFFERENTIATED, GRADIENT_FIELDS, INPUTS, OPTIONS, TRAINED, joined, split

Tensor = torch.Tensor

_TRAIN = f"attention_train({INPUTS}, {OPTIONS}, {TRAINED.schema}) -> (Tensor, Tensor)"
_BACKWARD = (
    f"attention_backward(Tensor dout, Tensor? dlse, {INPUTS}, Tensor out, Tensor lse, {OPTIONS}, "
    f"{DIFFERENTIATED.schema}) -> ({', '.join(['Tensor'] * (3 + len(GRADIENT_FIELDS)))})"
)
NO_BATCH_OF_LEARNED = (
    "aux tensors with a gradient have none for several gradients of the output in one (is_grads_batched=True, or vmap "
    "over backward passes): ask for one after the other"
)

NO_DOUBLE_BACKWARD = (
    "flashgen.attention has first derivatives only, and a gradient of its gradient is asked for; "
    "call backward or torch.autograd.grad without create_graph for what goes through it"
)

_backward: Any = attention_backward_kernel  # which is called with all options in one tuple
_TRAINS = WITH_LSE | TRAINS
_TRAINS_THE_SAME_BITS = _TRAINS | DETERMINISTIC
_BY_KERNELS = tuple(
    (gradient.field, GRADIENT_BITS[gradient.field]) for gradient in table.gradients() if gradient.by == "kernel"
)


def asked_of(deterministic: bool) -> int:
    """The flags of a forward pass whose gradients will be asked for."""
    return _TRAINS_THE_SAME_BITS if deterministic or is_deterministic() else _TRAINS


def train(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], features: Features, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """Output and LSE by the plan of a call that returns both; it fails where there is no backward pass."""
    asked = asked_of(deterministic)
    for field, bit in _BY_KERNELS:
        tensor = getattr(features, field)
        if tensor is not None and tensor.requires_grad:
            asked |= bit
    for number, tensor in enumerate(features.aux):
        asked |= tensor.requires_grad << AUX_GRADIENT_SHIFT + number
    causal, scale, bshd, offset, offset_tensor = options
    found: tuple[Tensor, Tensor]
    found = attention_features_kernel(q, k, v, causal, scale, bshd, offset, offset_tensor, features, asked)
    return found


def save(
    ctx: Any,
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    options: tuple[Any, ...],
    features: Features,
    deterministic: bool,
) -> None:
    """Keep what the backward pass needs, every tensor by way of torch's hooks for saved tensors.

    Args:
        ctx: of the autograd function.
        inputs: q, k and v.
        outputs: output and LSE.
        options: causal, softmax_scale, bshd, q_offset and its tensor.
        features: of the call.
        deterministic: as the call said.
    """
    *others, offset_tensor = options
    tensors, numbers = split(features)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *outputs, offset_tensor, *tensors)
    ctx.numbers = others, numbers, deterministic


def differentiate(
    saved: tuple[Any, ...],
    numbers: tuple[Any, ...],
    gradients: tuple[Tensor | None, Tensor | None],
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and of features in the order of the table, without torch's dispatcher.

    Args:
        saved: the tensors that `save` kept, unpacked (which torch's checkpoints allow once).
        numbers: what else it kept.
        gradients: of the output and of the LSE; None is 0.
        needs: for each gradient of a feature, whether it is asked for.
    """
    tensors, options, features, deterministic = _unpacked(saved, numbers, gradients)
    found: tuple[Tensor | None, ...] = _backward(*tensors, *options, deterministic, features, needs)
    return found


def differentiate_by_op(
    saved: tuple[Any, ...],
    numbers: tuple[Any, ...],
    gradients: tuple[Tensor | None, Tensor | None],
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The same by the op."""
    tensors, options, features, deterministic = _unpacked(saved, numbers, gradients)
    found: tuple[Tensor | None, ...]
    found = attention_backward_op(*tensors, *options, *DIFFERENTIATED.flat(features, deterministic, *needs))
    return found


def _unpacked(
    saved: tuple[Any, ...], numbers: tuple[Any, ...], gradients: tuple[Tensor | None, Tensor | None]
) -> tuple[tuple[Any, ...], tuple[Any, ...], Features, bool]:
    """The tensors of a backward pass, its options, its features, and whether it is deterministic."""
    q, k, v, out, lse, offset_tensor, *tensors = saved
    dout, dlse = gradients
    others, rest, deterministic = numbers
    if dout is None:
        dout = torch.zeros_like(out)
    return (dout, dlse, q, k, v, out, lse), (*others, offset_tensor), joined(tensors, rest), deterministic


def _attention_train(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: Tensor | None = None,
    *flat: Any,
) -> tuple[Tensor, Tensor]:
    features, deterministic = TRAINED.restored(*flat)
    options = (causal, softmax_scale, bshd, q_offset, q_offset_tensor)
    if table.given(features):
        return train(q, k, v, options, features, deterministic)
    found: tuple[Tensor, Tensor] = attention_kernel(q, k, v, *options, asked_of(deterministic))
    return found


def _attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: Tensor | None = None,
    *flat: Any,
) -> tuple[Tensor, ...]:
    """The op, which always returns a tensor for each gradient: an empty one for what was not asked for.

    Output and sums are those of autograd wherever no op is called, so only here they are looked at in every call.
    """
    if q.dim() == v.dim() == 4:  # else that is what is wrong
        check_outputs(out, dout, q, v)
        check_lse("lse", lse, q, bshd=bshd)
        if dlse is not None:
            check_lse("dlse", dlse, q, bshd=bshd)
    lse = lse.contiguous()
    features, deterministic, *needs = DIFFERENTIATED.restored(*flat)
    gradients = _backward(
        *(dout, dlse, q, k, v, out, lse, causal, softmax_scale, bshd, q_offset, q_offset_tensor, deterministic),
        features if table.given(features) else None,
        tuple(needs),
    )
    return tuple(lse.new_empty(0) if one is None else one for one in gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, causal, scale, bshd, offset, offset_tensor, *flat = inputs
    features, deterministic = TRAINED.restored(*flat)
    save(ctx, (q, k, v), output, (causal, scale, bshd, offset, offset_tensor), features, deterministic)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    # trailing arguments that equal their defaults are not among these
    asked = dict(zip(_TRAIN_NAMES, ctx.needs_input_grad, strict=False))
    needs = tuple(asked.get(field, False) for field in GRADIENT_FIELDS)
    dq, dk, dv, *others = differentiate_by_op(ctx.saved_tensors, ctx.numbers, (dout, dlse), needs)
    found = {"q": dq, "k": dk, "v": dv}
    found |= {field: gradient for field, gradient, needed in zip(GRADIENT_FIELDS, others, needs, strict=True) if needed}
    # of the structure of the arguments: a list of tensors has a list of gradients
    return tuple([None] * len(n) if isinstance(n, list) else found.get(name) for name, n in asked.items())


def _refuse(ctx: Any, *gradients: Tensor | None) -> None:
    raise UnsupportedError(NO_DOUBLE_BACKWARD)


for _schema in (_TRAIN, _BACKWARD):
    LIBRARY.define(_schema)  # type: ignore[no-untyped-call]
for _key in ("CPU", "CUDA"):  # the CPU's raises an error
    LIBRARY.impl("attention_train", _attention_train, _key)  # type: ignore[no-untyped-call]
    LIBRARY.impl("attention_backward", _attention_backward, _key)  # type: ignore[no-untyped-call]
attention_train_op = torch.ops.flashgen.attention_train.default
attention_backward_op = torch.ops.flashgen.attention_backward.default
_TRAIN_NAMES = [argument.name for argument in attention_train_op._schema.arguments]
torch.library.register_fake("flashgen::attention_train", forward_fake(TRAINED.restored, with_lse=True), lib=LIBRARY)
torch.library.register_fake("flashgen::attention_backward", backward_fake, lib=LIBRARY)
torch.library.register_autograd("flashgen::attention_train", _differentiate, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd("flashgen::attention_backward", _refuse, lib=LIBRARY)
for _name in ("attention_train", "attention_backward"):
    map_one_by_one(_name, LIBRARY)
