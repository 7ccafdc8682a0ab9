"""Random tensors for one backward call, in enough copies to defeat the L2 cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flashgen.core.features.score_tensors import Shape4
from flashgen.core.features.values import Features
from flashgen.core.workload import Workload
from flashgen.launch.backward import BackwardTensors
from flashgen.launch.dtypes import TORCH_DTYPES
from flashgen.measure.data_kinds import NORMAL
from flashgen.measure.feature_inputs import FeatureForm
from flashgen.measure.inputs import LAYOUTS, Arena, make_inputs

SEED_STEP = 1
"""Gradients are drawn apart from q, k and v, which are those of the forward workload with the same seed."""

RESULTS = ("dq", "dk", "dv", "dbias")
"""What a backward pass writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardInputs:
    """`copies` sets of tensors of one workload; `features` holds the feature arguments of each.

    What a pass writes is NaN, and so are `out` and `lse` until the right ones are written there. With `padding`, every
    tensor is a part of a larger one that is NaN behind the last position; a store behind the end destroys `guards`.
    """

    tensors: tuple[BackwardTensors, ...]
    features: tuple[Features, ...]
    guards: tuple[torch.Tensor, ...] = ()

    @property
    def copies(self) -> int:
        """How many sets there are."""
        return len(self.tensors)

    @property
    def nbytes(self) -> int:
        """Device memory held by all sets, without padding, in bytes."""
        found = [tensor for each in self.tensors for tensor in each]
        found += [tensor for each in self.features for tensor in (each.bias, each.mask)]
        return sum(tensor.numel() * tensor.element_size() for tensor in found if tensor is not None)


def make_backward_inputs(
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
    with_dlse: bool = False,
    with_dbias: bool = True,
) -> BackwardInputs:
    """Inputs of the forward pass as `make_inputs` has them, and standard normal gradients of out and LSE.

    With `padding`, dout, dk and dv are in the other layout, so that no two tensors of a head share their strides.

    Args:
        workload: the shapes and the dtype; its direction does not count.
        copies: number of sets, at least 1.
        seed: the same seed gives the same numbers on the same kind of device.
        device: where the tensors live.
        layout: order in memory, `bhsd` or `bshd`; the views returned are in bhsd order in both cases.
        padding: NaN positions behind the last one.
        gain: factor on q, so that scores can be made large.
        form: the form of bias, mask, slopes and sinks; None is what models have.
        data: a name of `measure.data_kinds.DATA_KINDS`.
        with_dlse: whether the LSE has a gradient.
        with_dbias: whether the gradient of a bias is asked for.

    Raises:
        WorkloadError: the layout or the kind of data is unknown, or copies is below 1.
        UnsupportedError: the workload has a feature that inputs cannot be made for.
    """
    w = replace(workload, direction="forward")
    first = make_inputs(
        w, copies=copies, seed=seed, device=device, layout=layout, padding=padding, gain=gain, form=form, data=data
    )
    arena = Arena(
        copies=copies,
        batch=w.batch,
        layout=layout,
        padding=padding,
        dtype=TORCH_DTYPES[w.dtype],
        generator=torch.Generator(device=device).manual_seed(seed + SEED_STEP),
    )
    other = replace(arena, layout=LAYOUTS[1 - LAYOUTS.index(layout)]) if padding else arena
    dout, _ = other.make(w.nheads, w.seqlen_q, w.head_dim_v, random=True)
    dlse = arena.flat((w.batch, w.nheads, w.seqlen_q), random=True)[0].unbind() if with_dlse else (None,) * copies
    results = {
        "dq": arena.make(w.nheads, w.seqlen_q, w.head_dim, random=False),
        "dk": other.make(w.nheads_k, w.seqlen_k, w.head_dim, random=False),
        "dv": other.make(w.nheads_k, w.seqlen_k, w.head_dim_v, random=False),
    }
    bias = first.features[0].bias
    if bias is not None and with_dbias:
        # the kernel writes a row for every head where queries share the bias; the caller sums what batch or heads share
        rows = (w.batch, w.nheads, w.seqlen_k)
        results["dbias"] = arena.flat(tuple(bias.shape), bias.dtype) if w.bias == "full" else arena.flat(rows)
    tensors = tuple(
        BackwardTensors(
            q=first.q[n],
            k=first.k[n],
            v=first.v[n],
            out=first.out[n],
            lse=first.lse[n],
            dout=dout[n],
            dlse=dlse[n],
            **{name: used[n] for name, (used, _) in results.items()},
        )
        for n in range(copies)
    )
    guards = tuple(guard for _, guard in results.values()) if padding else ()
    return BackwardInputs(tensors=tensors, features=first.features, guards=guards)


def written(tensors: BackwardTensors) -> dict[str, torch.Tensor]:
    """What a backward pass writes, by name."""
    found = {name: getattr(tensors, name) for name in RESULTS}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def dbias_shape(tensors: BackwardTensors) -> Shape4 | None:
    """The sizes to which dS is summed as the gradient of the bias."""
    if tensors.dbias is None:
        return None
    sizes = tuple(tensors.dbias.shape)
    return sizes if len(sizes) == 4 else (sizes[0], sizes[1], 1, sizes[2])
