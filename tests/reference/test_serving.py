"""The references of packed sequences, caches and states, against oracles that are written down on their own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flashgen
from flashgen import reference
from flashgen.core.errors import FlashgenError, UnsupportedError, WorkloadError
from tests import decoding, packing, prefixes
from tests.packing import Case, assert_right
from tests.paging import paged

Tensor = torch.Tensor
WIDE = torch.float64

PACKED = [
    packing.Case(queries=(3, 0, 5), keys=(7, 4, 2), options={"causal": True}, dtype=WIDE),
    packing.Case(queries=(4, 6), used_q=(4, 2), used_k=(1, 6), spare=3, alibi="each", sinks=True, dtype=WIDE),
    packing.Case(queries=(6, 2), options={"window": (2, 1), "softcap": 3.0}, poison=(1,), layout="heads", dtype=WIDE),
]


def odd_or_first(b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return (k_idx % 2 == 1) | (k_idx <= 2 * b)


@pytest.mark.parametrize("case", PACKED, ids=range(3))
def test_packed_sequences(case: packing.Case) -> None:
    packed = packing.make(case)
    out, lse = reference.attention_varlen(packed.q, packed.k, packed.v, **packed.named, return_lse=True)
    assert (out.dtype, lse.dtype) == (WIDE, WIDE)
    packing.assert_right(packed, out.float(), lse)


def test_functions_of_packed_sequences_see_the_sequence() -> None:
    packed = packing.make(packing.Case(queries=(5, 3), mod=odd_or_first, dtype=torch.float32))
    packing.assert_right(
        packed, *reference.attention_varlen(packed.q, packed.k, packed.v, **packed.named, return_lse=True)
    )


def test_gradients_of_packed_sequences() -> None:
    ends = torch.tensor([0, 2, 2, 5], dtype=torch.int32)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return reference.attention_varlen(q, k, v, ends, max_seqlen_q=3, causal=True)

    leaves = [torch.randn(6, heads, 8, dtype=WIDE, requires_grad=True) for heads in (2, 1, 1)]
    assert torch.autograd.gradcheck(call, leaves)
    values = [leaf.detach().float() for leaf in leaves]
    found = torch.func.grad(lambda *given: call(*given).sum(), argnums=(0, 1, 2))(*values)
    torch.testing.assert_close(found, torch.autograd.grad(call(*leaves).sum(), leaves), check_dtype=False)


CACHED = [
    decoding.Case(lens=(0, 3, 17), seqlen_q=2, page=4, options={"causal": True}),
    decoding.Case(lens=(5, 9), room=12, leftpad=(2, 0), sinks=True, alibi=True, layout="hnd"),
    decoding.Case(lens=(5, 9), batch_idx=(3, 0), seqlen_q=3, options={"window": (2, 1), "softcap": 4.0}),
    decoding.Case(lens=(40, 7), page=8, layout="interleaved", options={"window": (9, None), "causal": True}),
]


@pytest.mark.parametrize("case", CACHED, ids=range(4))
def test_caches(case: decoding.Case) -> None:
    call = decoding.make(case)
    tensors, named = decoding.arguments(call)
    decoding.assert_right(call, *reference.attention_decode(*tensors, **{**named, "return_lse": True}))
    wide = [x.double() for x in tensors[:3]]
    out, lse = reference.attention_decode(*wide, tensors[3], **{**named, "return_lse": True})
    torch.testing.assert_close((out, lse), decoding.oracle(call), check_dtype=False)


@pytest.mark.parametrize(("page", "starts"), [(None, (0, 1)), (4, ())])
def test_caches_behind_a_prefix(page: int | None, starts: tuple[int, ...]) -> None:
    case = decoding.Case(lens=(3, 6, 1, 2), seqlen_q=2, page=page, options={"causal": True, "window": (5, None)})
    call = decoding.make(case)
    prefix = prefixes.make_prefix(case, (7, 5), starts, page)
    tensors, named = decoding.arguments(call)
    found = reference.attention_decode(*tensors, **{**named, "return_lse": True, "prefix": prefix})
    decoding.assert_right(prefixes.joined(call, prefix), *found)


def test_a_gradient_of_decoding_is_refused_as_by_the_kernels() -> None:
    tensors, named = decoding.arguments(decoding.make(decoding.Case(lens=(3,))))
    tensors[0].requires_grad_()
    with pytest.raises(UnsupportedError, match="no backward pass"):
        reference.attention_decode(*tensors, **named)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes", "rotary_cos"])
def test_a_gradient_of_what_goes_with_tokens_is_refused_as_by_the_kernels(name: str) -> None:
    is_rotary = name == "rotary_cos"
    function = "append_kv" if is_rotary else "attention_decode"
    given = right(function) | ({"rotary_sin": torch.zeros(8, 8)} if is_rotary else {})
    learned = torch.zeros((8, 8) if is_rotary else 2, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"no (backward pass|gradient)"):
        getattr(reference, function)(**given, **{name: learned})


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_numbers_of_heads_with_gaps_are_taken_as_by_the_kernels(name: str) -> None:
    cache, numbers = torch.rand(2, 8, 2, 16).half(), torch.rand(4)[::2]
    given = right("attention_decode") | {"q": cache[:, :1], "k_cache": cache, "v_cache": cache}
    found, expected = (reference.attention_decode(**given, **{name: x}) for x in (numbers, numbers.contiguous()))
    torch.testing.assert_close(found, expected)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("attention_decode", {"fixed_split_size": 3}),
    ("attention_decode", {"seqlens": torch.tensor([1, 2], dtype=torch.int64)}),
    ("attention_decode", {"q": torch.zeros(2, 17, 4, 16, dtype=torch.float16)}),
    ("attention_varlen", {"max_seqlen_k": None, "cu_seqlens_k": torch.tensor([0, 2, 4]).int()}),
    ("attention_varlen", {"cu_seqlens_q": torch.tensor([0, 2, 4])}),
    ("append_kv", {"seqlens": None}),
    ("append_kv", {"rotary_cos": torch.zeros(8, 8)}),
    ("append_kv", {"seqlens": 12}),
    ("merge_states", {"layout": "x"}),
    ("merge_states", {"lses": torch.zeros(3, 2)}),
]


def right(name: str) -> dict[str, Any]:
    cache, ints = torch.zeros(2, 8, 2, 16, dtype=torch.float16), torch.ones(2, dtype=torch.int32)
    rows = torch.zeros(4, 2, 16, dtype=torch.float16)
    ends = torch.tensor([0, 2, 4], dtype=torch.int32)
    return {
        "attention_decode": {"q": cache[:, :1], "k_cache": cache, "v_cache": cache, "seqlens": ints},
        "attention_varlen": {"q": rows, "k": rows, "v": rows, "cu_seqlens_q": ends, "max_seqlen_q": 2},
        "append_kv": {"k": cache[:, :1].clone(), "v": cache[:, :1].clone(), "k_cache": cache, "v_cache": cache.clone()}
        | {"seqlens": ints},
        "merge_states": {"outs": torch.zeros(2, 1, 2, 3, 16), "lses": torch.zeros(2, 1, 2, 3)},
    }[name]


@pytest.mark.parametrize(("name", "wrong"), WRONG, ids=range(len(WRONG)))
def test_what_the_kernels_calls_refuse_is_refused_in_their_words(name: str, wrong: dict[str, Any]) -> None:
    getattr(reference, name)(**right(name))
    said = []
    for module in (reference, flashgen):
        with pytest.raises(FlashgenError) as refused:
            getattr(module, name)(**{**right(name), **wrong})
        said.append((refused.type, str(refused.value)))
    assert said[0] == said[1]


@pytest.mark.parametrize("is_stacked", [True, False])
def test_states_of_disjoint_keys_merge_into_attention(is_stacked: bool) -> None:
    q, k, v = (torch.randn(2, heads, 9, 16, dtype=WIDE, requires_grad=True) for heads in (4, 2, 2))
    parts = [reference.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 4), slice(4, 9))]
    outs, lses = ([part[n] for part in parts] for n in (0, 1))
    outs.append(torch.full_like(outs[0], math.nan))  # FlashAttention-2's state without keys
    lses.append(torch.full_like(lses[0], math.inf))
    given = (torch.stack(outs), torch.stack(lses)) if is_stacked else (outs, lses)
    found = reference.merge_states(*given)
    expected = reference.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v)) for out, lse in (found, expected)]
    torch.testing.assert_close(*grads)


PAGED = {
    "chunks": (Case(queries=(1, 1, 20, 3), keys=(40, 1, 33, 2), options={"causal": True}), {"num_decodes": 2}),
    "window": (Case(queries=(5, 20), keys=(59, 20), sinks=True, options={"window": (9, 3)}), {}),
    "scores": (Case(queries=(5, 20), keys=(0, 33), alibi="own", options={"softcap": 3.0}), {}),
}


@pytest.mark.parametrize("name", PAGED)
@pytest.mark.parametrize("by_ends", [False, True])
def test_packed_sequences_over_pages(name: str, by_ends: bool) -> None:
    case, options = PAGED[name]
    call = paged(case, 8, "interleaved", by_ends=by_ends)
    assert_right(
        call.packed, *reference.attention_varlen(call.q, call.k, call.v, **call.named, **options, return_lse=True)
    )
    with pytest.raises(UnsupportedError, match="no gradient through keys and values in pages"):
        reference.attention_varlen(call.q, call.k.clone().requires_grad_(), call.v, **call.named)
    with pytest.raises(WorkloadError, match="keys of a sequence are 0 to"):
        reference.attention_varlen(call.q, call.k, call.v, **{**call.named, "max_seqlen_k": 3})
