"""Which calls of `flashgen.attention` a decode family serves: few queries, whose keys too few CTAs would read.

A forward pass has a CTA for each key head of each sequence, where the heads of a group are in one tile, and that CTA
reads all keys of the sequence alone. So with few sequences most SMs are idle, for as long as the keys take. A decode
family shares the keys among all SMs, and costs a merge. Which is faster follows from sizes that a host knows:
docs/decisions/few-queries.md has the figures.

A config that the caller names, and a query offset other than the default, are left to the forward families. So is what
no decode family computes, with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashgen.codegen.family import Sizes
from flashgen.core.decode_limits import MAX_BATCH, MAX_KEYS, MAX_SEQLEN_Q
from flashgen.core.device import Device
from flashgen.core.errors import UnsupportedError
from flashgen.core.workload import DECODE, Specialization
from flashgen.runtime.lookup.decode_ladder import served_step
from flashgen.runtime.lookup.ladder import Served
from flashgen.runtime.lookup.records import Records

FEW_ROWS, MOST_ROWS = 16, 128
"""Query rows of a key head: up to the first a decode step is as long as its keys take, above the second nothing was
measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """Where a decode family is as fast as a forward pass.

    Attributes:
        busy: CTAs of a forward pass for each SM with which it is as fast, whatever the keys.
        keys: keys of each CTA with which it is as fast where there is next to no other CTA.
    """

    busy: float
    keys: int


FEW, MANY = Break(busy=0.6, keys=512), Break(busy=0.3, keys=1536)
"""Up to `FEW_ROWS` query rows of a key head, and with more of them, found on an H200."""


def decode_specialization(spec: Specialization) -> Specialization:
    """What a decode family would compile in for a forward pass: a causal mask and a window are numbers there."""
    return replace(spec, direction=DECODE, causal=False, window=False, deterministic=False)


def keys_seen(sizes: Sizes, window_left: int | None) -> int:
    """Keys that the queries of a sequence see at most."""
    return sizes.seqlen_k if window_left is None else min(sizes.seqlen_k, window_left + sizes.seqlen_q)


def why_not_decoded(spec: Specialization, sizes: Sizes, keys: int, device: Device) -> str | None:
    """The reason why a forward family serves a call, or None where a decode family does if it computes it.

    Args:
        spec: of the forward pass.
        sizes: of the call.
        keys: `keys_seen`.
        device: the GPU.
    """
    rows, ctas = sizes.seqlen_q * (sizes.nheads // sizes.nheads_k), sizes.batch * sizes.nheads_k
    even = FEW if rows <= FEW_ROWS else MANY
    if spec.direction != "forward" or not 1 <= sizes.seqlen_q <= MAX_SEQLEN_Q:
        return f"it has no 1 to {MAX_SEQLEN_Q} queries"
    if not device.is_nvidia:
        return f"the rule for few queries was made on GPUs of NVIDIA, not {device.arch}"
    if spec.offset_tensor:
        return "its queries do not stand at the last keys"
    if not 0 < sizes.batch <= MAX_BATCH or sizes.seqlen_k > MAX_KEYS:
        return f"a decode family takes up to {MAX_BATCH} sequences at once"
    if rows > MOST_ROWS:
        return f"{rows} query rows of a key head are more than {MOST_ROWS}"
    if keys * (1 - ctas / (even.busy * device.num_sms)) < even.keys:
        return f"it is as fast with {ctas} CTAs of {keys} keys and {rows} query rows each, on {device.num_sms} SMs"
    return None


def served_by_decoding(spec: Specialization, sizes: Sizes, keys: int, device: Device, records: Records) -> Served | str:
    """What serves a call by decoding, or the reason why nothing does; arguments as `why_not_decoded` has them."""
    reason = why_not_decoded(spec, sizes, keys, device)
    if reason is not None:
        return reason
    try:
        return served_step(decode_specialization(spec), sizes._replace(seqlen_k=keys), device, records)
    except UnsupportedError as error:
        return str(error)
