"""Calls like an earlier one but for their sizes: the rules that sizes can break, and their numbers.

A step of an inference engine has other sequences and more pages than the one before, and the same tensors otherwise.
Torch is asked whether they are, with any sizes (`flashgen.runtime.decode.recent`); a launch then writes its sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashgen.core.alignment import ALIGNMENT_BYTES
from flashgen.core.decode_limits import MAX_BATCH, MAX_KEYS
from flashgen.core.features.positions import clamp_window
from flashgen.core.features.values import Window
from flashgen.launch.allocation import empty_on_current
from flashgen.launch.decode_numbers import DecodeShape, Strides, strides_of
from flashgen.launch.decode_plan import Launch
from flashgen.runtime.decode.call import CheckedDecode, DecodeCall
from flashgen.runtime.decode.recent import RECENT, Again, Kind, Ready, Result, Tensors, question
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.calls import MAX_ROW_STRIDE
from flashgen.runtime.ops.outputs import empty_output

OPEN: dict[Kind, tuple[Again, ...]] = {}
"""What serves calls of a kind whose sizes are new, by the kind."""

MOST_OPEN = 4
"""Layouts of calls of one kind that are open to sizes."""

MOST_SIZES = 4096

Launches = Callable[[DecodeShape], Launch]

Plan = Callable[[CheckedDecode], Launches]
"""Gives the launches of calls that differ from a checked one in sizes alone; under the lock of `serve`."""


def open_to_sizes(kind: Kind, call: DecodeCall, tensors: Tensors, checked: CheckedDecode, plan: Plan) -> None:
    """Let calls like this one but for their sizes be served without the slow path, where no other rule needs it."""
    slopes = call.features.alibi_slopes
    if not checked.spec.aligned16 or (slopes is not None and slopes.dim() != 1):
        return
    fits = question(tensors, *_any_sizes(call, tensors))
    if fits is not None:
        known = OPEN.get(kind, ())
        OPEN[kind] = (_Open(kind, call, checked, plan).again(fits, call.q.get_device()), *known[: MOST_OPEN - 1])


class _Open:
    """What calls have in common that differ in sizes alone."""

    def __init__(self, kind: Kind, call: DecodeCall, checked: CheckedDecode, plan: Plan) -> None:
        self._kind, self._checked, self._plan = kind, checked, plan
        self._page_size = checked.spec.page_size
        self._has_rows, self._with_lse = call.batch_idx is not None, call.return_lse
        self._window: Window = (call.features.window[0], 0 if call.causal else call.features.window[1])
        self._unit = ALIGNMENT_BYTES // call.q.element_size()
        shape = checked.shape
        is_dense = shape.batch > 1 and shape.o_strides[0] == shape.seqlen_q * shape.nheads * shape.head_dim_v
        self._strides: tuple[int, ...] | None = (*shape.o_strides, 1) if is_dense else None
        self._opened: dict[tuple[int, int], Launches] = {}

    def again(self, fits: Callable[..., bool], index: int) -> Again:
        """What serves calls whose tensors fit, as those of `RECENT` do."""
        empty, data_ptr = empty_on_current(), torch.Tensor.data_ptr
        only_device, current = torch.cuda.device_count() == 1, torch._C._cuda_getDevice
        is_paged, with_lse, kind = self._page_size is not None, self._with_lse, self._kind
        known: dict[tuple[Any, ...], tuple[Ready, tuple[Any, ...], tuple[Any, ...]]] = {}

        def again(tensors: Tensors) -> Result | None:
            if not fits(*tensors) or not (only_device or current() == index):
                return None
            q, k, v, lens, *others = tensors
            if is_paged:
                sizes: tuple[Any, ...] = (q.shape[0], lens.shape[0], others[0].shape, others[0].stride())
            else:
                sizes = (
                    q.shape[0],
                    lens.shape[0],
                    k.shape,
                    k.stride(),
                    v.shape,
                    v.stride(),
                    *[t.shape for t in others],
                )
            found = known.get(sizes)
            is_new = found is None
            if found is None:
                found = self._made(tensors)
                if found is None:
                    return None
                if len(known) >= MOST_SIZES:
                    known.clear()
                known[sizes] = found
            ready, layout, lse_layout = found
            out = empty(*layout)
            lse = empty(*lse_layout) if with_lse else None
            pointers = (out.data_ptr(), *map(data_ptr, tensors if lse is None else (lse, *tensors)))
            if (pointers[0] | q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT_BYTES:
                return None
            run, sized = ready.launch
            run(sized, pointers, out, True)
            if not is_new:
                ready.remember(kind, tensors, out, lse)
                if again not in OPEN.get(kind, ()):  # forgotten while it was launched: nor may it be found sooner
                    RECENT.pop(kind, None)
            return out if lse is None else (out, lse)

        return again

    def _made(self, tensors: Tensors) -> tuple[Ready, tuple[Any, ...], tuple[Any, ...]] | None:
        """What serves calls of other sizes, and how what they write is laid out; None where a rule is broken."""
        q, _, v, *_ = tensors
        known, batch = self._checked.shape, q.shape[0]
        strides = self._strides
        if strides is None or batch == 1:  # torch has rules for what it lays out like a tensor
            strides = empty_output(q, v, bshd=True).stride()
            if any(step % self._unit for step in strides[:3]):
                return None
        layout = (batch, *q.shape[1:3], known.head_dim_v), strides, q.dtype
        shape = self._shape(tensors, (strides[0], strides[1], strides[2]))
        if shape is None:
            return None
        size_class = (batch - 1).bit_length(), (shape.keys - 1).bit_length()  # as in decode_ladder.class_of
        with serve.LOCK:
            opened = self._opened.get(size_class)
            if opened is None:
                checked = CheckedDecode(spec=self._checked.spec, shape=shape)
                opened = self._opened[size_class] = self._plan(checked)
            launch = opened(shape)
        rows, heads = known.seqlen_q, known.nheads
        return Ready(launch), layout, ((batch, heads, rows), (heads * rows, rows, 1), torch.float32)

    def _shape(self, tensors: Tensors, o_strides: Strides) -> DecodeShape | None:
        q, k, v, *lists = tensors
        known, batch = self._checked.shape, q.shape[0]
        # strides that the first call had no use for may be any
        if not 0 < batch <= MAX_BATCH or (batch > 1 and q.stride(0) % self._unit):
            return None
        for one in lists:
            if one.dtype is torch.int32 and (one.shape[0] != batch or (one.shape[-1] > 1 and one.stride(-1) != 1)):
                return None
        left, right = self._window
        if self._page_size is not None:
            table = lists[1]
            seqlen_k = self._page_size * table.shape[1]
            if not 0 < seqlen_k <= MAX_KEYS:
                return None
            left, right = clamp_window((left, right), known.seqlen_q, seqlen_k)
            return known._replace(
                batch=batch,
                seqlen_k=seqlen_k,
                o_strides=o_strides,
                table_stride=table.stride(0),
                window_left=left,
                window_right=right,
            )
        k_strides, v_strides, (rows, seqlen_k, *_) = strides_of(k), strides_of(v), k.shape
        if k.shape[:3] != v.shape[:3] or not rows or (rows != batch and not self._has_rows):
            return None
        if max(k_strides[1], v_strides[1]) >= MAX_ROW_STRIDE or not 0 < seqlen_k <= MAX_KEYS:
            return None
        if any(step % self._unit for step in (*k_strides, *v_strides)):
            return None
        left, right = clamp_window((left, right), known.seqlen_q, seqlen_k)
        return known._replace(
            batch=batch,
            seqlen_k=seqlen_k,
            k_strides=k_strides,
            v_strides=v_strides,
            o_strides=o_strides,
            window_left=left,
            window_right=right,
        )


def _any_sizes(call: DecodeCall, tensors: Tensors) -> tuple[list[list[int | None]], list[list[int | None]]]:
    """Shapes and strides, with None for those that may be others."""
    sizes: list[list[int | None]] = [[None, *tensors[0].shape[1:]]]
    strides: list[list[int | None]] = [[*tensors[0].stride()]]
    for cache in tensors[1:3]:
        is_paged = call.block_table is not None
        sizes.append([*cache.shape] if is_paged else [None, None, *cache.shape[2:]])
        strides.append([*cache.stride()] if is_paged else [None, None, None, cache.stride(3)])
    for one in tensors[3:]:
        count = one.dim() if one.dtype is torch.int32 else 0
        sizes.append([None] * count + [*one.shape[count:]])
        strides.append([None] * (one.dim() - 1) * bool(count) + [*one.stride()[-1 if count else 0 :]])
    return sizes, strides
