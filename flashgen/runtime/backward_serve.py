"""The slow path of backward passes: resolve, compile if needed, and bind a plan, by the ladder of forward passes.

SDPA takes no part: its backward pass belongs to its own forward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.core.errors import UnsupportedError
from flashgen.runtime import serve
from flashgen.runtime.backward_calls import BackwardCall, CheckedBackwardCall
from flashgen.runtime.calls import Call

if TYPE_CHECKING:
    from flashgen.codegen.build import CompiledKernel
    from flashgen.core.config import Config
    from flashgen.core.device import Device
    from flashgen.runtime.backward_runs import BackwardRun


def prepare_backward(call: BackwardCall, *, sink_grad: bool) -> BackwardRun:
    """What serves this and every later backward pass of this key.

    Raises:
        WorkloadError: shapes or dtypes do not fit together.
        UnsupportedError: no family serves the call; the message lists each one's reason.
        LaunchError: a kernel would have to be built while a CUDA graph is captured.
        BuildError: a compile is needed and the settings forbid it, or it failed.
    """
    from flashgen.launch.plan import make_backward_plan
    from flashgen.runtime.backward_runs import backward_run
    from flashgen.runtime.dispatch import resolve

    problem, device, index = placed(call)

    def bind(kernel: CompiledKernel, config: Config, index: int) -> BackwardRun:
        launch = make_backward_plan(kernel, problem.spec, config, problem.geometry, index)
        return backward_run(launch, problem, sink_grad=sink_grad)

    with serve.LOCK:
        served = resolve(problem.workload, problem.spec, device, serve.records(), config=call.forward.config)
        serve.notice(problem.workload, served, device)
        return serve.built(problem.spec, served, device, index, bind)


def check_support(forward: Call, *, deterministic: bool, bias_grad: bool) -> None:
    """Refuse a forward call whose backward pass no family serves.

    Raises:
        UnsupportedError: that is so; the message lists each family's reason.
    """
    from flashgen.codegen.families import applicable

    problem, device, _ = placed(BackwardCall(forward=forward, deterministic=deterministic, bias_grad=bias_grad))
    applicable(problem.spec, device)


def placed(call: BackwardCall) -> tuple[CheckedBackwardCall, Device, int]:
    """A call as a problem of its GPU, the GPU, and torch's index of it.

    Raises:
        WorkloadError: shapes or dtypes do not fit together.
        UnsupportedError: the tensors are not on a GPU.
    """
    problem = CheckedBackwardCall.of(call)
    index = serve.gpu_index(call.forward.q)
    if index is None:
        raise UnsupportedError(serve.not_on_gpu(problem.workload, call.forward))
    device = serve.device_at(index)
    return problem.on(device), device, index
