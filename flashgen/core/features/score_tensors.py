"""Features with a number for every score, or for every key: bias and mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.core.alignment import ALIGNMENT_BYTES
from flashgen.core.errors import WorkloadError
from flashgen.core.features.declaration import (
    Argument,
    CallFacts,
    Feature,
    Gradient,
    KernelTensor,
    OpArgument,
    Support,
    Token,
    Value,
    Variant,
)
from flashgen.core.features.dtypes import FLOATS, dtype_name
from flashgen.core.features.values import Features

if TYPE_CHECKING:
    import torch

Shape4 = tuple[int, int, int, int]

AXES = "(batch, nheads, seqlen_q, seqlen_k)"


def broadcast_strides(tensor: torch.Tensor) -> Shape4:
    """Strides in elements of a four-dimensional tensor as if it were expanded: 0 where its size is 1."""
    strides = (0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tuple(strides)  # type: ignore[return-value]


def broadcast_kind(tensor: torch.Tensor | None) -> str:
    """The kind of a bias or a mask in a workload: "" for None, "keys" where all queries share a value, else "full"."""
    if tensor is None:
        return ""
    return "full" if broadcast_strides(tensor)[2] else "keys"


def aligned_scores(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether every bias or mask is contiguous along the keys, its pointer and other strides multiples of 16 bytes."""
    for tensor in tensors:
        if tensor is None:
            continue
        *outer, last = broadcast_strides(tensor)
        size = tensor.element_size()
        if last != 1 or tensor.data_ptr() % ALIGNMENT_BYTES or any(s * size % ALIGNMENT_BYTES for s in outer):
            return False
    return True


def _four_dimensions(name: str, tensor: torch.Tensor | None, facts: CallFacts) -> torch.Tensor | None:
    if tensor is None:
        return None
    q, sizes = facts.q, facts.sizes
    if tensor.device != q.device:
        raise WorkloadError(f"{name} is on the device of q, got {tensor.device} and {q.device}")
    missing = 4 - tensor.dim()
    padded = (1,) * missing + tuple(tensor.shape)
    if missing < 0 or any(size not in (1, full) for size, full in zip(padded, sizes, strict=True)):
        raise WorkloadError(f"{name} broadcasts to {AXES} in any layout of q, got {tuple(tensor.shape)} for {sizes}")
    return tensor[(None,) * missing] if missing else tensor


def _checked_bias(features: Features, facts: CallFacts) -> dict[str, Any]:
    bias = _four_dimensions("bias", features.bias, facts)
    if bias is not None and dtype_name(bias) not in FLOATS:
        raise WorkloadError(f"bias is float32, float16 or bfloat16, got {bias.dtype}")
    return {"bias": bias}


def _checked_mask(features: Features, facts: CallFacts) -> dict[str, Any]:
    mask = _four_dimensions("mask", features.mask, facts)
    if mask is not None and dtype_name(mask) != "bool":
        raise WorkloadError(f"mask is bool, True where attended, got {mask.dtype}; a mask of numbers to add is a bias")
    return {"mask": mask}


def _tokens(field: str) -> tuple[Token, ...]:
    return (Token(text=field, field=field, value="full"), Token(text=f"key{field}", field=field, value="keys"))


def _words(name: str, kind: str) -> tuple[str, ...]:
    return ({"full": name, "keys": f"key {name}"}[kind],) if kind else ()


def _strides(name: str) -> tuple[str, ...]:
    return tuple(f"stride_{name}_{axis}" for axis in "bhqk")


BIAS = Feature(
    name="bias",
    fields=("bias",),
    absent="it reads no bias",
    arguments=(Argument(name="bias"),),
    values=(Value(name="bias", op=(OpArgument(schema="Tensor? bias=None", default=None),)),),
    checked=_checked_bias,
    workload=lambda features, facts: {"bias": broadcast_kind(features.bias)},
    specialization=lambda features: {
        "aligned_scores": aligned_scores((features.bias, features.mask)),
        "bias_dtype": "" if features.bias is None else FLOATS[dtype_name(features.bias)],
    },
    tokens=_tokens("bias"),
    variants=(
        Variant(text="scattered", field="aligned_scores", value=False, place="alignment"),
        *(
            Variant(text=f"bias_{dtype}", field="bias_dtype", value=dtype, place="dtype")
            for dtype in ("bf16", "fp16", "fp32")
        ),
        Variant(text="dbias", field="bias_grad", value=True, place="gradient"),
    ),
    tensors=(KernelTensor(name="Bias", of=lambda features: features.bias),),
    sizes=_strides("bias"),
    gradient=Gradient(field="bias", by="kernel", needed=OpArgument(schema="bool needs_bias_grad=False", default=False)),
    words=lambda workload: _words("bias", workload.bias),
    support=(
        Support(group="Scores", name="bias for every query and key", fields={"bias": "full"}),
        Support(group="Scores", name="bias for every key", fields={"bias": "keys"}),
        Support(group="Scores", name="bias in fp32 beside bf16", fields={"bias": "full", "bias_dtype": "fp32"}),
        Support(
            group="Memory",
            name="bias or mask strided along the keys",
            fields={"bias": "full", "mask": "full", "aligned_scores": False},
        ),
    ),
    gradient_support=(
        Support(
            group="Gradients",
            name="gradient of a bias for every query and key",
            fields={"bias": "full", "bias_grad": True},
        ),
        Support(group="Gradients", name="gradient of a bias for every key", fields={"bias": "keys", "bias_grad": True}),
    ),
)

MASK = Feature(
    name="mask",
    fields=("mask",),
    absent="it reads no mask",
    arguments=(Argument(name="mask"),),
    values=(Value(name="mask", op=(OpArgument(schema="Tensor? mask=None", default=None),)),),
    checked=_checked_mask,
    workload=lambda features, facts: {"mask": broadcast_kind(features.mask)},
    specialization=lambda features: {"aligned_scores": aligned_scores((features.bias, features.mask))},
    tokens=_tokens("mask"),
    tensors=(KernelTensor(name="Mask", of=lambda features: features.mask),),
    sizes=_strides("mask"),
    words=lambda workload: _words("mask", workload.mask),
    support=(
        Support(group="Masks", name="boolean mask for every query and key", fields={"mask": "full"}),
        Support(group="Masks", name="boolean mask for every key", fields={"mask": "keys"}),
        Support(group="Masks", name="window and boolean mask for every key", fields={"window": True, "mask": "keys"}),
    ),
)
