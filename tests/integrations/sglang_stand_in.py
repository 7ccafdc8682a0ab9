"""Modules with the names, base class and registries that SGLang publishes for attention backends, nothing behind."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

ATTENTION_BACKENDS: dict[str, Callable[[Any], Any]] = {}
ATTENTION_BACKEND_CHOICES = ["triton"]


class AttentionBackend(ABC):
    forward_metadata: Any = None

    @abstractmethod
    def init_forward_metadata(self, forward_batch: Any) -> None: ...

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:  # noqa: B027 - nothing, as in SGLang
        pass

    def forward(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **given: Any
    ) -> torch.Tensor:
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        call: Any = getattr(self, "forward_decode" if mode.is_decode() else "forward_extend")
        found: torch.Tensor = call(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **given)
        return found


def register_attention_backend(name: str) -> Callable[[Any], Any]:
    def decorator(make: Any) -> Any:
        ATTENTION_BACKENDS[name] = make
        return make

    return decorator


def add_attention_backend_choices(choices: list[str]) -> None:
    ATTENTION_BACKEND_CHOICES.extend(choices)


@contextmanager
def sglang_stand_in() -> Iterator[None]:
    """Let `import sglang...` find these, and flashgen's classes on top of them, until the end of the block."""
    ours, layers = "flashgen.integrations.sglang", "sglang.srt.layers.attention"
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "sglang" or ours in name}
    registry = {"ATTENTION_BACKENDS": ATTENTION_BACKENDS, "register_attention_backend": register_attention_backend}
    choices = {
        "ATTENTION_BACKEND_CHOICES": ATTENTION_BACKEND_CHOICES,
        "add_attention_backend_choices": add_attention_backend_choices,
    }
    try:
        for name in kept:
            del sys.modules[name]
        for name, contents in {
            "sglang": {},
            "sglang.srt": {},
            "sglang.srt.server_args": choices,
            "sglang.srt.layers": {},
            layers: {},
            f"{layers}.attention_registry": registry,
            f"{layers}.base_attn_backend": {"AttentionBackend": AttentionBackend},
        }.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(contents)
        ATTENTION_BACKENDS.clear()
        del ATTENTION_BACKEND_CHOICES[1:]
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang" or ours in name]:
            del sys.modules[name]
        sys.modules.update(kept)
