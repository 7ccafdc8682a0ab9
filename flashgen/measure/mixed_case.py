"""Mixed batches in two launches, timed beside the one launch of a config: steps of decoding, and chunks of prompts.

The steps are the first sequences of the batch. They are computed by a decode config on the same pages, and the chunks
behind them by the config of the forward pass without them, into the same output: what `flashgen.attention_varlen` does
with `num_decodes`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile

from flashgen.core.features.pages import later_sequences
from flashgen.core.features.sequences import VARLEN
from flashgen.core.features.values import Features
from flashgen.core.lengths import MIXED, SAME
from flashgen.core.record import Failure
from flashgen.core.workload import DECODE, Workload
from flashgen.measure.decode_case import DecodeFactory, shape_of
from flashgen.measure.decode_inputs import DecodeTensors
from flashgen.measure.timing import Run
from flashgen.measure.verification_case import VerificationCase
from flashgen.measure.verify import KernelFactory, check

NO_SEQUENCES = {value.name: value.default for value in VARLEN.values} | {"block_table": None, "window": (None, None)}
"""What a step of decoding is told by other arguments."""


def steps_of(workload: Workload) -> Workload | None:
    """The steps of decoding of a mixed batch as a workload of their own; None where it is no such batch, or has none.

    They see as many keys as sequences of the batch may have, of which the profile is not their own.
    """
    w = workload
    if w.lengths != MIXED or w.page_size is None or not w.is_packed:
        return None
    number = len(list(takewhile(lambda rows: rows == 1, w.each_seqlen_q)))
    if number in (0, w.batch):
        return None
    changes = {"varlen": False, "total_q": None, "total_k": None, "lengths": SAME}
    return replace(w, direction=DECODE, batch=number, seqlen_q=1, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLaunches:
    """A mixed batch whose steps of decoding have launches of their own."""

    case: VerificationCase
    steps: Workload
    prefill: KernelFactory
    decode: DecodeFactory

    def verified(self) -> Failure | None:
        """Why the output of the first copy is wrong, or None; no LSE is asked for, as engines ask for none."""
        inputs = self.case.inputs
        inputs.out[0].fill_(float("nan"))
        self.run()(0)
        verdict = check(inputs.out[0], None, self.case.expected)
        return verdict if isinstance(verdict, Failure) else None

    def run(self) -> Run:
        """A launch of both that is ready for every copy."""
        i, number, scale = self.case.inputs, self.steps.batch, self.case.softmax_scale
        rest = [later_sequences(features, number) for features in i.features]
        prefill = self.prefill(i.q[0], i.k[0], i.v[0], i.out[0], rest[0])
        tensors = [self._tensors(n) for n in range(i.copies)]
        decode = self.decode(shape_of(self.steps, tensors[0])._replace(has_lse=False))

        def launch(n: int) -> None:
            prefill(i.q[n], i.k[n], i.v[n], i.out[n], None, scale, self.case.q_offset, rest[n])
            decode(tensors[n])

        return launch

    def _tensors(self, n: int) -> DecodeTensors:
        i, first = self.case.inputs, slice(0, self.steps.batch)
        features = i.features[n]
        assert features.seqused_k is not None
        assert features.block_table is not None
        q, out = (rows[0].transpose(0, 1)[first].unsqueeze(1) for rows in (i.q[n], i.out[n]))
        return DecodeTensors(
            q=q,
            k=i.k[n].transpose(1, 2),
            v=i.v[n].transpose(1, 2),
            out=out,
            lse=i.lse[n].new_empty((self.steps.batch, self.steps.nheads, 1)),
            lens=features.seqused_k[first],
            features=_of_steps(features, first),
            table=features.block_table[first],
        )


def _of_steps(features: Features, first: slice) -> Features:
    slopes = features.alibi_slopes
    own = slopes[first] if slopes is not None and slopes.dim() == 2 else slopes
    return replace(features, alibi_slopes=own, **NO_SEQUENCES)  # type: ignore[arg-type]
