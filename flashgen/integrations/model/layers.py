"""Which layers of a model make which calls: a recorder that knows the module that runs."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from flashgen.core.calls import CallRecord
from flashgen.runtime.record import counted_by


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCalls:
    """Calls that the same thing served, and the layers that make them."""

    layers: tuple[str, ...]
    record: CallRecord


class LayerRecorder:
    """Counts the calls of a model's modules, each for the innermost one that runs in its thread."""

    counts_reference = True

    def __init__(self, model: torch.nn.Module) -> None:
        """Know the modules of a model by their paths."""
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._running = threading.local()
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, CallRecord]] = Counter()

    def cell(self, record: CallRecord) -> CallRecord:
        """The record itself: a layer is only known when it calls."""
        return record

    def count(self, cell: CallRecord) -> None:
        """Count one call of the layer that runs."""
        stack = self._stack()
        with self._lock:
            self._counts[stack[-1] if stack else "", cell] += 1

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Count the calls of a block."""
        hooks = (
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        )
        try:
            with counted_by(self):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def calls(self) -> tuple[LayerCalls, ...]:
        """What was counted, the longest time first.

        Backward passes run where no module does: they are of the layers whose forward passes they differentiate.
        """
        layers: dict[CallRecord, list[str]] = {}
        counts: Counter[CallRecord] = Counter()
        for (layer, record), count in self._counts.items():
            counts[record] += count
            layers.setdefault(record, []).extend([layer] if layer else [])
        found = [
            LayerCalls(layers=tuple(layers[record] or _forward_layers(record, layers)), record=replace(record, calls=n))
            for record, n in counts.items()
        ]
        return tuple(sorted(found, key=lambda one: (-one.record.total_ms, one.record.workload.key)))

    def _begin(self, module: torch.nn.Module, given: Any) -> None:
        path = self._paths.get(id(module))
        if path is not None:
            self._stack().append(path)

    def _end(self, module: torch.nn.Module, given: Any, found: Any) -> None:
        if id(module) in self._paths and self._stack():
            self._stack().pop()

    def _stack(self) -> list[str]:
        if not hasattr(self._running, "stack"):
            self._running.stack = []
        found: list[str] = self._running.stack
        return found


def with_backward(calls: tuple[LayerCalls, ...]) -> tuple[LayerCalls, ...]:
    """Calls of the reference, whose gradients are torch's, with the backward passes that kernels would have."""
    passes = [
        replace(one, record=replace(one.record, workload=replace(one.record.workload, direction="backward")))
        for one in calls
        if one.record.workload.direction == "forward" and not one.record.server
    ]
    return (*calls, *passes)


def _forward_layers(backward: CallRecord, layers: dict[CallRecord, list[str]]) -> list[str]:
    """The layers whose forward passes a backward pass belongs to."""
    if backward.workload.direction != "backward":
        return []
    forward = replace(backward.workload, direction="forward")
    found = [name for record, names in layers.items() if record.workload == forward for name in names]
    return list(dict.fromkeys(found))
