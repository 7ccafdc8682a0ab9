"""The few calls of the CUDA driver that a launch needs, through ctypes.

Triton's own launcher builds a C extension for every signature, parses every argument of every call, and in 3.6
encodes tensor descriptors again at each launch. With prepared parameters a launch is one call of the driver, whatever
the number of arguments. `PyDLL` keeps the interpreter lock during these calls: they only put work into a queue.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_int, c_uint, c_uint64, c_void_p
from typing import Any

from flashgen.core.errors import LaunchError

MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
STATIC_SHARED_LIMIT = 48 * 1024
"""A block gets more than this only after asking for it."""


class LaunchConfig(Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid_x", c_uint),
        ("grid_y", c_uint),
        ("grid_z", c_uint),
        ("block_x", c_uint),
        ("block_y", c_uint),
        ("block_z", c_uint),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("num_attributes", c_uint),
    )


PROGRAMMATIC_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: a kernel need not wait for the end of the one before it."""

_ATTRIBUTE_WORDS = 9
"""A CUlaunchAttribute: its id, padded to 8 bytes, and a value of 64 bytes."""

_PROGRAMMATIC: Any = (ctypes.c_uint64 * _ATTRIBUTE_WORDS)(PROGRAMMATIC_SERIALIZATION, 1)
PROGRAMMATIC_ATTRIBUTE = ctypes.addressof(_PROGRAMMATIC)
"""The address of that attribute, the only one of a `LaunchConfig` that has one."""


pointer_to = c_void_p.from_param
"""What ctypes makes of an address that it is to give as it is."""


@functools.cache
def library() -> Any:
    """The CUDA driver of this machine.

    Raises:
        LaunchError: there is none.
    """
    try:
        cuda = ctypes.PyDLL("libcuda.so.1")
    except OSError as error:
        raise LaunchError(f"launching needs the CUDA driver, and libcuda.so.1 cannot be opened: {error}") from error
    cuda.cuLaunchKernelEx.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p)
    cuda.cuTensorMapReplaceAddress.argtypes = (c_void_p, c_void_p)
    cuda.cuModuleLoadData.argtypes = (POINTER(c_void_p), c_void_p)
    cuda.cuModuleGetFunction.argtypes = (POINTER(c_void_p), c_void_p, ctypes.c_char_p)
    cuda.cuFuncSetAttribute.argtypes = (c_void_p, c_int, c_int)
    cuda.cuFuncSetCacheConfig.argtypes = (c_void_p, c_int)
    return cuda


def launch_function() -> Any:
    """`cuLaunchKernelEx` for `launch_arguments`; otherwise ctypes converts the same arguments at every launch."""
    return library()["cuLaunchKernelEx"]


def launch_arguments(config: int, function: int, parameters: int) -> tuple[Any, ...]:
    """The arguments of a launch: addresses of its configuration and of those of its parameters, and a kernel."""
    return pointer_to(config), pointer_to(function), pointer_to(parameters), None


def check(code: int, action: str) -> None:
    """Raise what the driver says.

    Raises:
        LaunchError: `code` is not success; the message has the driver's name and text for it.
    """
    if code == 0:
        return
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    library().cuGetErrorName(code, ctypes.byref(name))
    library().cuGetErrorString(code, ctypes.byref(text))
    said = f"{(name.value or b'?').decode()}: {(text.value or b'?').decode()}"
    raise LaunchError(f"the CUDA driver could not {action}: {said} ({code})")


def load_function(cubin: bytes, name: str, shared_bytes: int) -> int:
    """Load a binary into the current context and return the handle of its kernel; it stays loaded.

    Raises:
        LaunchError: the driver refuses the binary or the amount of shared memory.
    """
    cuda = library()
    module, function = c_void_p(), c_void_p()
    check(cuda.cuModuleLoadData(ctypes.byref(module), cubin), f"load kernel {name}")
    check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"find kernel {name}")
    if shared_bytes > STATIC_SHARED_LIMIT:
        check(cuda.cuFuncSetCacheConfig(function, PREFER_SHARED), "prefer shared memory")
        code = cuda.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
        check(code, f"give a block {shared_bytes} bytes of shared memory")
    if function.value is None:
        raise LaunchError(f"the CUDA driver gave no handle for kernel {name}")
    return function.value


def current_context() -> int:
    """The CUDA context of this thread; 0 if it has none."""
    context = c_void_p()
    check(library().cuCtxGetCurrent(ctypes.byref(context)), "name the current context")
    return context.value or 0


def use_context(index: int) -> int:
    """The CUDA context of this thread; a thread without one gets the primary context of GPU `index`, torch's own.

    A new thread has none until something makes one current, and neither torch's allocator nor `torch.cuda.device` does.

    Raises:
        LaunchError: the driver gives none.
    """
    found = current_context()
    if not found:
        found = _primary_context(index)
        check(library().cuCtxSetCurrent(c_void_p(found)), "make a context current")
    return found


@functools.cache
def _primary_context(index: int) -> int:
    # retained once and never released: torch keeps it as long as the process, too
    device, context = c_int(), c_void_p()
    check(library().cuDeviceGet(ctypes.byref(device), index), f"find GPU {index}")
    check(library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"name the context of GPU {index}")
    if context.value is None:
        raise LaunchError(f"the CUDA driver gave no context for GPU {index}")
    return context.value


def adopt_context(context: int) -> bool:
    """Make `context` current if this thread has none; returns whether it had none."""
    if current_context():
        return False
    check(library().cuCtxSetCurrent(c_void_p(context)), "make a context current")
    return True


def capture_id(stream: int) -> int:
    """What tells the capture that `stream` takes part in from every other capture of this process."""
    status, identity = c_int(), c_uint64()
    code = library().cuStreamGetCaptureInfo_v2(
        c_void_p(stream), ctypes.byref(status), ctypes.byref(identity), None, None, None
    )
    check(code, "name the CUDA graph under capture")
    return identity.value
