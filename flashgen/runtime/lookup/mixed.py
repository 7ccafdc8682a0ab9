"""Which mixed batches are two launches: steps of decoding by a decode family, chunks of prompts by a forward family.

A forward pass has a program for each head of a sequence of one query, with one row of a tile in use, and that program
reads all keys of the sequence alone, once for every head of a group, or for all of them where tiles have heads side by
side (`codegen.head_packing`). A decode family reads them once for all heads of a group, shares them among all SMs, and
costs two more kernels.

Which is faster a record says, where there is one: a search of a workload with the profile `mixed` over pages times two
launches beside its winner, which takes one for all (`core.record.SPLIT`), and calls of the class of that workload have
what was faster. Of several records the one of the first layer counts. Without a record it is a rule: two launches are
worth it from some keys on, `APART_KEYS`, below which a program reads its keys in about the time of the other kernels.
That figure is an estimate from the parts of the rule for few queries (`flashgen.runtime.lookup.few_queries`), not a
measurement of mixed batches. Tiles with all heads of a group, of enough sequences for all SMs, took 0.96 of the time of
two launches with up to 1024 keys on an H200, and 0.95 with up to 8192: there it is one launch up to `TOGETHER_KEYS`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashgen.codegen.families import reasons
from flashgen.core.device import Device
from flashgen.core.lengths import MIXED
from flashgen.core.record import SPLIT, TuningRecord
from flashgen.core.workload import DECODE, Specialization, Workload
from flashgen.runtime.lookup.few_queries import FEW
from flashgen.runtime.lookup.packed_ladder import PackedSizes, served_packed
from flashgen.runtime.lookup.records import Records

APART_KEYS = FEW.keys
"""Keys that a sequence has room for from which on steps of decoding get launches of their own without a record."""

TOGETHER_KEYS = 8192
"""The most keys with which one launch was the faster one where tiles have all heads of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """Whether a mixed batch is two launches, why, and the record that says so, if one does."""

    are_two: bool
    why: str
    record: TuningRecord | None = None

    def __str__(self) -> str:
        return f"{'two launches' if self.are_two else 'one launch'}: {self.why}"


def launches(
    workload: Workload, spec: Specialization, device: Device, records: Records, *, has_chunks: bool = True
) -> Launches:
    """What computes a mixed batch.

    Args:
        workload: of the call: packed sequences over pages, of any profile of lengths.
        spec: what is compiled in.
        device: the GPU.
        records: all there are.
        has_chunks: whether there is more than steps of decoding; without, no record is about such a batch.
    """
    reason = why_not_decoded(spec, device)
    if reason is not None:
        return Launches(are_two=False, why=reason)
    sizes = PackedSizes.of(workload)
    record = _measured(sizes, spec, device, records) if has_chunks else None
    if record is not None:
        return _as_measured(record)
    left, keys = workload.window_left, workload.seqlen_k
    keys = keys if left is None else min(keys, left + 1)
    if has_chunks and APART_KEYS <= keys <= TOGETHER_KEYS and _reads_keys_once(sizes, spec, device, records):
        return Launches(are_two=False, why=f"tiles have all heads that share keys, of which {keys} are not too many")
    if keys < APART_KEYS:
        return Launches(are_two=False, why=f"{keys} keys are fewer than {APART_KEYS}, and nothing was measured")
    return Launches(are_two=True, why=f"{keys} keys are {APART_KEYS} or more, and nothing was measured")


def why_not_decoded(spec: Specialization, device: Device) -> str | None:
    """The reason why no decode family computes the steps of a batch over these pages, or None."""
    if spec.mods is not None:
        return "no decode family takes functions of the caller"
    step = replace(spec, direction=DECODE, varlen=False, deterministic=False)
    found = reasons(step, device)
    return None if None in found.values() else "; ".join(f"{name}: {reason}" for name, reason in found.items())


def _reads_keys_once(sizes: PackedSizes, spec: Specialization, device: Device, records: Records) -> bool:
    """Whether the tiles that serve have all heads of a group, and there are tiles for all SMs in steps of decoding."""
    group, packs = sizes.nheads // sizes.nheads_k, sizes.batch * sizes.nheads_k
    if group == 1 or packs < device.num_sms:
        return False
    config = served_packed(spec, sizes, device, records).config
    return config.get("packed_heads", 1) == group


def _measured(sizes: PackedSizes, spec: Specialization, device: Device, records: Records) -> TuningRecord | None:
    """The record of the class of these sizes that was timed beside two launches, of the first layer that has one."""
    for one in records.choices(spec, device).here:
        w = one.record.workload
        is_of_class = w.lengths == MIXED and PackedSizes.of(w).largest == sizes.largest
        if is_of_class and one.reason is None and split_ms(one.record) is not None and spec.is_measured:
            return one.record
    return None


def split_ms(record: TuningRecord) -> float | None:
    """The time of two launches beside a record's one, in ms; None where they were not timed."""
    return next((one.median_ms for one in record.baselines if one.impl == SPLIT), None)


def _as_measured(record: TuningRecord) -> Launches:
    two_ms, one_ms = split_ms(record) or 0.0, record.time_ms or 0.0
    why = f"{two_ms:.4f} ms in two launches and {one_ms:.4f} ms in one were measured for {record.workload.key}"
    return Launches(are_two=two_ms < one_ms, why=why, record=record)
