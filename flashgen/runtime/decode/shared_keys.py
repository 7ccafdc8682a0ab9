"""The pass of a decode call over keys that its sequences share: from tensors to launches, and the memo of these.

A launch has groups of one size: the queries of a group's sequences are rows of one tile after the other, and the kernel
finds where each stands from its sequence's own length. Groups of several sizes are several launches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashgen.core.collection import CollectionPaused
from flashgen.core.decode_limits import MAX_BATCH, MAX_KEYS
from flashgen.core.errors import WorkloadError
from flashgen.core.features.positions import clamp_window
from flashgen.launch.decode_plan import POINTERS, Launch
from flashgen.runtime.decode.call import CheckedDecode, DecodeCall, is_aligned, keys_of_a_sequence
from flashgen.runtime.decode.contents import check_contents
from flashgen.runtime.decode.plans import planned
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.helpers import remember
from flashgen.runtime.ops.keys import layout_of

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKeys:
    """The tensors of a prefix, and the first sequence of each group: () are groups of equal size."""

    k: Tensor
    v: Tensor
    seqlens: Tensor
    block_table: Tensor | None
    starts: tuple[int, ...]

    def runs(self, batch: int) -> Iterator[Run]:
        """Groups that follow one another and have the same size, as many as a launch takes.

        Raises:
            WorkloadError: the groups are not those of so many sequences and prefixes.
        """
        prefixes = len(self.seqlens) if self.seqlens.dim() else 0
        starts = self.starts or tuple(range(0, batch, max(batch // max(prefixes, 1), 1)))
        sizes = [stop - start for start, stop in itertools.pairwise((*starts, batch))]
        if (
            len(starts) != prefixes
            or not starts
            or starts[0]
            or min(sizes) < 1
            or (not self.starts and batch % prefixes)
        ):
            asked = (
                f"group_starts are ascending from 0 and below {batch}" if self.starts else "groups are of equal size"
            )
            raise WorkloadError(
                f"the {batch} sequences of a call lie in groups, one for each prefix; {asked}, got "
                f"{prefixes} prefixes{f' and group_starts {self.starts}' if self.starts else ''}"
            )
        first = 0
        for members, same in itertools.groupby(sizes):
            for groups in _at_most(MAX_BATCH, len(list(same))):
                yield Run(first=first, groups=groups, start=starts[first], members=members)
                first += groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Groups of one size: the first of them, how many they are, the first sequence, and the sequences of each."""

    first: int
    groups: int
    start: int
    members: int

    @property
    def sequences(self) -> slice:
        """All of their sequences."""
        return slice(self.start, self.start + self.groups * self.members)

    @property
    def prefixes(self) -> slice:
        """Their prefixes."""
        return slice(self.first, self.first + self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPass:
    """A launch's call, as one of decoding with a group in the place of a sequence; without tensors, for it is kept.

    Attributes:
        checked: what is compiled in, and the numbers.
        run: the groups.
        reach: keys that a query and a window show in front of a sequence's end; None without a window.
        room: keys that a prefix has at most.
    """

    checked: CheckedDecode
    run: Run
    reach: int | None
    room: int

    def first_keys(self, seqlens: Tensor, own: Tensor) -> Tensor | None:
        """The first shared key that a window shows to any sequence of a group, int32 (groups,); None without one."""
        if self.reach is None:
            return None
        nearest = own[self.run.sequences].clamp(0, self.checked.shape.own_seqlen_k).view(-1, self.run.members).amin(1)
        return seqlens[self.run.prefixes].clamp(0, self.room) + nearest - self.reach


_MEMO: dict[tuple[Any, ...], tuple[tuple[SharedPass, Launch | None], ...]] = {}

serve.FORGETTING.append(_MEMO.clear)


def attend_shared(call: DecodeCall, shared: SharedKeys, out: Tensor, lse: Tensor, *, keeps: bool) -> None:
    """Write the output and the LSE of all queries over the keys that they share, for a call whose rules hold.

    Raises:
        WorkloadError, UnsupportedError, BuildError, LaunchError: as `flashgen.attention_decode`.
    """
    key = _key(call, shared, out)
    found = _MEMO.get(key)
    if found is None:
        index = serve.gpu_index(call.q)
        with CollectionPaused(), serve.LOCK:  # remembered within, as other steps are
            found = tuple(
                (one, planned(one.checked, None, index) if one.room else None) for one in passes(call, shared, out)
            )
            remember(_MEMO, key, found)
    for one, launch in found:
        if launch is None:
            out[one.run.sequences].zero_()
            lse[one.run.sequences].fill_(float("-inf"))
        else:
            _launch(one, launch, call, shared, out, lse, keeps)


def passes(call: DecodeCall, shared: SharedKeys, out: Tensor) -> Iterator[SharedPass]:
    """The launches of a call, checked.

    Raises:
        WorkloadError: shapes, dtypes or strides break a rule.
    """
    own_room = keys_of_a_sequence(call)
    left, right = call.features.window
    right = 0 if call.causal else right
    for run in shared.runs(len(call.q)):
        own = shared_call(call, shared, run)
        with said_of_a_prefix():
            checked = CheckedDecode.of(own, out[run.sequences][: run.groups])
        check_heads(call, shared)
        room = checked.shape.seqlen_k
        if room + own_room > MAX_KEYS:
            raise WorkloadError(f"a sequence has at most {MAX_KEYS} keys, got room for {room + own_room}")
        window_left, window_right = clamp_window((left, right), call.q.shape[1], room + own_room)
        shape = checked.shape._replace(
            window_left=window_left,
            window_right=window_right,
            has_leftpad=left is not None,
            has_lse=True,
            members=run.members,
            own_seqlen_k=own_room,
        )
        reach = None if left is None else call.q.shape[1] + window_left
        # of one group, too, sequences are steps of a stride
        aligned = checked.spec.aligned16 and is_aligned(call.q) and is_aligned(out)
        spec = replace(checked.spec, offset_tensor=True, aligned16=aligned)
        yield SharedPass(checked=CheckedDecode(spec=spec, shape=shape), run=run, reach=reach, room=room)


@contextmanager
def said_of_a_prefix() -> Iterator[None]:
    """Rules of a call that are broken here are broken by its prefix, and the message says so."""
    try:
        yield
    except WorkloadError as error:
        raise WorkloadError(f"of a prefix: {error}") from error


def check_heads(call: DecodeCall, shared: SharedKeys) -> None:
    """Refuse shared keys that are not of the heads of a sequence's own: both passes write one kind of output.

    Args:
        call: a call whose rules hold.
        shared: keys whose rules hold among themselves.

    Raises:
        WorkloadError: heads or their columns are others.
    """
    for name, one, own in (("k", shared.k, call.k_cache), ("v", shared.v, call.v_cache)):
        if one.shape[2:] != own.shape[2:]:
            raise WorkloadError(
                f"{name} of a prefix has the heads and the head_dim of {name}_cache, {tuple(own.shape[2:])}, "
                f"got {tuple(one.shape[2:])}"
            )


def check_shared(call: DecodeCall, shared: SharedKeys) -> None:
    """Refuse lengths and page ids of prefixes that lead out of their caches, as `check_contents` does.

    Raises:
        WorkloadError: there is one.
    """
    for one in passes(call, shared, call.q.new_empty((*call.q.shape[:3], call.v_cache.shape[3]))):
        own = shared_call(call, shared, one.run)
        features = replace(own.features, window=(None, None))
        check_contents(replace(own, features=features), one.first_keys(shared.seqlens, call.seqlens))


def shared_call(call: DecodeCall, shared: SharedKeys, run: Run) -> DecodeCall:
    """The call over the shared keys of a run, with as many sequences as groups; sinks count once, with the own keys."""
    features = call.features
    slopes = features.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[run.sequences][: run.groups]
    table, caches = shared.block_table, (shared.k, shared.v)
    if table is None and all(one.dim() for one in caches):
        caches = shared.k[run.prefixes], shared.v[run.prefixes]
    elif table is not None and table.dim():
        table = table[run.prefixes]
    return replace(
        call,
        q=call.q[run.sequences][: run.groups],
        k_cache=caches[0],
        v_cache=caches[1],
        seqlens=shared.seqlens[run.prefixes],
        block_table=table,
        leftpad=None,
        batch_idx=None,
        features=replace(features, sinks=None, alibi_slopes=slopes),
    )


def _launch(
    one: SharedPass, launch: Launch, call: DecodeCall, shared: SharedKeys, out: Tensor, lse: Tensor, keeps: bool
) -> None:
    sequences, prefixes = one.run.sequences, one.run.prefixes
    first_keys = one.first_keys(shared.seqlens, call.seqlens)
    slopes = call.features.alibi_slopes
    given = {
        "Q": call.q[sequences],
        "K": shared.k if shared.block_table is not None else shared.k[prefixes],
        "V": shared.v if shared.block_table is not None else shared.v[prefixes],
        "O": out[sequences],
        "LSE": lse[sequences],
        "Lens": shared.seqlens[prefixes],
        "Leftpad": first_keys,
        "Table": None if shared.block_table is None else shared.block_table[prefixes],
        "OwnLens": call.seqlens[sequences],
        "AlibiSlopes": slopes[sequences] if slopes is not None and slopes.dim() == 2 else slopes,
    }
    tensors = [given.get(name) for name in POINTERS]
    pointers = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    index = call.q.get_device()
    with torch.cuda.device(index):
        launch(pointers, call.q, keeps)


def _at_most(most: int, count: int) -> Iterator[int]:
    """A number in parts."""
    while count:
        yield min(most, count)
        count -= min(most, count)


def _key(call: DecodeCall, shared: SharedKeys, out: Tensor) -> tuple[Any, ...]:
    """What chooses launches and their numbers: shapes and strides, alignment and options."""
    features, lists = call.features, (call.block_table, shared.block_table, call.features.alibi_slopes)
    tensors = (call.q, call.k_cache, call.seqlens, shared.k, shared.v, shared.seqlens, out, *lists)
    pointers = call.q.data_ptr() | shared.k.data_ptr() | shared.v.data_ptr() | out.data_ptr()
    needs_gradient = torch.is_grad_enabled() and (shared.k.requires_grad or shared.v.requires_grad)
    options = (call.causal, call.softmax_scale, call.fixed_split_size, features.window, features.softcap)
    return (
        pointers & 15,
        shared.starts,
        needs_gradient,
        *options,
        *[None if each is None else layout_of(each) for each in tensors],
    )
