"""What serves calls of helper kernels: compiled once for a GPU, found on disk by later processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashgen.core.alignment import ALIGNMENT_BYTES
from flashgen.core.collection import CollectionPaused
from flashgen.core.device import Device
from flashgen.core.errors import BuildError, UnsupportedError
from flashgen.core.settings import settings
from flashgen.runtime.ops import serve

if TYPE_CHECKING:
    from flashgen.codegen.build import CompiledKernel
    from flashgen.codegen.helper import HelperKernel
    from flashgen.launch.helper_launch import WithNumbers

_LAUNCHERS: dict[tuple[HelperKernel, int | None], WithNumbers] = {}


def remember(memo: dict[tuple[Any, ...], Any], key: tuple[Any, ...], run: Any) -> None:
    """Fill a memo of calls, which starts over rather than growing for ever."""
    with serve.LOCK:
        if len(memo) >= serve.MEMO_LIMIT:
            memo.clear()
        memo[key] = run


def used_strides(tensor: torch.Tensor) -> list[int]:
    """Its strides, 0 along an axis of one element, where they mean nothing."""
    return [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def has_aligned_rows(tensor: torch.Tensor) -> bool:
    """Whether all its strides in use but the last are multiples of 16 bytes."""
    return not any(stride * tensor.element_size() % ALIGNMENT_BYTES for stride in used_strides(tensor)[:-1])


def launcher(helper: HelperKernel, beside: torch.Tensor) -> WithNumbers:
    """What launches a helper kernel where a tensor is; compiled or read from disk at its first use there.

    Raises:
        UnsupportedError: the tensor is not on a GPU.
        BuildError: a compile is needed and the settings forbid it, or it failed.
        LaunchError: the driver refuses the kernel, or a CUDA graph is being captured.
    """
    index = serve.gpu_index(beside)
    if index is None and not is_interpreted():
        raise UnsupportedError(f"flashgen.{helper.id} runs on GPUs, got tensors on {beside.device}")
    with serve.LOCK, CollectionPaused():
        found = _LAUNCHERS.get((helper, index))
        if found is None:
            from flashgen.launch import helper_launch

            if index is None:
                found = helper_launch.interpreted_launcher(helper)
            else:
                found = helper_launch.helper_launcher(_compiled(helper, serve.device_at(index), index), index)
            _LAUNCHERS[helper, index] = found
        return found


def warm(helper: HelperKernel, index: int) -> None:
    """Compile and load a helper kernel for a GPU, whatever the settings forbid.

    Raises:
        BuildError: it does not compile.
    """
    from flashgen.launch.helper_launch import helper_launcher

    with serve.LOCK:
        if (helper, index) not in _LAUNCHERS:
            compiled = _compiled(helper, serve.device_at(index), index, is_warming=True)
            _LAUNCHERS[helper, index] = helper_launcher(compiled, index)


def is_interpreted() -> bool:
    """Whether Triton interprets kernels, on tensors of the CPU."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def _compiled(helper: HelperKernel, device: Device, index: int, *, is_warming: bool = False) -> CompiledKernel:
    from flashgen.codegen import build
    from flashgen.launch import binaries
    from flashgen.launch.plan import check_capture

    check_capture(index, f"building {helper.id} for {helper.key}")
    found = binaries.read_helper(helper, device)
    if found is not None:
        return found
    if settings().no_compile and not is_warming:
        raise BuildError(
            f"FLASHGEN_NO_COMPILE forbids compiling outside warmup, and {helper.id} for {helper.key} is not compiled; "
            "call flashgen.warmup with helpers=True, or make this call once where compiling is allowed"
        )
    compiled = build.compile_helper(helper, device)
    binaries.write_helper(compiled, helper)
    return compiled
