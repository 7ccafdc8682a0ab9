"""Calls of packed sequences that differ from an earlier one in sizes alone: what is left of the slow path for them.

A step of training has other documents than the one before: another number of them, other rows, other bounds. What is
the same at all sizes is found at the first calls of a kind, as in `flashgen.runtime.ops.open_calls`; a config is that
of the class (`flashgen.runtime.lookup.packed_ladder`). Whatever else there is, an error among it, is left to the slow
path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flashgen.core.alignment import ALIGNMENT_BYTES
from flashgen.core.checks import MAX_SIZE
from flashgen.core.errors import LaunchError
from flashgen.core.features import table
from flashgen.core.features.sequences import VARLEN
from flashgen.core.features.values import Features
from flashgen.core.nearest import visible_keys
from flashgen.core.workload import DTYPE_BYTES
from flashgen.launch.geometry import Geometry, PackedGrid
from flashgen.runtime.lookup.packed_ladder import PackedSizes, has_window, served_packed
from flashgen.runtime.ops.backward_runs import BackwardRun
from flashgen.runtime.ops.backward_runs import packed_run as packed_backward_run
from flashgen.runtime.ops.keys import fields_reader
from flashgen.runtime.ops.open_calls import BACKWARD, Key, is_aligned, sizes_of, view
from flashgen.runtime.ops.outputs import empty_output
from flashgen.runtime.ops.runs import FeatureRun, feature_run, packed_run

if TYPE_CHECKING:
    from flashgen.core.config import Config
    from flashgen.core.device import Device
    from flashgen.launch.plan import OpenPlan
    from flashgen.runtime.lookup.records import Records
    from flashgen.runtime.ops.backward_calls import CheckedBackwardCall
    from flashgen.runtime.ops.calls import CheckedCall

Tensor = torch.Tensor

_OPEN = (*(value.name for value in VARLEN.values), "window", "softcap")
_others = fields_reader(tuple(value.name for value in table.values() if value.name not in _OPEN))
"""The fields of features without which a call may be open: those that bring tensors or code of their own."""


def packed_open_key(features: Features) -> tuple[Any, ...] | None:
    """What of the features of packed sequences sizes leave as it is, or None where calls are not open to sizes."""
    if features.cu_seqlens_q is None or any(isinstance(one, Tensor) or one for one in _others(features)):
        return None
    used = features.seqused_q is None, features.seqused_k is None
    return ("packed", features.window, features.softcap > 0, features.batch_invariant, *used)


class _OpenPacked:
    """What calls of one specialization have in common, with pointers that are multiples of 16 bytes."""

    def __init__(
        self,
        problem: CheckedCall | CheckedBackwardCall,
        device: Device,
        records: Records,
        plan_of: Callable[[Config], OpenPlan | None],
    ) -> None:
        """Keep what the sizes of a call do not change.

        Args:
            problem: one of the calls.
            device: the GPU.
            records: what serves it.
            plan_of: finds the kernels of a config.
        """
        w = problem.workload
        self._spec, self._device, self._records, self._plan_of = problem.spec, device, records, plan_of
        self._step = ALIGNMENT_BYTES // DTYPE_BYTES[w.dtype]
        self._window = (w.window_left, 0 if w.causal else w.window_right)
        self._has_window = has_window(w)
        self._invariant = problem.call.batch_invariant
        self._plans: dict[PackedSizes, OpenPlan] = {}

    def _planned(self, views: dict[str, Any], q: Tensor, features: Features, *, with_lse: bool = False) -> Any:
        """The launch of a call with these views, or None where the slow path has to be asked."""
        sizes = sizes_of(views["q"], views["k"], views["v"], self._step)
        batch = _sequences(features, q)
        if sizes is None or sizes.batch != 1 or not batch:
            return None
        queries, keys = features.max_seqlens
        if (queries | keys) > MAX_SIZE:  # which is all ones
            return None
        seen = visible_keys(keys, *self._window, has_window=self._has_window)
        rows = min(sizes.seqlen_q, batch * queries)
        packed = PackedSizes(batch, sizes.nheads, sizes.nheads_k, rows, queries, keys, seen)
        plan = self._plan_for(packed, with_lse=with_lse)
        if plan is None:
            return None
        grid = PackedGrid(sequences=batch, max_seqlen_q=queries, max_seqlen_k=keys)
        try:
            return plan.sized(Geometry(tensors=views, packed=grid))
        except LaunchError:
            return None

    def _plan_for(self, sizes: PackedSizes, *, with_lse: bool) -> OpenPlan | None:
        """The kernels of the config of a class, asked for once: to hash what the ladder is asked by costs more."""
        largest = sizes.largest
        plan = self._plans.get(largest)
        if plan is None:
            options = {"with_lse": with_lse, "batch_invariant": self._invariant}
            plan = self._plan_of(served_packed(self._spec, sizes, self._device, self._records, **options).config)
            if plan is not None:
                self._plans[largest] = plan
        return plan


class OpenPackedCall(_OpenPacked):
    """Forward calls."""

    def __init__(self, problem: CheckedCall, *others: Any) -> None:
        """As of an `_OpenPacked`."""
        super().__init__(problem, *others)
        call = problem.call
        self._with_lse, self._bshd = call.with_lse, call.bshd
        self._same_head_dim = call.q.shape[-1] == call.v.shape[-1]

    def run(self, key: Key, q: Tensor, k: Tensor, v: Tensor, features: Features) -> FeatureRun | None:
        """What serves the calls of these shapes and strides, or None where the slow path has to be asked."""
        bshd = self._bshd
        out = view(empty_output(q, v, bshd=bshd), bshd)
        if not is_aligned(out, self._step):
            return None
        views = {"q": view(q, bshd), "k": view(k, bshd), "v": view(v, bshd), "o": out}
        launch = self._planned(views, q, features, with_lse=self._with_lse)
        if launch is None or not bshd:
            return None if launch is None else feature_run(launch, bshd=bshd, with_lse=self._with_lse)
        shape = views["q"][0][1:3] if self._with_lse else None
        return packed_run(launch, q, same_head_dim=self._same_head_dim, lse_shape=shape)


class OpenPackedBackwardCall(_OpenPacked):
    """Backward passes, with a gradient of the output whose pointer is a multiple of 16 bytes, too."""

    def __init__(self, problem: CheckedBackwardCall, *others: Any) -> None:
        """As of an `_OpenPacked`."""
        super().__init__(problem, *others)
        self._bshd, self._dtype = problem.call.forward.bshd, problem.call.forward.q.dtype

    def run(
        self, key: Key, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, dout: Tensor, features: Features
    ) -> BackwardRun | None:
        """What serves the backward passes of these shapes and strides, or None as of an `OpenPackedCall`."""
        bshd, (q, _, v) = self._bshd, inputs
        expected = (*q.shape[:3], v.shape[3])
        for tensor in (out, dout):
            if tensor.shape != expected or tensor.dtype is not self._dtype or tensor.device != q.device:
                return None
        likes = [tensor if tensor.is_contiguous() else torch.empty_like(tensor) for tensor in inputs]
        views = [view(tensor, bshd) for tensor in (*inputs, out, dout, *likes)]
        if not all(is_aligned(each, self._step) for each in views[3:]):
            return None
        launch = self._planned(dict(zip(BACKWARD, views, strict=True)), q, features)
        return None if launch is None else packed_backward_run(launch, q, (torch.empty_like,) * 3, copies_dout=False)


def _sequences(features: Features, q: Tensor) -> int:
    """How many sequences there are; 0 where the slow path has to look at what says where they lie."""
    ends, keys = features.cu_seqlens_q, features.cu_seqlens_k
    if ends is None or keys is None or ends.dim() != 1:
        return 0
    size, index = ends.shape[0], q.get_device()
    for one, count in ((ends, size), (keys, size), (features.seqused_q, size - 1), (features.seqused_k, size - 1)):
        if one is not None and (
            one.dtype is not torch.int32
            or one.shape != (count,)
            or one.get_device() != index
            or not one.is_contiguous()
        ):
            return 0
    return max(size - 1, 0)
