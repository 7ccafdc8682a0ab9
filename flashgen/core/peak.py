"""The least time that a workload can take on a device: what tells a record that was made up from a measured one."""

from __future__ import annotations

from collections.abc import Iterable

from flashgen.core.device import Device
from flashgen.core.record import Failure, Measurement
from flashgen.core.workload import DTYPE_BYTES, Workload

CLOCK_MARGIN = 1.25
"""How far cards may be above the data sheet's rate: 1.98 GHz instead of 1.83 on an H200, more where users raise it."""

CACHE_MARGIN = 2.0
"""How far a kernel gets above the memory's bandwidth: a part of the inputs is still in L2, whatever was rotated."""

LEAST_KERNEL_MS = 0.0005
"""A kernel that does nothing takes longer, whatever the device."""


def least_ms(workload: Workload, device: Device) -> float:
    """A time in ms that no kernel for `workload` stays below on any card with the SMs of `device`.

    It follows from the data sheets' rates of the architecture (`core.architecture`), since the figures of a `Device`
    may come from the file that is doubted. A mask may hide any part of the pairs, and a kernel may skip those. Packed
    sequences have the lengths of their profile; those of any lengths are measured first where all are alike.
    """
    if workload.mask:
        return LEAST_KERNEL_MS
    row = device.architecture
    halves = DTYPE_BYTES[workload.dtype] // 2  # TF32 has half of the rate of bf16, fp32 less
    flops_per_ms = device.num_sms * row.mma_flops * row.boost_ghz * 1e6 * CLOCK_MARGIN / halves
    bytes_per_ms = row.bandwidth_gbs * 1e6 * CACHE_MARGIN
    return max(workload.flops / flops_per_ms, workload.bytes / bytes_per_ms, LEAST_KERNEL_MS)


def why_unreachable(workload: Workload, device: Device, outcome: Measurement | float) -> str | None:
    """The reason why a time of an outcome, in ms, is none that the workload can take on the device, or None."""
    if not isinstance(outcome, Measurement):
        return _why_below(workload, device, (outcome,))
    profiles = {profile.lengths: profile for profile in workload.profiles}
    every = [(workload, (*outcome.times_ms, *outcome.hard_times_ms))]
    every += [(profiles.get(name, workload), times) for name, times in outcome.profile_times_ms]
    reasons = (_why_below(of, device, times) for of, times in every)
    return next((reason for reason in reasons if reason is not None), None)


def _why_below(workload: Workload, device: Device, times_ms: Iterable[float]) -> str | None:
    least, fastest = least_ms(workload, device), min(times_ms)
    if fastest < least:
        return f"{workload.key} takes at least {least:.3g} ms on {device.identity} (peak rates), got {fastest}"
    return None


def believed(workload: Workload, device: Device, outcome: Measurement | Failure) -> Measurement | Failure:
    """What an executor says of a config, but a failure where a time is out of reach.

    Timers fail, and such a time would win every comparison; no database takes it.
    """
    reason = None if isinstance(outcome, Failure) else why_unreachable(workload, device, outcome)
    return outcome if reason is None else Failure(stage="verify", reason=reason)
