"""Calls of `flashgen.attention` of many kinds in turns, which no memo may take for each other: forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
import triton.language as tl

import flashgen
from flashgen.core.features.values import BlockMask
from flashgen.runtime.autograd.ops import attention_backward_op
from tests import tiers
from tests.fakes.turns import Call, Change, Kind, Results, Turns, changed
from tests.runtime.layouts import cut, evens, expanded, odd, odd_steps, same, shifted, swapped

Tensor = torch.Tensor


def one_head(tensor: Tensor) -> Tensor:
    """One head in the place of all; of (batch, rows, heads, head_dim) one row."""
    return tensor[:, :1].expand(tensor.shape)


def of_inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """TF32 is allowed."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@contextlib.contextmanager
def same_bits() -> Iterator[None]:
    """Algorithms are deterministic."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def shift_scores(score, b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return score + h


def scale_scores(score, b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return score * 2.0


def from_table(score, b, h, q_idx, k_idx, table):  # type: ignore[no-untyped-def]
    return score + tl.load(table + h)


def options_at(batch: int, heads: int, rows: int, keys: int, bshd: bool, **options: Any) -> dict[str, Any]:
    """Options of a call, some of which are made for its sizes."""
    made = {
        name: one(batch, heads, rows, keys) if callable(one) and name in SIZED else one for name, one in options.items()
    }
    return {"layout": "bshd" if bshd else "bhsd", **made}


SIZED = ("q_offset", "alibi_slopes", "sinks", "bias", "mask", "aux", "block_mask", "rng_state")


def dense(
    size: int,
    *,
    stream: int = 7,
    trains: str = "",
    few: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    dims: tuple[int, int] = (64, 64),
    heads: tuple[int, int] = (4, 2),
    bshd: bool = False,
    laid_q: Callable[[Tensor], Tensor] = same,
    laid_k: Callable[[Tensor], Tensor] = same,
    laid_dout: Callable[[Tensor], Tensor] = same,
    under: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    of: tuple[str, ...] = (),
    changes: Mapping[str, Change] = {},
    **options: Any,
) -> Call:
    """A call, of a `few` queries where it says so; `trains` names the tensors whose gradients are asked for."""
    batch, rows, keys = 1 + size % 2, few or 50 + 3 * size, 2000 + size if few else 60 + 5 * size

    def made(head: int, length: int, dim: int) -> Tensor:
        return torch.zeros(*((batch, length, head, dim) if bshd else (batch, head, length, dim)), dtype=dtype)

    q, k, v = (
        laid_q(made(heads[0], rows, dims[0])),
        laid_k(made(heads[1], keys, dims[0])),
        made(heads[1], keys, dims[1]),
    )
    given = options_at(batch, heads[0], rows, keys, bshd, **options)
    tensors: dict[str, Any] = {"q": q, "k": k, "v": v}
    tensors |= {name: one for name, one in given.items() if isinstance(one, Tensor)}
    tensors |= {name: change(tensors[name]) for name, change in changes.items()}
    given |= {name: tensors[name] for name in changes}
    q, k, v = (given.pop(name, tensors[name]) for name in "qkv")
    tensors |= {f"aux{n}": one for n, one in enumerate(given.get("aux", ()))}
    wanted = [tensors[name] for name in trains.split()]

    def passes() -> Iterator[Results]:
        for one in wanted:
            one.requires_grad_()
        with under():
            out = flashgen.attention(q, k, v, **given)
            results = dict(zip(("out", "lse"), out if isinstance(out, tuple) else (out,), strict=False))
            yield results
            if wanted and torch.is_grad_enabled():
                asked = [results[name] for name in of or results]
                douts = [laid_dout(torch.zeros_like(one)) for one in asked]
                found = torch.autograd.grad(asked, wanted, douts)
                yield results | {f"d{name}": one for name, one in zip(trains.split(), found, strict=True)}

    return Call(tensors=tensors, passes=passes, stream=stream)


def blocks(of_each: bool, trains: bool, batch: int, heads: int, rows: int, keys: int) -> BlockMask:
    """A block mask of all blocks, for all heads or of each."""
    axes, (one, other) = (batch, heads) if of_each else (1, 1), (-(-rows // 128), -(-keys // 128))
    lists = {}
    for prefix, first, second in (("", one, other), *((("q_", other, one),) if trains else ())):
        for kind in ("partial", "full"):
            lists[f"{prefix}{kind}_counts"] = torch.zeros(*axes, first, dtype=torch.int32)
            lists[f"{prefix}{kind}_indices"] = torch.zeros(*axes, first, second, dtype=torch.int32)
    return BlockMask(**lists, seqlen_q=rows, seqlen_k=keys)


def slopes(batch: int, heads: int, rows: int, keys: int) -> Tensor:
    return torch.zeros(heads)


def slopes_of_each(batch: int, heads: int, rows: int, keys: int) -> Tensor:
    return torch.zeros(batch, heads)


def wide_slopes(batch: int, heads: int, rows: int, keys: int) -> Tensor:
    return torch.zeros(batch, heads + 3)[:, :heads]


def numbers(dtype: torch.dtype, batch: int, heads: int, rows: int, keys: int) -> Tensor:
    return torch.zeros(heads, dtype=dtype)


def table(dtype: torch.dtype, batch: int, heads: int, rows: int, keys: int) -> tuple[Tensor, ...]:
    return (torch.zeros(heads, dtype=dtype),)


def scores(
    dtype: torch.dtype,
    axes: str,
    batch: int,
    heads: int,
    rows: int,
    keys: int,
    laid: Callable[[Tensor], Tensor] = same,
) -> Tensor:
    """A bias or a mask with those of its axes that are named, of rows of whole 16 bytes."""
    sizes = {"b": batch, "h": heads, "q": rows, "k": keys}
    room = [sizes[axis] if axis in axes else 1 for axis in "bhq"]
    return laid(torch.zeros(*room, -keys % 16 + keys, dtype=dtype))[..., :keys]


def offsets(batch: int, heads: int, rows: int, keys: int) -> Tensor:
    return torch.zeros(batch, dtype=torch.int32)


def state(batch: int, heads: int, rows: int, keys: int) -> Tensor:
    return torch.zeros(2, dtype=torch.int64)


CAUSAL = {"causal": True}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "head dims": {"dims": (128, 128)},
    "odd head dims": {"dims": (20, 20)},
    "wide values": {"dims": (64, 128)},
    "narrow values": {"dims": (128, 64)},
    "fp16": {"dtype": torch.float16},
    "fp32": {"dtype": torch.float32},
    "tf32": {"dtype": torch.float32, "under": tf32},
    "autocast": {"dtype": torch.float32, "under": autocast},
    "no gradient": {"trains": "q", "under": torch.no_grad},
    "inference": {"under": torch.inference_mode},
    "tensors of inference": {"laid_q": of_inference, "laid_k": of_inference, "under": torch.inference_mode},
    "heads": {"heads": (6, 1)},
    "bshd": {"bshd": True},
    "causal": CAUSAL,
    "causal bshd": {**CAUSAL, "bshd": True},
    "offset": {**CAUSAL, "q_offset": 3},
    "other offset": {**CAUSAL, "q_offset": -7},
    "far offset": {**CAUSAL, "q_offset": 10**6},
    "no offset": {**CAUSAL, "q_offset": 0},
    "offsets": {**CAUSAL, "q_offset": offsets},
    "scale": {"softmax_scale": 0.3},
    "other scale": {"softmax_scale": 0.5, **CAUSAL},
    "lse": {"return_lse": True},
    "stream": {"stream": 9},
    "causal lse": {"return_lse": True, **CAUSAL},
    "odd address": {"laid_q": shifted},
    "odd address of keys": {"laid_k": shifted},
    "odd strides": {"laid_q": odd},
    "odd steps": {"laid_q": odd_steps, "laid_k": odd_steps},
    "other order": {"laid_q": swapped},
    "cut": {"laid_q": cut, "laid_k": cut},
    "one head": {"laid_k": one_head},
    "one query": {"laid_q": one_head, "bshd": True},
    "left": {"window": (8, None)},
    "right": {"window": (None, 8)},
    "both": {"window": (8, 8)},
    "all": {"window": (10**9, 8)},
    "left and causal": {"window": (8, None), **CAUSAL},
    "left and zero": {"window": (8, 0)},
    "left, causal and offset": {"window": (8, None), **CAUSAL, "q_offset": 5},
    "left and offsets": {"window": (8, None), "q_offset": offsets},
    "softcap": {"softcap": 30.0},
    "other softcap": {"softcap": 50.0},
    "softcap and scale": {"softcap": 30.0, "softmax_scale": 0.5},
    "slopes": {"alibi_slopes": slopes},
    "slopes of each": {"alibi_slopes": slopes_of_each},
    "slopes far apart": {"alibi_slopes": wide_slopes},
    "slopes and offset": {"alibi_slopes": slopes, "q_offset": 9},
    "sinks": {"sinks": partial(numbers, torch.float32)},
    "sinks bf16": {"sinks": partial(numbers, torch.bfloat16)},
    "sinks and lse": {"sinks": partial(numbers, torch.float32), "return_lse": True},
    "bias": {"bias": partial(scores, torch.bfloat16, "bhqk")},
    "bias fp32": {"bias": partial(scores, torch.float32, "bhqk")},
    "bias of heads": {"bias": partial(scores, torch.bfloat16, "hqk")},
    "bias of keys": {"bias": partial(scores, torch.bfloat16, "bk")},
    "odd bias": {"bias": partial(scores, torch.bfloat16, "bhqk", laid=shifted)},
    "mask": {"mask": partial(scores, torch.bool, "bhqk")},
    "mask of keys": {"mask": partial(scores, torch.bool, "bk")},
    "mask and bias": {
        "mask": partial(scores, torch.bool, "qk"),
        "bias": partial(scores, torch.bfloat16, "hqk"),
    },
    "score_mod": {"score_mod": shift_scores},
    "other score_mod": {"score_mod": scale_scores},
    "mask_mod": {"mask_mod": evens},
    "aux": {"score_mod": from_table, "aux": partial(table, torch.float32)},
    "aux bf16": {"score_mod": from_table, "aux": partial(table, torch.bfloat16)},
    "block mask": {"mask_mod": evens, "block_mask": partial(blocks, False, False)},
    "block mask of each": {"mask_mod": evens, "block_mask": partial(blocks, True, True)},
    "block mask that trains": {"mask_mod": evens, "block_mask": partial(blocks, False, True)},
    "block mask of other lengths": {"mask_mod": evens, "block_mask": lambda *_: blocks(False, True, 1, 1, 8, 8)},
    "wrong offsets": {**CAUSAL, "q_offset": lambda batch, *_: torch.zeros(batch, dtype=torch.int64)},
    "wrong slopes": {"alibi_slopes": partial(numbers, torch.bfloat16)},
    "wrong sinks": {"sinks": partial(numbers, torch.float16)},
    "wrong mask": {"mask": partial(scores, torch.uint8, "bhqk")},
    "wrong bias": {"bias": partial(scores, torch.float64, "bhqk")},
    "bias of fewer keys": {"bias": lambda batch, heads, rows, keys: torch.zeros(rows, keys - 1)},
    "wrong state": {"dropout_p": 0.1, "rng_state": lambda *_: torch.zeros(2, dtype=torch.int32)},
    "dropout": {"dropout_p": 0.1, "rng_state": state},
    "other dropout": {"dropout_p": 0.5, "rng_state": state},
}
FEW: dict[str, dict[str, Any]] = {
    f"{words}, {name}": {**KINDS[name], "few": count}
    for words, count in {"few": 3, "one": 1}.items()
    for name in (
        *("plain", "causal", "offset", "no offset", "offsets", "scale", "lse", "left and causal", "softcap"),
        *("other softcap", "slopes", "slopes of each", "sinks", "sinks bf16", "head dims", "odd address", "bshd"),
    )
}
TRAINED: dict[str, dict[str, Any]] = {
    f"{name}, trained": {"trains": "q k v", **KINDS[name]}
    for name in KINDS
    if name not in ("far offset", "no offset", "all", "left and zero", "autocast") and "inference" not in name
} | {
    "keys alone": {"trains": "k"},
    "deterministic": {"trains": "q k v", "deterministic": True},
    "deterministic by torch": {"trains": "q k v", "under": same_bits},
    "softcap, deterministic by torch": {"trains": "q k v", "under": same_bits, "softcap": 30.0},
    "deterministic and causal": {"trains": "q k v", "deterministic": True, **CAUSAL},
    "of the lse": {"trains": "q k", "return_lse": True, "of": ("lse",)},
    "of the output": {"trains": "q k v", "return_lse": True, "of": ("out",)},
    "odd gradient": {"trains": "q k v", "laid_dout": shifted},
    "gradient in other order": {"trains": "q k v", "laid_dout": swapped},
    "odd strides of a gradient": {"trains": "q k v", "laid_dout": odd},
    "expanded gradient": {"trains": "q k v", "laid_dout": expanded},
    "bias that is learned": {**KINDS["bias"], "trains": "q bias"},
    "bias of heads that is learned": {**KINDS["bias of heads"], "trains": "q bias"},
    "bias of keys that is learned": {**KINDS["bias of keys"], "trains": "q k bias"},
    "sinks that are learned": {**KINDS["sinks"], "trains": "q sinks"},
    "table that is learned": {**KINDS["aux"], "trains": "q aux0"},
}


def kinds_of(named: dict[str, dict[str, Any]]) -> dict[str, Kind]:
    return {name: partial(dense, **given) for name, given in named.items()}


def test_forward_calls_in_turns_are_launched_as_each_alone(turns: Turns) -> None:
    turns.check(kinds_of(KINDS | FEW), range(3))


def test_backward_passes_in_turns_are_launched_as_each_alone(turns: Turns) -> None:
    turns.check(kinds_of({"plain": {}, "causal": CAUSAL, "lse": {"return_lse": True}} | TRAINED), range(3))


CHANGED = (
    changed("q", "k", "v", **CAUSAL),
    changed("q", "k", "v", bshd=True, trains="q k v"),
    changed("q_offset", q_offset=offsets, **CAUSAL),
    changed("alibi_slopes", "sinks", alibi_slopes=slopes_of_each, sinks=partial(numbers, torch.float32)),
    changed("bias", "mask", bias=partial(scores, torch.bfloat16, "bhqk"), mask=partial(scores, torch.bool, "qk")),
    changed("bias", bias=partial(scores, torch.bfloat16, "hqk"), trains="q bias"),
    changed("rng_state", rng_state=state, dropout_p=0.1),
)


@pytest.mark.parametrize("kinds", tiers.first(2, CHANGED))
def test_calls_of_which_a_tensor_is_another_one_are_launched_as_each_alone(
    turns: Turns, kinds: dict[str, dict[str, Any]]
) -> None:
    turns.check(kinds_of(kinds), range(3))


def differentiated(
    size: int,
    *,
    bshd: bool = False,
    laid_out: Callable[[Tensor], Tensor] = same,
    laid_lse: Callable[[Tensor], Tensor] = same,
    laid_dlse: Callable[[Tensor], Tensor] | None = None,
    **features: Any,
) -> Call:
    """The op of backward passes, which programs of ring attention call with outputs and LSEs of their own."""
    batch, heads, rows = 1 + size % 2, 4, 50 + 3 * size
    shape = (batch, rows, heads, 64) if bshd else (batch, heads, rows, 64)
    q, k, v, out, dout = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(5))
    lse = torch.zeros(batch, heads, rows)
    given = {"q": q, "k": k, "v": v, "out": laid_out(out), "lse": laid_lse(lse), "dout": dout}
    given["dlse"] = None if laid_dlse is None else laid_dlse(lse)

    def passes() -> Iterator[Results]:
        found = attention_backward_op(**given, bshd=bshd, **features)
        yield dict(zip(("dq", "dk", "dv"), found, strict=False))

    return Call(tensors=given, passes=passes)


DIFFERENTIATED: dict[str, dict[str, Any]] = {
    f"{kind}{name}": {**options, **given}
    for kind, options in {"": {}, "bshd, ": {"bshd": True}, "softcap, ": {"softcap": 9.0}}.items()
    for name, given in {
        "plain": {},
        "output in fp32": {"laid_out": Tensor.float},
        "output in fp16": {"laid_out": Tensor.half},
        "output of fewer rows": {"laid_out": lambda out: out[:, :-1]},
        "output of all rows": {"laid_out": lambda out: out[:, :1].expand(out.shape)},
        "lse in bf16": {"laid_lse": Tensor.bfloat16},
        "lse of more rows": {"laid_lse": lambda lse: torch.nn.functional.pad(lse, (0, 8))},
        "lse by rows": {"laid_lse": lambda lse: lse.transpose(1, 2).contiguous().transpose(1, 2)},
        "gradient of the lse": {"laid_dlse": same},
        "gradient of the lse in fp16": {"laid_dlse": Tensor.half},
        "gradient of the lse of one row": {"laid_dlse": lambda lse: lse[..., :1]},
        "expanded gradient of the lse": {"laid_dlse": expanded},
    }.items()
}


@tiers.EXHAUSTIVE
def test_ops_of_backward_passes_in_turns_are_launched_as_each_alone(turns: Turns) -> None:
    turns.check({name: partial(differentiated, **given) for name, given in DIFFERENTIATED.items()}, range(3))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 0, 0), (0, 5, 7), (2, 5, 0), (2, 0, 7), (2, 0, 0)])
def test_empty_calls_of_grouped_heads_train(turns: Turns, batch: int, queries: int, keys: int, causal: bool) -> None:
    """What chooses how many heads a tile has counts tiles, of which there are none."""
    for head_dim in (16, 64, 128):
        rows = ((4, queries), (2, keys), (2, keys))
        q, k, v = (torch.zeros(batch, *one, head_dim, dtype=torch.bfloat16, requires_grad=True) for one in rows)
        out = flashgen.attention(q, k, v, causal=causal)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        assert [one.shape for one in gradients] == [q.shape, k.shape, v.shape]
        assert not any(one.any() for one in gradients)
