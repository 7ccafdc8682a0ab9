"""Pairwise covering arrays: few cases in which every two values of every two factors meet at least once.

Faults of a kernel with many features come from one value or from two that meet; a case for each combination would be
millions. The same cases serve the GPU (`forward_cases()`) and, with smaller values, Triton's interpreter.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flashgen.core.workload import Specialization
from flashgen.measure.feature_inputs import FeatureForm
from flashgen.measure.odd_shapes import BLIND, PER_HEAD, SHARED, SWAPPED, USUAL, OddShape

ATTEMPTS = 30
"""Rows tried for each row taken; more make the array a little shorter."""

Value = object
Pair = tuple[tuple[str, Value], tuple[str, Value]]


def covering_array(factors: Mapping[str, Sequence[Value]], seed: int = 0) -> list[dict[str, Value]]:
    """Rows that name a value of each factor, such that every pair of values is in some row (greedy, repeatable)."""
    names = list(factors)
    missing: set[Pair] = set()
    for one, other in itertools.combinations(names, 2):
        missing |= {((one, a), (other, b)) for a in factors[one] for b in factors[other]}
    generator = random.Random(seed)
    rows = []
    while missing:
        # sets have no order of their own from one process to the next
        ordered = sorted(missing, key=repr)
        tried = [_row(factors, missing, generator.choice(ordered), generator) for _ in range(ATTEMPTS)]
        best = max(tried, key=lambda row: len(missing & set(_pairs(row, names))))
        missing -= set(_pairs(best, names))
        rows.append(best)
    return rows


def _row(
    factors: Mapping[str, Sequence[Value]], missing: set[Pair], start: Pair, generator: random.Random
) -> dict[str, Value]:
    """A row with the pair `start`, whose other values, in random order, each complete most missing pairs."""
    row = dict(start)
    place = {name: number for number, name in enumerate(factors)}
    rest = [name for name in factors if name not in row]
    generator.shuffle(rest)

    def completed(name: str, value: Value) -> int:
        """Of the pairs with this value alone: all others are there whatever it is."""
        here = (name, value)
        pairs = ((here, other) if place[name] < place[other[0]] else (other, here) for other in row.items())
        return sum(pair in missing for pair in pairs)

    for name in rest:
        values = list(factors[name])
        generator.shuffle(values)
        row[name] = max(values, key=functools.partial(completed, name))
    return {name: row[name] for name in factors}


def _pairs(row: Mapping[str, Value], names: list[str]) -> Iterator[Pair]:
    known = [(name, row[name]) for name in names if name in row]
    return itertools.combinations(known, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCase:
    """One attention problem of a covering array; the fields are its factors.

    `layout` "unaligned" has rows of head_dim + 1 elements. `offset` counts where positions matter. A bias or a mask is
    "full", "keys", or "scattered": a full one with strides that are not aligned.
    """

    dtype: str
    dims: tuple[int, int]
    layout: str
    heads: tuple[int, int]
    lengths: tuple[int, int]
    position: str
    offset: str
    softcap: bool
    alibi: bool
    sink: bool
    bias: str
    mask: str
    form: FeatureForm

    @property
    def title(self) -> str:
        """Readable name of a test."""
        return f"{self.spec.key}-{self.layout}-{self.shape.title}".replace(" ", "").replace(",", "-")

    @property
    def spec(self) -> Specialization:
        """What is compiled in."""
        causal, window = "causal" in self.position, "window" in self.position
        kinds = {"": "", "full": "full", "keys": "keys", "scattered": "full"}
        return Specialization(
            direction="forward",
            dtype=self.dtype,
            head_dim=self.dims[0],
            head_dim_v=self.dims[1],
            causal=causal,
            window=window,
            softcap=self.softcap,
            alibi=self.alibi,
            sink=self.sink,
            bias=kinds[self.bias],
            mask=kinds[self.mask],
            aligned16=self.layout != "unaligned",
            aligned_scores="scattered" not in (self.bias, self.mask),
            offset_tensor=self.offset == "tensor" and (causal or window or self.alibi),
        )

    @property
    def shape(self) -> OddShape:
        """Sizes and forms of its inputs."""
        (seqlen_q, seqlen_k), (nheads, nheads_k) = self.lengths, self.heads
        window = {"window": (33, 5), "causal-window": (17, None)}.get(self.position, (None, None))
        return OddShape(
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            nheads=nheads,
            nheads_k=nheads_k,
            layout="bhsd" if self.layout == "bhsd" else "bshd",
            q_offset=None if self.offset == "default" else seqlen_k - seqlen_q - 7,
            window=window,
            form=self.form if self.spec.aligned_scores else replace(self.form, scattered="odd"),
        )


FACTORS: dict[str, Sequence[Value]] = {
    "dtype": ("bf16", "fp16", "fp32", "tf32"),
    "dims": (
        *((size, size) for size in (16, 64, 72, 80, 96, 128, 160, 192, 256, 512)),
        (192, 128),
    ),
    "layout": ("bhsd", "bshd", "unaligned"),
    "heads": ((4, 4), (4, 1), (6, 2)),
    "lengths": ((1, 333), (113, 203), (203, 113), (257, 257)),
    "position": ("", "causal", "window", "causal-window"),
    "offset": ("default", "int", "tensor"),
    "softcap": (False, True),
    "alibi": (False, True),
    "sink": (False, True),
    "bias": ("", "full", "keys", "scattered"),
    "mask": ("", "full", "keys", "scattered"),
    "form": (USUAL, PER_HEAD, SHARED, replace(SWAPPED, blind=BLIND.blind)),
}


def forward_cases(**smaller: Sequence[Value]) -> list[ForwardCase]:
    """The covering array of forward features; `smaller` replaces the values of some factors."""
    return [ForwardCase(**row) for row in covering_array({**FACTORS, **smaller})]  # type: ignore[arg-type]
