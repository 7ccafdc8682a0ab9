"""What `append_kv` and `merge_states` refuse, with the rule and the value, and the same without memory."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import flashgen
from flashgen.core.errors import FlashgenError, UnsupportedError, WorkloadError
from flashgen.runtime.ops.overlap import lies_in_itself, share_memory

BATCH, NEW, HEADS, DIM, PAGES, PAGE = 2, 3, 2, 32, 4, 8


def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def call(**changes: Any) -> dict[str, Any]:
    """The arguments of a good call with pages, with changes; None takes one out."""
    given = {
        "k": torch.zeros(BATCH, NEW, HEADS, DIM),
        "v": torch.zeros(BATCH, NEW, HEADS, DIM),
        "k_cache": torch.zeros(6, PAGE, HEADS, DIM),
        "v_cache": torch.zeros(6, PAGE, HEADS, DIM),
        "seqlens": integers(BATCH),
        "block_table": integers(BATCH, PAGES),
    } | changes
    return {name: value for name, value in given.items() if value is not None}


COS = torch.zeros(PAGES * PAGE, DIM // 2)
ROTARY = {"rotary_cos": COS, "rotary_sin": COS}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"k": torch.zeros(BATCH, HEADS, DIM)}, "k is (batch, seqlen_new, nheads_k, head_dim), and v the same"),
    "values": ({"v": torch.zeros(BATCH, NEW, 1, DIM)}, "got (2, 3, 2, 32) and (2, 3, 1, 32)"),
    "no heads": ({"k": torch.zeros(2, 3, 0, 8), "v": torch.zeros(2, 3, 0, 8)}, "are at least 1, got k (2, 3, 0, 8)"),
    "dtype": (
        {"k": torch.zeros(BATCH, NEW, HEADS, DIM).double()},
        "bfloat16, float16 or float32, got k with torch.float64",
    ),
    "cache dtype": ({"v_cache": torch.zeros(6, PAGE, HEADS, DIM).half()}, "v_cache torch.float16 on cpu"),
    "device": ({"k_cache": torch.zeros(6, PAGE, HEADS, DIM, device="meta")}, "k_cache torch.float32 on meta"),
    "cache heads": (
        {"k_cache": torch.zeros(6, PAGE, 1, DIM)},
        "got (6, 8, 1, 32) and (6, 8, 2, 32) for k (2, 3, 2, 32)",
    ),
    "cache width": ({"v_cache": torch.zeros(6, PAGE, HEADS, 16)}, "(6, 8, 2, 32) and (6, 8, 2, 16)"),
    "empty pages": (
        {"k_cache": torch.zeros(6, 0, HEADS, DIM), "v_cache": torch.zeros(6, 0, HEADS, DIM)},
        "a page has at least 1 slot, got k_cache (6, 0, 2, 32)",
    ),
    "table dtype": (
        {"block_table": integers(BATCH, PAGES, dtype=torch.int64)},
        "block_table is int32 (batch, num_pages)",
    ),
    "table rank": ({"block_table": integers(BATCH)}, "got torch.int32 (2,) on cpu for batch 2"),
    "table batch": ({"block_table": integers(3, PAGES)}, "got torch.int32 (3, 4) on cpu for batch 2"),
    "two places": ({"batch_idx": integers(BATCH)}, "exclude each other, got block_table and batch_idx"),
    "slots and table": (
        {"slot_mapping": integers(6, dtype=torch.int64)},
        "exclude each other, got block_table and slot",
    ),
    "slots dtype": ({"block_table": None, "slot_mapping": integers(6)}, "slot_mapping is int64 on the device of k"),
    "slots size": (
        {"block_table": None, "slot_mapping": integers(5, dtype=torch.int64)},
        "a slot_mapping has one slot for each token, (batch, seqlen_new) or flat, or for the first ones of packed",
    ),
    "rows": (
        {"block_table": None, "k_cache": torch.zeros(1, 8, 2, 32), "v_cache": torch.zeros(1, 8, 2, 32)},
        "1 rows for",
    ),
    "lengths dtype": ({"seqlens": integers(BATCH, dtype=torch.int64)}, "seqlens is int32 (batch,) on the device of k"),
    "lengths size": ({"seqlens": integers(1)}, "got torch.int32 (1,) on cpu for batch 2"),
    "no lengths": ({"seqlens": None}, "seqlens, the keys of each sequence before, are given unless a slot_mapping is"),
    "number below": ({"seqlens": -1}, "32 slots less 3, got -1"),
    "number above": ({"seqlens": 30}, "32 slots less 3, got 30"),
    "lengths kind": ({"seqlens": 1.5}, "seqlens, where it is no tensor, must be a whole number, got 1.5"),
    "padding": ({"leftpad": integers(BATCH, 1)}, "leftpad is int32 (batch,) on the device of k"),
    "one table": ({"rotary_cos": COS}, "rotary_cos and rotary_sin come together, before rotary_seqlens or q, got"),
    "tables apart": ({"rotary_cos": COS, "rotary_sin": COS[:, :8]}, "got (32, 16) and (32, 8)"),
    "rotary_dim": (
        {"rotary_cos": COS[:, :12], "rotary_sin": COS[:, :12]},
        "a multiple of 16 up to head_dim 32, got 24",
    ),
    "rotary width": ({"rotary_cos": COS.repeat(1, 2), "rotary_sin": COS.repeat(1, 2)}, "head_dim 32, got 64"),
    "rotary dtype": (
        {"rotary_cos": COS.half(), "rotary_sin": COS.half()},
        "have the dtype of k or float32, got torch.float16",
    ),
    "positions": ({"rotary_cos": COS[:31], "rotary_sin": COS[:31]}, "got 31 positions and 32 slots"),
    "slots without positions": (
        {"block_table": None, "seqlens": None, "slot_mapping": integers(6, dtype=torch.int64), **ROTARY},
        "a rotary embedding needs the positions of tokens, seqlens or rotary_seqlens, got neither",
    ),
    "q alone": ({"q": torch.zeros(BATCH, 1, HEADS, DIM)}, "come together, before rotary_seqlens or q, got ['q'] alone"),
    "q batch": ({"q": torch.zeros(1, 1, HEADS, DIM), **ROTARY}, "q is (batch, seqlen_q, nheads, head_dim)"),
    "q heads": ({"q": torch.zeros(BATCH, 1, 3, DIM), **ROTARY}, "nheads is a multiple of nheads_k, got 3 and 2"),
    "no tensor": ({"k_cache": [1, 2]}, "k_cache must be a tensor"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_append_kv_says_the_rule_and_the_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(message)):
        flashgen.append_kv(**call(**changes))


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in ("device", "no tensor")])
def test_append_kv_says_the_same_without_memory(name: str) -> None:
    changes, message = REFUSED[name]
    given = call(**changes)
    given = {key: one.to("meta") if isinstance(one, torch.Tensor) else one for key, one in given.items()}
    with pytest.raises(WorkloadError, match=re.escape(message.replace("cpu", "meta"))):
        flashgen.append_kv(**given)


def halves() -> torch.Tensor:
    return torch.zeros(6, 2, PAGE, HEADS, DIM)


MEMORY: dict[str, tuple[dict[str, Any], str]] = {
    "columns": ({"k": torch.zeros(BATCH, NEW, DIM, HEADS).mT}, "the last dimension is contiguous, got k with strides"),
    "lengths": ({"seqlens": integers(1).expand(BATCH)}, "seqlens is contiguous, got strides (0,) for shape (2,)"),
    "expanded": (
        {"k_cache": torch.zeros(1, PAGE, HEADS, DIM).expand(6, -1, -1, -1)},
        "a place of its own, got k_cache",
    ),
}


@pytest.mark.parametrize(("changes", "message"), MEMORY.values(), ids=MEMORY)
def test_strides_are_refused_with_the_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(message)):
        flashgen.append_kv(**call(**changes))


def test_tensors_elsewhere_and_gradients_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"flashgen\.append_kv runs on GPUs, got tensors on cpu"):
        flashgen.append_kv(**call())
    k = torch.zeros(BATCH, NEW, HEADS, DIM, requires_grad=True)
    with pytest.raises(UnsupportedError, match="append_kv has no gradient: call it under torch"):
        flashgen.append_kv(**call(k=k))
    with torch.no_grad(), pytest.raises(UnsupportedError, match="runs on GPUs"):
        flashgen.append_kv(**call(k=k))


def test_memory_that_two_tensors_share_is_found_exactly() -> None:
    whole = halves()
    assert not share_memory(whole[:, 0], whole[:, 1])
    assert not share_memory(whole[..., :16], whole[..., 16:])
    assert not share_memory(whole[0:2], whole[2:])
    assert share_memory(whole[..., :17], whole[..., 16:])
    assert share_memory(whole[:, 0], whole[2:, 0])
    assert share_memory(whole[:, 1], whole[5, 1, 7:])
    assert not share_memory(whole[:, :, ::2], whole[:, :, 1::2])
    assert not share_memory(whole, torch.zeros(4))
    assert not share_memory(whole[:0], whole)
    halved = whole.view(torch.float16)
    assert share_memory(halved[..., 1:2], whole[..., :1])
    assert not share_memory(halved[..., 2:3], whole[..., :1])
    assert not lies_in_itself(whole.permute(4, 2, 0, 1, 3))
    assert lies_in_itself(whole.flatten().as_strided((3, 4), (2, 1)))
    assert not lies_in_itself(whole[:, :1].as_strided((3, 1), (4, 0)))


STATES: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "none": ([], [], {}, "there is at least one state, and an LSE for each, got 0 outputs, 0 LSEs"),
    "number": (torch.zeros(3, 2, 4, 5, 8), torch.zeros(2, 2, 4, 5), {}, "got 3 outputs, 2 LSEs"),
    "no state": (torch.zeros(0, 2, 4, 5, 8), torch.zeros(0, 2, 4, 5), {}, "there is at least one state"),
    "rank": (
        torch.zeros(2, 4, 5, 8),
        torch.zeros(2, 4, 5),
        {},
        "of four dimensions, bhsd, and of one shape, got (4, 5, 8)",
    ),
    "shapes": ([torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 6, 8)], torch.zeros(2, 2, 4, 5), {}, "and (2, 4, 6, 8)"),
    "layout": (torch.zeros(2, 2, 5, 4, 8), torch.zeros(2, 2, 4, 5), {}, "float32 (2, 5, 4) for an output (2, 5, 4, 8)"),
    "packed": (
        torch.zeros(2, 9, 4, 8),
        torch.zeros(2, 9, 4),
        {"layout": "thd"},
        "float32 (4, 9) for an output (9, 4, 8) in",
    ),
    "word": (
        torch.zeros(2, 2, 4, 5, 8),
        torch.zeros(2, 2, 4, 5),
        {"layout": "sbhd"},
        'layout is "bhsd", "bshd" or "thd", got',
    ),
    "lse dtype": (torch.zeros(2, 2, 4, 5, 8), torch.zeros(2, 2, 4, 5).half(), {}, "got torch.float16 (2, 4, 5) on cpu"),
    "dtype": (
        torch.zeros(2, 2, 4, 5, 8).double(),
        torch.zeros(2, 2, 4, 5),
        {},
        "bfloat16, float16 or float32, got torch.fl",
    ),
    "dtypes": (
        [torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 5, 8).half()],
        [torch.zeros(2, 4, 5)] * 2,
        {},
        "got torch.float32 on cpu and torch.float16 on cpu",
    ),
    "result": (
        torch.zeros(2, 2, 4, 5, 8),
        torch.zeros(2, 2, 4, 5),
        {"dtype": torch.int8},
        "output is bfloat16, float16 or",
    ),
    "kind": (torch.zeros(2, 2, 4, 5, 8), 3, {}, "lses must be a list, got 3"),
    "dtype kind": (
        torch.zeros(2, 2, 4, 5, 8),
        torch.zeros(2, 2, 4, 5),
        {"dtype": "half"},
        "output is bfloat16, float16 or float32, got 'half'",
    ),
}


@pytest.mark.parametrize(("outs", "lses", "options", "message"), STATES.values(), ids=STATES)
def test_merge_states_says_the_rule_and_the_value(outs: Any, lses: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(message)):
        flashgen.merge_states(outs, lses, **options)


def test_merge_states_needs_a_gpu_and_columns_side_by_side() -> None:
    with pytest.raises(UnsupportedError, match=r"flashgen\.merge_states runs on GPUs, got tensors on cpu"):
        flashgen.merge_states(torch.zeros(2, 2, 4, 5, 8), torch.zeros(2, 2, 4, 5))
    with pytest.raises(WorkloadError, match=r"the last dimension of a state is contiguous, got strides"):
        flashgen.merge_states(torch.zeros(2, 2, 4, 8, 5).mT, torch.zeros(2, 2, 4, 5))


def test_results_without_memory_have_the_shapes_and_strides_of_real_ones() -> None:
    outs, lses = torch.empty(12, 2, 5, 4, 8, device="meta").bfloat16(), torch.empty(12, 2, 4, 5, device="meta")
    for given in ((outs, lses), (list(outs), list(lses)), (list(outs)[:3], lses[:3])):
        out, lse = flashgen.merge_states(*given, layout="bshd", dtype=torch.float32)
        assert (out.shape, out.dtype, out.stride()) == ((2, 5, 4, 8), torch.float32, (160, 32, 8, 1))
        assert (lse.shape, lse.dtype) == ((2, 4, 5), torch.float32)
    given = {key: one.to("meta") for key, one in call(q=torch.zeros(BATCH, 1, 4, DIM), **ROTARY).items()}
    assert flashgen.append_kv(**given).shape == (BATCH, 1, 4, DIM)
    assert issubclass(WorkloadError, FlashgenError)
