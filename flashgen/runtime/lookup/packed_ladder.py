"""The look-up ladder for packed sequences: from what a host knows of a call to the config that serves it.

Lengths never reach the host, and a new batch must not mean a new kernel. So calls are looked up by class: the number of
sequences, the rows of all of them, and the bounds of their lengths, each rounded up to a power of two. All calls of a
class have one config, which is found once:

3., 4. a record of the class on this device, of the user or shipped; of several, one for any lengths comes first
5. the nearest measured record of this device: of packed sequences within `NEAR`, then of dense ones within it, and then
   of packed ones anywhere; over pages those with pages of any size, then those without, and then those with pages again
6. likewise of another device of the architecture
7. the nearest predicted record
8. the default config of the first family that applies, as it fits the class

What serves from rung 5 on has the tile that is expected to take least for a ramp of lengths of the class
(`flashgen.codegen.family.KernelFamily.balanced`).

A dense record serves where its config is valid for packed sequences and of the family whose default would serve: it was
tuned for the same kernel, while a record of another family may be slower. Likewise one without pages serves a call over
pages, with page ids read as the default reads them. Dense records do not: they were tuned for neither. A call whose
bits must not depend on its neighbours (`batch_invariant`) is served by the default, whatever its sizes are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from flashgen.codegen.common_sequences import largest_of_class
from flashgen.codegen.families import balanced, exact_sibling, usual
from flashgen.codegen.family import Sizes
from flashgen.codegen.head_parts import power_of_two
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.lengths import ANY
from flashgen.core.nearest import Position, distance, packed_position, pages_apart, visible_keys
from flashgen.core.rungs import RUNGS
from flashgen.core.workload import Specialization, Workload
from flashgen.runtime.lookup.ladder import (
    FIRST_EXACT,
    LAST_EXACT,
    NEAREST_ELSEWHERE,
    NEAREST_HERE,
    PREDICTED,
    Served,
    resolve,
)
from flashgen.runtime.lookup.records import Candidate, Records

NEAR = 4.0
"""Steps of `core.nearest`: 4 times both lengths, say, or 256 times the rows."""

INVARIANT = "bits do not depend on the batch, so the default config serves all of them"


class PackedSizes(NamedTuple):
    """What a host knows of packed sequences; `visible_keys` is 0 without a window."""

    batch: int
    nheads: int
    nheads_k: int
    total_q: int
    seqlen_q: int
    seqlen_k: int
    visible_keys: int = 0

    @classmethod
    def of(cls, workload: Workload) -> PackedSizes:
        """Those of a workload of packed sequences."""
        w = workload
        seen = visible_keys(w.seqlen_k, w.window_left, 0 if w.causal else w.window_right, has_window=has_window(w))
        return cls(w.batch, w.nheads, w.nheads_k, w.total_q or 0, w.seqlen_q, w.seqlen_k, seen)

    @property
    def largest(self) -> PackedSizes:
        """The largest sizes of their class."""
        batch, rows, queries, keys = largest_of_class(self.batch, self.total_q, self.seqlen_q, self.seqlen_k)
        seen = power_of_two(self.visible_keys) if self.visible_keys else 0
        return PackedSizes(batch, self.nheads, self.nheads_k, rows, queries, keys, seen)

    @property
    def position(self) -> Position:
        """Where they lie."""
        rows, group = (self.total_q, self.seqlen_q), self.nheads // self.nheads_k
        return packed_position(*rows, self.seqlen_k, self.nheads, group, self.visible_keys)

    @property
    def sizes(self) -> Sizes:
        """What configs are fitted to: sequences as long as they can be."""
        return Sizes(
            batch=self.batch,
            nheads=self.nheads,
            nheads_k=self.nheads_k,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
        )

    @property
    def packed(self) -> Sizes:
        """What a tile is chosen for: rows of all sequences, and no more of one than it can have."""
        queries, keys = max(self.seqlen_q, 1), self.seqlen_k
        return Sizes(
            batch=1,
            nheads=self.nheads,
            nheads_k=self.nheads_k,
            seqlen_q=self.total_q,
            seqlen_k=self.total_q * keys // queries,
            sequences=self.batch,
            max_seqlen_q=queries,
            max_seqlen_k=keys,
        )


def served_pass(
    workload: Workload,
    spec: Specialization,
    device: Device,
    records: Records,
    *,
    config: Config | None = None,
    with_lse: bool = False,
    batch_invariant: bool = False,
) -> Served:
    """What serves a pass: by this ladder where it has packed sequences, else by `flashgen.runtime.lookup.ladder`.

    Raises:
        ConfigError: the explicit config is not valid here.
        UnsupportedError: no family supports the call; the message lists each one's reason.
    """
    if workload.is_packed and config is None:
        sizes = PackedSizes.of(workload)
        return served_packed(spec, sizes, device, records, with_lse=with_lse, batch_invariant=batch_invariant)
    return resolve(workload, spec, device, records, config=config, with_lse=with_lse)


def has_window(w: Workload) -> bool:
    """Whether a window other than the causal mask is asked for."""
    return w.window_left is not None or w.window_right is not None


def served_packed(
    spec: Specialization,
    sizes: PackedSizes,
    device: Device,
    records: Records,
    *,
    with_lse: bool = False,
    batch_invariant: bool = False,
) -> Served:
    """What serves a call of these sizes, found once for each class.

    Args:
        spec: what is compiled in.
        sizes: of the call.
        device: the GPU.
        records: all there are.
        with_lse: whether the call asks for the LSE, or trains.
        batch_invariant: whether its bits must not depend on its sizes.

    Raises:
        UnsupportedError: no family supports the call; the message lists each one's reason.
    """
    largest = None if batch_invariant else sizes.largest
    key = (spec, largest, device, with_lse)
    found: Served | None = records.steps.get(key)
    if found is None:
        walked = _walked(spec, largest, device, records)
        exact = exact_sibling(walked.config, spec) if with_lse else walked.config
        found = records.steps[key] = walked if exact == walked.config else walked.serving(exact)
    return found


def _walked(spec: Specialization, sizes: PackedSizes | None, device: Device, records: Records) -> Served:
    choices = records.choices(spec, device)
    if sizes is None:
        skipped = tuple(f"{rung}. {RUNGS[rung]}: {INVARIANT}" for rung in range(FIRST_EXACT, PREDICTED + 1))
        return Served(config=choices.default, rung=8, skipped=skipped)
    skipped_rungs, dense = list[str](), sizes.sizes
    for rung, candidates in _rungs(spec, sizes, device, records):
        candidate = reason = None
        for candidate in candidates:
            reason = candidate.reason
            if reason is None and rung > LAST_EXACT and spec.direction == "backward":
                # a forward pass gets the heads in a tile that its sizes ask for
                reason = candidate.why_poor(dense)
            if reason is None:
                record, skipped, config = candidate.record, tuple(skipped_rungs), candidate.config
                if rung > LAST_EXACT:
                    config = balanced(config, spec, sizes.packed, device)
                return Served(config=config, rung=rung, record=record, layer=candidate.layer, skipped=skipped)
        why_none = f"{candidate.config} cannot serve: {reason}" if candidate else "no such record"
        skipped_rungs.append(f"{rung}. {RUNGS[rung]}: {why_none}")
    config = balanced(usual(choices.default, spec, dense, device), spec, sizes.packed, device)
    return Served(config=config, rung=8, skipped=tuple(skipped_rungs))


def _rungs(
    spec: Specialization, sizes: PackedSizes, device: Device, records: Records
) -> Iterator[tuple[int, Iterable[Candidate]]]:
    choices, plainer = records.choices(spec, device), records.plainer(spec, device)
    pages, here = records.other_pages(spec, device), _ranked(choices.here, sizes, spec)
    exact = [one for _, one in here if spec.is_measured and PackedSizes.of(one.record.workload).largest == sizes]
    yield FIRST_EXACT, [one for one in exact if one.is_users]
    yield LAST_EXACT, [one for one in exact if not one.is_users]
    inexact = tuple(one for one in choices.here if one not in exact)
    own = _ranked((*inexact, *pages.here), sizes, spec) + _ranked(choices.twins, sizes, spec)
    yield NEAREST_HERE, _with_plainer(own, _ranked(plainer.here, sizes, spec))
    elsewhere = _ranked((*choices.elsewhere, *pages.elsewhere), sizes, spec)
    yield NEAREST_ELSEWHERE, _with_plainer(elsewhere, _ranked(plainer.elsewhere, sizes, spec))
    yield PREDICTED, [one for _, one in _ranked(choices.predicted, sizes, spec)]


Ranked = list[tuple[float, Candidate]]
"""Candidates with how far they are."""


def _with_plainer(own: Ranked, plainer: Ranked) -> list[Candidate]:
    near, far = [one for steps, one in own if steps <= NEAR], [one for steps, one in own if steps > NEAR]
    return [*near, *[one for steps, one in plainer if steps <= NEAR], *far]


def _ranked(candidates: tuple[Candidate, ...], sizes: PackedSizes, spec: Specialization) -> Ranked:
    """The nearest first; of one place those for any lengths, and then those of an earlier layer."""
    here = sizes.position
    ranked = [
        (_steps(one, here, spec), one.record.workload.lengths != ANY, one.order, number)
        for number, one in enumerate(candidates)
    ]
    return [(steps, candidates[number]) for steps, *_, number in sorted(ranked)]


def _steps(one: Candidate, here: Position, spec: Specialization) -> float:
    pages = one.record.workload.page_size
    return distance(here, one.position) + (pages_apart(spec.page_size, pages) if pages else 0.0)
