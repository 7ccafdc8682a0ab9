"""`Prefix`: keys that sequences of a decode call share; the call as one pass over them, one over the rest, and a merge.

The first pass has the queries of all sequences of a group in its tiles of rows, so shared keys are read once a tile and
not once a sequence. It launches what `flashgen.runtime.decode.shared_keys` prepared; the second is a decode call like
any other, which has the sinks; the kernel of `merge_states` makes one result of both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from flashgen.core.checks import items, whole_number
from flashgen.core.errors import WorkloadError
from flashgen.core.settings import settings
from flashgen.runtime.argument_types import check_tensor
from flashgen.runtime.decode.call import DecodeCall, check_call
from flashgen.runtime.decode.runs import call_of, run
from flashgen.runtime.decode.shared_keys import SharedKeys, attend_shared, check_heads, check_shared, said_of_a_prefix
from flashgen.runtime.ops.merging import merge
from flashgen.runtime.ops.outputs import empty_lse, empty_output

Result = tuple[torch.Tensor, torch.Tensor | None]

PREFIX_OPTIONS = {
    "prefix_seqlens": "Tensor?",
    "prefix_table": "Tensor?",
    "prefix_k": "Tensor?",
    "prefix_v": "Tensor?",
    "prefix_starts": "int[]?",
}
"""The fields of a prefix as arguments of the op, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Keys and values that sequences of a decode call share, in front of their own: `attention_decode(prefix=...)`.

    The sequences of a batch lie in groups that follow one another, and each group shares one prefix. Lengths and page
    ids stay on the GPU: a captured CUDA graph serves all of them. Which sequences belong together is part of it.

    Attributes:
        seqlens: keys of each prefix, int32 (prefixes,) on the GPU; 0 is allowed. Those that are longer than what there
            is room for count as just as long.
        block_table: the pages of each prefix in order, int32 (prefixes, pages); None for contiguous k and v.
        k: keys, (prefixes, slots, nheads_k, head_dim), or pages like those of a paged cache; None are the pages of the
            call's k_cache.
        v: values, likewise.
        group_starts: the first sequence of each group, ascending from 0; () are groups of equal size.

    Raises:
        WorkloadError: a field has a wrong type.
    """

    seqlens: torch.Tensor
    block_table: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    group_starts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_tensor("seqlens of a prefix", self.seqlens)
        for name in ("block_table", "k", "v"):
            tensor = getattr(self, name)
            if tensor is not None:
                check_tensor(f"{name} of a prefix", tensor)
        starts = (whole_number("a start of a group", one, 0) for one in items("group_starts", self.group_starts))
        object.__setattr__(self, "group_starts", tuple(starts))

    def shared_keys(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> SharedKeys:
        """Its tensors, with those of the call's cache where it has no others.

        Raises:
            WorkloadError: it has keys without values, or neither keys nor pages.
        """
        if (self.k is None) != (self.v is None):
            raise WorkloadError("a prefix has both k and v, or neither, whose pages are then those of the call's cache")
        if self.k is None and self.block_table is None:
            raise WorkloadError("a prefix without k and v has a block_table, of pages of the call's cache")
        k, v = (k_cache, v_cache) if self.k is None or self.v is None else (self.k, self.v)
        return SharedKeys(k=k, v=v, seqlens=self.seqlens, block_table=self.block_table, starts=self.group_starts)


def attend_with_prefix(prefix: Prefix, *arguments: Any) -> Result:
    """`runs.attend` of a call with a prefix: its arguments are those of `DecodeCall` in order."""
    return run_with_prefix(call_of(arguments), prefix)


def run_with_prefix(call: DecodeCall, prefix: Prefix, *, keeps: bool = True) -> Result:
    """The output of a call with a prefix, and its LSE where it asks for one; `keeps` as `runs.run` has it.

    Raises:
        WorkloadError, UnsupportedError, BuildError, LaunchError: as `flashgen.attention_decode`.
    """
    _refuse_leftpad(call)
    out, lse = run(replace(call, return_lse=True), keeps=keeps)
    assert lse is not None
    if not out.numel():
        return out, lse if call.return_lse else None
    shared = prefix.shared_keys(call.k_cache, call.v_cache)
    if settings().checks:
        check_shared(call, shared)
    shared_out, shared_lse = empty_output(call.q, call.v_cache, bshd=True), empty_lse(call.q, bshd=True)
    attend_shared(call, shared, shared_out, shared_lse, keeps=keeps)
    merged, merged_lse = merge((shared_out, out), (shared_lse, lse), "bshd")
    return merged, merged_lse if call.return_lse else None


def check_prefix(call: DecodeCall, prefix: Prefix) -> None:
    """Refuse tensors of a prefix that no call may have: what can be asked of tensors without memory, too.

    Raises:
        WorkloadError: a dtype, device or shape breaks a rule, or the call has a leftpad.
    """
    _refuse_leftpad(call)
    shared = prefix.shared_keys(call.k_cache, call.v_cache)
    prefixes = shared.seqlens.shape[:1]
    one_each = call.q.new_empty((*prefixes, *call.q.shape[1:]) if prefixes else call.q.shape)
    own = DecodeCall(
        q=one_each, k_cache=shared.k, v_cache=shared.v, seqlens=shared.seqlens, block_table=shared.block_table
    )
    with said_of_a_prefix():
        check_call(own)
    check_heads(call, shared)


def _refuse_leftpad(call: DecodeCall) -> None:
    if call.leftpad is not None:
        raise WorkloadError("keys behind a prefix begin at their first slot: a call with a prefix has no leftpad")


def flat(prefix: Prefix | None) -> tuple[Any, ...]:
    """The arguments of the op for a prefix, or for none."""
    if prefix is None:
        return (None,) * len(PREFIX_OPTIONS)
    return prefix.seqlens, prefix.block_table, prefix.k, prefix.v, list(prefix.group_starts)


def restored(
    seqlens: torch.Tensor | None,
    block_table: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    starts: list[int] | None,
) -> Prefix | None:
    """The prefix that these arguments of the op say, or None."""
    if seqlens is None:
        return None
    return Prefix(seqlens=seqlens, block_table=block_table, k=k, v=v, group_starts=tuple(starts or ()))
