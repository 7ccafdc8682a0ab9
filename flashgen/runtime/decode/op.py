"""The torch.library op of decode calls, which stands in graphs of torch.compile; other calls go without it."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.core.features import table
from flashgen.runtime.decode.call import DecodeCall, check_call
from flashgen.runtime.decode.prefix import PREFIX_OPTIONS, Prefix, check_prefix, restored, run_with_prefix
from flashgen.runtime.decode.runs import run
from flashgen.runtime.ops.batching import map_one_by_one
from flashgen.runtime.ops.outputs import empty_lse, empty_output
from flashgen.runtime.ops.schemas import FlatArguments

_TENSORS = ("q", "k_cache", "v_cache", "seqlens")
_OPTIONS = {
    "block_table": "Tensor?",
    "causal": "bool",
    "softmax_scale": "float?",
    "leftpad": "Tensor?",
    "batch_idx": "Tensor?",
    "fixed_split_size": "int?",
    "return_lse": "bool",
}
_NAMES = (*_TENSORS, *_OPTIONS)
_FLAT = tuple(f"{kind} {name}" for name, kind in {**_OPTIONS, **PREFIX_OPTIONS}.items())
_SCHEMA = ", ".join([*("Tensor " + name for name in _TENSORS), *_FLAT])

FEATURES = FlatArguments.of(
    tuple(value for value in table.values() if value.name in ("window", "softcap", "alibi_slopes", "sinks"))
)
"""Those of decode calls alone: the others have arguments of the same names, and a graph needs each name once."""

LIBRARY = torch.library.Library("flashgen", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define(f"attention_decode({_SCHEMA}, {FEATURES.schema}) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]
OP: Any = torch.ops.flashgen.attention_decode.default
"""The output and the LSE, which is empty where it is not asked for."""


def _call_of(given: tuple[Any, ...], named: dict[str, Any]) -> tuple[DecodeCall, Prefix | None]:
    arguments = dict(zip(_NAMES, given, strict=False))
    features, *_ = FEATURES.restored(*given[len(_NAMES) + len(PREFIX_OPTIONS) :], **named)
    prefix = restored(*given[len(_NAMES) : len(_NAMES) + len(PREFIX_OPTIONS)])
    return DecodeCall(**arguments, features=features), prefix


def _run(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call, prefix = _call_of(given, named)
    out, lse = run(call, keeps=False) if prefix is None else run_with_prefix(call, prefix, keeps=False)
    return out, out.new_empty(0, dtype=torch.float32) if lse is None else lse


def _fake(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call, prefix = _call_of(given, named)
    check_call(call)
    if prefix is not None:
        check_prefix(call, prefix)
    q = call.q
    lse = empty_lse(q, bshd=True) if call.return_lse else q.new_empty(0, dtype=torch.float32)
    return empty_output(q, call.v_cache, bshd=True), lse


for _key in ("CUDA", "CPU"):
    LIBRARY.impl("attention_decode", _run, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("flashgen::attention_decode", _fake, lib=LIBRARY)
map_one_by_one("attention_decode", LIBRARY)
