"""Tensors that say they are on a GPU, kernels that are not compiled, launches that leave a mark or compute in torch.

Everything of a call but the kernels is the real thing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.features.values import Features
from flashgen.core.workload import DTYPE_BYTES, Specialization
from flashgen.launch import plan
from flashgen.launch.backward import FIELDS, BackwardTensors
from flashgen.launch.geometry import Geometry, aligned16
from flashgen.runtime.ops.calls import Call
from tests.fakes.attention import Emulated
from tests.fakes.attention_backward import EmulatedBackward

MARK = 3.0
"""What a fake kernel writes into its output, and into the LSE."""


class OnGpu(torch.Tensor):
    """A CPU tensor that a kernel could be launched on."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0


AnyEmulated = TypeVar("AnyEmulated", bound="EmulatedGpu")


def tensor(
    *shape: int, dtype: torch.dtype = torch.bfloat16, swap: bool = False, shift: int = 0, on_gpu: bool = True
) -> torch.Tensor:
    """A tensor; `swap` lays dimension 1 and 2 out the other way round, `shift` moves its start by elements."""
    laid = (shape[0], shape[2], shape[1], shape[3]) if swap else shape
    count = 1
    for size in laid:
        count *= size
    found = torch.zeros(count + shift, dtype=dtype)[shift:].view(laid)
    found = found.transpose(1, 2) if swap else found
    return found.as_subclass(OnGpu) if on_gpu else found


def qkv(
    batch: int = 1, nheads: int = 4, nheads_k: int = 2, seqlen_q: int = 48, seqlen_k: int = 64, dim: int = 64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        tensor(batch, nheads, seqlen_q, dim),
        tensor(batch, nheads_k, seqlen_k, dim),
        tensor(batch, nheads_k, seqlen_k, dim),
    )


@dataclass
class FakeGpu:
    """What the slow path asked for, in order."""

    prepared: list[Call] = field(default_factory=list)
    compiled: list[tuple[Specialization, Config]] = field(default_factory=list)
    planned: list[tuple[Specialization, Config, Geometry, int]] = field(default_factory=list)
    planned_backward: list[tuple[Specialization, Config, Geometry, int]] = field(default_factory=list)
    loaded: list[tuple[Specialization, Config]] = field(default_factory=list)
    launched: list[SimpleNamespace] = field(default_factory=list)
    launched_backward: list[SimpleNamespace] = field(default_factory=list)

    def compile_kernel(self, spec: Specialization, config: Config, device: Device) -> Any:
        self.compiled.append((spec, config))
        return SimpleNamespace(spec=spec, config=config)

    def make_plan(self, kernel: Any, spec: Specialization, config: Config, geometry: Geometry, index: int) -> Any:
        assert (kernel.spec, kernel.config) == (spec, config)
        self.planned.append((spec, config, geometry, index))

        def launch(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            out: torch.Tensor,
            lse: torch.Tensor | None = None,
            softmax_scale: float | None = None,
            q_offset: int | torch.Tensor | None = None,
            features: Features | None = None,
        ) -> None:
            out.fill_(MARK)
            if lse is not None:
                lse.fill_(MARK)
            self.launched.append(
                SimpleNamespace(scale=softmax_scale, offset=q_offset, lse=lse, q=q.data_ptr(), features=features)
            )

        return launch

    def make_backward_plan(
        self, kernel: Any, spec: Specialization, config: Config, geometry: Geometry, index: int
    ) -> Any:
        assert (kernel.spec, kernel.config) == (spec, config)
        self.planned_backward.append((spec, config, geometry, index))

        def launch(
            tensors: BackwardTensors,
            softmax_scale: float | None = None,
            q_offset: int | torch.Tensor | None = None,
            features: Features | None = None,
            with_neg_delta: bool = True,
        ) -> torch.Tensor:
            for written in (tensors.dq, tensors.dk, tensors.dv, tensors.dbias):
                if written is not None:
                    written.fill_(MARK)
            given = {name: getattr(tensors, name) for name in (*FIELDS.values(), "dlse", "dbias")}
            pointers = {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in given.items()}
            # not the tensors: torch takes over a gradient that nobody else has
            self.launched_backward.append(
                SimpleNamespace(pointers=pointers, scale=softmax_scale, offset=q_offset, features=features)
            )
            return torch.full_like(tensors.lse, MARK)

        return launch

    def load(self, kernel: Any, index: int) -> int:
        self.loaded.append((kernel.spec, kernel.config))
        return 1

    def counting(self, prepare: Callable[[Call], Any]) -> Callable[[Call], Any]:
        def counted(call: Call) -> Any:
            self.prepared.append(call)
            return prepare(call)

        return counted


class MadeAnew:
    """In the place of an `OpenPlan`: a plan for every geometry, by the functions that make one for the first."""

    def __init__(self, kernel: Any, spec: Specialization, config: Config, index: int) -> None:
        self.given = kernel, spec, config, index

    def sized(self, geometry: Geometry, sizes: Sizes | None = None) -> Any:
        kernel, spec, config, index = self.given
        make = plan.make_plan if spec.direction == "forward" else plan.make_backward_plan
        return make(kernel, spec, config, geometry, index)


@dataclass
class EmulatedGpu(FakeGpu):
    """Plans that compute, in fp32 on the CPU.

    A launch knows a tensor by its memory and the geometry that its plan was made for, as a kernel does, and writes into
    memory alone; what the specialization promised is checked at every launch.
    """

    def make_plan(self, kernel: Any, spec: Specialization, config: Config, geometry: Geometry, index: int) -> Any:
        mark = super().make_plan(kernel, spec, config, geometry, index)
        attend = Emulated(causal=spec.causal)

        def launch(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            out: torch.Tensor,
            lse: torch.Tensor | None = None,
            softmax_scale: float | None = None,
            q_offset: int | torch.Tensor | None = None,
            features: Features | None = None,
        ) -> None:
            mark(q, k, v, out, lse, softmax_scale, q_offset, features)
            given = {"q": q, "k": k, "v": v, "o": out}
            views = _views(spec, geometry, given, features or Features())
            q, k, v, found = (views[name].float() for name in "qkvo")
            sums = torch.empty(q.shape[:3])
            scale, offset = _defaults(geometry, softmax_scale, q_offset)
            attend(q, k, v, found, sums, scale, offset, features or Features())
            views["o"].copy_(found)
            if lse is not None:
                lse.copy_(sums)

        return launch

    def make_backward_plan(
        self, kernel: Any, spec: Specialization, config: Config, geometry: Geometry, index: int
    ) -> Any:
        mark = super().make_backward_plan(kernel, spec, config, geometry, index)
        differentiate = EmulatedBackward(scores=Emulated(causal=spec.causal))

        def launch(
            tensors: BackwardTensors,
            softmax_scale: float | None = None,
            q_offset: int | torch.Tensor | None = None,
            features: Features | None = None,
            with_neg_delta: bool = True,
        ) -> torch.Tensor:
            mark(tensors, softmax_scale, q_offset, features)
            given = {name: getattr(tensors, field) for name, field in FIELDS.items()}
            views = _views(spec, geometry, given, features or Features())
            _check_bias_gradient(spec, geometry, tensors)
            assert tensors.lse.is_contiguous()
            wide = {FIELDS[name]: view.float() for name, view in views.items()}
            dbias = None if tensors.dbias is None else tensors.dbias.float()
            scale, offset = _defaults(geometry, softmax_scale, q_offset)
            found = tensors._replace(**wide, dbias=dbias)
            neg_delta = differentiate(found, scale, offset, features or Features())
            for name in ("dq", "dk", "dv"):
                views[name].copy_(wide[name])
            if tensors.dbias is not None:
                tensors.dbias.copy_(found.dbias)  # type: ignore[arg-type]
            return neg_delta

        return launch


def emulated_by(kind: type[AnyEmulated], emulated: EmulatedGpu, patch: pytest.MonkeyPatch) -> AnyEmulated:
    """One of another kind in the place of an emulated GPU, which makes its plans from here on."""
    found = kind(compiled=emulated.compiled)
    patch.setattr(plan, "make_plan", found.make_plan)
    patch.setattr(plan, "make_backward_plan", found.make_backward_plan)
    return found


def _views(
    spec: Specialization, geometry: Geometry, given: dict[str, torch.Tensor], features: Features
) -> dict[str, torch.Tensor]:
    """The tensors as kernels see them: memory, with the shapes and strides of the geometry."""
    assert (spec.window, spec.softcap, spec.alibi, spec.bias == "", spec.mask == "") == (
        features.window != (None, None),
        features.softcap > 0,
        features.alibi_slopes is not None,
        features.bias is None,
        features.mask is None,
    )
    assert features.alibi_slopes is None or features.alibi_slopes.stride(-1) == 1
    views = {name: tensor.as_strided(*geometry.tensor(name)) for name, tensor in given.items()}
    pointers = 0
    for view in views.values():
        pointers |= view.data_ptr()
    assert not spec.aligned16 or aligned16(geometry, pointers, DTYPE_BYTES[spec.dtype])
    return views


def _defaults(
    geometry: Geometry, scale: float | None, offset: int | torch.Tensor | None
) -> tuple[float, int | torch.Tensor]:
    """Softmax scale and query offset of a call that may name none."""
    (*_, seqlen_q, head_dim), seqlen_k = geometry.q_shape, geometry.k_shape[2]
    return head_dim**-0.5 if scale is None else scale, seqlen_k - seqlen_q if offset is None else offset


def _check_bias_gradient(spec: Specialization, geometry: Geometry, tensors: BackwardTensors) -> None:
    dbias = tensors.dbias
    assert (dbias is not None) is spec.bias_grad
    if dbias is None:
        return
    assert dbias.is_contiguous()
    if spec.bias == "keys":
        assert (dbias.dtype, geometry.dbias_shape) == (torch.float32, None)
    else:
        assert tuple(dbias.shape) == geometry.dbias_shape
