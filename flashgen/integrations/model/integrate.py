"""The public call `integrate`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from flashgen.core.checks import flag, real_number
from flashgen.core.device import Device, find_device
from flashgen.core.errors import DeviceError, TuningError
from flashgen.integrations.model.layers import LayerCalls, LayerRecorder, with_backward
from flashgen.integrations.model.misses import Misses, served_on
from flashgen.integrations.model.proof import DIFFERS, NOT_RUN, Proof, prove
from flashgen.integrations.model.report import Integration, integration, rows_of
from flashgen.integrations.model.routes import route_of
from flashgen.integrations.model.runs import Examples, Inputs, checked_model, left_as_it_is
from flashgen.runtime.ops import serve
from flashgen.tuning import api
from flashgen.tuning.events import Event, OnEvent
from flashgen.tuning.from_calls import Gain, Gains, by_share


def integrate(
    model: torch.nn.Module,
    inputs: Inputs | None = None,
    *,
    training: bool = False,
    reference: bool = False,
    target: str | None = None,
    limit_s: float = 600.0,
    budget: str = "30s",
    database: str | Path | None = None,
    compare: bool = True,
    on_event: OnEvent = lambda event: None,
) -> Integration:
    """Let a model attend by flashgen, tune what it calls, and say what serves each layer and whether it is as exact.

    Models of transformers, also inside of others, are routed by transformers' registry, every other module by the calls
    of `scaled_dot_product_attention` in its forward pass. The model is run on the examples as it is, while each call is
    counted for the layer that makes it. Workloads without a measured record are then searched, the longest share of the
    time first; what a call needs, and what a missing record costs, are estimates from records and the data sheet.
    Last, copies of the model in evaluation mode are compared: errors against float64 are at most twice those of its own
    attention in its own dtype (three times for gradients), plus two units in the last place of the largest number. A
    model whose comparison fails is put back as it was; `undo()` of the report does so, too.

    Args:
        model: a module whose parameters are on a GPU.
        inputs: examples of what it will be called with: a tensor, a mapping of named inputs, a list of them, or a
            function that runs the model that it is given and returns what it gave. The shapes are what is tuned.
            None is the dummy inputs that models of transformers have of their own, a few tokens: the model is routed
            and compared, and nothing is tuned.
        training: also run the backward pass, of the model's own loss or else, and with padding, of the mean square of
            what it gives. Gradients that the model holds are kept.
        reference: compute by `flashgen.reference`, on any device: exact and slow, to try a model without a GPU. Nothing
            is tuned then.
        target: with `reference`, the GPU that layers are looked up for.
        limit_s: seconds for tuning; 0 tunes nothing.
        budget: for each workload, as of `flashgen tune`.
        database: where records go; None is the first of FLASHGEN_DB, or the user's.
        compare: whether to compare.
        on_event: is told all events of tuning (`flashgen.tuning.events`).

    Returns:
        The report: `str()`, `to_markdown()`, `to_json()`, `write(path)`, `write_package(name)` and `undo()`.

    Raises:
        DeviceError: the model is not on a GPU and `reference` is False, or there is no such `target`.
        UnsupportedError: its attention asks for no function, or calls something that flashgen does not compute.
        WorkloadError: the model has no parameters, or the inputs are none.
        TuningError: `limit_s` or `budget` is none, or `target` is given without `reference`.
        DatabaseError: results cannot be stored.
    """
    checked, has_shapes = checked_model(model), inputs is not None
    examples = Examples.of(inputs) if has_shapes else Examples.of_model(checked)
    training, reference = flag("training", training), flag("reference", reference)
    compare, limit_s = flag("compare", compare), _seconds(limit_s)
    device = _device(checked, reference, target)
    route = route_of(checked, reference=reference)
    route.apply(checked)
    try:
        calls = _counted(checked, examples, training=training, device=device, reference=reference)
        before = calls
        gains: tuple[Gain, ...] = ()
        if device is not None and not reference and has_shapes and limit_s and calls:
            gains = _tuned(checked, calls, device, limit_s, budget, database, on_event)
            calls = _counted(checked, examples, training=training, device=device, reference=reference)
        proof = Proof(status=NOT_RUN, reason="nobody asked for it")
        if compare:
            proof = prove(checked, examples, route, training=training)
    except BaseException:
        route.undo(checked)
        raise
    is_routed = proof.status != DIFFERS
    if not is_routed:
        route.undo(checked)
    misses = None if device is None else Misses(device)
    return integration(
        checked,
        route,
        device=device,
        by_reference=reference,
        has_shapes=has_shapes,
        rows=rows_of(calls, misses),
        before=rows_of(before, misses),
        gains=gains,
        proof=proof,
        is_routed=is_routed,
    )


def _seconds(limit_s: object) -> float:
    found = real_number("limit_s", limit_s, TuningError)
    if not 0 <= found < math.inf:
        raise TuningError(f"limit_s is finite and not below 0, got {found}")
    return found


def _device(model: torch.nn.Module, reference: bool, target: str | None) -> Device | None:
    """The GPU that serves, or that is looked up for."""
    if reference:
        return None if target is None else find_device(target)
    if target is not None:
        raise TuningError("target names the GPU that layers are looked up for where the reference computes")
    index = next((serve.gpu_index(one) for one in model.parameters()), None)
    if index is None:
        raise DeviceError(
            "flashgen's kernels run on a GPU, and the model's parameters are not on one: reference=True computes "
            "there, exact and slow, and target='h200' says what would serve on another GPU"
        )
    return serve.device_at(index)


def _counted(
    model: torch.nn.Module, examples: Examples, *, training: bool, device: Device | None, reference: bool
) -> tuple[LayerCalls, ...]:
    """What a run calls, by layer."""
    recorder = LayerRecorder(model)
    with left_as_it_is(model), torch.set_grad_enabled(training), recorder.listening():
        found = examples.run(model)
        if training:
            examples.loss(found).backward()  # type: ignore[no-untyped-call]
    calls = recorder.calls()
    if not reference:
        return calls
    calls = with_backward(calls) if training else calls
    if device is None:
        return calls
    return tuple(
        LayerCalls(layers=one.layers, record=served_on(one.record, device, training=training)) for one in calls
    )


def _tuned(
    model: torch.nn.Module,
    calls: tuple[LayerCalls, ...],
    device: Device,
    limit_s: float,
    budget: str,
    database: str | Path | None,
    on_event: OnEvent,
) -> tuple[Gain, ...]:
    """What a search gained; calls of this process are served by it from then on."""
    records = [one.record for one in calls if one.record.rung]
    if not records:
        return ()
    gains = Gains(records)

    def told(event: Event) -> None:
        gains(event)
        on_event(event)

    index: Any = next(serve.gpu_index(one) for one in model.parameters())
    finished = api.tune(
        by_share(records, device),
        device=index,
        budget=budget,
        limit_s=limit_s,
        database=database,
        on_event=told,
    )
    serve.reload()
    return gains.of(finished)
