"""Shapes that catch kernels which are right on round numbers only, and the check of one config on all of them.

Every case has NaN behind the last position of q, k and v (see `measure.inputs.Inputs`), strides that are not packed,
and guards behind the outputs: a key used behind the end, a row left unwritten or a store out of bounds is a failure.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashgen.core.record import Failure
from flashgen.core.workload import Specialization, Workload
from flashgen.measure.inputs import Inputs, make_inputs
from flashgen.measure.verify import Errors, Golden, KernelFactory, check, golden

PADDING = 16
"""Positions behind the end; keeps every stride a multiple of 16 bytes when head_dim is."""

ODD_SEED = 20260101


@dataclass(frozen=True, slots=True, kw_only=True)
class OddShape:
    """One shape with everything about it that may go wrong; `q_offset` None is the bottom right."""

    seqlen_q: int
    seqlen_k: int
    batch: int = 2
    nheads: int = 4
    nheads_k: int = 4
    layout: str = "bhsd"
    q_offset: int | None = None
    scale_factor: float = 1.0  # of head_dim ** -0.5
    gain: float = 1.0

    @property
    def title(self) -> str:
        """How a failure names it."""
        parts = [f"{self.seqlen_q}x{self.seqlen_k}", f"heads {self.nheads}/{self.nheads_k}", self.layout]
        parts += [] if self.q_offset is None else [f"q_offset {self.q_offset}"]
        parts += [] if self.gain == 1.0 else [f"scores times {self.gain:g}"]
        return ", ".join(parts)


ODD_SHAPES = (
    OddShape(seqlen_q=1, seqlen_k=1),
    OddShape(seqlen_q=1, seqlen_k=1023, nheads=8, nheads_k=2, layout="bshd"),
    OddShape(seqlen_q=113, seqlen_k=203, nheads_k=1),
    OddShape(seqlen_q=113, seqlen_k=203, nheads=6, nheads_k=2, layout="bshd", scale_factor=0.5),
    OddShape(seqlen_q=203, seqlen_k=113, nheads_k=2),
    OddShape(seqlen_q=203, seqlen_k=113, layout="bshd"),
    OddShape(seqlen_q=1023, seqlen_k=1023, batch=1, layout="bshd"),
    OddShape(seqlen_q=1023, seqlen_k=1024, batch=1, nheads_k=2),
    OddShape(seqlen_q=300, seqlen_k=333, q_offset=0, batch=1),
    OddShape(seqlen_q=129, seqlen_k=257, q_offset=-40, batch=3, layout="bshd"),
    OddShape(seqlen_q=64, seqlen_k=640, batch=1, gain=30.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Inputs with their right answer and the arguments of the call."""

    inputs: Inputs
    expected: Golden
    softmax_scale: float
    q_offset: int

    def run(self, factory: KernelFactory, copy: int = 0) -> Errors | Failure:
        """Poison the outputs of one set of inputs, run the kernel on it, and judge."""
        i = self.inputs
        q, k, v, out, lse = i.q[copy], i.k[copy], i.v[copy], i.out[copy], i.lse[copy]
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        factory(q, k, v, out)(q, k, v, out, lse, self.softmax_scale, self.q_offset)
        verdict = check(out, lse, self.expected)
        if isinstance(verdict, Errors) and not all(bool(torch.isnan(guard).all()) for guard in i.guards):
            return Failure(stage="verify", reason="the kernel writes behind the end of out or lse")
        return verdict


def odd_problems(spec: Specialization, device: torch.device | str) -> tuple[tuple[OddShape, Problem], ...]:
    """The odd shapes of one specialization with their right answers; meant to be kept for all its configs."""
    return tuple((shape, _odd_problem(spec, shape, device)) for shape in ODD_SHAPES)


def check_odd(factory: KernelFactory, problems: tuple[tuple[OddShape, Problem], ...]) -> Failure | None:
    """Run a kernel on all odd shapes; the first failure, naming its shape, or None."""
    for shape, problem in problems:
        verdict = problem.run(factory)
        if isinstance(verdict, Failure):
            return Failure(stage=verdict.stage, reason=f"at {shape.title}: {verdict.reason}")
    return None


def _odd_problem(spec: Specialization, shape: OddShape, device: torch.device | str) -> Problem:
    workload = Workload(
        dtype=spec.dtype,
        batch=shape.batch,
        nheads=shape.nheads,
        nheads_k=shape.nheads_k,
        seqlen_q=shape.seqlen_q,
        seqlen_k=shape.seqlen_k,
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        causal=spec.causal,
    )
    inputs = make_inputs(
        workload, copies=1, seed=ODD_SEED, device=device, layout=shape.layout, padding=PADDING, gain=shape.gain
    )
    scale = shape.scale_factor * spec.head_dim**-0.5
    offset = shape.seqlen_k - shape.seqlen_q if shape.q_offset is None else shape.q_offset
    q, k, v = inputs.q[0], inputs.k[0], inputs.v[0]
    expected = golden(q, k, v, causal=spec.causal, q_offset=offset, softmax_scale=scale)
    return Problem(inputs=inputs, expected=expected, softmax_scale=scale, q_offset=offset)
