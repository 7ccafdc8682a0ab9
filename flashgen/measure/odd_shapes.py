"""Shapes that catch kernels which are right on round numbers only, and the check of one config on all of them.

Every case has NaN behind the last position of q, k, v and the bias (see `measure.inputs.Inputs`), NaN in the keys and
values that no query sees, strides that are not packed, and guards behind the outputs: a key used behind the end, one
that leaks though it is hidden, a row left unwritten or a store out of bounds is a failure.

One table serves every specialization: a shape's window, and the form of its bias, mask, slopes and cap, count where
the specialization has the feature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from flashgen.core.record import Failure
from flashgen.core.workload import Specialization, Workload
from flashgen.measure.data_kinds import DATA_KINDS, HARD_KINDS, NORMAL, hard_kinds
from flashgen.measure.feature_inputs import FeatureForm
from flashgen.measure.inputs import make_inputs
from flashgen.measure.score_rule import ScoreRule, refuse_uncomputed
from flashgen.measure.verification_case import VerificationCase
from flashgen.measure.verify import Errors, Offset, oracle_of

PADDING = 16
"""Positions behind the end; keeps every stride a multiple of 16 bytes when head_dim is."""

ODD_SEED = 20260101

OFFSET_STEPS = (0, -29, 17)
"""Where the offset comes from a tensor, what is added for each batch element in turn."""

EARLY_KEYS = 4
"""Of four scores of a usual row times 140, one is above 99 more often than not: by so much scores may grow from one
step to the next before a kernel computes a tile again whose references follow the row sums."""

GROWTH, TF32_GROWTH = 140.0, 60.0
"""Factors on the first keys. Scores in the hundreds are off by whole weights in TF32, in eager attention too."""

Window = tuple[int | None, int | None]
USUAL = FeatureForm()


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
    early_keys: float = 1.0
    """A factor on the first keys: where keys are read backwards, the maximum of many a row then comes last and late."""
    window: Window = (None, None)
    form: FeatureForm = USUAL
    data: str = NORMAL

    @property
    def title(self) -> str:
        """How a failure names it."""
        parts = [f"{self.seqlen_q}x{self.seqlen_k}", f"heads {self.nheads}/{self.nheads_k}", self.layout]
        parts += [] if self.q_offset is None else [f"q_offset {self.q_offset}"]
        parts += [] if self.gain == 1.0 else [f"scores times {self.gain:g}"]
        parts += [] if self.early_keys == 1.0 else [f"first keys times {self.early_keys:g}"]
        parts += [] if self.data == NORMAL else [DATA_KINDS[self.data].meaning]
        parts += [] if self.window == (None, None) else [f"window {self.window}"]
        return ", ".join(parts)


PER_HEAD = FeatureForm(
    bias_axes=(True, True), mask_axes=(True, True), alibi_batch=True, blind=True, visible_keys="start"
)
SHARED = FeatureForm(bias_axes=(False, False), mask_axes=(False, False), softcap=30.0, visible_keys="holes")
SWAPPED = FeatureForm(
    bias_axes=(True, False), mask_axes=(False, True), alibi_batch=True, softcap=30.0, visible_keys="ends"
)
BLIND = FeatureForm(blind=True)

ODD_SHAPES = (
    OddShape(seqlen_q=1, seqlen_k=1, window=(0, 0)),
    OddShape(seqlen_q=1, seqlen_k=1023, nheads=8, nheads_k=2, layout="bshd", window=(100, None)),
    OddShape(seqlen_q=113, seqlen_k=203, nheads_k=1, window=(0, 0), form=PER_HEAD),
    OddShape(seqlen_q=113, seqlen_k=203, nheads=6, nheads_k=2, layout="bshd", scale_factor=0.5, window=(1, 1)),
    OddShape(seqlen_q=203, seqlen_k=113, nheads_k=2, window=(20, None), form=SWAPPED),
    OddShape(seqlen_q=203, seqlen_k=113, layout="bshd", window=(None, 30), form=SHARED),
    OddShape(seqlen_q=1023, seqlen_k=1023, batch=1, layout="bshd", window=(300, 200), form=BLIND),
    OddShape(seqlen_q=1023, seqlen_k=1024, batch=1, nheads_k=2, window=(127, None), form=SHARED),
    OddShape(seqlen_q=300, seqlen_k=333, q_offset=0, batch=1, window=(5, 3), form=BLIND),
    OddShape(seqlen_q=129, seqlen_k=257, q_offset=-40, batch=3, layout="bshd", window=(10, 50), form=BLIND),
    OddShape(seqlen_q=64, seqlen_k=640, q_offset=600, batch=1, gain=30.0, window=(257, 64), form=SWAPPED),
    OddShape(seqlen_q=200, seqlen_k=700, batch=1, nheads_k=2, early_keys=GROWTH),
)
WINDOW_SHAPES = (
    OddShape(seqlen_q=129, seqlen_k=400, q_offset=330, window=(40, 40)),  # the last rows see no key
    OddShape(seqlen_q=200, seqlen_k=260, batch=1, nheads=2, nheads_k=1),  # no edge at all
)
"""More of them where a window is compiled in."""

HARD_SHAPES = tuple(
    OddShape(seqlen_q=70, seqlen_k=300, batch=1, nheads=2, nheads_k=1, layout=layout, data=data)
    for data, layout in zip(HARD_KINDS, ("bhsd", "bshd", "bhsd", "bshd"), strict=True)
)
"""Every kind of hard data, with keys for several blocks and few enough scores for a gate that is run often."""

FEW_KEYS_SHAPES = (
    OddShape(seqlen_q=1023, seqlen_k=128, batch=1, nheads_k=2),
    OddShape(seqlen_q=130, seqlen_k=77, q_offset=-40, batch=3, layout="bshd"),
    OddShape(seqlen_q=64, seqlen_k=100, q_offset=60, batch=1, gain=30.0),
    *(replace(shape, seqlen_k=100) for shape in HARD_SHAPES),
)
"""In the place of those with more keys, for a config that no launch with so many may have."""

CAP_SHAPES = (OddShape(seqlen_q=200, seqlen_k=700, batch=1, nheads_k=2, form=FeatureForm(softcap=400.0)),)
"""With a softcap in a forward pass: one that bounds too little for exponentials to need no running maximum."""


Factory = Callable[..., Any]
"""Makes what a problem of its direction launches: a `verify.KernelFactory`, a `backward_problem.BackwardFactory` or a
`decode_case.DecodeFactory`."""


class Titled(Protocol):
    """A shape that failures name."""

    @property
    def title(self) -> str:
        """How a failure names it."""
        ...


class Runnable(Protocol):
    """A problem of any direction."""

    def run(self, factory: Any, repeats: int = 0, *, out_alone: bool = False) -> Errors | Failure:
        """Run a kernel, judge what it wrote, and ask for the same bits so many times more."""
        ...


def odd_problems(spec: Specialization, device: torch.device | str) -> tuple[tuple[OddShape, VerificationCase], ...]:
    """The odd shapes of one specialization with their right answers; meant to be kept for all its configs.

    Raises:
        UnsupportedError: the specialization has a feature that the references do not compute.
    """
    return tuple((shape, odd_problem(spec, shape, device)) for shape in odd_shapes(spec))


def odd_shapes(spec: Specialization, most_keys: int | None = None) -> tuple[OddShape, ...]:
    """The shapes for a specialization, with what does not concern it left out, and what has more than `most_keys`.

    Raises:
        UnsupportedError: the specialization has a feature that the references do not compute.
    """
    refuse_uncomputed(spec)
    found = []
    capped = CAP_SHAPES if spec.softcap and spec.direction == "forward" else ()
    shapes = ODD_SHAPES + (WINDOW_SHAPES if spec.window else ()) + capped + HARD_SHAPES
    if most_keys is not None:
        shapes = tuple(shape for shape in shapes + FEW_KEYS_SHAPES if shape.seqlen_k <= most_keys)
    kinds = {NORMAL, *hard_kinds(spec.dtype)}
    for number, shape in enumerate(shape for shape in shapes if shape.data in kinds):
        if shape.early_keys != 1.0 and spec.direction == "backward":
            continue  # it reads statistics, and follows none
        # a causal mask is the right edge
        left, right = shape.window if spec.window else (None, None)
        form = replace(shape.form, bias_dtype=spec.bias_dtype, sink_dtype=spec.sink_dtype)
        if not spec.aligned_scores:
            form = replace(form, scattered=("odd", "transposed")[number % 2])
        growth = TF32_GROWTH if spec.dtype == "tf32" and shape.early_keys != 1.0 else shape.early_keys
        window = left, None if spec.causal else right
        found.append(replace(shape, early_keys=growth, window=window, form=form))
    return tuple(found)


def check_odd(
    factory: Factory, problems: Sequence[tuple[Titled, Runnable]], repeats: int = 0, *, out_alone: bool = False
) -> Failure | None:
    """Run a kernel on all odd shapes; the first failure, naming its shape, or None."""
    for shape, problem in problems:
        verdict = problem.run(factory, repeats, out_alone=out_alone)
        if isinstance(verdict, Failure):
            return Failure(stage=verdict.stage, reason=f"at {shape.title}: {verdict.reason}")
    return None


def odd_problem(spec: Specialization, shape: OddShape, device: torch.device | str) -> VerificationCase:
    """One shape with its right answer; `spec.aligned16` and `spec.aligned_scores` do not count, `shape.form` does."""
    inputs = make_inputs(
        odd_workload(spec, shape),
        copies=1,
        seed=ODD_SEED,
        device=device,
        layout=shape.layout,
        padding=PADDING,
        gain=shape.gain,
        form=shape.form,
        data=shape.data,
    )
    features = replace(inputs.features[0], window=shape.window)
    q, k, v = inputs.q[0], inputs.k[0], inputs.v[0]
    k[:, :, :EARLY_KEYS] *= shape.early_keys
    offset = odd_offset(spec, shape, device)
    scale = shape.scale_factor * spec.head_dim**-0.5
    rule = ScoreRule.of(q, k, causal=spec.causal, q_offset=offset, softmax_scale=scale, features=features)
    hide_unseen_keys(rule, q, k, v)
    expected = oracle_of(
        q, k, v, causal=spec.causal, q_offset=offset, softmax_scale=scale, features=features, tf32=spec.dtype == "tf32"
    )
    inputs = replace(inputs, features=(features,))
    return VerificationCase(inputs=inputs, expected=expected, softmax_scale=scale, q_offset=offset)


def odd_workload(spec: Specialization, shape: OddShape) -> Workload:
    """The features of a specialization at an odd shape, without its window."""
    names = ("direction", "dtype", "head_dim", "head_dim_v", "causal", "softcap", "alibi", "sink", "bias", "mask")
    sizes = ("batch", "nheads", "nheads_k", "seqlen_q", "seqlen_k")
    return Workload(**{name: getattr(spec, name) for name in names}, **{name: getattr(shape, name) for name in sizes})


def hide_unseen_keys(rule: ScoreRule, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write NaN over the keys and values that no query sees."""
    unseen = rule.unseen_keys(q, k)
    if unseen is not None:
        for tensor in (k, v):
            tensor.masked_fill_(unseen[..., None], float("nan"))


def odd_offset(spec: Specialization, shape: OddShape, device: torch.device | str) -> Offset:
    """The query offset of a shape, a tensor where the specialization reads it from one."""
    offset = shape.seqlen_k - shape.seqlen_q if shape.q_offset is None else shape.q_offset
    if not spec.offset_tensor:
        return offset
    steps = [OFFSET_STEPS[b % len(OFFSET_STEPS)] for b in range(shape.batch)]
    return torch.tensor([offset + step for step in steps], dtype=torch.int32, device=device)
