"""Random inputs for one workload: reproducible, in either layout, and enough of them to defeat the L2 cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.features.values import Features
from flashgen.core.workload import Workload
from flashgen.launch.dtypes import TORCH_DTYPES
from flashgen.measure.data_kinds import NORMAL, data_kind
from flashgen.measure.feature_inputs import SOFTCAP_BEND, FeatureForm, feature_bytes, make_features
from flashgen.measure.score_rule import uncomputed

LAYOUTS = ("bhsd", "bshd")

MAX_COPIES = 256
"""More sets than this are not made: inputs of a few hundred bytes are hot in L2 in real use as well."""

USUAL_L2_BYTES = 64 * 1024 * 1024
"""Taken where a device does not tell its L2 size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """`copies` sets of tensors of one workload, all viewed as (batch, heads, seqlen, head_dim).

    `out` and `lse` are where a kernel writes; `features` holds the feature arguments. With `padding`, every tensor is a
    slice of one with that many more positions after the last, all NaN (True in a mask): a kernel that uses a key behind
    the end computes NaN, and one that writes behind the end destroys `guards`.
    """

    q: tuple[torch.Tensor, ...]
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    out: tuple[torch.Tensor, ...]
    lse: tuple[torch.Tensor, ...]
    features: tuple[Features, ...]
    guards: tuple[torch.Tensor, ...] = ()

    @property
    def copies(self) -> int:
        """How many sets there are."""
        return len(self.q)

    @property
    def nbytes(self) -> int:
        """Device memory held by all sets, without padding, in bytes."""
        shared = {id(tensor): tensor for tensor in (*self.k, *self.v)}  # pages of all copies are in one pool
        groups = [*self.q, *shared.values(), *self.out, *self.lse]
        groups += [tensor for each in self.features for tensor in (each.bias, each.mask) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """Makes one operand of all copies at a time, with NaN behind the last position and where nothing is drawn."""

    copies: int
    batch: int
    layout: str
    padding: int
    dtype: torch.dtype
    generator: torch.Generator

    def make(self, heads: int, length: int, width: int, *, random: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(copies, batch, heads, length, width), standard normal if `random`, and its padding alone."""
        shape = [self.copies, self.batch, heads, length + self.padding, width]
        if self.layout == "bshd":
            shape[2], shape[3] = shape[3], shape[2]
        whole = torch.full(shape, float("nan"), dtype=self.dtype, device=self.generator.device)
        whole = whole if self.layout == "bhsd" else whole.transpose(2, 3)
        used = whole[:, :, :, :length]
        if random:
            used.normal_(generator=self.generator)
        return used, whole[:, :, :, length:]

    def flat(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, random: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(copies, *shape), contiguous, standard normal if `random`, and the padding behind the last copy."""
        size = self.copies * math.prod(shape)
        whole = torch.full((size + self.padding,), float("nan"), dtype=dtype, device=self.generator.device)
        if random:
            whole[:size].normal_(generator=self.generator)
        return whole[:size].view(self.copies, *shape), whole[size:]


def make_inputs(
    workload: Workload,
    *,
    copies: int,
    seed: int,
    device: torch.device | str,
    layout: str = "bhsd",
    padding: int = 0,
    gain: float = 1.0,
    form: FeatureForm | None = None,
    data: str = NORMAL,
) -> Inputs:
    """Standard normal q (times `gain`), k and v, changed as the kind of data says; out and lse filled with NaN.

    With a softcap, q is also so large that the cap matters (`feature_inputs.SOFTCAP_BEND`).

    Args:
        workload: the shapes and the dtype.
        copies: number of sets, at least 1.
        seed: the same seed gives the same numbers on the same kind of device.
        device: where the tensors live.
        layout: order in memory, `bhsd` or `bshd`; the views returned are in bhsd order in both cases.
        padding: NaN positions behind the last one, see `Inputs`.
        gain: factor on q, so that scores can be made large.
        form: the form of bias, mask, slopes and sinks; None is what models have.
        data: a name of `measure.data_kinds.DATA_KINDS`.

    Raises:
        WorkloadError: the layout or the kind of data is unknown, or copies is below 1.
        UnsupportedError: the workload has a feature that inputs cannot be made for.
    """
    if layout not in LAYOUTS:
        raise WorkloadError(f"layout is one of {', '.join(LAYOUTS)}, got {layout!r}")
    if copies < 1:
        raise WorkloadError(f"copies must be at least 1, got {copies}")
    missing = [*uncomputed(workload), *(["backward"] if workload.direction == "backward" else [])]
    if missing:
        raise UnsupportedError(f"inputs can be made for packed forward attention; {workload.key} has {missing}")
    form, kind = form or FeatureForm(), data_kind(data)
    w, dtype = workload, TORCH_DTYPES[workload.dtype]
    generator = torch.Generator(device=device).manual_seed(seed)
    arena = Arena(copies=copies, batch=w.batch, layout=layout, padding=padding, dtype=dtype, generator=generator)
    q, _ = arena.make(w.nheads, w.seqlen_q, w.head_dim, random=True)
    k, _ = arena.make(w.nheads_k, w.seqlen_k, w.head_dim, random=True)
    v, _ = arena.make(w.nheads_k, w.seqlen_k, w.head_dim_v, random=True)
    out, out_guard = arena.make(w.nheads, w.seqlen_q, w.head_dim_v, random=False)
    gain *= form.softcap / SOFTCAP_BEND if w.softcap else 1.0
    if gain != 1.0:
        q.mul_(gain)
    kind.apply(q, k)
    features = make_features(w, form, copies=copies, generator=generator, padding=padding)
    lse, lse_guard = arena.flat((w.batch, w.nheads, w.seqlen_q))
    guards = (out_guard, lse_guard) if padding else ()
    return Inputs(
        q=q.unbind(),
        k=k.unbind(),
        v=v.unbind(),
        out=out.unbind(),
        lse=lse.unbind(),
        features=features,
        guards=guards,
    )


def rotation_copies(workload: Workload, l2_bytes: int) -> int:
    """Sets to rotate so that one pass over them moves at least twice the L2 cache; at most `MAX_COPIES`.

    Of packed sequences over pages the pages alone are so many bytes.
    """
    wanted = 2 * (l2_bytes or USUAL_L2_BYTES)
    is_paged = workload.is_packed and workload.page_size is not None
    moved = workload.cache_bytes if is_paged else workload.bytes + feature_bytes(workload)
    return min(MAX_COPIES, max(1, -(-wanted // max(1, moved))))
