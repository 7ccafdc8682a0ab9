"""The torch.library ops of `flashgen.append_kv`: one writes keys and values, one rotates queries as well.

They change two caches in place, and say so in their schemas: torch.compile keeps them in order, and makes no copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from flashgen.codegen.append_kv import AppendSpec, append_kernel
from flashgen.core.settings import settings
from flashgen.runtime.ops.append_contents import check_contents
from flashgen.runtime.ops.append_rules import AppendArguments, check, check_apart, check_memory
from flashgen.runtime.ops.batching import refuse_mapping
from flashgen.runtime.ops.calls import DTYPES
from flashgen.runtime.ops.forward import LIBRARY
from flashgen.runtime.ops.helpers import has_aligned_rows, launcher, remember, used_strides
from flashgen.runtime.ops.keys import layout_of
from flashgen.runtime.ops.outputs import dense_like
from flashgen.runtime.ops.overlap import span_bytes

if TYPE_CHECKING:
    from flashgen.launch.helper_launch import HelperRun

Tensor = torch.Tensor

_SCHEMA = (
    "Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? seqlens=None, SymInt? seqlen=None, "
    "Tensor? block_table=None, Tensor? slot_mapping=None, Tensor? batch_idx=None, Tensor? leftpad=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? rotary_seqlens=None, bool rotary_interleaved=True"
)
LIBRARY.define(f"append_kv({_SCHEMA}) -> ()")  # type: ignore[no-untyped-call]
LIBRARY.define(f"append_kv_q(Tensor q, {_SCHEMA}, bool q_causal=True) -> Tensor")  # type: ignore[no-untyped-call]

Run = Callable[[AppendArguments], "Tensor | None"]
"""Serves every call of one key of the memo: writes, and returns the rotated queries, if any are given."""

_MEMO: dict[tuple[Any, ...], Run] = {}
_remembered = _MEMO.get

MOST_PROVEN = 64
"""Distances of two caches that are remembered as ones at which they share nothing."""

PLACES = {"rows": "batch_idx", "pages": "block_table", "slots": "slot_mapping"}
"""By what is compiled in, the argument that says where tokens go."""


def append(given: AppendArguments) -> Tensor | None:
    """Write keys and values in place; the rotated queries, if any are given.

    Raises:
        WorkloadError: an argument breaks a rule.
        UnsupportedError: the tensors are not on a GPU.
        BuildError, LaunchError: there is no kernel, and none can be made now.
    """
    # in one piece, because every call of a function costs as much as three parts of the key
    k, v, k_cache, v_cache, seqlens, seqlen, block_table, slot_mapping, batch_idx, leftpad, cos, sin = given[:12]
    first, q = given.rotary_seqlens, given.q
    addresses = k.data_ptr() | v.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()
    if q is not None:
        addresses |= q.data_ptr()
    if cos is not None and sin is not None:
        addresses |= cos.data_ptr() | sin.data_ptr()
    key = (
        not addresses & 15,
        seqlen is None,
        given.rotary_interleaved,
        given.q_causal,
        k.shape,
        v.shape,
        k_cache.shape,
        v_cache.shape,
        k.stride(),
        v.stride(),
        k_cache.stride(),
        v_cache.stride(),
        k.dtype,
        v.dtype,
        k_cache.dtype,
        v_cache.dtype,
        k.get_device(),
        v.get_device(),
        k_cache.get_device(),
        v_cache.get_device(),
        None if seqlens is None else layout_of(seqlens),
        None if block_table is None else layout_of(block_table),
        None if slot_mapping is None else layout_of(slot_mapping),
        None if batch_idx is None else layout_of(batch_idx),
        None if leftpad is None else layout_of(leftpad),
        None if cos is None else layout_of(cos),
        None if sin is None else layout_of(sin),
        None if first is None else layout_of(first),
        None if q is None else layout_of(q),
    )
    run = _remembered(key)
    if run is None:
        run = _prepared(given, aligned=not addresses & 15)
        remember(_MEMO, key, run)
    if settings().checks:
        check_contents(given)
    return run(given)


def _prepared(given: AppendArguments, *, aligned: bool) -> Run:
    check(given)
    check_memory(given)
    spec = _specialization(given, aligned=aligned)
    kernel = append_kernel(spec)
    with_numbers = launcher(kernel, given.k)
    rows, q_rows = given.tokens * given.k.shape[-2], 0 if given.q is None else math.prod(given.q.shape[:3])
    programs = -(-rows // kernel.rows) - (-q_rows // kernel.rows)
    if not programs:
        return _nothing_to_write
    return _run(with_numbers(programs, _numbers(given, rows, q_rows)), given, spec)


def _nothing_to_write(given: AppendArguments) -> Tensor | None:
    """What serves calls without a new token; a length is no part of a key."""
    if given.seqlen is not None:
        check(given)
    return None if given.q is None else dense_like(given.q)


def _run(launch: HelperRun, first: AppendArguments, spec: AppendSpec) -> Run:
    """What serves all calls like the first one."""
    place = AppendArguments._fields.index(PLACES[spec.place])
    counts = [0 if one is None else first.batch for one in (first.seqlens, first.batch_idx, first.rotary_seqlens)]
    keep_apart, is_rotary = _keeper(first), bool(spec.rotary)
    room = first.capacity - first.seqlen_new

    def run(given: AppendArguments) -> Tensor | None:
        k, v, k_cache, v_cache, seqlens, seqlen, *_ = given
        keep_apart(given)
        if seqlen is not None and not 0 <= seqlen <= room:
            check(given)
        q_out = None if given.q is None else dense_like(given.q)
        rotary = (given.q, q_out, given.rotary_cos, given.rotary_sin) if is_rotary else ()
        tensors = (k, v, k_cache, v_cache, *rotary, seqlens, given.rotary_seqlens, given[place])
        launch(tensors, (seqlen or 0, *counts))
        increment_version((k_cache, v_cache))
        return q_out

    return run


def _keeper(first: AppendArguments) -> Callable[[AppendArguments], None]:
    """What refuses calls that write where something else lies; it asks much only where two tensors are close.

    Two caches often are, as halves of one tensor: they are compared once for each distance.
    """
    k_span, v_span = span_bytes(first.k_cache), span_bytes(first.v_cache)
    new_k, new_v, queries = (0 if one is None else span_bytes(one) for one in (first.k, first.v, first.q))
    proven: set[int] = set()
    data_ptr = Tensor.data_ptr

    def keep_apart(given: AppendArguments) -> None:
        k, v, k_cache, v_cache = map(data_ptr, given[:4])
        k_end, v_end, distance = k_cache + k_span, v_cache + v_span, v_cache - k_cache
        q, is_alone = given.q, True
        if q is not None:
            start = q.data_ptr()
            end = start + queries
            is_alone = (start >= k_end or end <= k_cache) and (start >= v_end or end <= v_cache)
        if (
            is_alone
            and distance in proven
            and (k >= k_end or k + new_k <= k_cache)
            and (k >= v_end or k + new_k <= v_cache)
            and (v >= k_end or v + new_v <= k_cache)
            and (v >= v_end or v + new_v <= v_cache)
        ):
            return
        check_apart(given)
        if len(proven) >= MOST_PROVEN:
            proven.clear()
        proven.add(distance)

    return keep_apart


def _specialization(given: AppendArguments, *, aligned: bool) -> AppendSpec:
    dtype, cos = DTYPES[given.k.dtype], given.rotary_cos
    place = next((place for place, name in PLACES.items() if getattr(given, name) is not None), "rows")
    is_aligned = aligned and all(has_aligned_rows(tensor) for tensor in _with_columns(given))
    return AppendSpec(
        dtype=dtype,
        head_dim=given.k.shape[-1],
        head_dim_v=given.v.shape[-1],
        place=place,
        rotary="" if cos is None else "interleaved" if given.rotary_interleaved else "halves",
        rotary_dim=0 if cos is None else 2 * cos.shape[1],
        table_dtype="" if cos is None else DTYPES[cos.dtype],
        aligned16=is_aligned,
    )


def _with_columns(given: AppendArguments) -> list[Tensor]:
    """The tensors whose rows are moved; queries go where `dense_like` puts them."""
    found = [given.k, given.v, given.k_cache, given.v_cache]
    if given.q is not None:
        found += [given.q, dense_like(given.q)]
    return found + [one for one in (given.rotary_cos, given.rotary_sin) if one is not None]


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """All of `used_strides` but the last."""
    return tuple(used_strides(tensor)[:-1])


def _numbers(given: AppendArguments, rows: int, q_rows: int) -> list[int]:
    """What follows the numbers of the call among the parameters of the kernel."""
    k, v, q, cos, sin = given.k, given.v, given.q, given.rotary_cos, given.rotary_sin
    found = [rows, given.seqlen_new, k.shape[-2], given.page_size, given.num_pages, given.k_cache.shape[0]]
    if cos is not None:
        heads = (1, 1) if q is None else q.shape[1:3]
        found += [q_rows, *heads, cos.shape[0], int(given.q_causal)]
    for tensor in (k, v):
        found += [0] * (4 - tensor.dim()) + list(_strides(tensor))
    found += [*_strides(given.k_cache), *_strides(given.v_cache)]
    if cos is not None and sin is not None:
        found += [0] * 6 if q is None else [*_strides(q), *_strides(dense_like(q))]
        found += [*_strides(cos), *_strides(sin)]
    if given.block_table is not None:
        found += _strides(given.block_table)
    return found


def _op(*flat: Any) -> None:
    append(AppendArguments(*flat))


def _op_with_queries(q: Tensor, *flat: Any) -> Tensor:
    found = append(_with_queries(q, *flat))
    assert found is not None
    return found


def _with_queries(q: Tensor, *flat: Any) -> AppendArguments:
    """The arguments of a call of the op with queries; torch leaves out those at the end that equal their defaults."""
    count = AppendArguments._fields.index("q")
    given = AppendArguments(*flat[:count])._replace(q=q)
    return given._replace(q_causal=flat[count]) if len(flat) > count else given


def _fake(*flat: Any) -> None:
    check(AppendArguments(*flat))


def _fake_with_queries(q: Tensor, *flat: Any) -> Tensor:
    check(_with_queries(q, *flat))
    return dense_like(q)


for _name, _kernel, _shape in (("append_kv", _op, _fake), ("append_kv_q", _op_with_queries, _fake_with_queries)):
    for _key in ("CPU", "CUDA"):  # the CPU's raises an error, or interprets
        LIBRARY.impl(_name, _kernel, _key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"flashgen::{_name}", _shape, lib=LIBRARY)
    refuse_mapping(_name, "append_kv", LIBRARY)

append_op = torch.ops.flashgen.append_kv.default
append_q_op = torch.ops.flashgen.append_kv_q.default
