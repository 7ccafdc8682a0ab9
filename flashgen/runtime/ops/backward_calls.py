"""`BackwardCall`: what a backward pass was asked for; `CheckedBackwardCall`: its rules hold."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flashgen.core.config import Config
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.features.score_tensors import broadcast_kind
from flashgen.core.features.table import specialization_fields
from flashgen.core.features.values import Features
from flashgen.core.score_mods import ScoreMods
from flashgen.core.workload import Specialization, Workload
from flashgen.launch.backward import BackwardTensors, backward_geometry
from flashgen.launch.geometry import Geometry, aligned16
from flashgen.runtime.ops.calls import MAX_ROW_STRIDE, NO_FEATURES, Call, CheckedCall
from flashgen.runtime.ops.gradients import BiasRule, bias_rule, empty_bias_gradient
from flashgen.runtime.ops.keys import aux_gradient
from flashgen.runtime.ops.mods import resolve
from flashgen.runtime.ops.outputs import META, aligned_like, dense_like, empty_lse, empty_output


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardCall:
    """The arguments of one backward pass that choose code; tensors are in the layout of the forward call.

    `dout` and `out` of None are laid out as the forward pass allocates its output: so they are where a backward pass
    is only asked about. `gradients` names the fields of the features whose gradients are asked for, and aux tensors.
    SDPA takes no part (`generated_only`): its backward pass belongs to its own forward pass.
    """

    forward: Call
    out: torch.Tensor | None = None
    dout: torch.Tensor | None = None
    deterministic: bool = False
    gradients: frozenset[str] = frozenset()
    generated_only: bool = field(default=True, init=False)

    def checked(self) -> CheckedBackwardCall:
        """The call, its rules checked; raises as `CheckedBackwardCall.of` does."""
        return CheckedBackwardCall.of(self)

    def exact(self) -> BackwardCall:
        """The call with exact products."""
        return replace(self, forward=self.forward.exact())

    @property
    def mods(self) -> ScoreMods | None:
        """The user's functions, with which of their tensors have a gradient; a mask_mod alone gives them none."""
        found = self.forward.mods
        if found is None or found.score_mod is None:
            return found
        numbers = tuple(n for n in range(len(found.aux)) if aux_gradient(n) in self.gradients)
        return replace(found, aux_grads=numbers) if numbers else found

    @property
    def q(self) -> torch.Tensor:
        """The queries."""
        return self.forward.q

    @property
    def batch_invariant(self) -> bool:
        """Whether bits must not depend on the batch."""
        return self.forward.batch_invariant

    @property
    def open_key(self) -> tuple[Any, ...] | None:
        """What backward passes of other sizes have in common with this one."""
        return self.forward.open_key

    @property
    def config(self) -> Config | None:
        """A config to serve with, in the place of the look-up."""
        return self.forward.config


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedBackwardCall:
    """A backward call whose rules hold.

    Attributes:
        call: the call.
        workload: what is computed.
        spec: what is compiled in.
        geometry: shapes and strides of all tensors, `dout` being a copy where that is needed.
        copies: whether kernels get copies of q, k and v, which are meant there, too.
        pads: whether heads of these are wider; then `out` and `dout` are such copies, too.
        copies_dout: whether `dout` is one of the same width.
        bias_rule: how the gradient of the bias is made.
        copies_bias: whether the kernels get a copy of the bias, one with a value of its own for every query.
    """

    call: BackwardCall
    workload: Workload
    spec: Specialization
    geometry: Geometry
    copies: bool
    pads: bool
    copies_dout: bool
    bias_rule: BiasRule
    copies_bias: bool

    @classmethod
    def of(cls, call: BackwardCall) -> CheckedBackwardCall:
        """Check a call.

        Raises:
            WorkloadError: shapes, dtypes or arguments do not fit together; the message names the rule and the values.
        """
        forward = CheckedCall.of(call.forward)
        rule, features, copies_bias = _bias(call, forward)
        out = call.out if call.out is not None else _new_output(call.forward)
        dout = call.dout if call.dout is not None else out
        check_outputs(out, dout, call.q, call.forward.v)
        workload = replace(
            forward.workload,
            direction="backward",
            deterministic=call.deterministic,
            bias=broadcast_kind(features.bias if features else None),
        )
        asked = replace(call, forward=call.forward.of_copies()) if forward.copies else call
        if forward.pads:
            out = dout = aligned_like(out, META)
        copied = _Laid.of(asked, out, torch.empty_like(out, device=META), features, rule)
        given = copied if _must_copy(dout, call.forward.bshd) else _Laid.of(asked, out, dout, features, rule)
        # a kernel for odd tensors is slower than a copy of this one
        laid = given if given.aligned16 or not copied.aligned16 else copied
        spec = Specialization.of(
            workload,
            aligned16=laid.aligned16,
            offset_tensor=call.forward.offset_tensor,
            bias_grad=rule in ("full", "keys"),
            mods=call.mods,
            **specialization_fields(features or NO_FEATURES),
        )
        return cls(
            call=call,
            workload=workload,
            spec=spec,
            geometry=laid.geometry,
            copies=forward.copies,
            pads=forward.pads,
            copies_dout=laid is copied,
            bias_rule=rule,
            copies_bias=copies_bias,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Laid:
    """The geometry of a call with one choice of `dout`, and whether everything in it is aligned.

    What is yet to be allocated, which torch does at multiples of 512 bytes, is on the meta device.
    """

    geometry: Geometry
    aligned16: bool

    @classmethod
    def of(
        cls, call: BackwardCall, out: torch.Tensor, dout: torch.Tensor, features: Features | None, rule: BiasRule
    ) -> _Laid:
        forward = call.forward
        inputs = (forward.q, forward.k, forward.v)
        laid = [*inputs, out, dout, *(dense_like(tensor, META) for tensor in inputs)]
        q, k, v, o, do, dq, dk, dv = (tensor.transpose(1, 2) if forward.bshd else tensor for tensor in laid)
        bias = None if features is None else features.bias
        tensors = BackwardTensors(
            q=q,
            k=k,
            v=v,
            out=o,
            lse=empty_lse(forward.q, bshd=forward.bshd),
            dout=do,
            dq=dq,
            dk=dk,
            dv=dv,
            dbias=None if bias is None else empty_bias_gradient(bias, rule, (*q.shape[:2], k.shape[2]), META),
        )
        geometry = backward_geometry(tensors, features)
        pointers = 0
        for tensor in laid:
            pointers |= tensor.data_ptr()
        return cls(geometry=geometry, aligned16=aligned16(geometry, pointers, forward.q.element_size()))


def _bias(call: BackwardCall, forward: CheckedCall) -> tuple[BiasRule, Features | None, bool]:
    """How the gradient of the bias is made, the features that the kernels get, and whether their bias is a copy."""
    features = forward.features
    if features is None or features.bias is None or "bias" not in call.gradients:
        return "", features, False
    rule = bias_rule(features.bias, forward.workload.seqlen_k)
    # which `flashgen.attention` expands
    if rule == "rows" and features.mods and resolve(features.mods).score_mod is not None:
        raise UnsupportedError(
            "the gradient of a bias that a score_mod follows needs a value for each key, got one for all of a row, of "
            f"shape {tuple(features.bias.shape)}: expand it"
        )
    is_shared = rule == "full" and broadcast_kind(features.bias) == "keys"
    return rule, replace(features, bias=features.bias.contiguous()) if is_shared else features, is_shared


def _new_output(forward: Call) -> torch.Tensor:
    return empty_output(forward.q, forward.v, bshd=forward.bshd)


def _must_copy(dout: torch.Tensor, bshd: bool) -> bool:
    """Whether no kernel takes these strides: those of an expanded gradient, say, which `out.sum()` leaves."""
    rows = dout.stride(1 if bshd else 2)
    return (dout.shape[3] > 1 and dout.stride(3) != 1) or rows >= MAX_ROW_STRIDE


def check_outputs(out: torch.Tensor, dout: torch.Tensor, q: torch.Tensor, v: torch.Tensor) -> None:
    """Check the output of a call and its gradient, for a q and a v that are right.

    Raises:
        WorkloadError: one has not the shape of q with the columns of v, in the dtype of q on its device; or the last
            dimension of the output is not contiguous.
    """
    expected = (*q.shape[:3], v.shape[3])
    for name, tensor in (("out", out), ("dout", dout)):
        if tuple(tensor.shape) != expected or tensor.dtype != q.dtype or tensor.device != q.device:
            raise WorkloadError(
                f"out and dout are {expected} in the dtype of q on its device, got {name} {tuple(tensor.shape)} in "
                f"{tensor.dtype} on {tensor.device}"
            )
    if out.shape[3] > 1 and out.stride(3) != 1 and out.numel():
        raise WorkloadError(f"the last dimension is contiguous, got out with strides {out.stride()}")
