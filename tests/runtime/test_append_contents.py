"""What `append_kv` looks for in lengths, tables and slots under `FLASHGEN_CHECKS=1`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.core.errors import WorkloadError
from flashgen.core.settings import settings
from flashgen.runtime.ops import append as ops
from flashgen.runtime.ops.append_contents import check_contents
from flashgen.runtime.ops.append_rules import AppendArguments, check

NEW, HEADS, DIM, PAGE = 3, 2, 32, 8
COS = torch.zeros(20, DIM // 2)
ROTARY = {"rotary_cos": COS, "rotary_sin": COS}


def numbers(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def given(**changes: Any) -> AppendArguments:
    """Two sequences of 7 and 12 keys in pages of 8; entries that no new key needs are anything."""
    table = torch.tensor([[0, 3, -1], [99, 5, -7]], dtype=torch.int32)
    paged = {"seqlens": numbers(7, 12), "block_table": table}
    new, cache = torch.zeros(2, NEW, HEADS, DIM), torch.zeros(6, PAGE, HEADS, DIM)
    tensors = {"k": new, "v": new, "k_cache": cache, "v_cache": cache.clone()}
    found = AppendArguments(**(tensors | paged | changes))
    check(found)
    return found


RIGHT: dict[str, dict[str, Any]] = {
    "pages": {},
    "to the last slot": {"seqlens": numbers(21, 13), "block_table": torch.tensor([[9, 9, 2], [9, 1, 9]]).int()},
    "rotary": {**ROTARY, "rotary_seqlens": numbers(17, 0)},
    "a row each": {"block_table": None, "seqlens": numbers(5, 0)},
    "rows": {"block_table": None, "seqlens": numbers(5, 0), "batch_idx": numbers(5, 0)},
    "one length": {"block_table": None, "seqlens": None, "seqlen": 5},
    "slots": {"block_table": None, "seqlens": None, "slot_mapping": numbers(0, -1, 47, -9, 3, 4, dtype=torch.int64)},
    "slots and angles": {
        "block_table": None,
        "seqlens": numbers(17, 0),  # beyond a row, which slots do not ask for
        "slot_mapping": numbers(0, 1, 2, 3, 4, 5, dtype=torch.int64),
        **ROTARY,
    },
    "angles of tokens with a slot alone": {
        "block_table": None,
        "seqlens": numbers(18, 19),
        "slot_mapping": numbers(0, 1, -1, 2, -1, -1, dtype=torch.int64),
        **ROTARY,
    },
    "angles of packed tokens, of which the last are padding": {
        **{name: torch.zeros(NEW, HEADS, DIM) for name in ("k", "v")},
        "block_table": None,
        "seqlens": None,
        "slot_mapping": numbers(0, 1, dtype=torch.int64),
        "rotary_seqlens": numbers(18),
        **ROTARY,
    },
}

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a length below 0": (
        {"seqlens": numbers(7, -1)},
        "seqlens are 0 to 21: 24 slots less 3 new keys; got -1 for sequence 1",
    ),
    "no room": ({"seqlens": numbers(22, 0)}, "got 22 for sequence 0"),
    "no room in a row": ({"block_table": None, "seqlens": numbers(5, 6)}, "0 to 5: 8 slots less 3 new keys; got 6"),
    "a page beyond the cache": ({"seqlens": numbers(7, 6)}, "page ids of new keys are 0 to 5; got 99 for sequence 1"),
    "a page below 0": ({"seqlens": numbers(14, 12)}, "page ids of new keys are 0 to 5; got -1 for sequence 0"),
    "a row beyond": (
        {"block_table": None, "seqlens": numbers(5, 0), "batch_idx": numbers(5, 6)},
        "batch_idx is 0 to 5, a row of the caches; got 6 for sequence 1",
    ),
    "a slot beyond": (
        {"block_table": None, "seqlens": None, "slot_mapping": numbers(0, 1, 48, 2, 3, 4, dtype=torch.int64)},
        "slots are below 48, as many as the cache has, or negative for none; got 48 for token 2",
    ),
    "an angle beyond": ({**ROTARY, "rotary_seqlens": numbers(0, 18)}, "begin at 0 to 17, .* got 18 for sequence 1"),
    "an angle of lengths": (RIGHT["slots and angles"] | {"seqlens": numbers(18, 0)}, "0 to 19, .* got 20 for token 2"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_has_a_place_passes(name: str) -> None:
    check_contents(given(**RIGHT[name]))


@pytest.mark.parametrize("name", WRONG)
def test_what_would_be_left_out_is_refused(name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises(WorkloadError, match=message):
        check_contents(given(**changes))


def test_nothing_is_asked_of_no_sequences() -> None:
    none = torch.zeros(0, NEW, HEADS, DIM)
    cache = torch.zeros(6, PAGE, HEADS, DIM)
    table = torch.zeros(0, 0, dtype=torch.int32)
    check_contents(AppendArguments(none, none, cache, cache.clone(), numbers(), block_table=table))


def test_the_setting_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[AppendArguments] = []
    monkeypatch.setattr(ops, "_prepared", lambda given, aligned: calls.append)
    monkeypatch.setattr(ops, "_MEMO", {})
    wrong = given(seqlens=numbers(22, 0))
    ops.append(wrong)
    monkeypatch.setenv("FLASHGEN_CHECKS", "1")
    settings.cache_clear()
    with pytest.raises(WorkloadError, match="got 22"):
        ops.append(wrong)
    ops.append(given())
    settings.cache_clear()
    assert len(calls) == 2
