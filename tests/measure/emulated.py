"""A flash kernel in plain torch (blocks of keys, fp32 statistics, probabilities rounded), and broken ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashgen.measure.verify import Kernel


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """Calling it writes out and lse; the fields plant mistakes."""

    causal: bool
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

    def factory(self, *_: torch.Tensor) -> Kernel:
        return self

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        softmax_scale: float,
        q_offset: int,
    ) -> None:
        if self.use_keys_behind_end:
            k, v = _longer(k, 8), _longer(v, 8)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        seqlen_q, seqlen_k = q.shape[2], k.shape[2] - (8 if self.use_keys_behind_end else 0)
        offset = seqlen_k - seqlen_q if self.ignore_offset else q_offset
        m = torch.full(q.shape[:3], float("-inf"), dtype=self.statistics)
        total = torch.zeros(q.shape[:3], dtype=self.statistics)
        acc = torch.zeros(out.shape, dtype=self.accumulator)
        rows = torch.arange(seqlen_q)[:, None]
        for start in range(0, k.shape[2], self.block_n):
            keys = torch.arange(start, min(start + self.block_n, k.shape[2]))
            scores = q.float() @ k[:, :, keys].float().mT * (softmax_scale * self.scale_error)
            hidden = (keys >= seqlen_k - self.drop_last_key)[None, :].expand(seqlen_q, -1)
            if self.causal:
                hidden = hidden | (keys[None, :] > rows + offset)
            scores = torch.where(hidden, self.mask_value, scores)
            new_m = torch.maximum(m.float(), scores.amax(-1))
            safe = torch.where(new_m == float("-inf"), 0.0, new_m)
            p = torch.exp(scores - safe[..., None])
            alpha = torch.exp(m.float() - safe)
            total = (total.float() * alpha + p.sum(-1)).to(self.statistics)
            product = p.to(v.dtype).float() @ v[:, :, keys].float()
            acc = (acc.float() * alpha[..., None] + product).to(self.accumulator)
            m = new_m.to(self.statistics)
        result = acc.float() / torch.where(total == 0, 1.0, total.float())[..., None]
        log_sum = m.float() + total.float().log()
        log_sum = log_sum * 1.4426950408889634 if self.base2_lse else log_sum
        last = seqlen_q - 1 if self.forget_last_row else seqlen_q
        out[:, :, :last] = result[:, :, :last].to(out.dtype)
        if not self.forget_lse:
            lse.copy_(log_sum)
        if self.write_behind_end:
            _longer(out, 1)[:, :, seqlen_q] = 0.0


def _longer(tensor: torch.Tensor, extra: int) -> torch.Tensor:
    """The same memory, seen `extra` positions beyond the end."""
    shape = (*tensor.shape[:2], tensor.shape[2] + extra, tensor.shape[3])
    return tensor.as_strided(shape, tensor.stride(), tensor.storage_offset())
