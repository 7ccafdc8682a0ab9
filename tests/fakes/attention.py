"""A flash kernel in plain torch (blocks of keys, fp32 statistics, probabilities rounded), and broken ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashgen.core.features.values import Features
from flashgen.measure.verify import LaunchFunction
from flashgen.reference.functions import ScoreFunctions
from flashgen.reference.philox import Dropout


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """Calling it writes out and lse; the fields plant mistakes."""

    causal: bool
    tf32: bool = False
    block_n: int = 64
    drop_last_key: bool = False
    scale_error: float = 1.0
    forget_last_row: bool = False
    forget_lse: bool = False
    statistics: torch.dtype = torch.float32
    accumulator: torch.dtype = torch.float32
    mask_value: float = float("-inf")
    use_keys_behind_end: bool = False
    write_behind_end: bool = False
    ignore_offset: bool = False
    base2_lse: bool = False
    leak_hidden: bool = False
    window_error: tuple[int, int] = (0, 0)
    forget: str = ""
    sink_is_a_key: bool = False
    sink_out_of_lse: bool = False
    bias_head_error: int = 0
    bias_before_softcap: bool = False
    bias_is_scaled: bool = False
    alibi_without_offset: bool = False
    alibi_is_signed: bool = False
    invert_mask: bool = False
    mask_first_batch: bool = False

    def factory(self, *_: torch.Tensor | Features) -> LaunchFunction:
        return self

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        softmax_scale: float,
        q_offset: int | torch.Tensor,
        features: Features,
    ) -> None:
        if self.use_keys_behind_end:
            k, v = _longer(k, 8), _longer(v, 8)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        seqlen_q, seqlen_k = q.shape[2], k.shape[2]
        offset = torch.as_tensor(seqlen_k - seqlen_q if self.ignore_offset else q_offset).view(-1, 1, 1, 1)
        factors = dropped(features, q, k)
        m = torch.full(q.shape[:3], float("-inf"), dtype=self.statistics)
        total = torch.zeros(q.shape[:3], dtype=self.statistics)
        acc = torch.zeros(out.shape, dtype=self.accumulator)
        for start in range(0, k.shape[2], self.block_n):
            keys = torch.arange(start, min(start + self.block_n, k.shape[2]))
            scores = self._product(q, k[:, :, keys].mT) * (softmax_scale * self.scale_error)
            scores = self._modified(scores, torch.arange(seqlen_q)[:, None], offset, keys, softmax_scale, features)
            hidden = self._hidden(torch.arange(seqlen_q)[:, None], offset, keys, features)
            hidden = hidden | (keys >= seqlen_k - self.drop_last_key)[None, :]
            scores = torch.where(hidden, self.mask_value, scores)
            new_m = torch.maximum(m.float(), scores.amax(-1))
            safe = torch.where(new_m == float("-inf"), 0.0, new_m)
            p = torch.exp(scores - safe[..., None])
            alpha = torch.exp(m.float() - safe)
            total = (total.float() * alpha + p.sum(-1)).to(self.statistics)
            values = v[:, :, keys]
            if not self.leak_hidden:
                values = torch.where((p.amax(-2) > 0)[..., None], values, 0.0)
            shares = p if factors is None else p * factors[..., keys]
            product = self._product(shares.to(v.dtype), values)
            acc = (acc.float() * alpha[..., None] + product).to(self.accumulator)
            m = new_m.to(self.statistics)
        log_sum = m.float() + total.float().log()
        if features.sinks is not None and self.forget != "sinks":
            sink = features.sinks.float().view(1, -1, 1) * (softmax_scale if self.sink_is_a_key else 1.0)
            total = (total.float() + torch.exp(sink - m.float())).to(self.statistics)
            log_sum = log_sum if self.sink_out_of_lse else torch.logaddexp(log_sum, sink.expand_as(log_sum))
        blind = (total == 0) | (m == float("-inf"))
        result = torch.where(blind[..., None], 0.0, acc.float() / torch.where(blind, 1.0, total.float())[..., None])
        log_sum = log_sum * 1.4426950408889634 if self.base2_lse else log_sum
        last = seqlen_q - 1 if self.forget_last_row else seqlen_q
        out[:, :, :last] = result[:, :, :last].to(out.dtype)
        if not self.forget_lse:
            lse.copy_(log_sum)
        if self.write_behind_end:
            _longer(out, 1)[:, :, seqlen_q] = 0.0

    def _product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if self.tf32:  # rounded to nearest: half a unit of the 10th bit is added before the rest is dropped
            a, b = (((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32) for x in (a, b))
        return a.float() @ b.float()

    def _modified(
        self,
        scores: torch.Tensor,
        rows: torch.Tensor,
        offset: torch.Tensor,
        keys: torch.Tensor,
        scale: float,
        features: Features,
    ) -> torch.Tensor:
        bias = None if features.bias is None or self.forget == "bias" else self._part(features.bias, keys).float()
        bias = bias.roll(self.bias_head_error, 1) if bias is not None and self.bias_head_error else bias
        bias = bias * scale if bias is not None and self.bias_is_scaled else bias
        if bias is not None and self.bias_before_softcap:
            scores = scores + bias
        if features.softcap and self.forget != "softcap":
            scores = features.softcap * torch.tanh(scores / features.softcap)
        if features.alibi_slopes is not None and self.forget != "alibi":
            slopes = features.alibi_slopes.view(-1, scores.shape[1], 1, 1)
            distance = rows + (0 if self.alibi_without_offset else offset) - keys
            scores = scores - slopes * (distance if self.alibi_is_signed else distance.abs())
        return scores if bias is None or self.bias_before_softcap else scores + bias

    def _hidden(self, rows: torch.Tensor, offset: torch.Tensor, keys: torch.Tensor, features: Features) -> torch.Tensor:
        hidden = torch.zeros((), dtype=torch.bool)
        left, right = features.window
        right = 0 if self.causal else right
        if right is not None:
            hidden = hidden | (keys > rows + offset + right + (0 if self.causal else self.window_error[1]))
        if left is not None:
            hidden = hidden | (keys < rows + offset - left - self.window_error[0])
        functions = ScoreFunctions.of(features, keys.device)  # the same in all sequences and heads
        if functions is not None:
            hidden = hidden | ~functions.visible(0, 1, len(rows), int(keys[-1]) + 1)[:, :, keys]
        if features.mask is not None and self.forget != "mask":
            mask = self._part(features.mask, keys)
            mask = mask[:1] if self.mask_first_batch else mask
            hidden = hidden | (mask if self.invert_mask else ~mask)
        return hidden

    def _part(self, tensor: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """What a bias or mask has for some keys, NaN or True as it is in memory for those behind the end."""
        tensor = tensor[(None,) * (4 - tensor.dim())]
        return tensor[..., keys.clamp_max(tensor.shape[3] - 1)]


def dropped(features: Features, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """What dropout multiplies weights by, or None."""
    dropout = Dropout.of(features)
    heads = torch.arange(q.shape[0] * q.shape[1]).view(q.shape[:2])
    return None if dropout is None else dropout.factors(heads, q.shape[2], k.shape[2]).float()


def _longer(tensor: torch.Tensor, extra: int) -> torch.Tensor:
    """The same memory, seen `extra` positions beyond the end."""
    shape = (*tensor.shape[:2], tensor.shape[2] + extra, tensor.shape[3])
    return tensor.as_strided(shape, tensor.stride(), tensor.storage_offset())
