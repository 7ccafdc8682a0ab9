"""Launches of decode plans on tensors of this process, for the gate and the stopwatch."""

from __future__ import annotations

from flashgen.launch.decode_numbers import DecodeShape
from flashgen.launch.decode_plan import NUMBERS_OF_HEADS, POINTERS, DecodePlan
from flashgen.launch.feature_arguments import TENSORS
from flashgen.measure.decode_case import DecodeFactory, DecodeLaunch
from flashgen.measure.decode_inputs import DecodeTensors


def decode_factory(plan: DecodePlan) -> DecodeFactory:
    """What makes launches of a plan, on the current stream of the current GPU."""

    def factory(shape: DecodeShape) -> DecodeLaunch:
        launch = plan.sized(shape)

        def run(tensors: DecodeTensors) -> None:
            launch(pointers_of(tensors), tensors.q, True)

        return run

    return factory


def pointers_of(tensors: DecodeTensors) -> tuple[int, ...]:
    """The addresses of a call in the order of `POINTERS`, 0 for what it does not have."""
    named = {
        "Q": tensors.q,
        "K": tensors.k,
        "V": tensors.v,
        "O": tensors.out,
        "LSE": tensors.lse,
        "Lens": tensors.lens,
        "Leftpad": tensors.leftpad,
        "Table": tensors.table,
    }
    found = (TENSORS[name](tensors.features) if name in NUMBERS_OF_HEADS else named.get(name) for name in POINTERS)
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in found)
