"""`BackwardVerificationCase`: tensors of a backward call with their right gradients, to verify and time on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from flashgen.core.errors import MeasureError
from flashgen.core.features.values import Features
from flashgen.core.record import Failure
from flashgen.core.workload import Specialization, Workload
from flashgen.launch.backward import BackwardTensors
from flashgen.launch.plan import BackwardLaunch
from flashgen.measure.backward_inputs import BackwardInputs, make_backward_inputs, written
from flashgen.measure.backward_verify import BackwardOracle, backward_oracle_of, check_backward
from flashgen.measure.data_kinds import NORMAL
from flashgen.measure.odd_shapes import (
    ODD_SEED,
    PADDING,
    OddShape,
    hide_unseen_keys,
    odd_offset,
    odd_shapes,
    odd_workload,
)
from flashgen.measure.reference import exact
from flashgen.measure.score_rule import ScoreRule
from flashgen.measure.timing import Run
from flashgen.measure.verification_case import other_bits
from flashgen.measure.verify import Errors, Offset

BackwardFactory = Callable[[BackwardTensors, Features], BackwardLaunch]
"""Makes the launch for the shapes and strides of these tensors and features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardVerificationCase:
    """Inputs with the right gradients of copy 0 and the arguments of the call."""

    inputs: BackwardInputs
    expected: BackwardOracle
    softmax_scale: float
    q_offset: Offset

    @property
    def copies(self) -> int:
        """Sets of inputs to rotate."""
        return self.inputs.copies

    @property
    def nbytes(self) -> int:
        """Device memory held, in bytes."""
        return self.inputs.nbytes + self.expected.nbytes

    def run(self, factory: BackwardFactory, repeats: int = 0, *, out_alone: bool = False) -> Errors | Failure:
        """Poison what is written, run the kernels, and judge; then ask for the same bits so many times more.

        Raises:
            MeasureError: `out_alone`, which is for forward passes.
        """
        if out_alone:
            raise MeasureError("only a forward pass has an output to judge without an LSE, got out_alone")
        tensors, features = self.inputs.tensors[0], self.inputs.features[0]
        kernels, outputs = factory(tensors, features), written(tensors)

        def launch() -> torch.Tensor:
            for tensor in outputs.values():
                tensor.fill_(float("nan"))
            # scratch memory is usually what was freed last: none of it may be taken for zeros
            torch.full((tensors.dq.numel() + 4 * tensors.lse.numel(),), float("nan"), device=tensors.q.device)
            return kernels(tensors, self.softmax_scale, self.q_offset, features)

        verdict = check_backward(tensors, launch(), self.expected)
        if isinstance(verdict, Failure):
            return verdict
        if not all(bool(torch.isnan(guard).all()) for guard in self.inputs.guards):
            return Failure(stage="verify", reason="a kernel writes behind the end of a gradient")
        return other_bits(launch, outputs, repeats) or verdict

    def timed(self, factory: BackwardFactory) -> Run:
        """A launch that is ready for every copy."""
        inputs, scale, offset = self.inputs, self.softmax_scale, self.q_offset
        launch = factory(inputs.tensors[0], inputs.features[0])

        def run(n: int) -> None:
            launch(inputs.tensors[n], scale, offset, inputs.features[n])

        return run


def backward_problem(
    workload: Workload, copies: int, seed: int, device: torch.device | str, data: str = NORMAL
) -> BackwardVerificationCase:
    """A workload's inputs of a kind of data with the right answer of the first copy.

    What the other copies are given of a forward pass is computed in fp32: it is their own, but they are not judged.

    Raises:
        UnsupportedError: the workload has a feature that inputs cannot be made for.
    """
    w = workload
    inputs = make_backward_inputs(w, copies=copies, seed=seed, device=device, data=data)
    scale, offset = w.head_dim**-0.5, w.seqlen_k - w.seqlen_q
    found = _solved(inputs, w.causal, offset, scale, tf32=w.dtype == "tf32")
    for t, features in zip(inputs.tensors[1:], inputs.features[1:], strict=True):
        rule = ScoreRule.of(t.q, t.k, causal=w.causal, q_offset=offset, softmax_scale=scale, features=features)
        answer = exact(t.q, t.k, t.v, rule, dtype=torch.float32)
        t.out.copy_(answer.out)
        t.lse.copy_(answer.lse)
    return found


def backward_odd_problems(
    spec: Specialization, device: torch.device | str, most_keys: int | None = None
) -> tuple[tuple[OddShape, BackwardVerificationCase], ...]:
    """The odd shapes of one specialization with their right answers; meant to be kept for all its configs.

    Or for those that no launch with more than `most_keys` may have.

    Sinks are no part of a backward specialization, but change the LSE: every other shape has them, and every second
    pair of shapes has a gradient of the LSE.

    Raises:
        UnsupportedError: the specialization has a feature that the references do not compute.
    """
    shapes = enumerate(odd_shapes(spec, most_keys))
    return tuple(
        (shape, backward_odd_problem(spec, shape, device, sink=n % 2 == 1, dlse=n // 2 % 2 == 1)) for n, shape in shapes
    )


def backward_odd_problem(
    spec: Specialization, shape: OddShape, device: torch.device | str, *, sink: bool = False, dlse: bool = False
) -> BackwardVerificationCase:
    """One shape with its right answer; alignments of the specialization do not count, `shape.form` does."""
    inputs = make_backward_inputs(
        replace(odd_workload(spec, shape), sink=sink),
        copies=1,
        seed=ODD_SEED,
        device=device,
        layout=shape.layout,
        padding=PADDING,
        gain=shape.gain,
        form=shape.form,
        data=shape.data,
        with_dlse=dlse,
        with_dbias=spec.bias_grad,
    )
    features = replace(inputs.features[0], window=shape.window)
    tensors, offset = inputs.tensors[0], odd_offset(spec, shape, device)
    scale = shape.scale_factor * spec.head_dim**-0.5
    rule = ScoreRule.of(
        tensors.q, tensors.k, causal=spec.causal, q_offset=offset, softmax_scale=scale, features=features
    )
    hide_unseen_keys(rule, tensors.q, tensors.k, tensors.v)
    return _solved(replace(inputs, features=(features,)), spec.causal, offset, scale, tf32=spec.dtype == "tf32")


def _solved(
    inputs: BackwardInputs, causal: bool, offset: Offset, scale: float, *, tf32: bool
) -> BackwardVerificationCase:
    expected = backward_oracle_of(
        inputs.tensors[0], causal=causal, q_offset=offset, softmax_scale=scale, features=inputs.features[0], tf32=tf32
    )
    return BackwardVerificationCase(inputs=inputs, expected=expected, softmax_scale=scale, q_offset=offset)
