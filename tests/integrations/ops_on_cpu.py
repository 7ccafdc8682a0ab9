"""flashgen's ops for tensors on a CPU: the reference, in place of the error that they are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from flashgen.core.features.values import Features
from flashgen.reference.attend import attend
from flashgen.reference.dense import rule_of
from flashgen.reference.packed import attention_varlen
from flashgen.reference.philox import Dropout
from flashgen.reference.stand_ins import lse_dtype
from flashgen.runtime import api
from flashgen.runtime.autograd import functions, ops
from flashgen.runtime.ops.schemas import DIFFERENTIATED, GRADIENT_FIELDS, SERVED, TRAINED
from flashgen.runtime.varlen import api as varlen

Tensor = torch.Tensor


@contextmanager
def ops_on_cpu() -> Iterator[None]:
    """Implement the ops of dense attention until the end of the block; calls go by torch's dispatcher, all of them."""
    library = torch.library.Library(ops.LIBRARY.ns, "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that they replace others
        for name, function in _OPS.items():
            library.impl(name, function, "CPU", allow_override=True)
    try:
        with ExitStack() as stack:
            for module in (api, varlen, functions):
                stack.enter_context(patch.object(module, "can_bypass_dispatcher", lambda *tensors: False))
            yield
    finally:
        library._destroy()


def _wide(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: Tensor | None = None,
    features: Features | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and LSE in float64, which torch can differentiate."""
    if features is not None and features.cu_seqlens_q is not None:
        return _packed(q, k, v, causal, softmax_scale, features)
    offset = q_offset if q_offset_tensor is None else q_offset_tensor
    one, two, three = (x.transpose(1, 2) if bshd else x for x in (q, k, v))
    features = features or Features()
    rule = rule_of(one, two, features, causal=causal, q_offset=offset, softmax_scale=softmax_scale)
    out, lse = attend(one, two, three, rule, None, Dropout.of(features))
    return (out.transpose(1, 2) if bshd else out), lse


def _packed(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None, features: Features
) -> tuple[Tensor, Tensor]:
    assert features.cu_seqlens_q is not None
    longest_q, longest_k = features.max_seqlens
    is_paged = features.block_table is not None
    out, lse = attention_varlen(
        q[0].double(),
        *(x.double() if is_paged else x[0].double() for x in (k, v)),
        features.cu_seqlens_q,
        None if is_paged and features.seqused_k is not None else features.cu_seqlens_k,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        seqused_k=features.seqused_k,
        block_table=features.block_table,
        dropout_p=features.dropout_p,
        rng_state=features.rng_state,
        window=features.window,
        causal=causal,
        softmax_scale=softmax_scale,
        return_lse=True,
    )
    return out[None], lse[None]


def _forward(q: Tensor, *given: Any, features: Features | None = None) -> tuple[Tensor, Tensor]:
    out, lse = _wide(q, *given, features=features)
    return out.to(q.dtype).contiguous(), lse.to(lse_dtype(q))


def _features(*given: Any) -> tuple[Tensor, Tensor]:
    (features,) = SERVED.restored(*given[BEHIND_INPUTS:])  # torch leaves out what equals its default
    return _forward(*given[:BEHIND_INPUTS], features=features)


def _train(*given: Any) -> tuple[Tensor, Tensor]:
    features, _ = TRAINED.restored(*given[BEHIND_INPUTS:])
    return _forward(*given[:BEHIND_INPUTS], features=features)


def _backward(*given: Any) -> tuple[Tensor, ...]:
    # in a thread of its own, because below the dispatcher's key of autograd nothing is differentiated
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_gradients, *given).result()


def _gradients(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *given: Any
) -> tuple[Tensor, ...]:
    """Gradients by the output and the LSE that are given, which may be those over more keys than these."""
    features, _, *needs = DIFFERENTIATED.restored(*given[5:])
    asked = {name: getattr(features, name) for name, needed in zip(GRADIENT_FIELDS, needs, strict=True) if needed}
    with torch.enable_grad():
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v, *asked.values())]
        own_features = replace(features, **dict(zip(asked, leaves[3:], strict=True)))
        own, own_lse = _wide(*leaves[:3], *given[:5], features=own_features)
        share = (own_lse.detach() - lse.double()).exp().nan_to_num(0.0)  # of these keys in the weights of all
        is_bshd = len(given) > 2 and given[2]
        beyond = (dout.double() * (own.detach() - out.double())).sum(-1)
        beyond = beyond.transpose(1, 2) if is_bshd else beyond
        of_lse = share * (beyond if dlse is None else beyond + dlse.double())
        rows = (share.transpose(1, 2) if is_bshd else share)[..., None]
        loss = (rows * own * dout.double()).sum() + (own_lse.nan_to_num(neginf=0.0) * of_lse).sum()
        found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    grads = [gradient.to(x.dtype) for gradient, x in zip(found, (q, k, v, *asked.values()), strict=True)]
    others = dict(zip(asked, grads[3:], strict=True))
    return (*grads[:3], *(others.get(name, lse.new_empty(0)) for name in GRADIENT_FIELDS))


BEHIND_INPUTS = 8
"""Arguments of an op in front of its features: q, k, v, and five options."""

_OPS = {
    "attention": lambda *given: _forward(*given)[0],
    "attention_lse": _forward,
    "attention_features": lambda *given: _features(*given)[0],
    "attention_features_lse": _features,
    "attention_train": _train,
    "attention_backward": _backward,
}
