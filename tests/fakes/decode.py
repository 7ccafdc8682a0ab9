"""Decode kernels emulated in torch: what a launch of a plan would write, and mistakes that it may make."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashgen.launch.decode_numbers import DecodeShape
from flashgen.measure.decode_case import DecodeLaunch
from flashgen.measure.decode_inputs import DecodeTensors


@dataclass
class EmulatedStep:
    """A factory of the gate: one key too many with `extra` 1, one too few with -1."""

    extra: int = 0
    launched: Callable[[DecodeTensors], object] = lambda tensors: None

    def __call__(self, shape: DecodeShape) -> DecodeLaunch:
        def run(tensors: DecodeTensors) -> None:
            self.launched(tensors)
            for b in range(shape.batch):
                self._one(shape, tensors, b)

        return run

    def _one(self, shape: DecodeShape, t: DecodeTensors, b: int) -> None:
        length = int(t.lens[b])
        keys = torch.arange(max(min(length + self.extra, shape.seqlen_k), 0))
        place = torch.arange(shape.seqlen_q)[:, None] + length - shape.seqlen_q
        seen = (keys >= place - shape.window_left) & (keys <= place + shape.window_right + max(self.extra, 0))
        if t.leftpad is not None:
            seen = seen & (keys >= t.leftpad[b])
        used = seen.any(0)
        keys, seen = keys[used], seen[:, used]
        group = shape.nheads // shape.nheads_k
        k, v = (_rows(t, cache, b, keys).repeat_interleave(group, 1).float() for cache in (t.k, t.v))
        s = torch.einsum("qhd,khd->hqk", t.q[b].float(), k) * shape.softmax_scale
        if shape.softcap:
            s = shape.softcap * torch.tanh(s / shape.softcap)
        if t.features.alibi_slopes is not None:
            s = s - t.features.alibi_slopes[:, None, None] * (place - keys).abs()
        s = s.masked_fill(~seen, -math.inf)
        if t.features.sinks is not None:
            s = torch.cat([s, t.features.sinks.float()[:, None, None].expand(-1, shape.seqlen_q, 1)], -1)
        lse = torch.logsumexp(s, -1) if s.shape[-1] else torch.full(s.shape[:2], -math.inf)
        p = torch.exp(s - torch.where(lse.isinf(), 0.0, lse)[..., None])[..., : len(keys)]
        t.out[b] = torch.einsum("hqk,khd->qhd", p.to(t.q.dtype).float(), v).to(t.q.dtype)
        t.lse[b] = lse


def _rows(t: DecodeTensors, cache: torch.Tensor, b: int, keys: torch.Tensor) -> torch.Tensor:
    if t.table is None:
        return cache[b, keys]
    page = cache.shape[1]
    pages = t.table[b][keys // page].long().clamp(0, cache.shape[0] - 1)
    return cache[pages, keys % page]
