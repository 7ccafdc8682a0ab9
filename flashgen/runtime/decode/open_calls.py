"""Calls like an earlier one but for their sizes: the rules that sizes can break, and their numbers.

A step of an inference engine has other sequences and more pages than the one before, and the same tensors otherwise.
Torch is asked whether they are, with any sizes (`flashgen.runtime.decode.recent`); a launch then writes its sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashgen.core.features.score_tensors import ALIGNMENT_BYTES
from flashgen.core.features.values import Window
from flashgen.launch.decode_numbers import DecodeShape
from flashgen.launch.decode_plan import Launch
from flashgen.runtime.decode.call import MAX_KEYS, CheckedDecode, DecodeCall, strides_of, window_of
from flashgen.runtime.decode.recent import GUARDS, Again, Kind, Ready, Result, Tensors, question
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.calls import MAX_ROW_STRIDE
from flashgen.runtime.ops.outputs import empty_lse, empty_output

OPEN: dict[Kind, tuple[Again, ...]] = {}
"""What serves calls of a kind whose sizes are new, by the kind."""

MOST_OPEN = 4
"""Layouts of calls of one kind that are open to sizes."""

MOST_SIZES = 4096

MAX_BATCH = 1024
"""Sequences of one launch, whose lengths every program looks at; larger batches are several launches."""

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
        self._opened: dict[tuple[int, int], Launches] = {}

    def again(self, fits: Callable[..., bool], index: int) -> Again:
        """What serves calls whose tensors fit, as those of `RECENT` do."""
        empty, data_ptr = GUARDS._empty_strided_cuda, torch.Tensor.data_ptr
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
            return out if lse is None else (out, lse)

        return again

    def _made(self, tensors: Tensors) -> tuple[Ready, tuple[Any, ...], tuple[Any, ...]] | None:
        """What serves calls of other sizes, and how what they write is laid out; None where a rule is broken."""
        q, _, v, *_ = tensors
        out = empty_output(q, v, bshd=True)
        lse = empty_lse(q, bshd=True) if self._with_lse else out
        shape = self._shape(tensors, out)
        if shape is None:
            return None
        size_class = (shape.batch - 1).bit_length(), (shape.keys - 1).bit_length()  # as in decode_ladder.class_of
        with serve.LOCK:
            opened = self._opened.get(size_class)
            if opened is None:
                checked = CheckedDecode(spec=self._checked.spec, shape=shape)
                opened = self._opened[size_class] = self._plan(checked)
            launch = opened(shape)
        layouts = [(tuple(one.shape), one.stride(), one.dtype) for one in (out, lse)]
        return Ready(launch), layouts[0], layouts[1]

    def _shape(self, tensors: Tensors, out: torch.Tensor) -> DecodeShape | None:
        q, k, v, lens, *others = tensors
        known, batch, unit = self._checked.shape, q.shape[0], ALIGNMENT_BYTES // q.element_size()
        lists = [one for one in others if one.dtype is torch.int32]
        if not 0 < batch <= MAX_BATCH or any(one.shape[0] != batch for one in (lens, *lists)):
            return None
        strides = [known.q_strides, known.k_strides, known.v_strides, strides_of(out)]
        if self._page_size is not None:
            seqlen_k, table_stride = self._page_size * lists[0].shape[1], lists[0].stride(0)
        else:
            seqlen_k, table_stride = k.shape[1], 0
            strides[1:3] = strides_of(k), strides_of(v)
            rows = k.shape[0]
            if k.shape[:3] != v.shape[:3] or not rows or (rows != batch and not self._has_rows):
                return None
            if max(strides[1][1], strides[2][1]) >= MAX_ROW_STRIDE:
                return None
        if not 0 < seqlen_k <= MAX_KEYS or any(step % unit for one in strides for step in one):
            return None
        left, right = window_of(self._window, False, known.seqlen_q, seqlen_k)
        return known._replace(
            batch=batch,
            seqlen_k=seqlen_k,
            k_strides=strides[1],
            v_strides=strides[2],
            o_strides=strides[3],
            table_stride=table_stride,
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
