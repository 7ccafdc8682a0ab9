"""What the memo holds: one object for each kind of backend that allocates an output and computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from flashgen.launch.plan import Launch

SDPA_BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""The backends behind `flashgen.runtime.dispatch.SDPA_IMPLS`."""

Offset = int | torch.Tensor | None
Result = tuple[torch.Tensor, torch.Tensor | None]


class Run(Protocol):
    """Serves every call of one key of the memo: the output in the layout of q, and the LSE if it was asked for."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, q_offset: Offset
    ) -> Result:
        """Compute attention; see `flashgen.attention` for the meaning of the arguments."""


class KernelRun:
    """One generated kernel bound to one geometry."""

    __slots__ = ("_bshd", "_plan", "_same_head_dim", "_with_lse")

    def __init__(self, plan: Launch, *, bshd: bool, same_head_dim: bool, with_lse: bool) -> None:
        self._plan = plan
        self._bshd = bshd
        self._same_head_dim = same_head_dim
        self._with_lse = with_lse

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, q_offset: Offset
    ) -> Result:
        """Allocate and launch."""
        out = torch.empty_like(q) if self._same_head_dim else empty_output(q, v, bshd=self._bshd)
        lse = empty_lse(q, bshd=self._bshd) if self._with_lse else None
        self._plan(q, k, v, out, lse, softmax_scale, q_offset)
        return out, lse


class SdpaRun:
    """One SDPA backend for one set of shapes."""

    __slots__ = ("_backend", "_bshd", "_causal", "_gqa")

    def __init__(self, impl: str, *, causal: bool, bshd: bool, gqa: bool) -> None:
        self._backend = SDPA_BACKENDS[impl]
        self._causal = causal
        self._bshd = bshd
        self._gqa = gqa

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, q_offset: Offset
    ) -> Result:
        """Call SDPA with this backend alone."""
        expected = empty_output(q, v, bshd=self._bshd).stride()
        if self._bshd:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        with sdpa_kernel(self._backend):
            out = scaled_dot_product_attention(
                q, k, v, is_causal=self._causal, scale=softmax_scale, enable_gqa=self._gqa
            )
        out = out.transpose(1, 2) if self._bshd else out
        # torch.compile was promised these strides
        return (out if out.stride() == expected else out.new_empty_strided(out.shape, expected).copy_(out)), None


def empty_output(q: torch.Tensor, v: torch.Tensor, *, bshd: bool) -> torch.Tensor:
    """The uninitialised output of a call: q's layout in memory, with v's head_dim."""
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q)
    if bshd or q.stride(1) >= q.stride(2):
        return q.new_empty((*q.shape[:3], v.shape[-1]))
    # (batch, nheads, seqlen, head_dim) as a view of memory in bshd order
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[-1])).transpose(1, 2)


def empty_lse(q: torch.Tensor, *, bshd: bool) -> torch.Tensor:
    """The uninitialised LSE of a call: fp32 (batch, nheads, seqlen_q), whatever the layout of q."""
    batch, one, two, _ = q.shape
    return q.new_empty((batch, two, one) if bshd else (batch, one, two), dtype=torch.float32)
