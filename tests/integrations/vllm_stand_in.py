"""Modules with the names, base classes and registry that vLLM publishes for attention backends, and nothing behind."""

from __future__ import annotations

import enum
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    NEVER = 0


@dataclass
class MultipleOf:
    base: int


class AttentionBackend(ABC):
    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type: ...

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(*given: Any) -> tuple[int, ...]: ...


class AttentionImpl(ABC):
    total_cp_world_size = 1

    @abstractmethod
    def __init__(self, *given: Any) -> None: ...

    @abstractmethod
    def forward(self, *given: Any) -> torch.Tensor: ...


class AttentionMetadataBuilder(ABC):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None

    @abstractmethod
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def build(self, *given: Any) -> Any: ...


OVERRIDES: dict[Any, str] = {}


class AttentionBackendEnum(enum.Enum):
    CUSTOM = None

    def is_overridden(self) -> bool:
        return self in OVERRIDES

    def get_path(self) -> str:
        return OVERRIDES[self]


def register_backend(backend: AttentionBackendEnum, class_path: str) -> None:
    OVERRIDES[backend] = class_path


@contextmanager
def vllm_stand_in() -> Iterator[None]:
    """Let `import vllm...` find these, and flashgen's classes on top of them, until the end of the block."""
    ours = "flashgen.integrations.vllm"
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vllm" or ours in name}
    backend = {name: value for name, value in globals().items() if name.startswith("Attention") or name == "MultipleOf"}
    registry = {"AttentionBackendEnum": AttentionBackendEnum, "register_backend": register_backend}
    try:
        for name in kept:
            del sys.modules[name]
        for name, contents in {
            "vllm": {},
            "vllm.v1": {},
            "vllm.v1.attention": {},
            "vllm.v1.attention.backend": backend,
            "vllm.v1.attention.backends": {},
            "vllm.v1.attention.backends.registry": registry,
        }.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(contents)
        OVERRIDES.clear()
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm" or ours in name]:
            del sys.modules[name]
        sys.modules.update(kept)
