"""Anchors: torch's own attention, one backend at a time, timed in the same race as the generated kernels."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from flashgen.core.features.values import Features
from flashgen.core.workload import Workload
from flashgen.launch.sdpa import BACKENDS
from flashgen.measure.inputs import Inputs
from flashgen.measure.timing import Run
from flashgen.measure.verification_case import VerificationCase
from flashgen.measure.verify import Oracle

NO_FEATURES = Features()

SAME_FUNCTION = 0.05
"""Relative error below which an output is the same function: far above rounding, far below another mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpaCall:
    """`scaled_dot_product_attention` on one backend: call `run(q, k, v, features)` inside `context`.

    The features bring a bias or a mask and may be left out where there is none.
    """

    impl: str
    run: Callable[..., torch.Tensor]

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Allows this backend alone."""
        return sdpa_kernel(BACKENDS[self.impl])


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineCall:
    """One of torch's backends on a problem: `run(n)` computes copy n, inside `context`."""

    run: Run
    context: Callable[[], contextlib.AbstractContextManager[object]]


def unsupported(impl: str, workload: Workload) -> str | None:
    """Why torch's backend cannot be asked for this workload, or None; whether it can run is seen by running it."""
    if workload.direction != "forward":
        return "the backward pass has baselines of its own"
    reason = features_without_mask(workload)
    if reason is not None:
        return reason
    if workload.bias or workload.mask:
        return why_not_masked(impl, workload)
    if _needs_lower_right(workload) and impl == "sdpa-cudnn":
        return "torch reaches cuDNN with a causal mask to the top left only"
    if _needs_lower_right(workload) and impl == "sdpa-efficient" and workload.nheads != workload.nheads_k:
        return "torch's efficient kernel needs as many KV heads as query heads"
    return None


def features_without_mask(workload: Workload) -> str | None:
    """Why no backend can be asked because of a feature, or None."""
    if any((workload.softcap, workload.alibi, workload.sink, workload.varlen)):
        return "scaled_dot_product_attention has no such feature without a materialized mask"
    if workload.page_size is not None or workload.window_left is not None or workload.window_right is not None:
        return "scaled_dot_product_attention has no such feature without a materialized mask"
    return None


def why_not_masked(impl: str, workload: Workload) -> str | None:
    """Why a backend cannot be asked for this bias or mask, or None."""
    if workload.causal or (workload.bias and workload.mask):
        return "scaled_dot_product_attention takes one mask or bias and nothing beside it"
    if impl == "sdpa-flash":
        return "torch's flash kernel has no mask and no bias"
    if workload.nheads != workload.nheads_k:
        return "with a mask, torch's kernels need as many KV heads as query heads"
    return None


def sdpa_call(impl: str, workload: Workload) -> SdpaCall:
    """The call for a workload that `unsupported` has no objection to."""
    gqa = workload.nheads != workload.nheads_k
    corner: torch.Tensor | None = None
    causal = workload.causal and workload.seqlen_q == workload.seqlen_k
    if _needs_lower_right(workload):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about rows without a key, which the comparison with the oracle judges
            corner = causal_lower_right(workload.seqlen_q, workload.seqlen_k)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: Features = NO_FEATURES) -> torch.Tensor:
        mask = next((given for given in (corner, features.bias, features.mask) if given is not None), None)
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa
        )

    return SdpaCall(impl=impl, run=run)


def prepared(impl: str, workload: Workload, problem: VerificationCase) -> BaselineCall | str:
    """Torch's backend on all copies of a problem, once it has computed the same function, or why it cannot."""
    reason = unsupported(impl, workload)
    if reason is not None:
        return reason
    call, inputs = sdpa_call(impl, workload), problem.inputs
    reason = runs(call, inputs, problem.expected)
    if reason is not None:
        return reason
    return BaselineCall(
        run=lambda n: call.run(inputs.q[n], inputs.k[n], inputs.v[n], inputs.features[n]), context=call.context
    )


def runs(call: SdpaCall, inputs: Inputs, expected: Oracle) -> str | None:
    """Run the call once: None if it works and computes the same function, else the reason."""
    with warnings.catch_warnings(), call.context():
        warnings.simplefilter("ignore")  # torch explains at length why a backend was left out
        try:
            out = call.run(inputs.q[0], inputs.k[0], inputs.v[0], inputs.features[0])
        except RuntimeError as error:
            return str(error).splitlines()[0]
    if out.shape != expected.out.shape:
        return f"its output has shape {tuple(out.shape)}"
    distance = float((out.double() - expected.out).norm() / expected.out.double().norm().clamp_min(1e-30))
    return None if distance <= SAME_FUNCTION else f"it computes something else (relative error {distance:.3g})"


def _needs_lower_right(workload: Workload) -> bool:
    """A causal mask to the bottom right that `is_causal` (top left) does not give; one query sees every key anyway."""
    return workload.causal and workload.seqlen_q not in (1, workload.seqlen_k)
