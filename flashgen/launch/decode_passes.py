"""A decode config as a plan of forward passes: dense keys are a cache whose sequences all have as many as there are."""

from __future__ import annotations

import threading
from typing import Any

import torch

from flashgen.codegen.build import CompiledKernel
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.decode_limits import MAX_BATCH
from flashgen.core.features.positions import clamp_window
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.launch.decode_numbers import DecodeShape, Strides
from flashgen.launch.decode_plan import DecodePlan
from flashgen.launch.decode_plan import Launch as DecodeLaunch
from flashgen.launch.feature_arguments import NO_FEATURES
from flashgen.launch.geometry import Geometry
from flashgen.launch.plan import EmptyPlan, Launch, check_capture

MOST_LAUNCHES = 64
"""Of calls that differ in scale, softcap and window alone."""

_LENGTHS: dict[int, torch.Tensor] = {}


class DecodePasses:
    """The kernels of a decode config on a GPU, for forward passes of one specialization."""

    def __init__(self, compiled: CompiledKernel, spec: Specialization, config: Config, device_index: int) -> None:
        """Load the kernels.

        Args:
            compiled: of the config.
            spec: of the forward passes.
            config: of a decode family.
            device_index: torch's index of the GPU.

        Raises:
            LaunchError: the driver refuses a binary, or a CUDA graph is being captured.
        """
        self._plan, self._spec, self._index = DecodePlan(compiled, config, device_index), spec, device_index
        self._lengths = endless(device_index)

    def sized(self, geometry: Geometry, sizes: Sizes | None = None) -> Launch:
        """The launch at a geometry; `sizes` are its own, where they are known and none is 0."""
        if sizes is None and geometry.is_empty:
            return EmptyPlan()
        return _Launch(self._plan, self._spec, geometry, self._lengths, self._index)


class _Launch:
    """A `flashgen.launch.plan.Launch`; what a decode launch has packed and this one gets in a call is found by it."""

    def __init__(
        self, plan: DecodePlan, spec: Specialization, geometry: Geometry, lengths: torch.Tensor, index: int
    ) -> None:
        self._plan, self._spec, self._geometry, self._lengths, self._index = plan, spec, geometry, lengths, index
        self._launches: dict[tuple[Any, ...], DecodeLaunch] = {}

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        q_offset: int | torch.Tensor | None = None,
        features: Features | None = None,
    ) -> None:
        assert q_offset is None, "queries stand at the last keys"
        given = features or NO_FEATURES
        written = (out,) if lse is None else (out, lse)
        others = [one for one in (given.sinks, given.alibi_slopes) if one is not None]
        key = (softmax_scale, lse is None, given.window, given.softcap)
        launch = self._launches.get(key) or self._sized(key, softmax_scale, given, has_lse=lse is not None)
        pointers = tuple([one.data_ptr() for one in (*written, q, k, v, self._lengths, *others)])
        if self._index == torch._C._cuda_getDevice():
            launch(pointers, q, False)
        else:
            with torch.cuda.device(self._index):
                launch(pointers, q, False)

    def _sized(
        self, key: tuple[Any, ...], softmax_scale: float | None, features: Features, *, has_lse: bool
    ) -> DecodeLaunch:
        shape = decode_shape(self._geometry, self._spec, features, softmax_scale, has_lse=has_lse)
        names = ["O", *(["LSE"] if has_lse else []), "Q", "K", "V", "Lens"]
        names += ["Sinks"] if features.sinks is not None else []
        names += ["AlibiSlopes"] if features.alibi_slopes is not None else []
        if len(self._launches) >= MOST_LAUNCHES:
            self._launches.clear()
        launch = self._launches[key] = self._plan.sized(shape, tuple(names))
        return launch


def decode_shape(
    geometry: Geometry, spec: Specialization, features: Features, softmax_scale: float | None, *, has_lse: bool
) -> DecodeShape:
    """A forward pass as a step of decoding."""
    (batch, nheads, seqlen_q, head_dim), (_, nheads_k, seqlen_k, _) = geometry.q_shape, geometry.k_shape
    left, right = features.window
    left, right = clamp_window((left, 0 if spec.causal else right), seqlen_q, seqlen_k)
    return DecodeShape(
        batch=batch,
        nheads=nheads,
        nheads_k=nheads_k,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim_v=spec.head_dim_v,
        q_strides=_strides(geometry, "q"),
        k_strides=_strides(geometry, "k"),
        v_strides=_strides(geometry, "v"),
        o_strides=_strides(geometry, "o"),
        window_left=left,
        window_right=right,
        softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        softcap=features.softcap,
        alibi_batch_stride=geometry.alibi_batch_stride,
        has_lse=has_lse,
    )


def _strides(geometry: Geometry, name: str) -> Strides:
    batch, head, row, _ = geometry.tensor(name)[1]
    return batch, row, head


def endless(index: int) -> torch.Tensor:
    """Lengths that are longer than all keys, which count as all of them, int32 on a GPU; made once.

    Raises:
        LaunchError: a CUDA graph is being captured.
    """
    if index not in _LENGTHS:
        check_capture(index, "filling lengths for few queries")
        # what this thread allocates may belong to a graph that torch.compile warms up for, and nothing of that is kept
        thread = threading.Thread(target=_fill, args=(index,))
        thread.start()
        thread.join()
    return _LENGTHS[index]


def _fill(index: int) -> None:
    with torch.cuda.device(index):
        _LENGTHS[index] = torch.full((MAX_BATCH,), 2**31 - 1, dtype=torch.int32, device=f"cuda:{index}")
        torch.cuda.current_stream().synchronize()
