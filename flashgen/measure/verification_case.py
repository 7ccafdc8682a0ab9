"""`VerificationCase`: inputs of one forward call with their right answer, to verify and to time kernels on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashgen.core.record import Failure
from flashgen.core.workload import Workload
from flashgen.measure.data_kinds import NORMAL
from flashgen.measure.inputs import Inputs, make_inputs
from flashgen.measure.timing import Run
from flashgen.measure.verify import Errors, KernelFactory, Offset, Oracle, check, oracle_of

SAME_SIZE = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationCase:
    """Inputs with the right answer of copy 0 and the arguments of the call."""

    inputs: Inputs
    expected: Oracle
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

    def run(self, factory: KernelFactory, repeats: int = 0, *, out_alone: bool = False) -> Errors | Failure:
        """Poison the outputs, run the kernel, and judge; then ask for the same bits so many times more.

        `out_alone`: no LSE is asked for, and none judged.
        """
        i = self.inputs
        q, k, v, out, sums, features = i.q[0], i.k[0], i.v[0], i.out[0], i.lse[0], i.features[0]
        kernel, lse = factory(q, k, v, out, features), None if out_alone else sums

        def launch() -> None:
            out.fill_(float("nan"))
            sums.fill_(float("nan"))
            kernel(q, k, v, out, lse, self.softmax_scale, self.q_offset, features)

        launch()
        verdict = check(out, lse, self.expected)
        if isinstance(verdict, Failure):
            return verdict
        if not all(bool(torch.isnan(guard).all()) for guard in i.guards):
            return Failure(stage="verify", reason="the kernel writes behind the end of out or lse")
        return other_bits(launch, {"out": out, "lse": sums}, repeats) or verdict

    def timed(self, factory: KernelFactory) -> Run:
        """A launch that is ready for every copy."""
        i, scale, offset = self.inputs, self.softmax_scale, self.q_offset
        kernel = factory(i.q[0], i.k[0], i.v[0], i.out[0], i.features[0])

        def run(n: int) -> None:
            kernel(i.q[n], i.k[n], i.v[n], i.out[n], i.lse[n], scale, offset, i.features[n])

        return run


def forward_problem(
    workload: Workload, copies: int, seed: int, device: torch.device | str, data: str = NORMAL
) -> VerificationCase:
    """A workload's inputs of a kind of data with the right answer of the first copy.

    Raises:
        UnsupportedError: the workload has a feature that inputs cannot be made for.
    """
    inputs = make_inputs(workload, copies=copies, seed=seed, device=device, data=data)
    scale, offset = workload.head_dim**-0.5, workload.seqlen_k - workload.seqlen_q
    expected = oracle_of(
        inputs.q[0],
        inputs.k[0],
        inputs.v[0],
        causal=workload.causal,
        q_offset=offset,
        softmax_scale=scale,
        features=inputs.features[0],
        tf32=workload.dtype == "tf32",
    )
    return VerificationCase(inputs=inputs, expected=expected, softmax_scale=scale, q_offset=offset)


def other_bits(launch: Callable[[], object], outputs: dict[str, torch.Tensor], repeats: int) -> Failure | None:
    """Launch again and compare the outputs bit by bit with what they hold now; a `Failure` names those that differ."""
    first = {name: output.clone() for name, output in outputs.items()} if repeats else {}
    for _ in range(repeats):
        launch()
        differing = [name for name, output in outputs.items() if not torch.equal(_bits(output), _bits(first[name]))]
        if differing:
            return Failure(stage="verify", reason=f"equal inputs give other bits of {', '.join(differing)} in a repeat")
    return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(SAME_SIZE[tensor.element_size()])
