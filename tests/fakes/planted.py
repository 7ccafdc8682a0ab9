"""Kernels that really do to a GPU what a broken candidate does, behind the usual service."""

from __future__ import annotations

import ctypes
import os

import torch
import triton
import triton.language as tl

from flashgen.core.config import Config
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.launch.gpu import current_device
from flashgen.measure.service import GpuService
from flashgen.measure.toolchain import GpuToolchain
from flashgen.measure.verify import KernelFactory
from flashgen.measure.worker import Announce

PLANTED = "planted"


@triton.jit
def store_far_away(pointer, distance):
    tl.store(pointer + distance, 1.0)


@triton.jit
def load_far_away(pointer, target, distance):
    tl.store(target, tl.load(pointer + distance))


@triton.jit
def spin_for_ever(flag):
    value = tl.load(flag, volatile=True)
    while value == 0:
        value = tl.load(flag, volatile=True)


@triton.jit
def trap(pointer):
    lane = tl.arange(0, 32)
    value = tl.inline_asm_elementwise(
        "{ trap; mov.u32 $0, $1; }", "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(pointer + lane, value)


@triton.jit
def fill(pointer, count, value, block: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    tl.store(pointer + offsets, value, mask=offsets < count)


class PlantedKernel:
    """Does what its name says instead of attention."""

    def __init__(self, act: str) -> None:
        self._act = act

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        softmax_scale: float,
        q_offset: int | torch.Tensor,
        features: Features,
    ) -> None:
        scratch = torch.zeros(64, dtype=torch.float32, device=q.device)
        flags = torch.zeros(64, dtype=torch.int32, device=q.device)
        if self._act == "store_far_away":
            store_far_away[(1,)](scratch, 1 << 44)
        elif self._act == "load_far_away":
            load_far_away[(1,)](scratch, scratch, 1 << 44)
        elif self._act == "spin_for_ever":
            spin_for_ever[(1,)](flags)
        elif self._act == "trap":
            trap[(1,)](flags)
        elif self._act == "allocate":
            torch.empty(1 << 50, dtype=torch.uint8, device=q.device)
        elif self._act == "abort":
            os.abort()
        elif self._act == "segfault":
            ctypes.string_at(0)
        elif self._act == "zeros":
            fill[(triton.cdiv(lse.numel(), 1024),)](lse, lse.numel(), 0.0, block=1024)
            out.zero_()
        elif self._act != "nothing":
            raise ValueError(self._act)


class PlantedToolchain(GpuToolchain):
    """Plants a kernel where the config asks for one; everything else is the usual."""

    def factory(self, spec: Specialization, config: Config) -> KernelFactory:
        if config.family != PLANTED:
            return super().factory(spec, config)
        return lambda *_: PlantedKernel(str(config["act"]))

    def exact_sibling(self, spec: Specialization, config: Config) -> Config:
        return config if config.family == PLANTED else super().exact_sibling(spec, config)

    def most_keys(self, config: Config) -> int | None:
        return None if config.family == PLANTED else super().most_keys(config)


class PlantedService(GpuService):
    """The usual service with that toolchain."""

    def __init__(self, announce: Announce, index: int) -> None:
        super().__init__(announce, index, PlantedToolchain(current_device(index), index))
