"""What the parameters of backward kernels are bound to, through the driver and through Triton alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from flashgen.core.errors import LaunchError
from flashgen.core.features.positions import MAX_OFFSET
from flashgen.core.features.values import Features
from flashgen.launch import counters
from flashgen.launch.backward import FIELDS, BackwardTensors, backward_geometry
from tests.fakes.driver import FakeDriver
from tests.fakes.imagined import (
    BACKWARD_DESCRIPTORS,
    BACKWARD_POINTERS,
    ROWS,
    Both,
    Imagined,
    backward_tensors,
    pointers,
)
from tests.launch.conftest import Streams

LOG2E = math.log2(math.e)
SIZES = ("batch", "nheads", "group_size", "seqlen_q", "seqlen_k")
STRIDES = tuple(f"stride_{name}{axis}: i64" for name in FIELDS for axis in "bhs")
DBIAS = (
    "DBias: *bf16",
    *(f"stride_dbias_{axis}: i64" for axis in "bhq"),
    "bias_batch: i32",
    "bias_heads: i32",
)


@pytest.fixture
def both(cuda: FakeDriver) -> Callable[..., Both]:
    def make(
        *named: tuple[str, ...],
        key: str = "bwd-bf16-d64",
        given: BackwardTensors | None = None,
        features: Features | None = None,
    ) -> Both:
        kernel = Imagined(*named, key=key)
        return Both(kernel, cuda, backward_geometry(given or backward_tensors(key), features))

    return make


@pytest.mark.parametrize("named", [BACKWARD_POINTERS, BACKWARD_DESCRIPTORS], ids=["pointers", "descriptors"])
def test_every_kernel_is_given_the_tensors_of_the_call(
    named: tuple[tuple[str, ...], ...], both: Callable[..., Both]
) -> None:
    launch = both(*named)
    for given in (backward_tensors(), backward_tensors(dlse=True), backward_tensors()):
        found = launch(given)
        addresses, seen = pointers(given), set[str]()
        for values in found:
            for name, address in addresses.items():
                for key in (name.upper(), f"{name}_desc"):
                    assert values.get(key, address) == address
                    seen |= {name} if key in values else set()
            assert values.get("LSE", given.lse.data_ptr()) == given.lse.data_ptr()
            assert values.get("NegDelta", 0) == 0, "at the start of the scratch memory"
            assert values.get("DqAcc", 2 * 6 * ROWS * 4) == 2 * 6 * ROWS * 4
        assert seen == set(FIELDS)
        if "DLSE" in found[0]:
            expected = (0, 0) if given.dlse is None else (given.dlse.data_ptr(), 200)
            assert (found[0]["DLSE"], found[0]["dlse_rows"]) == expected


def test_sizes_and_strides_are_those_of_the_geometry(both: Callable[..., Both]) -> None:
    given = backward_tensors(bshd=True)
    named = (tuple(f"{name}: i32" for name in SIZES), STRIDES, ("NegDelta: *fp32",))
    sizes, strides, _ = both(*named, given=given)(given)
    assert sizes == dict(zip(SIZES, (2, 6, 2, 200, 333), strict=True))
    for name, field in FIELDS.items():
        assert tuple(strides[f"stride_{name}{axis}"] for axis in "bhs") == getattr(given, field).stride()[:3]


def test_scale_offset_and_features_reach_every_kernel(both: Callable[..., Both]) -> None:
    scores = (
        *("softmax_scale: fp32", "softmax_scale_log2: fp32", "softcap_rate: fp32", "softcap_scale_log2: fp32"),
        *("q_offset: i32", "window_left: i32", "window_right: i32"),
        *("AlibiSlopes: *fp32", "stride_alibi_b: i32", "Bias: *bf16", "Mask: *u8"),
        *(f"stride_{name}_{axis}: i64" for name in ("bias", "mask") for axis in "bhqk"),
    )
    features = Features(
        window=(70, None),
        softcap=30.0,
        alibi_slopes=torch.ones(2, 6),
        bias=torch.zeros(2, 1, 200, 333),
        mask=torch.ones(1, 6, 1, 333, dtype=torch.bool),
    )
    launch = both(scores, scores, scores, features=features)
    for scale, offset, window in ((0.25, 5, (70, None)), (None, None, (3, 4)), (0.25, 1 << 40, (3, 4))):
        found = launch(backward_tensors(), scale, offset, replace(features, window=window))
        assert found[0] == found[1] == found[2]
        used = scale or 0.125
        expected = {
            "softmax_scale": used,
            "softmax_scale_log2": used * LOG2E,
            "softcap_rate": 2 * LOG2E * used / 30,
            "softcap_scale_log2": 2 * LOG2E * 30,
            "q_offset": {5: 5, None: 133}.get(offset, MAX_OFFSET),
            "window_left": window[0],
            "window_right": MAX_OFFSET + 533 if window[1] is None else window[1],
            "AlibiSlopes": features.alibi_slopes.data_ptr(),  # type: ignore[union-attr]
            "stride_alibi_b": 6,
            "Bias": features.bias.data_ptr(),  # type: ignore[union-attr]
            "Mask": features.mask.data_ptr(),  # type: ignore[union-attr]
            **dict(zip([f"stride_bias_{axis}" for axis in "bhqk"], (200 * 333, 0, 333, 1), strict=True)),
            **dict(zip([f"stride_mask_{axis}" for axis in "bhqk"], (0, 333, 0, 1), strict=True)),
        }
        assert found[0] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(LaunchError, match="the kernel reads AlibiSlopes, and the features of the call have none"):
        launch.plans[0](backward_tensors(), None, None, Features(softcap=30.0))


def test_without_a_window_or_slopes_an_offset_is_clamped_to_the_lengths(both: Callable[..., Both]) -> None:
    launch = both(("q_offset: i32",), ("q_offset: i32", "NegDelta: *fp32"))
    offsets = [launch(backward_tensors(), None, offset)[1]["q_offset"] for offset in (1 << 40, -(1 << 40), None, 7)]
    assert offsets == [333, -200, 133, 7]


def test_query_offsets_may_be_a_tensor(both: Callable[..., Both]) -> None:
    given, ones = backward_tensors(), [torch.zeros(2, dtype=torch.int32) for _ in range(2)]
    launch = both(("NegDelta: *fp32",), ("QOffset: *i32",), key="bwd-bf16-d64-causal-offset")
    for one in (*ones, ones[0]):
        assert launch(given, None, one)[1]["QOffset"] == one.data_ptr()
    for plan in launch.plans:
        for wrong in (None, 3):
            with pytest.raises(LaunchError, match=rf"reads query offsets from an int32 tensor \(batch,\), got {wrong}"):
                plan(given, None, wrong)
    plain = both(("q_offset: i32",), key="bwd-bf16-d64-causal")
    for plan in plain.plans:
        with pytest.raises(LaunchError, match=r"one integer query offset, got a tensor of shape torch\.Size\(\[2\]\)"):
            plan(given, None, ones[0])


def test_the_gradient_of_a_bias_is_written_where_the_call_wants_it(both: Callable[..., Both]) -> None:
    key = "bwd-bf16-d64-bias-dbias"
    given = [backward_tensors(key)._replace(dbias=torch.empty(1, 6, 200, 333, dtype=torch.bfloat16)) for _ in "ab"]
    launch = both(("NegDelta: *fp32",), DBIAS, key=key, given=given[0])
    for one in given:
        values = launch(one)[1]
        assert values == {
            "DBias": one.dbias.data_ptr(),  # type: ignore[union-attr]
            "stride_dbias_b": 0,
            "stride_dbias_h": 200 * 333,
            "stride_dbias_q": 333,
            "bias_batch": 1,
            "bias_heads": 6,
        }


@pytest.mark.parametrize("shape", [None, (2, 6, 333), (2, 3, 200, 333), (1, 1, 200, 1), (2, 6, 100, 333)], ids=str)
def test_a_full_bias_has_a_gradient_of_its_own_shape(shape: tuple[int, ...] | None, both: Callable[..., Both]) -> None:
    key = "bwd-bf16-d64-bias-dbias"
    given = backward_tensors(key)._replace(dbias=None if shape is None else torch.empty(shape))
    four = shape if shape and len(shape) == 4 else None
    with pytest.raises(LaunchError) as caught:
        both(("NegDelta: *fp32",), DBIAS, key=key, given=given)
    assert str(caught.value).endswith(f"those of the scores (2, 6, 200, 333) or 1 in the first three, got {four}")
    both(("NegDelta: *fp32",), DBIAS, key="bwd-bf16-d64-keybias-dbias", given=backward_tensors())


@pytest.mark.parametrize("name", FIELDS)
def test_a_head_in_two_parts_has_two_descriptors_of_one_tensor(name: str, both: Callable[..., Both]) -> None:
    """Each is of the whole tensor: a kernel names the columns, so neither shape nor pointer is another."""
    two = (f"{name}_desc: tensordesc<bf16[1, 1, 64, 64]>", f"{name}1_desc: tensordesc<bf16[1, 1, 64, 32],Layout(a=1)>")
    given = [backward_tensors("bwd-bf16-d96", bshd=bshd) for bshd in (True, True)]
    launch = both(("NegDelta: *fp32",), two, key="bwd-bf16-d96", given=given[0])
    for one in given:
        values = launch(one)[1]
        tensor = getattr(one, FIELDS[name])
        for key in (f"{name}_desc", f"{name}1_desc"):
            assert values[key] == tensor.data_ptr()
            assert values[f"{key}.shape"] == tuple(tensor.shape)
            assert values[f"{key}.strides"] == tensor.stride()
        boxes = [values[f"{name}{part}_desc.encoded"].box for part in ("", "1")]
        assert boxes == [(64, 64, 1, 1), (64, 65, 1, 1)], "as Triton's metadata has them"
    descriptors = [launch.kernel.seen[-1].arguments[key] for key in (f"{name}_desc", f"{name}1_desc")]
    assert [one.block_shape for one in descriptors] == [[1, 1, 64, 64], [1, 1, 64, 32]]


def test_scratch_memory_is_described_whatever_its_rank_and_type(both: Callable[..., Both]) -> None:
    _, values, _ = both(*BACKWARD_DESCRIPTORS)(backward_tensors())
    rows = 2 * 6 * ROWS + 1
    assert (values["dq_acc_desc.shape"], values["dq_acc_desc.strides"]) == ((rows, 64), (64, 1))
    assert (values["neg_delta_desc.shape"], values["neg_delta_desc.strides"]) == ((2, 6, ROWS), (6 * ROWS, ROWS, 1))
    wide, narrow = values["neg_delta_desc.encoded"], values["dq_acc_desc.encoded"]
    assert (wide.dtype, wide.shape, wide.byte_strides) == (7, (ROWS, 6, 2), (4 * ROWS, 4 * 6 * ROWS))
    assert (narrow.dtype, narrow.shape, narrow.byte_strides) == (7, (64, rows), (4 * 64,))
    assert values["q_desc.encoded"].dtype == 9
    assert (values["neg_delta_desc"], values["dq_acc_desc"]) == (0, 4 * 2 * 6 * ROWS)
    (flat,) = both(("neg_delta_desc: tensordesc<fp32[64]>",))(backward_tensors())
    assert (flat["neg_delta_desc.shape"], flat["neg_delta_desc.strides"]) == ((2 * 6 * ROWS,), (1,))
    assert flat["neg_delta_desc.encoded"].byte_strides == ()


def test_each_persistent_kernel_has_a_counter_of_its_own_on_each_stream(
    both: Callable[..., Both], streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "_FREE", {})
    monkeypatch.setattr(counters, "zeros", lambda index, count: torch.zeros(count, dtype=torch.int32))
    launch = both(("Counter: *i32", "NegDelta: *fp32"), ("NegDelta: *fp32",), ("NegDelta: *fp32", "Counter: *i32"))
    seen = []
    for streams.current in (0, 8, 0):
        for plan in launch.plans:
            plan(backward_tensors())
        read = [one.values["Counter"] for one in launch.cuda.launches[-3:] if "Counter" in one.values]
        seen_last = [one.arguments for one in launch.kernel.seen[-3:]]
        given = [one["Counter"].data_ptr() for one in seen_last if "Counter" in one]
        assert [one.stream for one in launch.cuda.launches[-3:]] == [streams.current] * 3
        seen.append(read + given)
    assert seen[0] == seen[2]
    assert len(set(seen[0] + seen[1])) == 8
