"""`Explanation`: why a call is served the way it is, in words and as facts for machines."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashgen.codegen.families import balanced, most_keys, reasons
from flashgen.codegen.family import Sizes
from flashgen.codegen.render import render, source_digest
from flashgen.core.config import Config
from flashgen.core.decode_limits import MAX_SEQLEN_Q
from flashgen.core.device import Device
from flashgen.core.feature_words import feature_words, specialization_words
from flashgen.core.lengths import MIXED
from flashgen.core.quoting import printable
from flashgen.core.record import TuningRecord, age
from flashgen.core.rungs import MEANINGS, RUNGS
from flashgen.core.staleness import why_stale
from flashgen.core.workload import Specialization, Workload
from flashgen.launch import nvml
from flashgen.launch.gpu import current_device
from flashgen.runtime.lookup.decode_ladder import served_step
from flashgen.runtime.lookup.few_queries import decode_specialization, keys_seen, served_by_decoding
from flashgen.runtime.lookup.handover import FasterBackend, faster_backend
from flashgen.runtime.lookup.ladder import LAST_EXACT, Served
from flashgen.runtime.lookup.mixed import launches
from flashgen.runtime.lookup.packed_ladder import PackedSizes, served_pass
from flashgen.runtime.lookup.records import Records
from flashgen.runtime.lookup.rules import Answers, Expected, Leaf, answers

GENERATED = "generated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a call is served the way it is; `str()` is what `flashgen explain` prints.

    `faster` is the backend of torch that was measured faster beside the record, and whether the call goes to it.
    `changed` says what is another one here than when the record was measured: Triton, torch, driver, the card's limits.
    `forward` is what serves by a forward or backward family, as `served` does but where a decode family is faster;
    `few_queries` says of a call with few queries why a decode family serves it, or why none does; else it is empty.
    `mixed` says of a mixed batch over pages whether it is one launch or two where the call counts its steps of decoding
    (`num_decodes`); else it is empty. `copies` says that q, k and v are copied first; `workload` is of the copies.
    """

    workload: Workload
    specialization: Specialization
    device: Device
    served: Served
    forward: Served
    few_queries: str
    mixed: str
    families: tuple[tuple[str, str | None], ...]
    faster: FasterBackend | None
    digest: str
    changed: tuple[str, ...] = ()
    copies: bool = False

    @property
    def backend(self) -> str:
        """What serves: "generated", or the name of one of torch's backends."""
        return GENERATED if self.faster is None or self.faster.obstacle else self.faster.impl

    @property
    def is_stale(self) -> bool:
        """Whether the template has changed since the record was made."""
        record = self.served.record
        return record is not None and bool(record.source_digest) and record.source_digest != self.digest

    @property
    def chosen_by(self) -> str:
        """Which answers of the rule of the class led to the config, which may be the nearest record's; else empty."""
        leaf = self._leaf
        rule = self.served.rule
        if leaf is None or rule is None:
            return ""
        return f"by the rule of its class, for {rule.words(self._answers)}"

    @property
    def expected(self) -> Expected | None:
        """What a record of another workload is expected to cost, where that is known."""
        rule = self.served.rule
        if rule is None:
            return None
        return self._leaf.expected if self._leaf is not None else rule.nearest

    @property
    def _answers(self) -> Answers:
        """What a rule is told of the call, as on the ladder."""
        return answers(Sizes.of(self.workload).in_blocks())

    @property
    def _leaf(self) -> Leaf | None:
        """That of the rule, if its config serves."""
        rule, record = self.served.rule, self.served.record
        leaf = None if rule is None else rule.leaf(self._answers)
        return leaf if leaf is not None and record is not None and record.config == leaf.config else None

    @property
    def features(self) -> tuple[str, ...]:
        """What the call asks for beside plain attention, in words."""
        return (*feature_words(self.workload), *specialization_words(self.specialization))

    def to_dict(self) -> dict[str, object]:
        """The same facts for machines."""
        record = self.served.record
        return {
            "workload": self.workload.key,
            "features": list(self.features),
            "specialization": self.specialization.key,
            "device": self.device.name,
            "device_identity": self.device.identity,
            "rung": self.served.rung,
            "rung_name": RUNGS[self.served.rung],
            "backend": self.backend,
            "backend_reason": str(self.faster) if self.faster else None,
            "family": self.served.config.family,
            "knobs": dict(self.served.config.knobs),
            "layer": self.served.layer,
            "record_workload": record.workload.key if record else None,
            "record_created": record.created if record else None,
            "record_provenance": record.provenance if record else None,
            "record_ms": record.time_ms if record else None,
            "record_hard_ms": record.hard_ms if record else None,
            "record_profile_ms": record.measurement.profile_ms if record and record.measurement else {},
            "chosen_by": self.chosen_by or None,
            "expected_ratio": self.expected.mean if self.expected else None,
            "expected_worst_ratio": self.expected.worst if self.expected else None,
            "slower_record_ms": self.served.slower.time_ms if self.served.slower else None,
            "stale": self.is_stale,
            "not_current": list(self.changed),
            "few_queries": self.few_queries or None,
            "mixed": self.mixed or None,
            "copies": self.copies,
            "skipped": list(self.served.skipped),
            "families": dict(self.families),
        }

    def __str__(self) -> str:
        lines = [
            f"workload   {self.workload.key}",
            f"features   {', '.join(self.features) or 'plain'}",
            f"device     {self.device.name} ({self.device.identity})",
            f"rung       {self.served.rung}. {RUNGS[self.served.rung]}",
            f"           {MEANINGS[self.served.rung]}",
            f"backend    {self.backend}",
            *([f"           {self.faster}"] if self.faster else []),
            f"config     {self.served.config}",
        ]
        lines += _record_lines(
            self.served, self.workload, self.specialization, self.is_stale, self.changed, self.device
        )
        lines += [f"chosen     {self.chosen_by}"] if self.chosen_by else []
        lines += [f"expected   {self.expected}"] if self.expected else []
        lines += [f"queries    {self.few_queries}"] if self.few_queries else []
        lines += [f"mixed      {self.mixed}"] if self.mixed else []
        lines += [f"copies     {_COPIES}"] if self.copies else []
        lines += [f"skipped    {line}" for line in self.served.skipped]
        lines += [f"family     {name}: {reason or 'applies'}" for name, reason in self.families]
        return "\n".join(map(printable, lines))


_COPIES = "q, k and v are not aligned to 16 bytes: kernels get copies of them, with rows of multiples of 16 bytes"

GROUP, HEADS = "heads_per_group", "packed_heads"
TILE = ("warpgroups", "block_n")

_WITHOUT_LSE = "measured without an LSE, which needs the config above"
_WITH_OTHER_TILE = "with another tile, which is expected to take less time at these sizes: the config above"
_WITH_ALL_KEYS = "with tiles that have all keys, of which there are few, and write dq themselves: the config above"
_WITH_SMALLER_GROUPS = "with smaller groups of heads, which the L2 cache holds at these sizes: the config above"
_WITH_OTHER_FAMILY = "of another family, which is faster at these sizes: the config above"
_WITH_KNOBS = {
    "split_keys": "with CTAs that share the keys of a tile, of which there are few at these sizes",
    "query_shares": "with tiles that share the queries of their keys, since there are few heads",
    GROUP: "with larger groups of heads, since there are few tiles at these sizes",
    "block_m": "with steps of 64 queries, of which there are few",
    "stagger_warpgroups": "with one warpgroup ahead of the other, which is faster at these sizes",
}
"""What `balanced` changed, where that is these knobs alone."""

_WITHOUT_PAGES = "measured without pages, over which the config above serves"


def _with_what(measured: Config, balanced_config: Config) -> str:
    """What a config that was measured at other sizes has instead at those of the call."""
    if most_keys(balanced_config) is not None and most_keys(measured) is None:
        return _WITH_ALL_KEYS
    if measured.family != balanced_config.family:
        return _WITH_OTHER_FAMILY
    known = dict(measured.knobs)
    changed = [knob for knob, value in balanced_config.knobs if known.get(knob) != value]
    if HEADS in changed:
        number = balanced_config.integer(HEADS)
        heads = f"{number} heads that share keys side by side" if number > 1 else "one head"
        what = f"another tile and {heads} in it" if set(TILE) & set(changed) else f"{heads} in a tile"
        return f"with {what}, which is expected to take less time at these sizes: the config above"
    if changed == [GROUP] and balanced_config.integer(GROUP) < measured.integer(GROUP):
        return _WITH_SMALLER_GROUPS
    if not all(knob in _WITH_KNOBS for knob in changed):
        return _WITH_OTHER_TILE
    return ", ".join(_WITH_KNOBS[knob] for knob in changed) + ": the config above"


def _record_lines(
    served: Served, workload: Workload, spec: Specialization, stale: bool, changed: tuple[str, ...], device: Device
) -> list[str]:
    record = served.record
    if record is None:
        return ["record     none: nothing was measured for this class of workloads"]
    time = f"{record.time_ms:.4f} ms, {record.tflops:.0f} TFLOP/s" if record.time_ms and record.tflops else "no time"
    if record.hard_ms is not None:
        time += f", {record.hard_ms:.4f} ms on hard data"
    if record.workload.is_decode and record.time_ms:
        time = f"{record.time_ms:.4f} ms, {record.gbps:.0f} GB/s of keys and values"
    profiles = record.measurement.profile_ms if record.measurement else {}
    time += "".join(f", {ms:.4f} ms on {profile}" for profile, ms in profiles.items())
    made = f"{record.provenance} {record.created or 'at an unknown time'}"
    made += f" ({age(record.created)} ago)" if record.created else ""
    versions = f"triton {record.versions.triton or '?'}, torch {record.versions.torch or '?'}"
    lines = [f"record     {record.workload.key} in {served.layer}: {time}", f"           {made}, {versions}"]
    if served.config != record.config:
        sizes = PackedSizes.of(workload).largest.packed if workload.is_packed else Sizes.of(workload)
        has_other_tile = served.rung > LAST_EXACT and balanced(record.config, spec, sizes, device) != record.config
        other = _with_what(record.config, served.config) if has_other_tile else _why_another_config(workload, record)
        lines.append(f"           {other}")
    if stale:
        lines.append("           stale: the template has changed since; the config still serves")
    lines += [f"           not current: {reason}; it serves (flashgen tune --reverify)" for reason in changed]
    if record.device.identity != device.identity and device.may_use(record.device):
        lines.append(f"           measured on the usual card of these sizes, {record.device.name}")
    if served.slower is not None:
        lines.append("           deterministic, and faster than the record of the workload itself:")
        lines.append(f"           {served.slower.time_ms:.4f} ms by {served.slower.config}")
    if record.baselines:
        others = ", ".join(f"{baseline.impl} {baseline.median_ms:.4f} ms" for baseline in record.baselines)
        lines.append(f"           measured beside it: {others}")
    return lines


def _why_another_config(workload: Workload, record: TuningRecord) -> str:
    if record.workload.is_decode:
        return "as it fits these sizes, the config above"
    return _WITHOUT_PAGES if workload.page_size and record.workload.page_size is None else _WITHOUT_LSE


def _changed(record: TuningRecord, device: Device) -> tuple[str, ...]:
    """Why a record is not current with the software here, and with the limits of the GPU here if that is its device."""
    index = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    is_here = index is not None and current_device(index).identity == device.identity
    return why_stale(record, nvml.versions(), nvml.limits(index) if is_here and index is not None else None)


def _by_decoding(
    workload: Workload, spec: Specialization, device: Device, records: Records, *, own_offset: bool
) -> tuple[Served | None, str]:
    """What serves a call of few queries by a decode family, if one does, and why or why not."""
    if own_offset:
        return None, "by a forward family: its queries do not stand at the last keys"
    sizes = Sizes.of(workload)
    keys = keys_seen(sizes, workload.window_left)
    served = served_by_decoding(spec, sizes, keys, device, records)
    if isinstance(served, str):
        return None, f"by a forward family: {served}"
    ctas = sizes.batch * sizes.nheads_k
    why = f"by decoding: all SMs share the keys, of which a forward pass has {keys} for each of {ctas} CTAs"
    return served, why


def _mixed(workload: Workload, spec: Specialization, device: Device, records: Records) -> str:
    is_mixed = workload.is_packed and workload.page_size is not None and workload.lengths == MIXED
    return str(launches(workload, spec, device, records)) if is_mixed else ""


def explain(
    workload: Workload,
    spec: Specialization,
    device: Device,
    records: Records,
    *,
    config: Config | None = None,
    generated_only: bool = False,
    with_lse: bool = False,
    own_offset: bool = False,
    copies: bool = False,
) -> Explanation:
    """Walk the ladder and say which rung served, why the ones above did not, and what every family says.

    `generated_only` is set for calls that SDPA would not compute identically (an LSE or a query offset is asked for, or
    a gradient will be), `with_lse` for those that ask for an LSE or train, `own_offset` for those with a query
    offset, and `copies` for those whose q, k and v are copied first.

    Raises:
        ConfigError: the explicit config is not valid here.
        UnsupportedError: no family supports the workload.
    """
    if workload.is_decode:
        served = served_step(spec, Sizes.of(workload), device, records, config)
    else:
        served = served_pass(workload, spec, device, records, config=config, with_lse=with_lse)
    decoded, few_queries = None, ""
    if config is None and spec.direction == "forward" and workload.seqlen_q <= MAX_SEQLEN_Q:
        decoded, few_queries = _by_decoding(workload, spec, device, records, own_offset=own_offset)
    forward, served = served, decoded or served
    compiled_in = decode_specialization(spec) if decoded else spec
    record = served.record
    return Explanation(
        workload=workload,
        specialization=spec,
        device=device,
        served=served,
        forward=forward,
        few_queries=few_queries,
        mixed=_mixed(workload, spec, device, records),
        families=tuple(reasons(spec, device).items()),
        faster=None if generated_only or decoded else faster_backend(workload, spec, served),
        # a record's is of the kernel that it was measured with, whatever this call's tensors are
        digest=source_digest(record.workload, record.config) if record else render(compiled_in, served.config).digest,
        changed=() if record is None else _changed(record, device),
        copies=copies,
    )
