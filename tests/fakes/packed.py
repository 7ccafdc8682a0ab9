"""Kernels of packed sequences emulated in torch, one sequence at a time, and mistakes that they may make."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.core.features.values import Features
from flashgen.launch.backward import BackwardTensors
from tests.packing import reference

Tensor = torch.Tensor


@dataclass
class EmulatedPack:
    """A factory of the gate in both directions; with `extra`, a sequence sees so many rows of the next one's keys."""

    causal: bool = False
    extra: int = 0
    writes_unused: bool = True

    def __call__(self, *given: Any) -> Any:
        return self._backward if isinstance(given[0], BackwardTensors) else self._forward

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float, _: int, features: Features
    ) -> None:
        self._clear(out)
        if lse is not None:
            self._clear(lse, -math.inf)
        for b, rows, keys in self._sequences(features, k.shape[2]):
            found = self._attend(
                *(one[0].transpose(0, 1).double() for one in (q[:, :, rows], k[:, :, keys], v[:, :, keys])),
                b,
                scale,
                features,
            )
            out[0, :, rows] = found[0].transpose(0, 1).to(out.dtype)
            if lse is not None:
                lse[0, :, rows] = found[1].float()

    def _backward(self, t: BackwardTensors, scale: float, _: int, features: Features) -> Tensor:
        for gradient in (t.dq, t.dk, t.dv):
            self._clear(gradient)
        dlse = torch.zeros_like(t.lse) if t.dlse is None else t.dlse
        for b, rows, keys in self._sequences(features, t.k.shape[2]):
            places = ((t.q, rows), (t.k, keys), (t.v, keys))
            given = [one[0, :, at].transpose(0, 1).double().requires_grad_() for one, at in places]
            out, lse = self._attend(*given, b, scale, features)
            total = (out * t.dout[0, :, rows].transpose(0, 1)).sum()
            total = total + (torch.where(lse.isinf(), 0.0, lse) * dlse[0, :, rows]).sum()
            if not total.requires_grad:
                continue
            found = torch.autograd.grad(total, given, allow_unused=True)
            for target, (_one, at), part in zip((t.dq, t.dk, t.dv), places, found, strict=True):
                if part is not None:
                    target[0, :, at] = part.transpose(0, 1).nan_to_num().to(target.dtype)
        return dlse.masked_fill(t.lse.isinf(), 0.0) - (t.dout.float() * t.out.float()).sum(-1)

    def _clear(self, written: Tensor, value: float = 0.0) -> None:
        if self.writes_unused:
            written.fill_(value)

    def _sequences(self, features: Features, total_k: int) -> Any:
        ends = [one.tolist() for one in (features.cu_seqlens_q, features.cu_seqlens_k) if one is not None]
        used = [None if one is None else one.tolist() for one in (features.seqused_q, features.seqused_k)]
        for b, ((q, q_end), (k, k_end)) in enumerate(zip(*map(itertools.pairwise, ends), strict=True)):
            rows = q_end - q if used[0] is None else used[0][b]
            keys = k_end - k if used[1] is None else used[1][b]
            yield b, slice(q, q + rows), slice(k, min(k + keys + self.extra, total_k))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, b: int, scale: float, features: Features
    ) -> tuple[Tensor, Tensor]:
        group, slopes = q.shape[1] // k.shape[1], features.alibi_slopes
        named: dict[str, Any] = {"softmax_scale": scale, "window": features.window, "causal": self.causal}
        named |= {"softcap": features.softcap, "sinks": None if features.sinks is None else features.sinks.double()}
        if slopes is not None:
            named["alibi_slopes"] = (slopes[b] if slopes.dim() == 2 else slopes).double()
        return reference(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), b, named)


@dataclass
class EmulatedPages(EmulatedPack):
    """The same over pages; `behind` keys too many are read, `shift` takes the ids of other entries of the table.

    With `clears`, values before a window are taken for 0, as kernels do that load whole steps of keys.
    """

    behind: int = 0
    shift: int = 0
    clears: bool = True

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float, _: int, features: Features
    ) -> None:
        self._clear(out)
        if lse is not None:
            self._clear(lse, -math.inf)
        assert features.cu_seqlens_q is not None
        ends = features.cu_seqlens_q.tolist()
        for b, (first, last) in enumerate(itertools.pairwise(ends)):
            rows = last - first if features.seqused_q is None else int(features.seqused_q[b])
            if not rows:
                continue
            keys = self._keys(features, b)
            given = [one.transpose(0, 1).double() for one in self._dense((k, v), features, b, keys)]
            left = features.window[0]
            if self.clears and left is not None:
                given[1][: max(keys - rows - left, 0)] = 0.0
            found = self._attend(q[0, :, first : first + rows].transpose(0, 1).double(), *given, b, scale, features)
            out[0, :, first : first + rows] = found[0].transpose(0, 1).to(out.dtype)
            if lse is not None:
                lse[0, :, first : first + rows] = found[1].float()

    def _keys(self, features: Features, b: int) -> int:
        if features.seqused_k is not None:
            return int(features.seqused_k[b]) + self.behind
        assert features.cu_seqlens_k is not None
        return int(features.cu_seqlens_k.diff()[b]) + self.behind

    def _dense(self, caches: tuple[Tensor, Tensor], features: Features, b: int, keys: int) -> list[Tensor]:
        table, page = features.block_table, caches[0].shape[2]
        assert table is not None
        entries = (torch.arange(-(-keys // page)) + self.shift) % table.shape[1]
        ids = table[b, entries].long().clamp(0, len(caches[0]) - 1)
        return [cache[ids].transpose(0, 1).flatten(1, 2)[:, :keys] for cache in caches]
