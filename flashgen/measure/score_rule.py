"""`ScoreRule`: what happens to a score before the softmax, on one block of scores at a time.

The order is that of the public call: scale * q.k, softcap, ALiBi, bias; then causal mask, window and mask together
make keys invisible. The same rule runs in float64 for the oracle and in the test dtype for eager attention. A bias or a
mask is never expanded: a block takes what it needs through its strides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.features.table import asked, given
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization, Workload

COMPUTED = frozenset({"causal", "window", "softcap", "alibi", "sinks", "bias", "mask", "q_offset", "deterministic"})
"""The features that the references compute; the gate judges no kernel with another one."""


def uncomputed(value: Workload | Specialization) -> list[str]:
    """The names of the features that a problem asks for and the references do not compute."""
    return [feature.name for feature in asked(value) if feature.name not in COMPUTED]


def refuse_uncomputed(spec: Specialization) -> None:
    """Refuse what the references do not compute, so that no kernel is compared with the wrong answer.

    Raises:
        UnsupportedError: it asks for a feature that is not among `COMPUTED`.
    """
    if missing := uncomputed(spec):
        raise UnsupportedError(
            f"the references compute {_LISTED} and no user-defined scores, and {spec.key} also asks for {missing}"
        )


_LISTED = ", ".join(sorted(COMPUTED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A rectangle of scores (units, group, rows, keys); a unit is one KV head of one batch element.

    `batches` (units,) is the batch index of each unit, `heads` (units, group) the query heads that read its keys.
    """

    batches: torch.Tensor
    heads: torch.Tensor
    rows: range
    keys: range

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This block of a tensor expanded to (batch, nheads, seqlen_q, seqlen_k)."""
        rows, keys = slice(self.rows.start, self.rows.stop), slice(self.keys.start, self.keys.stop)
        return tensor[:, :, rows, keys][self.batches[:, None], self.heads]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """Scale, modifications and visibility of scores.

    Key j is visible to query i iff `i + offset - left <= j <= i + offset + right` (causal is a right width of 0) and
    the mask is True there. `offset` is one integer, or an integer tensor of shape (batch,). `slopes` (batch, nheads),
    `sinks` (nheads,), `bias` and `mask` (batch, nheads, seqlen_q, seqlen_k) are views with strides of 0.
    """

    softmax_scale: float
    offset: int | torch.Tensor
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    @classmethod
    def of(  # the public call's arguments, resolved
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        *,
        causal: bool,
        q_offset: int | torch.Tensor | None,
        softmax_scale: float | None,
        features: Features | None,
    ) -> ScoreRule:
        """Resolve the defaults of the public call for `q` and `k`, both (batch, heads, seqlen, head_dim).

        Raises:
            WorkloadError: a tensor does not broadcast, or there is a feature that is not among `COMPUTED`.
        """
        check_shapes(q, k)
        features = features or Features()
        missing = [feature.name for feature in given(features) if feature.name not in COMPUTED]
        if missing:
            raise WorkloadError(f"the references compute {_LISTED}, got {missing}")
        left, right = features.window
        if causal:
            right = 0 if right is None else min(0, right)
        batch, nheads, seqlen_q, _ = q.shape
        scores = (batch, nheads, seqlen_q, k.shape[2])
        return cls(
            softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            offset=k.shape[2] - seqlen_q if q_offset is None else q_offset,
            left=left,
            right=right,
            softcap=features.softcap,
            slopes=_expanded("alibi_slopes", features.alibi_slopes, (batch, nheads)),
            sinks=_expanded("sinks", features.sinks, (nheads,)),
            bias=_expanded("bias", features.bias, scores),
            mask=_expanded("mask", features.mask, scores),
        )

    @property
    def hides(self) -> bool:
        """Whether a row may see fewer keys by its position alone."""
        return self.left is not None or self.right is not None

    def key_range(self, rows: range, seqlen_k: int) -> range:
        """Keys that at least one of `rows` may see by its position."""
        if not isinstance(self.offset, int):
            return range(seqlen_k)
        first = 0 if self.left is None else rows.start + self.offset - self.left
        last = seqlen_k if self.right is None else rows.stop + self.offset + self.right
        return range(min(max(first, 0), seqlen_k), min(max(last, 0), seqlen_k))

    def modify(self, scores: torch.Tensor, block: Block, magnitude: torch.Tensor | None = None) -> torch.Tensor:
        """Softcap, ALiBi and bias on `scale * q.k`, every step rounded to the dtype of `scores`.

        `scores` may be changed, and are not meant to be used again.

        `magnitude` (like `scores`, in place) becomes the sum of the absolute values of the parts of each score, which
        is what the absolute error of a score in floating point is proportional to. A capped score counts as the cap:
        tanh from an exponential is exact to an ulp of 1, not to one of its value.
        """
        if self.softcap:
            if scores.requires_grad:  # the derivative needs what tanh gave
                scores = torch.tanh(scores / self.softcap) * self.softcap
            else:
                scores.div_(self.softcap).tanh_().mul_(self.softcap)
            if magnitude is not None:
                magnitude.fill_(abs(self.softcap))
        for term in (self._alibi(block, scores.dtype), None if self.bias is None else block.of(self.bias)):
            if term is not None:
                scores.add_(term.to(scores.dtype))
                if magnitude is not None:
                    magnitude.add_(term.abs())
        return scores

    def hidden(self, block: Block) -> torch.Tensor | None:
        """True where a key is invisible; broadcasts to (units, group, rows, keys); None where all are visible."""
        hidden = None
        if self.hides:
            distance = self._distance(block)
            hidden = torch.zeros((), dtype=torch.bool, device=distance.device)
            if self.right is not None:
                hidden = hidden | (distance < -self.right)
            if self.left is not None:
                hidden = hidden | (distance > self.left)
        if self.mask is not None:
            unmasked = ~block.of(self.mask)
            hidden = unmasked if hidden is None else hidden | unmasked
        return hidden

    def unseen_keys(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
        """True for keys that no query of any of their heads sees, (batch, nheads_k, seqlen_k); None where all may be.

        Takes memory for every score at once: meant for small shapes.
        """
        (batch, nheads, seqlen_q, _), (_, nheads_k, seqlen_k, _) = q.shape, k.shape
        units, group = batch * nheads_k, nheads // nheads_k
        unit = torch.arange(units, device=q.device)
        heads = (unit % nheads_k)[:, None] * group + torch.arange(group, device=q.device)
        hidden = self.hidden(Block(batches=unit // nheads_k, heads=heads, rows=range(seqlen_q), keys=range(seqlen_k)))
        if hidden is None:
            return None
        hidden = hidden.expand(units, group, seqlen_q, seqlen_k)
        return hidden.flatten(1, 2).all(1).view(batch, nheads_k, seqlen_k)

    def sink(self, block: Block, dtype: torch.dtype) -> torch.Tensor | None:
        """The score without a value, (units, group, 1, 1)."""
        return None if self.sinks is None else self.sinks[block.heads].to(dtype)[..., None, None]

    def _distance(self, block: Block) -> torch.Tensor:
        """How far query i + offset is behind key j, (units or 1, 1, rows, keys), int64."""
        device = block.batches.device
        offset = self.offset
        if not isinstance(offset, int):
            offset = offset.to(device=device, dtype=torch.int64)[block.batches].view(-1, 1, 1, 1)
        row = torch.arange(block.rows.start, block.rows.stop, device=device).view(1, 1, -1, 1) + offset
        return row - torch.arange(block.keys.start, block.keys.stop, device=device)

    def _alibi(self, block: Block, dtype: torch.dtype) -> torch.Tensor | None:
        if self.slopes is None:
            return None
        exact = torch.promote_types(dtype, torch.float32)
        slopes = self.slopes[block.batches[:, None], block.heads].to(exact)[..., None, None]
        return -slopes * self._distance(block).abs().to(exact)


def check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None) -> None:
    """Refuse shapes that do not fit together.

    Raises:
        WorkloadError: they do not; the message states the rule and the shapes.
    """
    v = k if v is None else v
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise WorkloadError(f"q, k and v have four dimensions, got {shapes}")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise WorkloadError(
            f"q, k and v agree in batch, q and k in head_dim, k and v in heads and seqlen, got {shapes}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise WorkloadError(f"nheads must be a multiple of nheads_k, got {shapes}")


def _expanded(name: str, tensor: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
    if tensor is None:
        return None
    try:
        return tensor.expand(shape)
    except RuntimeError as error:
        raise WorkloadError(f"{name} broadcasts to {shape}, got {tuple(tensor.shape)}") from error
