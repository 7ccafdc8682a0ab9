"""Random caches of a step of decoding: contiguous or paged, with NaN wherever no query looks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from flashgen.core.errors import UnsupportedError
from flashgen.core.features.pages import PAGES
from flashgen.core.features.values import Features
from flashgen.core.workload import Workload
from flashgen.launch.dtypes import TORCH_DTYPES
from flashgen.measure.feature_inputs import SOFTCAP_BEND, FeatureForm, make_features
from flashgen.measure.score_rule import uncomputed

STALE = (-1, 2**31 - 1, 0)
"""What stands in a table behind the pages of a sequence."""

SPARE_PAGES = 3
"""Full of NaN, in a pool of pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTensors:
    """The tensors of one call, as `flashgen.attention_decode` has them: (batch, seqlen_q, nheads, head_dim) and so on.

    `out` and `lse` are where a kernel writes.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    lens: torch.Tensor
    features: Features
    table: torch.Tensor | None = None
    leftpad: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Device memory held, in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.q, self.k, self.v, self.out, self.lse))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeForm:
    """What of a call its workload leaves open.

    Attributes:
        lens: keys of each sequence, in the place of the workload's profile.
        leftpad: the first slot of each sequence that holds a key; of contiguous caches.
        layout: "nhd", or "hnd" with heads before slots in memory.
        features: the form of softcap, slopes and sinks.
    """

    lens: tuple[int, ...] = ()
    leftpad: tuple[int, ...] = ()
    layout: str = "nhd"
    features: FeatureForm = field(default_factory=FeatureForm)


def make_decode_inputs(
    workload: Workload, *, copies: int, seed: int, device: torch.device | str, form: DecodeForm | None = None
) -> tuple[DecodeTensors, ...]:
    """Standard normal q and caches, with a set of caches for each copy; lengths and tables are the same in all.

    What no query sees is NaN: slots behind a length, before a window or the left padding, whole pages. Table entries
    behind a length are stale. With a softcap, q is so large that the cap matters.

    Raises:
        UnsupportedError: the workload has a feature that inputs cannot be made for.
    """
    missing = [name for name in uncomputed(workload) if name != PAGES.name]
    if missing:
        raise UnsupportedError(f"caches can be made for steps of decoding; {workload.key} has {missing}")
    form, w = form or DecodeForm(), workload
    generator = torch.Generator(device=device).manual_seed(seed)
    lens = form.lens or w.each_length
    places = _Places.of(w, lens, form.leftpad, seed)
    gain = form.features.softcap / SOFTCAP_BEND if w.softcap else 1.0
    features = make_features(replace(w, page_size=None), form.features, copies=1, generator=generator, padding=0)[0]
    table = None if places.table is None else places.table.to(device)
    unseen = places.unseen.to(device)
    long_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    pads = torch.tensor(form.leftpad, dtype=torch.int32, device=device) if form.leftpad else None
    dtype = TORCH_DTYPES[w.dtype]

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    def cache(width: int) -> torch.Tensor:
        rows, slots = unseen.shape
        shape = (rows, slots, w.nheads_k, width)
        whole = normal(shape[0], shape[2], shape[1], width).transpose(1, 2) if form.layout == "hnd" else normal(*shape)
        return whole.masked_fill_(unseen[..., None, None], math.nan)

    def one() -> DecodeTensors:
        return DecodeTensors(
            q=normal(w.batch, w.seqlen_q, w.nheads, w.head_dim).mul_(gain),
            k=cache(w.head_dim),
            v=cache(w.head_dim_v),
            out=torch.full((w.batch, w.seqlen_q, w.nheads, w.head_dim_v), math.nan, dtype=dtype, device=device),
            lse=torch.full((w.batch, w.nheads, w.seqlen_q), math.nan, device=device),
            lens=long_lens,
            features=features,
            table=table,
            leftpad=pads,
        )

    return tuple(one() for _ in range(copies))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Where the keys of each sequence lie: `unseen` (rows or pages, slots) is True where no query looks."""

    unseen: torch.Tensor
    table: torch.Tensor | None

    @classmethod
    def of(cls, w: Workload, lens: Sequence[int], leftpad: Sequence[int], seed: int) -> _Places:
        seen = _seen(w, lens, leftpad)
        if w.page_size is None:
            return cls(unseen=~seen, table=None)
        page, columns = w.page_size, -(-w.seqlen_k // w.page_size)
        counts = [-(-length // page) for length in lens]
        total = sum(counts) + SPARE_PAGES
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        table = torch.tensor(STALE).repeat(w.batch * columns // len(STALE) + 1)[: w.batch * columns].view(-1, columns)
        unseen = torch.ones((total, page), dtype=torch.bool)
        for b, ids in enumerate(torch.split(order, [*counts, SPARE_PAGES])[: w.batch]):
            count = counts[b]
            padded = torch.zeros(count * page, dtype=torch.bool)
            padded[: lens[b]] = seen[b, : lens[b]]
            unseen[ids] = ~padded.view(count, page)
            table[b, :count] = ids
        return cls(unseen=unseen, table=table.to(torch.int32))


def _seen(w: Workload, lens: Sequence[int], leftpad: Sequence[int]) -> torch.Tensor:
    """(batch, seqlen_k): the slots that any query of a sequence sees."""
    ends = torch.tensor(lens)[:, None]
    first = torch.zeros_like(ends) if w.window_left is None else ends - w.seqlen_q - w.window_left
    if leftpad:
        first = torch.maximum(first, torch.tensor(leftpad)[:, None])
    slots = torch.arange(w.seqlen_k)
    return (slots < ends) & (slots >= first)
