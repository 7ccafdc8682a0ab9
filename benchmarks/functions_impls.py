"""The implementations that run functions of the caller, each called as its users call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import flashgen
from benchmarks import fa4
from benchmarks.flex import compiled_flex, flex_module, forget_compiled
from benchmarks.flex_variants import DEFAULT, FLEX, FlexVariants, Variant, why_not_flash, with_flex
from benchmarks.functions_cases import BACKWARD, BOTH, FORWARD, Function
from benchmarks.impls import IMPLS, Call, Impl, torch_version
from benchmarks.training_impls import alone_through_autograd, together
from flashgen.core.workload import Workload
from flashgen.measure.inputs import Inputs

PEERS = ("flashgen", FLEX, "fa4", "sdpa-cudnn", "sdpa-masked")
"""All that have a row somewhere: torch's SDPA of built-in features alone, FlashAttention-4 of forward passes alone."""

Wrap = Callable[[Impl], Impl]


def _forward_alone(impl: Impl) -> Impl:
    return impl


WRAPS: dict[str, Wrap] = {FORWARD: _forward_alone, BACKWARD: alone_through_autograd, BOTH: together}
"""What makes the implementation that races in a suite of one of a forward pass. Whatever it is, a backward pass alone
is called through autograd, with a graph that is kept."""


def impls_of(suite: str, function: Function, names: Sequence[str], flex: str) -> tuple[Impl, ...]:
    """What races in the calls of a function in a suite; variants that were near stay from one call to the next.

    Args:
        suite: of `functions_cases`.
        function: what the calls have.
        names: those that are wanted.
        flex: one of `flex_variants.CHOICES`.
    """
    wrap = WRAPS[suite]
    if function.is_built_in:
        known = tuple(wrap(impl) for impl in IMPLS if impl.name in PEERS)
        known = with_flex(known, flex, wrap)
    else:
        known = (wrap(_flashgen(function)), _flex(function, flex, wrap), wrap(_fa4(function)))
    order = {impl.name: impl for impl in known}
    return tuple(order[name] for name in PEERS if name in order and name in names)


def options_of(function: Function, workload: Workload, device: torch.device) -> dict[str, Any]:
    """The arguments of `flashgen.attention` for a function; its block mask is built here, once."""
    aux = function.aux(workload, device)
    options: dict[str, Any] = {"causal": workload.causal, "aux": aux}
    if function.score_mod is not None:
        options["score_mod"] = function.score_mod
    if function.mask_mod is not None:
        options["mask_mod"] = function.mask_mod
    if function.has_blocks and function.mask_mod is not None:
        sizes = {"seqlen_q": workload.seqlen_q, "seqlen_k": workload.seqlen_k}
        options["block_mask"] = flashgen.block_mask(function.mask_mod, aux=aux, device=device, **sizes)
    return options


def _none(workload: Workload) -> None:
    return None


def _flashgen(function: Function) -> Impl:
    def prepare(workload: Workload, inputs: Inputs) -> Call:
        options = options_of(function, workload, inputs.q[0].device)

        def run(n: int) -> torch.Tensor:
            out = flashgen.attention(inputs.q[n], inputs.k[n], inputs.v[n], **options)
            assert isinstance(out, torch.Tensor)
            return out

        return Call(run=run)

    return Impl(name="flashgen", version=lambda: flashgen.__version__, unsupported=_none, prepare=prepare)


def _flex(function: Function, choice: str, wrap: Wrap) -> Impl:
    default = Impl(name=FLEX, version=torch_version, unsupported=_none, prepare=partial(_prepare_default, function))
    if choice == "default":
        return wrap(default)

    def of(variant: Variant) -> Impl:
        made = replace(default, version=lambda: variant.version, prepare=partial(_prepare_flex, function, variant))
        return wrap(made if variant.is_triton else replace(made, unsupported=why_not_flash))

    variants = FlexVariants(of, flash=choice == "best", has_mask_mod=function.mask_mod is not None)
    return replace(wrap(default), variants=variants)


def _prepare_default(function: Function, workload: Workload, inputs: Inputs) -> Call:
    forget_compiled()
    return _prepare_flex(function, DEFAULT, workload, inputs)


def _prepare_flex(function: Function, variant: Variant, workload: Workload, inputs: Inputs) -> Call:
    aux = function.aux(workload, inputs.q[0].device)
    options: dict[str, Any] = {"enable_gqa": workload.nheads != workload.nheads_k}
    visible = _visible(function, workload, inputs.q[0].device)
    if visible is not None:
        options["block_mask"] = _blocks(visible, workload, inputs.q[0].device, variant.block_size)
    if function.flex_score is not None:
        options["score_mod"] = function.flex_score(aux)
    if variant.options:
        options["kernel_options"] = dict(variant.options)
    compiled = compiled_flex()
    return Call(run=lambda n: compiled(inputs.q[n], inputs.k[n], inputs.v[n], **options))


def _visible(function: Function, workload: Workload, device: torch.device) -> Callable[..., Any] | None:
    """FlexAttention's mask_mod for a call: the function's, or the causal mask."""
    if function.flex_mask is not None:
        return function.flex_mask(function.aux(workload, device))
    return (lambda b, h, i, j: i >= j) if workload.causal else None


def _blocks(visible: Callable[..., Any], workload: Workload, device: torch.device, size: tuple[int, int]) -> Any:
    lengths = (workload.seqlen_q, workload.seqlen_k)
    return flex_module().create_block_mask(visible, None, None, *lengths, device=device, BLOCK_SIZE=size)


def _fa4(function: Function) -> Impl:
    def unsupported(workload: Workload) -> str | None:
        if workload.direction == "backward":
            return "it is timed without functions in training here"
        return fa4.limits(workload)

    def prepare(workload: Workload, inputs: Inputs) -> Call:
        options = _fa4_options(function, workload, inputs)
        return Call(run=fa4.forward(inputs.q, inputs.k, inputs.v, causal=workload.causal, **options))

    return Impl(name="fa4", version=fa4.version, unsupported=unsupported, prepare=prepare)


def _fa4_options(function: Function, workload: Workload, inputs: Inputs) -> dict[str, Any]:
    if not function.fa4:
        return fa4.feature_options(replace(workload, **function.same), inputs.features[0])
    device = inputs.q[0].device
    given: dict[str, Any] = getattr(fa4.mods(), function.fa4)(*function.aux(workload, device))
    visible = function.flex_mask and _visible(function, workload, device)
    if visible is None or workload.head_dim > fa4.MAX_BLOCK_SPARSE_DIM:
        return given
    size = fa4.block_size(workload)
    return given | {"block_sparse_tensors": fa4.listed(_blocks(visible, workload, device, size), size)}
