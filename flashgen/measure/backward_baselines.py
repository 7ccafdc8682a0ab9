"""Anchors of backward passes: torch's own kernels, called below autograd and timed without their forward pass.

The operators behind `scaled_dot_product_attention` are called as its autograd would: the forward one once for every
copy of the inputs, with what it leaves for the backward one (its own output, LSE and random state), and only the
backward one in the timed part. Their arguments are matched by name, because the lists differ between torch's versions.

What torch prepares in a forward pass is prepared outside of the timed part as well: a mask becomes a bias of -inf, and
a bias is expanded and padded. What its autograd adds is inside: where a bias is shared, its gradient is summed.
Grouped heads are the kernels' own affair: flash and cuDNN sum them inside, and the efficient kernel takes none.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.core.features.values import Features
from flashgen.core.workload import Workload
from flashgen.launch.backward import BackwardTensors
from flashgen.measure.backward_verification_case import BackwardVerificationCase
from flashgen.measure.baselines import SAME_FUNCTION, BaselineCall, features_without_mask, why_not_masked

BIAS_STEP = 16
"""Torch's efficient kernel wants rows of a bias that begin at multiples of so many elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A pair of operators of torch: `forward` and `backward` are names under `torch.ops.aten`.

    `saved` names what the forward operator returns first, as the backward one calls it.
    """

    forward: str
    backward: str
    saved: tuple[str, ...]


BACKENDS = {
    "sdpa-flash": Backend(
        forward="_scaled_dot_product_flash_attention",
        backward="_scaled_dot_product_flash_attention_backward",
        saved=("out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset"),
    ),
    "sdpa-cudnn": Backend(
        forward="_scaled_dot_product_cudnn_attention",
        backward="_scaled_dot_product_cudnn_attention_backward",
        saved=("out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset"),
    ),
    "sdpa-efficient": Backend(
        forward="_scaled_dot_product_efficient_attention",
        backward="_scaled_dot_product_efficient_attention_backward",
        saved=("out", "logsumexp", "philox_seed", "philox_offset"),
    ),
}
"""By the names of `launch.sdpa.BACKENDS`."""


def unsupported(impl: str, workload: Workload) -> str | None:
    """Why torch's backend cannot be asked for this backward pass, or None; whether it can run is seen by running it."""
    reason = features_without_mask(workload)
    if reason is not None:
        return reason
    if impl == "sdpa-efficient" and workload.nheads != workload.nheads_k:
        return "torch's efficient kernel needs as many KV heads as query heads"
    if workload.bias or workload.mask:
        return _why_not_masked(impl, workload)
    if workload.causal and impl != "sdpa-flash" and workload.seqlen_q not in (1, workload.seqlen_k):
        return "torch's operator has a causal mask to the top left only"
    return None


def _why_not_masked(impl: str, workload: Workload) -> str | None:
    if workload.bias and impl == "sdpa-cudnn":
        return "torch's cuDNN kernel gives no gradient of a bias"
    return why_not_masked(impl, workload)


def prepared(impl: str, workload: Workload, problem: BackwardVerificationCase) -> BaselineCall | str:
    """Torch's backward pass on all copies of a problem, once it has computed the same gradients, or why it cannot."""
    reason = unsupported(impl, workload)
    if reason is not None:
        return reason
    inputs = problem.inputs

    def context() -> contextlib.AbstractContextManager[object]:
        return _mode(workload.deterministic)

    try:
        with warnings.catch_warnings(), context():
            warnings.simplefilter("ignore")
            pairs = zip(inputs.tensors, inputs.features, strict=True)
            calls = [
                gradients_call(impl, workload, tensors, features, problem.softmax_scale) for tensors, features in pairs
            ]
            reason = _difference(calls[0](), problem)
    except (RuntimeError, TypeError, AttributeError, LookupError) as error:  # another torch, or no memory for it
        return (str(error).splitlines() or [type(error).__name__])[0]
    return reason or BaselineCall(run=lambda n: calls[n](), context=context)


Gradients = tuple[torch.Tensor, ...]


def gradients_call(
    impl: str, workload: Workload, tensors: BackwardTensors, features: Features, scale: float
) -> Callable[[], Gradients]:
    """Runs the forward operator on q, k and v; the result runs the backward one, which writes tensors of its own."""
    backend = BACKENDS[impl]
    bias = _bias(tensors, features)
    has_gradient = features.bias is not None
    known: dict[str, Any] = {
        "query": tensors.q,
        "key": tensors.k,
        "value": tensors.v,
        "attn_bias": bias,
        "dropout_p": 0.0,
        "is_causal": workload.causal and workload.seqlen_q > 1,
        "compute_log_sumexp": True,
        "scale": scale,
        "grad_out": tensors.dout,
        "grad_out_": tensors.dout,
        "grad_input_mask": [True, True, True, has_gradient],
    }
    forward, backward = (getattr(torch.ops.aten, name).default for name in (backend.forward, backend.backward))
    positional, named = _arguments(forward, known)
    found = forward(*positional, **named)
    known |= dict(zip(backend.saved, found, strict=False))
    positional, named = _arguments(backward, known)

    def run() -> Gradients:
        gradients: Gradients = backward(*positional, **named)
        if features.bias is None:
            return gradients[:3]
        return (*gradients[:3], gradients[3].sum_to_size(features.bias.shape))

    return run


def _arguments(op: Any, known: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named arguments of an operator.

    Raises:
        LookupError: it needs one that is not known.
    """
    positional, named = [], {}
    for argument in op._schema.arguments:
        if argument.name not in known and not argument.has_default_value():
            raise LookupError(f"torch's {op} has an argument {argument.name}, which is not known here")
        value = known.get(argument.name, argument.default_value)
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    return positional, named


def _bias(tensors: BackwardTensors, features: Features) -> torch.Tensor | None:
    """What torch makes of a bias or a mask: expanded, with rows that begin at multiples of `BIAS_STEP` elements."""
    given = features.bias if features.mask is None else features.mask
    if given is None:
        return None
    q, keys = tensors.q, tensors.k.shape[2]
    own = torch.zeros((*given.shape[:3], -(-keys // BIAS_STEP) * BIAS_STEP), dtype=q.dtype, device=q.device)
    own = own[..., :keys]
    if given.dtype == torch.bool:
        own.masked_fill_(~given, float("-inf"))
    else:
        own.copy_(given)
    return own.expand(*q.shape[:3], keys)


def _difference(gradients: Gradients, problem: BackwardVerificationCase) -> str | None:
    """Why these are not the gradients of the problem's first copy, or None."""
    expected = problem.expected.gradients
    for name, found in zip(("dq", "dk", "dv", "dbias"), gradients, strict=False):
        right = expected[name].values
        if name == "dbias":
            right = right.squeeze(-1)
            # of kind "keys" a kernel writes a row for every head, and its caller sums what the heads share
            right = right if right.dim() == 4 else right.unsqueeze(2).sum_to_size(found.shape)
        if right.shape != found.shape:
            return f"its {name} has shape {tuple(found.shape)}"
        distance = float((found.double() - right).norm() / right.double().norm().clamp_min(1e-30))
        if not distance <= SAME_FUNCTION:  # nor where it is NaN
            return f"it computes something else (relative error of {name} {distance:.3g})"
    return None


@contextlib.contextmanager
def _mode(deterministic: bool) -> Iterator[None]:
    """No autograd; and where the workload asks for the same bits every time, so is torch asked."""
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    with torch.no_grad():
        torch.use_deterministic_algorithms(deterministic or before[0])
        memory.fill_uninitialized_memory = False  # that would be timed
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0])
            memory.fill_uninitialized_memory = before[1]
