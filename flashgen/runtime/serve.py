"""From a call's tensors to a launch: the memo of plans, the slow path that fills it, and warm-up.

The memo's key is finer than every rule of the slow path: shapes, strides, dtypes, devices, the pointers' alignment and
the arguments that choose code. A hit costs one dictionary look-up; no SQL, no environment, no log.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import BuildError, LaunchError, UnsupportedError, WorkloadError
from flashgen.core.settings import settings
from flashgen.core.workload import DTYPE_BYTES, Specialization, Workload

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
MEMO_LIMIT = 65536
"""Plans kept; a process that sees more shapes than this starts over rather than growing for ever."""

TUNE_SECONDS_PER_WORKLOAD = 30
"""What `flashgen tune` takes for one workload by default, said in the notice of the first call."""

if TYPE_CHECKING:
    from flashgen.codegen.build import CompiledKernel
    from flashgen.launch.geometry import Geometry
    from flashgen.runtime.dispatch import Records, Served
    from flashgen.runtime.runs import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The arguments of one attention call that choose code; tensors are in the layout that `bshd` names."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    bshd: bool = False
    offset_tensor: bool = False
    explicit_offset: bool = False
    with_lse: bool = False
    config: Config | None = None

    @property
    def generated_only(self) -> bool:
        """Whether SDPA would not compute the same: it returns no LSE and knows no query offset."""
        return self.with_lse or self.explicit_offset or self.offset_tensor

    @property
    def views(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v in (batch, head, sequence, head_dim) order."""
        if self.bshd:
            return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)
        return self.q, self.k, self.v


MEMO: dict[tuple[Any, ...], Run] = {}
"""Rung 2 of the ladder. Filled only after the slow path has succeeded, and never replaced, only cleared."""

_KERNELS: dict[tuple[Specialization, Config, str], CompiledKernel] = {}
_LOCK = threading.RLock()
_STATE = threading.local()
_NOTICED: set[str] = set()


def remember(key: tuple[Any, ...], run: Run) -> None:
    """Fill the memo, once the slow path has succeeded."""
    with _LOCK:
        if len(MEMO) >= MEMO_LIMIT:
            MEMO.clear()
        MEMO[key] = run


def reload() -> None:
    """Forget every look-up, so that the next calls read the databases again (after tuning beside this process).

    Compiled kernels stay: a config that is still the best one costs no new compile.
    """
    with _LOCK:
        MEMO.clear()
        _NOTICED.clear()
        settings.cache_clear()
        _records.cache_clear()


def workload_of(call: Call) -> Workload:
    """The workload of a call.

    Raises:
        WorkloadError: shapes or dtypes do not fit together; the message names the rule and the values.
    """
    q, k, v = call.views
    _check_tensors(q, k, v)
    batch, nheads, seqlen_q, head_dim = q.shape
    return Workload(
        dtype=DTYPES[q.dtype],
        batch=batch,
        nheads=nheads,
        nheads_k=k.shape[1],
        seqlen_q=seqlen_q,
        seqlen_k=k.shape[2],
        head_dim=head_dim,
        head_dim_v=v.shape[3],
        causal=call.causal,
    )


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise WorkloadError(f"q, k and v have 4 dimensions, got {name} with shape {tuple(tensor.shape)}")
        if tensor.dtype not in DTYPES:
            raise WorkloadError(f"dtype is bfloat16, float16 or float32, got {name} with {tensor.dtype}")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise WorkloadError(
                f"q, k and v share dtype and device, got q {q.dtype} on {q.device}, "
                f"{name} {tensor.dtype} on {tensor.device}"
            )
        if tensor.shape[3] > 1 and tensor.stride(3) != 1 and tensor.numel():
            raise WorkloadError(f"the last dimension is contiguous, got {name} with strides {tensor.stride()}")
    if k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[3] or k.shape[0] != q.shape[0]:
        raise WorkloadError(
            "q is (batch, nheads, seqlen_q, head_dim), k (batch, nheads_k, seqlen_k, head_dim) and v (batch, nheads_k, "
            f"seqlen_k, head_dim_v) in bhsd order, got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )


def prepare(call: Call) -> Run:
    """The slow path: resolve, compile if needed, and bind a plan. Returns what serves every later call of this key.

    Raises:
        WorkloadError: shapes or dtypes do not fit together.
        UnsupportedError: no family serves the call; the message lists each one's reason.
        LaunchError: a kernel would have to be built while a CUDA graph is captured.
        BuildError: a compile is needed and the settings forbid it, or it failed.
    """
    workload = workload_of(call)
    if not call.q.is_cuda:
        raise UnsupportedError(not_on_gpu(workload, call))
    index = call.q.get_device()
    device = device_at(index)
    with _LOCK:
        spec, served = _resolved(call, workload, device)
        _notice(workload, served, device)
        backend = _sdpa_backend(call, workload, spec, served)
        if backend is None:
            return _generated_run(call, spec, served, device, index)
    from flashgen.runtime.runs import sdpa_run

    return sdpa_run(backend, causal=workload.causal, bshd=call.bshd, gqa=workload.nheads != workload.nheads_k)


def _generated_run(call: Call, spec: Specialization, served: Served, device: Device, index: int) -> Run:
    """The kernel of the ladder's answer, or of the default config where a record's does not build or load here.

    A record may come from another Triton, under which its config still fitted.
    """
    from flashgen.codegen.families import default_config
    from flashgen.launch.plan import check_capture

    try:
        return _kernel_run(call, spec, served.config, device, index)
    except (BuildError, LaunchError) as error:
        check_capture(index, f"building the kernel for {spec.key}")
        default = default_config(spec, device)
        if served.record is None or settings().no_compile or default == served.config:
            raise
        warnings.warn(
            f"the record {served.record.workload.key} of {served.layer} cannot serve here and the default config does; "
            f"tune again with this Triton: {error}",
            stacklevel=2,
        )
        return _kernel_run(call, spec, default, device, index)


def _resolved(call: Call, workload: Workload, device: Device) -> tuple[Specialization, Served]:
    from flashgen.runtime.dispatch import resolve

    spec = specialization_of(call, workload)
    return spec, resolve(workload, spec, device, _records(), config=call.config)


def specialization_of(call: Call, workload: Workload) -> Specialization:
    """What a call's tensors need compiled in: their alignment and the kind of query offset."""
    from flashgen.launch.geometry import aligned16

    q, k, v = call.views
    geometry = _geometry(call)
    pointers = q.data_ptr() | k.data_ptr() | v.data_ptr()
    fits = aligned16(geometry, pointers, DTYPE_BYTES[workload.dtype])
    return Specialization.of(workload, aligned16=fits, offset_tensor=call.offset_tensor)


def _sdpa_backend(call: Call, workload: Workload, spec: Specialization, served: Served) -> str | None:
    from flashgen.runtime.dispatch import sdpa_backend

    return None if call.generated_only else sdpa_backend(workload, spec, served)


def _geometry(call: Call) -> Geometry:
    from flashgen.launch.geometry import Geometry
    from flashgen.runtime.runs import empty_output

    out = empty_output(call.q, call.v, bshd=call.bshd)
    return Geometry.of(*call.views, out.transpose(1, 2) if call.bshd else out)


def _kernel_run(call: Call, spec: Specialization, config: Config, device: Device, index: int) -> Run:
    from flashgen.launch.plan import make_plan
    from flashgen.runtime.runs import kernel_lse_run, kernel_run

    launch = make_plan(compiled(spec, config, device, index), spec, config, _geometry(call), index)
    if call.with_lse:
        return kernel_lse_run(launch, bshd=call.bshd)
    return kernel_run(launch, bshd=call.bshd, same_head_dim=call.q.shape[-1] == call.v.shape[-1])


def compiled(spec: Specialization, config: Config, device: Device, index: int) -> CompiledKernel:
    """The compiled kernel of a config, from this process or built now.

    Raises:
        BuildError: FLASHGEN_NO_COMPILE forbids it outside `warmup`, or the compile failed.
        LaunchError: a CUDA graph is being captured.
    """
    key = (spec, config, device.identity)
    found = _KERNELS.get(key)
    if found is None:
        from flashgen.codegen.build import compile_kernel
        from flashgen.launch.plan import check_capture

        check_capture(index, f"building the kernel for {spec.key}")
        if settings().no_compile and not getattr(_STATE, "warming", False):
            raise BuildError(
                f"FLASHGEN_NO_COMPILE forbids compiling outside warmup, and {config} for {spec.key} is not compiled; "
                "add its shapes to the flashgen.warmup call"
            )
        found = _KERNELS[key] = compile_kernel(spec, config, device)
    return found


@functools.cache
def device_at(index: int) -> Device:
    """GPU `index` of torch."""
    from flashgen.measure.gpu import current_device

    return current_device(index)


@functools.cache
def _records() -> Records:
    from flashgen.db.layers import Layers
    from flashgen.runtime.dispatch import Records

    return Records(Layers.open())


def records() -> Records:
    """The records that serve this process, read from the databases once until `reload`."""
    return _records()


def not_on_gpu(workload: Workload, call: Call) -> str:
    """The message of the error for tensors that are not on a GPU: every family with its reason."""
    from flashgen.codegen.families import FAMILIES

    listed = "; ".join(f"{row.id}: it runs on GPUs" for row in FAMILIES)
    return f"no kernel family serves {workload.key} on {call.q.device}: {listed}"


def _notice(workload: Workload, served: Served, device: Device) -> None:
    """One line, once a device and process, where nothing measured serves."""
    if served.record is not None or served.rung == 1 or settings().quiet or device.identity in _NOTICED:
        return
    _NOTICED.add(device.identity)
    shape = workload.key.removeprefix("fwd-")
    sys.stderr.write(
        f"flashgen: no tuned record for {device.name} ({device.identity}); the default config serves. "
        f"Tune with: flashgen tune --shape {shape}  (about {TUNE_SECONDS_PER_WORKLOAD} s)\n"
    )


def warm(calls: Iterable[tuple[Specialization, Config]], device: Device, index: int) -> int:
    """Compile and load the kernels of these configs; returns how many there are."""
    from flashgen.launch.plan import load

    _STATE.warming = True
    try:
        pairs = set(calls)
        for spec, config in pairs:
            load(compiled(spec, config, device, index), index)
        return len(pairs)
    finally:
        _STATE.warming = False
