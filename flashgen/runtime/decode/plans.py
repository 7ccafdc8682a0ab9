"""From a checked decode call to its launches: the ladder's config, its kernels, and the numbers of each call."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from flashgen.core.config import Config
from flashgen.core.errors import UnsupportedError
from flashgen.core.workload import DECODE, Specialization, Workload
from flashgen.launch.decode_numbers import DecodeShape
from flashgen.launch.decode_plan import POINTERS, DecodePlan, Launch
from flashgen.runtime.decode.call import CheckedDecode
from flashgen.runtime.decode.open_calls import Launches
from flashgen.runtime.ops import kernel_cache, recording, serve

if TYPE_CHECKING:
    from flashgen.codegen.build import CompiledKernel

PLANS: dict[tuple[Specialization, Config, int], DecodePlan] = {}
"""What launches have in common at all sizes, by what is compiled in, config and torch's index of the GPU."""


def planned(checked: CheckedDecode, config: Config | None, index: int | None) -> Launch:
    """The launch of a checked call, which gives an address for each of `POINTERS`; see `opened`."""
    return opened(checked, config, index, POINTERS)(checked.shape)


def opened(checked: CheckedDecode, config: Config | None, index: int | None, names: tuple[str, ...]) -> Launches:
    """The launches of calls that differ from a checked one in sizes of its class alone; under the lock of `serve`.

    Args:
        checked: what is compiled in, and the numbers.
        config: what is launched; None lets the ladder choose.
        index: torch's index of the GPU; None is refused.
        names: of `POINTERS`, those that calls give addresses for.

    Raises:
        UnsupportedError, BuildError, LaunchError: as `flashgen.attention_decode`.
    """
    spec = checked.spec
    if index is None:
        raise UnsupportedError(f"no kernel family serves {spec.key} on a CPU: all of them run on GPUs")
    from flashgen.runtime.lookup.decode_ladder import served_step
    from flashgen.runtime.lookup.ladder import Served

    device, sizes = serve.device_at(index), checked.shape.sizes
    served = Served(config=config, rung=1) if config else served_step(spec, sizes, device, serve.records())
    launches = kernel_cache.built(spec, served, device, index, partial(_plan, spec)).opened(checked.shape, names)
    counted: Launches = recording.counted_launches(launches, partial(decode_workload, spec), device, served)
    return counted


def _plan(spec: Specialization, kernel: CompiledKernel, config: Config, index: int) -> DecodePlan:
    key = (spec, config, index)
    plan = PLANS.get(key)
    if plan is None:
        plan = PLANS[key] = DecodePlan(kernel, config, index)
    return plan


def decode_workload(spec: Specialization, shape: DecodeShape) -> Workload:
    """What is computed by calls of one shape, with as many keys of each sequence as there is room for."""
    return Workload(
        direction=DECODE,
        dtype=spec.dtype,
        batch=shape.batch,
        nheads=shape.nheads,
        nheads_k=shape.nheads_k,
        seqlen_q=shape.seqlen_q,
        seqlen_k=shape.seqlen_k,
        head_dim=spec.head_dim,
        head_dim_v=shape.head_dim_v,
        causal=shape.window_right == 0,
        window_left=shape.window_left,
        window_right=shape.window_right,
        softcap=spec.softcap,
        alibi=spec.alibi,
        sink=spec.sink,
        page_size=spec.page_size,
    )
