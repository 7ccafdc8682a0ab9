"""The launch vocabulary: whatever a row of its table names is written, and nothing else is taken for a parameter."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch

from flashgen.core.errors import LaunchError
from flashgen.core.features.values import BlockMask, Features
from flashgen.launch import feature_arguments, vocabulary
from flashgen.launch.backward import backward_geometry
from flashgen.launch.geometry import Geometry
from flashgen.launch.plan import make_backward_plan, make_plan
from tests.fakes.driver import FakeDriver
from tests.fakes.imagined import SHAPE, SPLIT, Both, Imagined, backward_tensors
from tests.launch.kernels import tensors

BOTH_WAYS = pytest.mark.parametrize("direction", ["forward", "backward"])
KEYS = {"forward": "fwd-bf16-d64", "backward": "bwd-bf16-d64"}
FEATURES = Features(
    window=(70, 3),
    softcap=30.0,
    alibi_slopes=torch.ones(2, 6),
    sinks=torch.zeros(6),
    bias=torch.zeros(2, 1, 200, 336)[..., :333],
    mask=torch.ones(1, 6, 1, 336, dtype=torch.bool)[..., :333],
    aux=(torch.zeros(1), torch.zeros(1)),
    block_mask=BlockMask(
        partial_counts=torch.zeros(2, 6, 2, dtype=torch.int32),
        partial_indices=torch.zeros(2, 6, 2, 3, dtype=torch.int32),
        full_counts=torch.zeros(2, 6, 2, dtype=torch.int32),
        full_indices=torch.zeros(2, 6, 2, 3, dtype=torch.int32),
        q_partial_counts=torch.zeros(2, 6, 3, dtype=torch.int32),
        q_partial_indices=torch.zeros(2, 6, 3, 2, dtype=torch.int32),
        q_full_counts=torch.zeros(2, 6, 3, dtype=torch.int32),
        q_full_indices=torch.zeros(2, 6, 3, 2, dtype=torch.int32),
        seqlen_q=200,
        seqlen_k=333,
    ),
    cu_seqlens_q=torch.zeros(3, dtype=torch.int32),
    cu_seqlens_k=torch.zeros(3, dtype=torch.int32),
    seqused_q=torch.zeros(2, dtype=torch.int32),
    seqused_k=torch.zeros(2, dtype=torch.int32),
    max_seqlens=(100, 200),
    block_table=torch.zeros(2, 1, dtype=torch.int32),
    dropout_p=0.5,
    rng_state=torch.zeros(2, dtype=torch.int64),
)


def rows() -> list[tuple[list[str], str, str]]:
    """Names, types and meaning of each row of the table."""
    assert vocabulary.__doc__ is not None
    table = [line.strip("| ").split(" | ") for line in vocabulary.__doc__.splitlines() if line.startswith("| `")]
    return [(re.findall("`([^`]+)`", names), kinds, meaning) for names, kinds, meaning in table]


def named(direction: str) -> list[str]:
    """Every parameter of the table that a kernel of a direction may have, with one of its types."""
    other = {"forward": "backward:", "backward": "forward:"}[direction]
    strided = [name for name in vocabulary.STRIDED if direction == "backward" or len(name) == 1]
    ranges = {"<t>": strided, "<x>": list("bhqk"), "<n>": ["0", "1"], "<Piece>": [], "<piece>": []}
    found = []
    for names, kinds, meaning in rows():
        if meaning.startswith(other) or "QOffset" in names or (direction == "forward" and names[0] == "DO"):
            continue
        for name in names:
            hole = re.search("<.*?>", name)
            filled = [name.replace(hole[0], value) for value in ranges[hole[0]]] if hole else [name]
            found += [f"{each}: {typed(each, kinds)}" for each in filled]
    return found


def typed(name: str, kinds: str) -> str:
    if kinds == "tensordesc":
        return "tensordesc<bf16[1, 1, 64, 64]>"
    return "*fp32" if name[0].isupper() else "i64" if "i64" in kinds else kinds


def call_of(direction: str) -> tuple[Geometry, tuple[Any, ...]]:
    if direction == "forward":
        given = tensors(Imagined((), key=KEYS[direction]).spec, SHAPE)
        return Geometry.of(*given, FEATURES), (*given, torch.empty(2, 6, 200))
    one = backward_tensors(dlse=True)._replace(dbias=torch.empty(2, 1, 200, 333))
    return backward_geometry(one, FEATURES), (one,)


@BOTH_WAYS
def test_every_parameter_of_the_table_is_written(direction: str, cuda: FakeDriver) -> None:
    geometry, arguments = call_of(direction)
    kernel = (each for each in named(direction) if not each.startswith("Counter"))  # each plan has counters of its own
    (values,) = Both(Imagined(tuple(kernel), key=KEYS[direction]), cuda, geometry)(*arguments, 0.5, 7, FEATURES)
    assert {name for name, value in values.items() if value == 0 and not name.startswith("stride")} == set()


@BOTH_WAYS
def test_the_table_has_every_parameter_that_is_written(direction: str) -> None:
    geometry, _ = call_of(direction)
    binding = Imagined(key=KEYS[direction]).binding(geometry)
    listed = {each.split(": ")[0] for each in named(direction)} | {"Counter"}
    known = binding.scalars.keys() | binding.written | {tensor.pointer for tensor in binding.direction.tensors}
    assert known | set(feature_arguments.TENSORS) <= listed


WRONG = [
    "Out: *bf16",
    "window: i32",
    "DqPart: *fp32",
    "QOffset: *i32",
    "Aux: *fp32",
    "softmax_scale: *fp32",
    "Q: i64",
    "delta_desc: tensordesc<fp32[64]>",
    "q_desc: tensordesc<bf16[64, 64]>",
    "q: tensordesc<bf16[1, 1, 64, 64]>",
    "q2_desc: tensordesc<bf16[1, 1, 64, 64]>",
    "bias_desc: tensordesc<bf16[1, 1, 64, 64]>",
    "sinks_desc: tensordesc<bf16[1, 1, 64, 64]>",
]


@pytest.mark.parametrize("is_known_layout", [True, False], ids=["driver", "triton"])
@pytest.mark.parametrize(
    ("direction", "name"),
    [
        *itertools.product(("forward", "backward"), WRONG),
        ("forward", "dlse_rows: i32"),
        ("forward", "DO: *bf16"),
        ("forward", "do_desc: tensordesc<bf16[1, 1, 64, 64]>"),
        ("forward", "stride_dqb: i64"),
        ("forward", "bias_batch: i32"),
        ("forward", "NegDelta: *fp32"),
        ("backward", "lse_rows: i32"),
        ("backward", "dq_acc_desc: tensordesc<fp32[1, 1, 64]>"),
    ],
)
def test_a_parameter_that_no_launch_writes_is_refused(
    direction: str, name: str, is_known_layout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashgen.launch.plan.known_layout", lambda part: object() if is_known_layout else None)
    imagined = Imagined(("LSE: *fp32",), ("LSE: *fp32", name), key=KEYS[direction])
    geometry, _ = call_of(direction)
    make = make_plan if direction == "forward" else make_backward_plan
    with pytest.raises(LaunchError) as caught:
        make(imagined.compiled, imagined.spec, imagined.config, geometry, 0)
    text, (said, kind) = str(caught.value), name.split(": ")
    assert text.endswith(f"got {said} ({kind}) of imagined_main")
    own = ["NegDelta", "neg_delta_desc", "do_desc", "stride_dqb"] if direction == "backward" else ["lse_rows"]
    for known in ("Q", "LSE", "Sinks", "Aux<n>", "q_desc", "bias_desc", "seqlen_q", "window_left", *own):
        assert f" {known}," in text or f"({known}," in text


def test_a_descriptor_of_scores_stands_beside_its_pointer() -> None:
    geometry, _ = call_of("forward")
    both = ("Bias: *bf16", "bias_desc: tensordesc<bf16[1, 1, 64, 64]>")
    Imagined(both).binding(geometry)
    with pytest.raises(LaunchError, match="got bias_desc"):
        Imagined(both[:1], both[1:]).binding(geometry)


def test_scratch_memory_is_known_to_the_kernels_of_its_family_alone() -> None:
    geometry, _ = call_of("forward")
    kernels = (("PartialOut: *fp32",), ("partial_lse_desc: tensordesc<fp32[64]>",))
    Imagined(*kernels, config=SPLIT).binding(geometry)
    for each in kernels:
        with pytest.raises(LaunchError, match=r"got partial_lse_desc|got PartialOut"):
            Imagined(each).binding(geometry)


@BOTH_WAYS
def test_a_parameter_has_one_type_in_all_kernels(direction: str) -> None:
    geometry, _ = call_of(direction)
    with pytest.raises(LaunchError, match="got softmax_scale as fp32 and as i64 in imagined_main"):
        Imagined(("softmax_scale: fp32",), ("softmax_scale: i64",), key=KEYS[direction]).binding(geometry)
