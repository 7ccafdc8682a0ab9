"""Steps of decoding that catch kernels which are right on round lengths only.

Every case has NaN wherever no query looks and stale entries in its table (`measure.decode_inputs`): a key that is used
behind a length, before a window, in a page that only lies there, or a row left unwritten is a failure. One table serves
every specialization: pages are those of the specialization.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flashgen.core.workload import DECODE, Specialization, Workload
from flashgen.measure.decode_case import DecodeCase, decode_case
from flashgen.measure.decode_inputs import DecodeForm
from flashgen.measure.feature_inputs import FeatureForm
from flashgen.measure.score_rule import refuse_uncomputed

ODD_SEED = 20260103


@dataclass(frozen=True, slots=True, kw_only=True)
class OddStep:
    """A step of decoding with everything about it that may go wrong."""

    lens: tuple[int, ...]
    nheads: int = 4
    nheads_k: int = 2
    seqlen_q: int = 1
    room: int = 0
    causal: bool = True
    window_left: int | None = None
    leftpad: tuple[int, ...] = ()
    layout: str = "nhd"

    @property
    def title(self) -> str:
        """How a failure names it."""
        parts = [
            f"lengths {self.lens}",
            f"{self.seqlen_q} queries",
            f"heads {self.nheads}/{self.nheads_k}",
            self.layout,
        ]
        parts += [] if self.causal else ["not causal"]
        parts += [] if self.window_left is None else [f"window {self.window_left}"]
        parts += [f"left padding {self.leftpad}"] if self.leftpad else []
        return ", ".join(parts)


def odd_steps(page_size: int | None) -> tuple[OddStep, ...]:
    """The steps for caches of such pages: lengths around those of a page, or of the steps that kernels take."""
    page = page_size or 64
    edges = (0, 1, page - 1, page, page + 1, 129, 300)
    steps = (
        OddStep(lens=edges, room=400, layout="hnd"),
        OddStep(lens=edges[::-1], nheads=7, nheads_k=1, window_left=100),
        OddStep(lens=(5, 257, 3, 0), nheads=6, seqlen_q=5),
        OddStep(lens=(1, 300), seqlen_q=3, causal=False, nheads=2),
        OddStep(lens=(2999,), nheads=16, nheads_k=1, seqlen_q=2),
    )
    if page_size is None:
        return (*steps, OddStep(lens=(200, 64, 1), leftpad=(130, 64, 0), room=256))
    return steps


def odd_decode_problems(spec: Specialization, device: torch.device | str) -> tuple[tuple[OddStep, DecodeCase], ...]:
    """The odd steps of a specialization with their right answers; meant to be kept for all its configs.

    Raises:
        UnsupportedError: the specialization has a feature that the references do not compute.
    """
    refuse_uncomputed(replace(spec, page_size=None))  # which only say where keys lie
    return tuple((step, _problem(spec, step, device)) for step in odd_steps(spec.page_size))


def _problem(spec: Specialization, step: OddStep, device: torch.device | str) -> DecodeCase:
    names = ("dtype", "head_dim", "head_dim_v", "softcap", "alibi", "sink", "bias", "mask", "page_size")
    workload = Workload(
        direction=DECODE,
        batch=len(step.lens),
        nheads=step.nheads,
        nheads_k=step.nheads_k,
        seqlen_q=step.seqlen_q,
        seqlen_k=step.room or max(step.lens),
        causal=step.causal,
        window_left=step.window_left,
        **{name: getattr(spec, name) for name in names},
    )
    features = FeatureForm(bias_dtype=spec.bias_dtype, sink_dtype=spec.sink_dtype)
    form = DecodeForm(lens=step.lens, leftpad=step.leftpad, layout=step.layout, features=features)
    return decode_case(workload, copies=1, seed=ODD_SEED, device=device, form=form)
