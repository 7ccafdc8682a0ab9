"""What serves a workload on a GPU that is not there, and what a call loses that has no record of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flashgen.codegen.family import Sizes
from flashgen.core.calls import CallRecord, usual_ms
from flashgen.core.decode_limits import MAX_SEQLEN_Q
from flashgen.core.device import Device
from flashgen.core.errors import UnsupportedError
from flashgen.core.nearest import distance, position
from flashgen.core.record import TuningRecord
from flashgen.core.workload import Specialization, Workload
from flashgen.db.layers import Layers
from flashgen.runtime.lookup.decode_ladder import served_step
from flashgen.runtime.lookup.few_queries import keys_seen, served_by_decoding
from flashgen.runtime.lookup.handover import sdpa_backend
from flashgen.runtime.lookup.packed_ladder import served_pass
from flashgen.runtime.ops import recording, serve

EXACT = (1, 3, 4)
"""Rungs that miss nothing: a config of the caller, and records of just this workload."""

NEIGHBOURS = 5
"""So many of the nearest records say what a kernel for a workload can reach; the best of them counts."""


def served_on(record: CallRecord, device: Device, *, training: bool = False) -> CallRecord:
    """The same calls as the databases would serve them on a GPU; as they were if no kernel does there.

    Calls whose gradients are asked for (`training`) go to no backend of torch.
    """
    workload, records = record.workload, serve.records()
    spec, sizes = Specialization.of(workload), Sizes.of(workload)
    try:
        if workload.is_decode:
            served = served_step(spec, sizes, device, records)
        else:
            served = served_pass(workload, spec, device, records, with_lse=training)
    except UnsupportedError:
        return record
    impl = None if training else sdpa_backend(workload, spec, served)
    if workload.direction == "forward" and workload.seqlen_q <= MAX_SEQLEN_Q:
        decoded = served_by_decoding(spec, sizes, keys_seen(sizes, workload.window_left), device, records)
        if not isinstance(decoded, str):
            served, impl = decoded, None
    return replace(recording.call_record(workload, device, served, impl), calls=record.calls)


class Misses:
    """Estimates by the measured records of a GPU, of all layers of databases."""

    def __init__(self, device: Device) -> None:
        """Read the records, once."""
        self._device = device
        with Layers.open() as layers:
            found = layers.records(device=device, provenance="measured")
        self._known = tuple(record for record, _ in found if record.time_ms)

    def cost_ms(self, record: CallRecord) -> float | None:
        """What all calls of a record are taken to lose for want of a record of just their workload; 0 with one.

        An estimate: a kernel that was searched for this workload is taken to reach the share of the data sheet's rates
        that the best of the nearest records reaches, of the same class or else of the same pass, dtype and head
        dimension. None where there are none, or where nothing says what the calls need.
        """
        if record.rung in EXACT:
            return 0.0
        if record.call_ms is None:
            return None
        near = self._near(record.workload)
        if not near:
            return None
        share = max(usual_ms(one.workload, self._device) / (one.time_ms or 1.0) for one in near)
        tuned_ms = usual_ms(record.workload, self._device) / share
        return record.calls * max(0.0, record.call_ms - tuned_ms)

    def _near(self, workload: Workload) -> Sequence[TuningRecord]:
        kind = workload.specialization.workload_class
        same = [one for one in self._known if one.workload.specialization.workload_class == kind]
        found = same or [one for one in self._known if _is_like(one.workload, workload)]
        here = position(workload)
        return sorted(found, key=lambda one: (distance(here, position(one.workload)), one.workload.key))[:NEIGHBOURS]


def _is_like(one: Workload, other: Workload) -> bool:
    return (one.direction, one.dtype, one.head_dim) == (other.direction, other.dtype, other.head_dim)
