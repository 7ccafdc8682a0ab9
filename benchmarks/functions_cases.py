"""The functions of the caller that are raced, in three languages, and the calls that they are raced in.

Of each function there is Triton's text for flashgen, torch's for FlexAttention, and the CuTe DSL's for FlashAttention-4
(`fa4_mods.py`). What is right follows from a built-in feature that gives the same scores, in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import triton.language as tl

from benchmarks.problems import Problem, expected_of, training_inputs
from flashgen.core.features.values import Features
from flashgen.core.workload import BACKWARD_FLOPS_RATIO, Workload
from flashgen.measure.bench import INPUT_SEED
from flashgen.measure.feature_inputs import SOFTCAP, alibi_slopes
from flashgen.measure.inputs import Inputs, make_inputs

FORWARD, BACKWARD, BOTH = "functions", "functions_backward", "functions_training"
"""Suites: forward passes, backward passes alone, and both passes as training calls them."""

Tensor = torch.Tensor
Aux = tuple[Tensor, ...]
Mod = Callable[..., Any]


# --- in Triton's language, whose numbers are literals ----------------------------------------------------------------


def documents(b, h, q_idx, k_idx, ids):  # type: ignore[no-untyped-def]
    """A query sees its own document."""
    return tl.load(ids + q_idx) == tl.load(ids + k_idx)


def causal_documents(b, h, q_idx, k_idx, ids):  # type: ignore[no-untyped-def]
    """A query sees what came before it in its own document."""
    return (tl.load(ids + q_idx) == tl.load(ids + k_idx)) & (k_idx <= q_idx)


def prefix_lm(b, h, q_idx, k_idx, prefix):  # type: ignore[no-untyped-def]
    """A query sees the prefix, and what came before it."""
    return (k_idx <= q_idx) | (k_idx < tl.load(prefix + b))


def relative(score, b, h, q_idx, k_idx, table):  # type: ignore[no-untyped-def]
    """A value for each head and distance is added: the table is as wide as `TABLE`."""
    return score + tl.load(table + h * 8704 + k_idx - q_idx + 4352)


def softcap(score, b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    """`SOFTCAP * tanh(score / SOFTCAP)`; the language has a sigmoid."""
    return 50.0 * (2.0 * tl.sigmoid(0.04 * score) - 1.0)


def alibi(score, b, h, q_idx, k_idx, slopes):  # type: ignore[no-untyped-def]
    """The slope of a head times the distance is subtracted."""
    return score - tl.load(slopes + h) * tl.abs(q_idx - k_idx)


# --- their tensors and torch's text ----------------------------------------------------------------------------------

SHARES = (3, 18, 1, 11, 5, 2, 13, 8)
"""Lengths of the eight documents, relative to each other."""

PREFIX_SHARE = 8
"""One of so many keys is in the prefix: 1k of 8k."""

TABLE = 8704
"""Entries of a head: distances of less than 4096 keys, and 256 more on both sides, which tiles may reach."""


def document_lengths(seqlen: int) -> tuple[int, ...]:
    """The lengths of eight documents in a sequence; they end anywhere in a block."""
    ends = [round(seqlen * part / sum(SHARES)) for part in itertools.accumulate(SHARES)]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def _ids(w: Workload, device: torch.device) -> Aux:
    lengths = torch.tensor(document_lengths(w.seqlen_k), device=device)
    return (torch.repeat_interleave(torch.arange(len(lengths), device=device, dtype=torch.int32), lengths),)


def _prefix(w: Workload, device: torch.device) -> Aux:
    return (torch.full((w.batch,), w.seqlen_k // PREFIX_SHARE, device=device, dtype=torch.int32),)


def _table(w: Workload, device: torch.device) -> Aux:
    generator = torch.Generator(device=device).manual_seed(INPUT_SEED)
    return (torch.randn((w.nheads, TABLE), generator=generator, device=device),)


def _slopes(w: Workload, device: torch.device) -> Aux:
    return (alibi_slopes(w.nheads, device),)


def _nothing(w: Workload, device: torch.device) -> Aux:
    return ()


def half_of_the_keys(w: Workload, device: torch.device) -> Tensor:
    """A mask of keys (batch, 1, 1, seqlen_k) behind which padding begins: all lengths alike, half of them on average.

    The first sequence, whose output is compared, is of middle length.
    """
    lengths = (torch.arange(w.batch, device=device) + w.batch // 2) % w.batch
    ends = (w.seqlen_k * (2 * lengths + 1)) // (2 * w.batch)
    return (torch.arange(w.seqlen_k, device=device) < ends[:, None])[:, None, None, :]


def flex_documents(aux: Aux) -> Mod:
    """For FlexAttention, as the next ones."""
    (ids,) = aux
    return lambda b, h, i, j: ids[i] == ids[j]


def flex_causal_documents(aux: Aux) -> Mod:
    """See `causal_documents`."""
    (ids,) = aux
    return lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)


def flex_prefix_lm(aux: Aux) -> Mod:
    """See `prefix_lm`."""
    (prefix,) = aux
    return lambda b, h, i, j: (i >= j) | (j < prefix[b])


def flex_relative(aux: Aux) -> Mod:
    """See `relative`."""
    (table,) = aux
    return lambda score, b, h, i, j: score + table[h, j - i + TABLE // 2]


def flex_softcap(aux: Aux) -> Mod:
    """See `softcap`."""
    return lambda score, b, h, i, j: SOFTCAP * torch.tanh(score / SOFTCAP)


def flex_alibi(aux: Aux) -> Mod:
    """See `alibi`."""
    (slopes,) = aux
    return lambda score, b, h, i, j: score - slopes[h] * (i - j).abs()


# --- how many pairs are visible --------------------------------------------------------------------------------------


def _causal_pairs(seqlen: int) -> int:
    return seqlen * (seqlen + 1) // 2


def _document_pairs(w: Workload) -> int:
    return w.batch * sum(length * length for length in document_lengths(w.seqlen_k))


def _causal_document_pairs(w: Workload) -> int:
    return w.batch * sum(map(_causal_pairs, document_lengths(w.seqlen_k)))


def _prefix_pairs(w: Workload) -> int:
    prefix = w.seqlen_k // PREFIX_SHARE
    return w.batch * (_causal_pairs(w.seqlen_k) + prefix * (prefix - 1) // 2)


def _padded_pairs(w: Workload) -> int:
    return w.seqlen_q * int(half_of_the_keys(w, torch.device("cpu")).sum())


def _dense_pairs(w: Workload) -> int:
    return w.all_pairs


# --- functions and calls ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Function:
    """What a call has beside its workload: functions of the caller, or a built-in feature.

    Attributes:
        name: in the column `function`.
        same: the features of a workload that computes the same without functions.
        causal: whether the call has `causal=True`; a mask_mod says by itself what it hides.
        score_mod: in Triton's language, as the next one.
        mask_mod: likewise.
        aux: the tensors of both.
        flex_score: torch's text of score_mod for FlexAttention.
        flex_mask: likewise of mask_mod.
        fa4: the function of `fa4_mods` that gives FlashAttention-4 the same; empty for its own softcap.
        has_blocks: whether flashgen's call has a block mask.
        pairs: visible pairs of one head in all sequences.
    """

    name: str
    same: Mapping[str, Any]
    causal: bool = True
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    aux: Callable[[Workload, torch.device], Aux] = _nothing
    flex_score: Callable[[Aux], Mod] | None = None
    flex_mask: Callable[[Aux], Mod] | None = None
    fa4: str = ""
    has_blocks: bool = False
    pairs: Callable[[Workload], int] = field(default=_dense_pairs)

    @property
    def is_built_in(self) -> bool:
        """Whether the call has no function."""
        return self.score_mod is None and self.mask_mod is None


_DOCUMENTS: dict[str, Any] = {
    "same": {"mask": "full"},
    "causal": False,
    "mask_mod": documents,
    "aux": _ids,
    "flex_mask": flex_documents,
    "fa4": "documents",
    "pairs": _document_pairs,
}
FUNCTIONS = {
    function.name: function
    for function in (
        Function(name="documents", has_blocks=True, **_DOCUMENTS),
        Function(
            name="causal-documents",
            has_blocks=True,
            **_DOCUMENTS
            | {
                "mask_mod": causal_documents,
                "flex_mask": flex_causal_documents,
                "fa4": "causal_documents",
                "pairs": _causal_document_pairs,
            },
        ),
        Function(
            name="prefix-lm",
            same={"mask": "full"},
            causal=False,
            mask_mod=prefix_lm,
            aux=_prefix,
            flex_mask=flex_prefix_lm,
            fa4="prefix_lm",
            has_blocks=True,
            pairs=_prefix_pairs,
        ),
        Function(
            name="relative-bias",
            same={"bias": "full"},
            score_mod=relative,
            aux=_table,
            flex_score=flex_relative,
            fa4="relative",
        ),
        Function(name="softcap-mod", same={"softcap": True}, score_mod=softcap, flex_score=flex_softcap),
        Function(
            name="alibi-mod",
            same={"alibi": True},
            score_mod=alibi,
            aux=_slopes,
            flex_score=flex_alibi,
            fa4="alibi_without_offset",
        ),
        Function(name="documents-unlisted", **_DOCUMENTS),
        Function(name="softcap", same={"softcap": True}),
        Function(name="alibi", same={"alibi": True}),
        Function(name="key-mask", same={"mask": "keys"}, causal=False, pairs=_padded_pairs),
    )
}
"""By name: seven with functions of the caller, of which `documents-unlisted` has no block mask, and three without."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One race: a function in calls of some sizes, and the passes that are timed, which the suite says.

    `sizes` is the forward pass without the function and without a causal mask.
    """

    suite: str
    function: Function
    sizes: Workload

    @property
    def name(self) -> str:
        """What a pattern of `--only` is held against."""
        return f"{self.function.name}/{self.workload.key}"

    @cached_property
    def workload(self) -> Workload:
        """That of the rows: the call without functions of the caller."""
        features = dict(self.function.same) if self.function.is_built_in else {}
        return replace(self._call, **features)

    @cached_property
    def twin(self) -> Workload:
        """The workload that computes the same by built-in features alone."""
        return replace(self._call, **self.function.same)

    @property
    def _call(self) -> Workload:
        direction = "forward" if self.suite == FORWARD else "backward"
        return replace(self.sizes, direction=direction, causal=self.function.causal)

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of what is timed, of the visible pairs."""
        w = self.workload
        products = 2 * w.nheads * self.function.pairs(w) * (w.head_dim + w.head_dim_v)
        passes = {FORWARD: 1.0, BACKWARD: BACKWARD_FLOPS_RATIO, BOTH: 1.0 + BACKWARD_FLOPS_RATIO}
        return int(passes[self.suite] * products)

    def inputs(self, copies: int, where: torch.device) -> Inputs:
        """Tensors on a device; a built-in feature is among them, what a function takes is not."""
        drawn = replace(self.twin, bias="", mask="")
        if self.suite == FORWARD:
            found = make_inputs(drawn, copies=copies, seed=INPUT_SEED, device=where)
        else:
            found = training_inputs(drawn, copies=copies, where=where)
        if self.twin.mask == "keys":
            masked = replace(found.features[0], mask=half_of_the_keys(self.twin, where))
            return replace(found, features=(masked,) * copies)
        plain = Features(softcap=found.features[0].softcap)
        return found if self.function.is_built_in else replace(found, features=(plain,) * copies)

    def problem(self, copies: int, where: torch.device) -> Problem:
        """Inputs on a device, and what is right in float64."""
        inputs = self.inputs(copies, where)
        return Problem(inputs=inputs, expected=expected_of(self.twin, inputs, self._features(inputs, where)))

    def _features(self, inputs: Inputs, where: torch.device) -> Features:
        """Those of the twin: what the inputs have, and the bias or the mask that its functions come to.

        They are of the first sequence, and a bias of the last heads: of those that are compared.
        """
        w, function, drawn = self.twin, self.function, inputs.features[0]
        if function.is_built_in:
            return drawn
        aux = function.aux(w, where)
        i, j = torch.arange(w.seqlen_q, device=where)[:, None], torch.arange(w.seqlen_k, device=where)[None, :]
        first = torch.zeros((), dtype=torch.int64, device=where)
        if w.mask and function.flex_mask is not None:
            return replace(drawn, mask=function.flex_mask(aux)(first, first, i, j)[None, None])
        if w.alibi:
            return replace(drawn, alibi_slopes=alibi_slopes(w.nheads, where))
        if w.bias and function.flex_score is not None:
            heads = torch.arange(w.nheads - w.nheads // w.nheads_k, w.nheads, device=where)[:, None, None]
            return replace(drawn, bias=function.flex_score(aux)(0.0, first, heads, i, j)[None])
        return drawn


WIDE, NARROW, SHARED = "h16-d128", "h32-d64", "h32-hk8-d128"
CALLS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("documents", (f"b1-sq8192-{WIDE}", f"b1-sq16384-{WIDE}", f"b1-sq16384-{NARROW}")),
    ("causal-documents", tuple(f"b1-sq{n}-{h}" for n, h in ((8192, WIDE), (16384, WIDE), (16384, NARROW)))),
    ("causal-documents", (f"b1-sq16384-{SHARED}",)),
    ("prefix-lm", (f"b1-sq8192-{WIDE}", f"b1-sq8192-{NARROW}")),
    ("relative-bias", (f"b4-sq4096-{WIDE}", f"b4-sq4096-{NARROW}")),
    ("softcap-mod", (f"b4-sq4096-{WIDE}", f"b4-sq4096-{NARROW}")),
    ("alibi-mod", (f"b4-sq4096-{WIDE}", f"b4-sq4096-{NARROW}")),
    ("documents-unlisted", (f"b1-sq8192-{WIDE}", f"b1-sq8192-{NARROW}")),
)
BUILT_IN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("softcap", (f"b4-sq4096-{NARROW}", f"b4-sq4096-{WIDE}", "b4-sq4096-h8-d256")),
    ("alibi", (f"b4-sq4096-{NARROW}", f"b4-sq4096-{WIDE}")),
    ("key-mask", ("b32-sq512-h16-d64", "b8-sq2048-h16-d128")),
)
"""Features that train; their forward passes are in `features.csv`."""


def cases(*suites: str) -> tuple[Case, ...]:
    """The races of these suites: every call with a function in each, and built-in features in those of training."""
    return tuple(
        Case(suite=suite, function=FUNCTIONS[name], sizes=Workload.parse(text))
        for suite in suites
        for name, texts in (*CALLS, *(BUILT_IN if suite != FORWARD else ()))
        for text in texts
    )
