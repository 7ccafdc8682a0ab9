"""What is trained, as `benchmarks.training` names it: a model, a length, and the attentions that are compared on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.core.workload import Workload

EAGER, COMPILED = "eager", "compiled"
MODES = (EAGER, COMPILED)

EAGER_SUITE, COMPILED_SUITE = "training", "training_compiled"
"""The suites of GPT-2, without and with torch.compile."""

LONG_SUITE = "training_long"
"""That of GPT-2 on one long sequence, whose steps have more tokens."""

BERT_SUITE, PADDED_SUITE, PATHS_SUITE = "bert", "bert_padded", "paths"

REFERENCE, NOISE = "sdpa-flash", "sdpa-cudnn"
"""Losses are compared with those of the first, where it serves; how far the second is from it is the distance of two
kernels that are both right in bf16."""

GPT2_TOKENS, GPT2_LAYERS, GPT2_NHEADS = 16384, 12, 12
"""Tokens of a step where a sequence is not longer; layers and heads of GPT-2 with 124M parameters."""

HEAD_DIM = 64
"""Of all models."""

SAVED_BYTES = {EAGER: 6, COMPILED: 4}
"""What standard attention keeps of a score for its backward pass: its probability in fp32 and in bf16, or the score and
its probability in bf16, as the memory of GPT-2 at 1k and 4k shows."""

SCORES_SHARE = 0.7
"""Of the memory of a device, what scores may take: beside them are the model and what a layer holds for a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Something to train.

    Attributes:
        name: as command lines have it.
        suites: of the rows, by mode.
        workload: the attention of a layer, in the backward pass.
        impls: the attentions that are compared in each mode; all of `accepted` can be asked for.
        reference, noise: see `REFERENCE` and `NOISE`.
        steps, run_seconds: the length of a run, and what ends it sooner behind its first step.
    """

    name: str
    suites: Mapping[str, str]
    workload: Workload
    impls: Mapping[str, tuple[str, ...]]
    reference: str
    noise: str
    steps: int
    run_seconds: float

    @property
    def accepted(self) -> tuple[str, ...]:
        """Every attention that either mode has."""
        return tuple(dict.fromkeys(impl for impls in self.impls.values() for impl in impls))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.workload.batch * self.workload.seqlen_q

    def recomputes(self, impl: str, mode: str, memory_bytes: float) -> bool:
        """Whether the scores of standard attention would not fit beside the rest, and are computed twice instead."""
        if impl != "standard" or self.suites[EAGER] not in (EAGER_SUITE, LONG_SUITE):
            return False
        scores = self.workload.batch * self.workload.nheads * self.workload.seqlen_q * self.workload.seqlen_k
        return GPT2_LAYERS * scores * SAVED_BYTES[mode] > SCORES_SHARE * memory_bytes


def _suites(eager: str) -> dict[str, str]:
    return {EAGER: eager, COMPILED: f"{eager}_compiled"}


def gpt2(seqlen: int, *, suite: str = EAGER_SUITE, steps: int = 100, run_seconds: float = 8.0) -> Task:
    """GPT-2 at a length, 16k tokens a step or one sequence."""
    impls = ("sdpa-flash", "sdpa-cudnn", "flashgen", "standard")
    return Task(
        name=str(seqlen),
        suites=_suites(suite),
        workload=Workload(
            direction="backward",
            batch=max(1, GPT2_TOKENS // seqlen),
            nheads=GPT2_NHEADS,
            seqlen_q=seqlen,
            head_dim=HEAD_DIM,
            causal=True,
        ),
        impls={EAGER: impls, COMPILED: impls},
        reference=REFERENCE,
        noise=NOISE,
        steps=steps,
        run_seconds=run_seconds,
    )


BERT = Task(
    name="bert",
    suites=_suites(BERT_SUITE),
    workload=Workload(direction="backward", batch=64, nheads=16, seqlen_q=512, head_dim=HEAD_DIM),
    impls={
        EAGER: ("sdpa-flash", "sdpa-cudnn", "flashgen", "standard"),
        COMPILED: ("sdpa-flash", "sdpa-cudnn", "sdpa", "flex", "flashgen", "standard"),
    },
    reference=REFERENCE,
    noise=NOISE,
    steps=40,
    run_seconds=12.0,
)
"""BERT-large on 64 sequences of 512 tokens. `sdpa` is the backend that torch chooses."""

PADDED = Task(
    name="bert-padded",
    suites=_suites(PADDED_SUITE),
    workload=Workload(direction="backward", batch=64, nheads=16, seqlen_q=512, head_dim=HEAD_DIM, mask="keys"),
    impls={
        EAGER: ("sdpa-efficient", "flashgen"),
        COMPILED: ("sdpa-efficient", "sdpa-cudnn", "sdpa", "flex", "flashgen", "standard"),
    },
    reference="sdpa-efficient",
    noise=NOISE,
    steps=40,
    run_seconds=10.0,
)
"""The same with a mask of keys, which SDPA's flash backend does not take."""

PATHS = Task(
    name="paths",
    suites=_suites(PATHS_SUITE),
    workload=Workload(direction="backward", batch=8, nheads=4, seqlen_q=16384, head_dim=HEAD_DIM),
    impls={EAGER: ("sdpa-flash", "sdpa-cudnn", "flashgen"), COMPILED: ("sdpa-flash", "sdpa-cudnn", "flashgen")},
    reference=REFERENCE,
    noise=NOISE,
    steps=250,
    run_seconds=30.0,
)
"""Classification of images, a pixel a token; as default in eager mode alone, since attention is nearly all of it."""

LONG = gpt2(65536, suite=LONG_SUITE, steps=20, run_seconds=20.0)
"""A sequence of 64k, at about a second a step."""

TASKS = {task.name: task for task in (gpt2(1024), gpt2(4096), gpt2(16384), LONG, BERT, PADDED, PATHS)}
"""All of them by name, in the order in which they run."""

BY_DEFAULT = {PATHS.name: (EAGER,)}
"""The modes of a task that names none, where they are not all."""

OF_SUITE = {suite: task for task in TASKS.values() for suite in task.suites.values()}
"""A task of each suite: reference and noise are the same in all of a suite."""
