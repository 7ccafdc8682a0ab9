"""Launches of `attention_decode` on an imagined GPU, and calls that break one of its rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import flashgen
from flashgen.codegen.families import family
from flashgen.codegen.family import Sizes
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.runtime.decode.call import DecodeCall
from tests.decoding import Case, arguments, decode_config, make
from tests.fakes.driver import FakeDriver, Launched
from tests.fakes.gpu_zero import H200


def run(fake: FakeDriver, call: DecodeCall) -> list[Launched]:
    """The launches of a call."""
    fake.named = kernels_of(call)
    before = len(fake.launches)
    tensors, named = arguments(call)
    flashgen.attention_decode(*tensors, **named)
    return fake.launches[before:]


def kernels_of(call: DecodeCall, *, is_shared: bool = False) -> dict[str, Any]:
    """The parameters of a call's kernels, or of those over keys that sequences share, by the names of the kernels."""
    spec = Specialization(
        direction="decode",
        dtype="bf16" if call.q.dtype == torch.bfloat16 else "fp16",
        head_dim=call.q.shape[3],
        head_dim_v=call.v_cache.shape[3],
        page_size=None if call.block_table is None else call.k_cache.shape[1],
        sink=call.features.sinks is not None and not is_shared,
        offset_tensor=is_shared,
        alibi=call.features.alibi_slopes is not None,
        softcap=bool(call.features.softcap),
    )
    keys = 0 if call.fixed_split_size and not is_shared else 1  # what is shared has many query rows then
    batch = min(call.q.shape[0], 2)  # the rule is another one for one sequence
    config = decode_config(spec, Sizes(batch=batch, nheads=1, nheads_k=1, seqlen_q=1, seqlen_k=keys), H200)
    return {kernel.entry: kernel.parameters for kernel in family(config.family).kernels(spec, config)}


GOOD = Case(lens=(40, 7), page=16)


def broken(name: str) -> DecodeCall:
    """A call that breaks one rule."""
    call = make(GOOD)
    table, lens = call.block_table, call.seqlens
    assert table is not None
    plain = make(Case(lens=(40, 7)))
    ids = torch.zeros(2, dtype=torch.int32)
    return {
        "four dimensions": lambda: replace(call, q=call.q[0]),
        "all bfloat16 or all float16": lambda: replace(call, q=call.q.float()),
        "all bfloat16 or all float16, got": lambda: replace(call, v_cache=call.v_cache.bfloat16()),
        "last dimension of k_cache is contiguous": lambda: replace(call, k_cache=call.k_cache.transpose(1, 3)),
        "no backward pass": lambda: replace(call, q=call.q.clone().requires_grad_()),
        "seqlens is int32": lambda: replace(call, seqlens=lens.long()),
        "seqlens must be a tensor": lambda: replace(call, seqlens=[40, 7]),  # type: ignore[arg-type]
        "block_table is int32": lambda: replace(call, block_table=table[0]),
        "with batch 2": lambda: replace(call, block_table=table[:1]),
        "contiguous along its last": lambda: replace(call, block_table=table.repeat(1, 2)[:, ::2]),
        "same shape but for the last": lambda: replace(call, v_cache=call.v_cache[:-1]),
        "has the head_dim of q": lambda: replace(call, k_cache=call.k_cache[..., :16]),
        "a multiple of those of the caches": lambda: replace(call, q=call.q[:, :, :3]),
        "q has at least one head": lambda: replace(call, q=call.q[:, :, :0]),
        "head_dim_v must be at least 1, got 0": lambda: replace(
            call, q=call.q[..., :0], k_cache=call.k_cache[..., :0], v_cache=call.v_cache[..., :0]
        ),
        "1 to 16 queries": lambda: replace(call, q=call.q.repeat(1, 17, 1, 1)),
        "belong to contiguous caches": lambda: replace(call, leftpad=ids),
        "a row for each of the 2 sequences": lambda: replace(plain, k_cache=call.k_cache, v_cache=call.v_cache),
        "fixed_split_size is a multiple": lambda: replace(call, fixed_split_size=200),
        "fixed_split_size must be at least": lambda: replace(call, fixed_split_size=64),
        "softmax_scale is finite": lambda: replace(call, softmax_scale=-1.0),
        "softcap is finite": lambda: replace(call, features=Features(softcap=-1.0)),
        "window is": lambda: replace(call, features=Features(window=(1,))),  # type: ignore[arg-type]
        "an edge of a window": lambda: replace(call, features=Features(window=(-1, 0))),
        "causal must be True or False": lambda: replace(call, causal=2),  # type: ignore[arg-type]
        "sinks are": lambda: replace(call, features=Features(sinks=torch.zeros(3))),
        "alibi_slopes are": lambda: replace(call, features=Features(alibi_slopes=torch.zeros(3))),
    }[name]()


RULES = (
    *("four dimensions", "all bfloat16 or all float16", "all bfloat16 or all float16, got"),
    *("last dimension of k_cache is contiguous", "no backward pass", "seqlens is int32", "seqlens must be a tensor"),
    *("block_table is int32", "with batch 2", "contiguous along its last", "same shape but for the last"),
    *("head_dim_v must be at least 1, got 0", "q has at least one head"),
    *("has the head_dim of q", "a multiple of those of the caches", "1 to 16 queries", "belong to contiguous caches"),
    *("a row for each of the 2 sequences", "fixed_split_size is a multiple", "fixed_split_size must be at least"),
    *("softmax_scale is finite", "softcap is finite", "window is", "an edge of a window"),
    *("causal must be True or False", "sinks are", "alibi_slopes are"),
)
