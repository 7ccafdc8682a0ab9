"""From a call's tensors to a launch: the memo of plans, and the slow path that fills it.

The memo's key is finer than every rule of the slow path: shapes, strides, dtypes, devices, the pointers' alignment and
the arguments that choose code. A hit costs one dictionary look-up; no SQL, no environment, no log.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flashgen.core.collection import CollectionPaused
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import BuildError, UnsupportedError
from flashgen.core.settings import settings
from flashgen.core.workload import DECODE, Specialization, Workload
from flashgen.runtime.ops import kernel_cache, log, recording
from flashgen.runtime.ops.backward_calls import BackwardCall, CheckedBackwardCall
from flashgen.runtime.ops.calls import Call, CheckedCall

AnyCall = Call | BackwardCall
AnyCheckedCall = CheckedCall | CheckedBackwardCall

MEMO_LIMIT = 65536
"""Plans kept; a process that sees more shapes than this starts over rather than growing for ever."""

if TYPE_CHECKING:
    from flashgen.codegen.build import CompiledKernel
    from flashgen.launch.plan import OpenPlan
    from flashgen.runtime.lookup.records import Records
    from flashgen.runtime.ops.backward_runs import BackwardRun
    from flashgen.runtime.ops.open_calls import OpenBackwardCall, OpenCall
    from flashgen.runtime.ops.open_packed import OpenPackedBackwardCall, OpenPackedCall
    from flashgen.runtime.ops.runs import FeatureRun, Run

MEMO: dict[tuple[Any, ...], Any] = {}
"""Rung 2 of the ladder: a `Run`, for keys with features a `FeatureRun`, of backward passes a `BackwardRun`.

Filled only after the slow path has succeeded, and never replaced, only cleared.
"""

_PLANS: dict[tuple[Specialization, Config, int], OpenPlan] = {}
"""What a kernel's launches have in common at all sizes, by what is compiled in, config and torch's index of the GPU."""

_SEEN: set[tuple[Any, ...]] = set()
_OPEN: dict[tuple[Any, ...], OpenCall | OpenBackwardCall | OpenPackedCall | OpenPackedBackwardCall] = {}
"""Calls of which two have been served, by the part of the memo's key that sizes and strides leave as it is."""

TRAINABLE: set[tuple[int, tuple[Any, ...]]] = set()
"""Flags and keys of such calls whose gradients will be asked for and have a kernel."""

FORGETTING: list[Callable[[], None]] = []
"""What else forgets, where `reload` does: memos of calls that no database serves."""

LOCK = threading.RLock()


def remember(key: tuple[Any, ...], run: Run | FeatureRun | BackwardRun) -> None:
    """Fill the memo, once the slow path has succeeded."""
    with LOCK:
        _keep(key, run)


def _keep(key: tuple[Any, ...], run: Run | FeatureRun | BackwardRun) -> None:
    if len(MEMO) >= MEMO_LIMIT:
        MEMO.clear()
    MEMO[key] = run


def reload() -> None:
    """Forget every look-up, so that the next calls read the databases again (after tuning beside this process).

    Compiled kernels stay: a config that is still the best one costs no new compile.
    """
    with LOCK:
        log.forget()
        settings.cache_clear()
        _records.cache_clear()
        forget_runs()


def forget_runs() -> None:
    """Forget what serves each call, but neither records nor kernels: the next calls take the slow path again."""
    with LOCK:
        MEMO.clear()
        _OPEN.clear()
        _SEEN.clear()
        TRAINABLE.clear()
        for forget in FORGETTING:
            forget()


def prepare(call: AnyCall) -> Any:
    """The slow path: resolve, compile if needed, and bind a plan. Returns what serves every later call of this key.

    Raises:
        WorkloadError: shapes or dtypes do not fit together.
        UnsupportedError: no family serves the call; the message lists each one's reason.
        LaunchError: a kernel would have to be built while a CUDA graph is captured.
        BuildError: a compile is needed and the settings forbid it, or it failed.
    """
    with CollectionPaused():
        try:
            return _prepared(call)
        except UnsupportedError:
            recording.refused(lambda: call.checked().workload)
            raise


def _prepared(call: AnyCall) -> Any:
    from flashgen.runtime.lookup.handover import sdpa_backend
    from flashgen.runtime.lookup.ladder import DEFAULT, Served
    from flashgen.runtime.lookup.packed_ladder import served_pass

    problem, device, index = placed(call)
    workload = problem.workload
    with LOCK:
        with_lse = isinstance(call, Call) and call.with_lse
        served = served_pass(
            workload,
            problem.spec,
            device,
            records(),
            config=call.config,
            with_lse=with_lse,
            batch_invariant=call.batch_invariant,
        )
        is_open = problem.spec.aligned16 and not problem.copies and not recording.recorders()
        if call.open_key is not None and is_open:
            _open_to_sizes(call.open_key, problem, device, index)
        if isinstance(problem, CheckedCall) and not (problem.call.explicit_offset or problem.call.config):
            run = _decoded(problem, device, index)
            if run is not None:
                return run
        log.notice(workload, served, device)
        log.served_by(workload, served)
        backend = None if call.generated_only else sdpa_backend(workload, problem.spec, served)
        if backend is None:

            def bind(kernel: CompiledKernel, config: Config, index: int) -> Any:
                by = served if config == served.config else Served(config=config, rung=DEFAULT)
                return recording.counted(_bound(problem, kernel, config, index), workload, device, by)

            return kernel_cache.built(problem.spec, served, device, index, bind)
    from flashgen.runtime.ops.runs import of_copies, sdpa_run

    assert isinstance(call, Call)
    causal = workload.causal and workload.seqlen_q > 1  # torch's mask is to the top left; one query sees every key
    run = sdpa_run(backend, causal=causal, bshd=call.bshd, gqa=workload.nheads != workload.nheads_k)
    run = of_copies(run, problem) if isinstance(problem, CheckedCall) and problem.copies else run
    return recording.counted(run, workload, device, served, backend)


def _decoded(problem: CheckedCall, device: Device, index: int) -> Any:
    """What serves a call of few queries by a decode family, or None where a forward family does.

    So it does, too, where the settings forbid to compile the kernel.

    Raises:
        LaunchError: the driver refuses the kernel, or a CUDA graph is being captured.
    """
    from flashgen.codegen.family import Sizes
    from flashgen.runtime.lookup.few_queries import decode_specialization, keys_seen, served_by_decoding

    workload, spec = problem.workload, problem.spec
    sizes = Sizes.of(workload)
    served = served_by_decoding(spec, sizes, keys_seen(sizes, workload.window_left), device, records())
    if isinstance(served, str):
        return None
    config = served.config
    try:
        run = _bound(problem, kernel_cache.compiled(decode_specialization(spec), config, device, index), config, index)
        return recording.counted(run, workload, device, served)
    except BuildError:
        return None


def prepare_open(open_key: tuple[Any, ...], key: tuple[Any, ...], *given: Any) -> Any:
    """What serves a call like an earlier one but for its sizes, or None where the slow path has to be asked.

    The memo holds it from then on.

    Args:
        open_key: of both.
        key: of the call, in the memo.
        given: what `OpenCall.run` or `OpenBackwardCall.run` takes beside it.
    """
    with LOCK:  # so that no `reload` comes between
        found = _OPEN.get(open_key)
        run = None if found is None else found.run(key, *given)
        if run is not None:
            _keep(key, run)
        return run


def open_key(key: tuple[Any, ...], flags: int, shared: slice, part: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What sizes leave as it is of a call's key, whose second to fourth parts are the shapes of q, k and v.

    None where these have not the same number of dimensions: then the slow path says what is wrong.

    Args:
        key: of the memo.
        flags: those that count.
        shared: the parts of the key that are the same at all sizes.
        part: what the features add.
    """
    _, q, k, v = key[:4]
    dimensions = len(q)
    if not dimensions or len(k) != dimensions or len(v) != dimensions:
        return None
    return flags, key[shared], dimensions, q[-1], k[-1], v[-1], part


def _open_to_sizes(key: tuple[Any, ...], problem: AnyCheckedCall, device: Device, index: int) -> None:
    """Let later calls with this key be served without the slow path, from its second call on.

    So a process of one shape does not pay for it, least of all in its first call.
    """
    if key not in _SEEN:
        _SEEN.add(key)
        return
    from flashgen.runtime.lookup.by_sizes import SizesLookup
    from flashgen.runtime.ops.open_calls import OpenBackwardCall, OpenCall
    from flashgen.runtime.ops.open_packed import OpenPackedBackwardCall, OpenPackedCall

    spec = problem.spec
    kind: Any
    is_backward = isinstance(problem, CheckedBackwardCall)
    plans: dict[int, tuple[Config, OpenPlan]] = {}  # by config: a look-up of it costs less than its hash

    def plan_of(config: Config) -> OpenPlan | None:
        known = plans.get(id(config))
        if known is not None:
            return known[1]
        found = _PLANS.get((spec, config, index))
        if found is not None:
            plans[id(config)] = config, found
        return found

    if problem.workload.is_packed:
        kind = OpenPackedBackwardCall if is_backward else OpenPackedCall
        _OPEN[key] = kind(problem, device, records(), plan_of)
        return
    lookup = SizesLookup(records().choices(spec, device), problem.workload, spec, device, records())
    kind = OpenBackwardCall if is_backward else OpenCall
    _OPEN[key] = kind(problem, lookup, plan_of)


def check_support(call: BackwardCall) -> Specialization:
    """Refuse a call whose backward pass no family serves; returns what would be compiled in.

    Raises:
        UnsupportedError: that is so; the message lists each family's reason.
    """
    from flashgen.codegen.families import applicable

    problem, device, _ = placed(call)
    applicable(problem.spec, device)
    return problem.spec


def placed(call: AnyCall) -> tuple[AnyCheckedCall, Device, int]:
    """A call as a problem of its GPU, the GPU, and torch's index of it.

    With exact products where no family has TF32 on that GPU, which is allowed but not asked for.

    Raises:
        WorkloadError: shapes or dtypes do not fit together.
        UnsupportedError: the tensors are not on a GPU.
    """
    problem = call.checked()
    index = gpu_index(call.q)
    if index is None:
        raise UnsupportedError(not_on_gpu(problem.workload, call.q))
    device = device_at(index)
    if problem.workload.dtype == "tf32":
        from flashgen.codegen.families import reasons

        if None not in reasons(problem.spec, device).values():
            return call.exact().checked(), device, index
    return problem, device, index


def _bound(problem: AnyCheckedCall, kernel: CompiledKernel, config: Config, index: int) -> Any:
    """What the memo holds for a compiled kernel."""
    launch = _open_plan(kernel, problem.spec, config, index).sized(problem.geometry)
    if isinstance(problem, CheckedBackwardCall):
        from flashgen.runtime.ops.backward_runs import backward_run

        return backward_run(launch, problem)
    from flashgen.runtime.ops.runs import forward_run

    return forward_run(launch, problem)


def _open_plan(kernel: CompiledKernel, spec: Specialization, config: Config, index: int) -> OpenPlan:
    key = (spec, config, index)
    found = _PLANS.get(key)
    if found is None:
        from flashgen.codegen.families import family
        from flashgen.launch import decode_passes, plan

        is_decode = family(config.family).direction == DECODE
        made: Any = decode_passes.DecodePasses if is_decode else plan.OpenPlan
        found = _PLANS[key] = made(kernel, spec, config, index)
    return found


def gpu_index(tensor: torch.Tensor) -> int | None:
    """Torch's index of the GPU that a tensor is on, or None if it is on none."""
    return tensor.get_device() if tensor.is_cuda else None


@functools.cache
def device_at(index: int) -> Device:
    """GPU `index` of torch."""
    from flashgen.launch.gpu import current_device

    return current_device(index)


@functools.cache
def _records() -> Records:
    from flashgen.db.layers import Layers
    from flashgen.runtime.lookup.records import Records

    return Records(Layers.open())


def records() -> Records:
    """The records that serve this process, read from the databases once until `reload`."""
    return _records()


def not_on_gpu(workload: Workload, tensor: torch.Tensor) -> str:
    """The message of the error for tensors that are not on a GPU."""
    return f"no kernel family serves {workload.key} on {tensor.device}: all of them run on GPUs"
