"""A backward pass in plain torch (exact scores, fp32 sums, P and dS rounded to the dtype), and broken ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flashgen.core.features.values import Features
from flashgen.launch.backward import BackwardTensors
from flashgen.launch.plan import BackwardLaunch
from tests.fakes.attention import Emulated, _longer, dropped


@dataclass(kw_only=True)
class EmulatedBackward:
    """Calling it writes the gradients; the fields plant mistakes."""

    scores: Emulated
    bias_grad: str = ""
    drop_key: int | None = None
    scale_error: float = 1.0
    forget_scale: bool = False
    forget_delta: bool = False
    forget_dlse: bool = False
    forget_slope: bool = False
    delta_in_dtype: bool = False
    wrong_row: float = 0.0
    forget_group: bool = False
    unwritten: str = ""
    double_block: bool = False
    accumulator: torch.dtype = torch.float32
    leak_hidden: bool = False
    write_behind_end: str = ""
    bias_of_first_batch: bool = False
    jitter: float = 0.0
    calls: int = 0

    def factory(self, *_: BackwardTensors | Features) -> BackwardLaunch:
        return self

    def __call__(
        self,
        tensors: BackwardTensors,
        softmax_scale: float | None = None,
        q_offset: int | torch.Tensor | None = None,
        features: Features | None = None,
    ) -> torch.Tensor:
        assert softmax_scale is not None
        assert features is not None
        self.calls += 1
        t, product = tensors, self.scores._product
        group = t.q.shape[1] // t.k.shape[1]
        k, v = t.k.repeat_interleave(group, 1), t.v.repeat_interleave(group, 1)
        weights, slope = self._weights(t, k, softmax_scale, q_offset, features)
        if not self.leak_hidden:
            silent = (weights.amax(-2) == 0)[..., None]
            k, v = torch.where(silent, 0.0, k), torch.where(silent, 0.0, v)
        neg_delta = self._neg_delta(t)
        dp, factors = product(t.dout, v.mT), dropped(features, t.q, k)
        dp, shares = (dp, weights) if factors is None else (dp * factors, weights * factors)
        ds = weights * (dp if self.forget_delta else dp + neg_delta[..., None])
        self._write_bias(t, ds)
        ds = (ds if self.forget_slope else ds * slope).to(t.q.dtype)
        scale = 1.0 if self.forget_scale else softmax_scale
        dq = self._summed(ds, k) * scale
        if self.double_block:
            dq = dq + scale * product(ds[..., :64], k[:, :, :64])
        dk, dv = product(ds.mT, t.q) * softmax_scale, product(shares.to(t.q.dtype).mT, t.dout)
        dk, dv = (each.unflatten(1, (-1, group)) for each in (dk, dv))
        dk, dv = dk[:, :, 0] if self.forget_group else dk.sum(2), dv.sum(2)
        dq[:, -1, -1] *= 1.0 + self.wrong_row
        if self.calls % 2:
            dq = dq + self.jitter * dq.abs()
        for name, gradient in (("dq", dq), ("dk", dk), ("dv", dv)):
            last = -1 if self.unwritten == name else None
            getattr(t, name)[:, :, :last] = gradient[:, :, :last].to(t.q.dtype)
            if self.write_behind_end == name:
                _longer(getattr(t, name), 1)[:, :, -1] = 0.0
        return neg_delta

    def _weights(
        self, t: BackwardTensors, k: torch.Tensor, scale: float, q_offset: int | torch.Tensor | None, features: Features
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        rows, keys = torch.arange(t.q.shape[2])[:, None], torch.arange(k.shape[2])
        offset = torch.as_tensor(k.shape[2] - t.q.shape[2] if self.scores.ignore_offset else q_offset).view(-1, 1, 1, 1)
        scores = self.scores._product(t.q, k.mT) * (scale * self.scale_error)
        slope = 1.0 - torch.tanh(scores / features.softcap).square() if features.softcap else 1.0
        scores = self.scores._modified(scores, rows, offset, keys, scale, replace(features, sinks=None))
        hidden = self.scores._hidden(rows, offset, keys, features)
        if self.drop_key is not None:
            hidden = hidden | (keys == self.drop_key % len(keys))
        weights = torch.exp(scores - torch.where(t.lse == float("-inf"), 0.0, t.lse)[..., None])
        hidden = hidden.expand(weights.shape)
        slope = torch.where(hidden, 0.0, slope) if isinstance(slope, torch.Tensor) else slope
        return torch.where(hidden, 0.0, weights), slope

    def _neg_delta(self, t: BackwardTensors) -> torch.Tensor:
        products = t.dout.float() * t.out.float()
        products = products.to(t.q.dtype).float() if self.delta_in_dtype else products
        return -products.sum(-1) if t.dlse is None or self.forget_dlse else t.dlse - products.sum(-1)

    def _summed(self, ds: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        dq = torch.zeros((*ds.shape[:3], k.shape[3]), dtype=self.accumulator)
        for start in range(0, k.shape[2], 64):
            block = self.scores._product(ds[..., start : start + 64], k[:, :, start : start + 64])
            dq = (dq.float() + block).to(self.accumulator)
        return dq.float()

    def _write_bias(self, t: BackwardTensors, ds: torch.Tensor) -> None:
        if t.dbias is None:
            return
        if t.dbias.dim() == 3:
            t.dbias.copy_(ds.sum(2))
            return
        ds = ds[:1] if self.bias_of_first_batch else ds
        for axis, size in enumerate(t.dbias.shape):
            ds = ds.sum(axis, keepdim=True) if size == 1 else ds
        t.dbias.copy_(ds)
