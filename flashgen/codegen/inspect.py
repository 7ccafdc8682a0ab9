"""What a compiled kernel takes: registers, spills and shared memory, read without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.core.device import Device
from flashgen.core.errors import BuildError

RESERVED_SMEM = 1024
"""Bytes of shared memory that the CUDA driver keeps of every block (compute capability 8.0 and newer)."""


SCRATCH_PREFIX = "flashgen-"
"""Of the files that are made here in the temporary directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Registers of a thread, and bytes of local memory of a thread (its stack: spills and nothing else here)."""

    registers: int
    spills: int


def resources(handle: Any, device: Device) -> Resources:
    """Registers and spills of a Triton compiled kernel.

    Raises:
        BuildError: the tools that come with Triton could not read the binary.
    """
    return _from_cubin(handle.asm["cubin"]) if device.is_nvidia else _from_amdgcn(handle.asm["amdgcn"])


def _from_cubin(cubin: bytes) -> Resources:
    text = _resource_usage(cubin)
    found = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    if not found:
        raise BuildError(f"cuobjdump named no registers: {text[:200]!r}")
    return Resources(registers=int(found[-1][0]), spills=int(found[-1][1]))


def _from_amdgcn(text: str) -> Resources:
    registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
    spills = re.search(r"\.private_segment_fixed_size:\s*(\d+)", text)
    if registers is None or spills is None:
        raise BuildError("the AMD assembly names no .vgpr_count or .private_segment_fixed_size")
    return Resources(registers=int(registers[1]), spills=int(spills[1]))


def _resource_usage(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(prefix=SCRATCH_PREFIX, suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            done = subprocess.run(
                [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, timeout=60, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise BuildError(f"cuobjdump of Triton could not read a kernel: {error}") from error
    return done.stdout
