"""The functions for FlashAttention-4, run on a stand-in for the CuTe DSL, against those that FlexAttention gets."""

from __future__ import annotations

import importlib
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks import fa4, flex, functions_impls
from benchmarks.functions_cases import FORWARD, FUNCTIONS, Case
from flashgen.core.workload import Workload
from flashgen.measure.inputs import make_inputs
from tests.benchmarks.races import CPU, fake_module

SIZES = "b2-h4-hk2-sq6-sk10-d32"


class Kind:
    """A type of the DSL, which is also called to convert."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.torch = dtype

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.torch)


class Vector:
    """A TensorSSA: neighbouring values of one thread, and arithmetic between them."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.shape, self.dtype = values, values.shape, values.dtype

    def __getitem__(self, n: int) -> torch.Tensor:
        return self.values[n]

    def to(self, kind: Kind) -> Vector:
        return Vector(self.values.to(kind.torch))

    def _with(self, other: Any, of: Callable[[Any, Any], Any]) -> Vector:
        return Vector(of(self.values, other.values if isinstance(other, Vector) else other))

    def __add__(self, other: Any) -> Vector:
        return self._with(other, operator.add)

    def __sub__(self, other: Any) -> Vector:
        return self._with(other, operator.sub)

    def __mul__(self, other: Any) -> Vector:
        return self._with(other, operator.mul)

    def __ne__(self, other: object) -> Any:
        return self._with(other, operator.ne)

    def __eq__(self, other: object) -> Any:
        return self._with(other, operator.eq)

    def __ge__(self, other: Any) -> Any:
        return self._with(other, operator.ge)

    def __lt__(self, other: Any) -> Any:
        return self._with(other, operator.lt)

    def __and__(self, other: Any) -> Any:
        return self._with(other, operator.and_)

    def __or__(self, other: Any) -> Any:
        return self._with(other, operator.or_)

    __hash__ = None  # type: ignore[assignment]


class Registers:
    """A tensor in registers."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __setitem__(self, n: int, value: torch.Tensor) -> None:
        self.values[n] = value

    def load(self) -> Vector:
        return Vector(self.values)


@pytest.fixture
def mods(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`benchmarks.fa4_mods`, imported anew above the stand-in."""
    parts: dict[str, dict[str, Any]] = {
        "flash_attn": {},
        "flash_attn.cute": {},
        "flash_attn.cute.utils": {
            "scalar_to_ssa": lambda a, kind: Vector(torch.as_tensor(a).reshape(1).to(kind.torch))
        },
        "cutlass": {
            "Float32": Kind(torch.float32),
            "Int32": Kind(torch.int32),
            "BFloat16": Kind(torch.bfloat16),
            "Float16": Kind(torch.float16),
        },
        "cutlass.cute": {
            "jit": lambda function: function,
            "TensorSSA": lambda value, shape, dtype: value,
            "make_rmem_tensor": lambda size, kind: Registers(torch.zeros(size, dtype=kind.torch)),
            "recast_tensor": lambda registers, kind: Registers(registers.values.view(kind.torch)),
        },
        "cutlass._mlir": {},
        "cutlass._mlir.dialects": {},
        "cutlass._mlir.dialects.math": {"absi": lambda vector: Vector(vector.values.abs())},
    }
    for name, members in parts.items():
        vars(fake_module(monkeypatch, name)).update(members)
    monkeypatch.delitem(sys.modules, "benchmarks.fa4_mods", raising=False)
    yield importlib.import_module("benchmarks.fa4_mods")
    sys.modules.pop("benchmarks.fa4_mods", None)


def index(*values: int) -> Vector:
    return Vector(torch.tensor(values, dtype=torch.int32))


def scores_of(function: Any, aux: list[torch.Tensor], workload: Workload) -> torch.Tensor:
    """What a function makes of scores of 1, by batch, head, query and key, as many keys at a time as it takes."""
    w, step = workload, getattr(function, "__vec_size__", 1)
    found = torch.empty(w.batch, w.nheads, w.seqlen_q, w.seqlen_k)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, (w.batch, w.nheads, w.seqlen_q, w.seqlen_k // step))):
        keys = [int(j) * step + n for n in range(step)]
        at = (index(int(b)), index(int(h)), index(*[int(i)] * step), index(*keys))
        found[b, h, i, keys] = function(Vector(torch.ones(step)), *at, None, aux).values.float()
    return found


def everywhere(function: Any, workload: Workload, *first: torch.Tensor) -> torch.Tensor:
    """What one of FlexAttention's functions gives, with every index at once."""
    w = workload
    axes = [
        torch.arange(n).view([-1 if n_axis == axis else 1 for n_axis in range(4)])
        for axis, n in enumerate((w.batch, w.nheads, w.seqlen_q, w.seqlen_k))
    ]
    given: torch.Tensor = function(*first, *axes)
    return given.expand(w.batch, w.nheads, w.seqlen_q, w.seqlen_k)


@pytest.mark.parametrize("tokens", ["alibi", "bias", "keybias", "bias-odd"])
def test_scores_become_what_flex_makes_of_them(tokens: str, mods: Any) -> None:
    sizes = SIZES.replace("sk10", "sk9") if tokens.endswith("odd") else SIZES
    workload = Workload.parse(f"{sizes}-{tokens.removesuffix('-odd')}")
    features = make_inputs(workload, copies=1, seed=1, device=CPU).features[0]
    given = fa4.feature_options(workload, features)
    assert given.keys() == {"score_mod", "aux_tensors"}
    found = scores_of(given["score_mod"], given["aux_tensors"], workload)
    right = everywhere(flex.score_mod(workload, features), workload, torch.ones(1))
    torch.testing.assert_close(found, right.float())
    assert getattr(given["score_mod"], "__vec_size__", 1) == (1 if tokens.endswith("odd") else 2)


@pytest.mark.parametrize("name", ["relative-bias", "alibi-mod"])
def test_functions_of_the_caller_change_scores_as_flexes_do(name: str, mods: Any) -> None:
    function, workload = FUNCTIONS[name], Workload.parse("b2-h4-hk2-sq6-d32")
    aux = function.aux(workload, CPU)
    given = getattr(mods, function.fa4)(*aux)
    assert function.flex_score is not None
    right = everywhere(function.flex_score(aux), workload, torch.ones(1))
    torch.testing.assert_close(scores_of(given["score_mod"], given["aux_tensors"], workload), right.float())


@pytest.mark.parametrize("name", ["documents", "causal-documents", "prefix-lm"])
def test_functions_of_the_caller_hide_what_flexes_do(name: str, mods: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []
    part = types.SimpleNamespace(BlockSparseTensorsTorch=lambda *found, block_size: sizes.append(block_size) or found)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", part)  # type: ignore[arg-type]
    workload = Workload.parse("b1-h2-sq24-d32")
    case = Case(suite=FORWARD, function=FUNCTIONS[name], sizes=workload)
    given = functions_impls._fa4_options(case.function, case.twin, case.inputs(1, CPU))
    assert given.keys() == {"mask_mod", "aux_tensors", "block_sparse_tensors"}
    assert sizes == [(192, 128)]
    axes = (1, 2, 24, 24)
    found = torch.empty(axes, dtype=torch.bool)
    for at in torch.cartesian_prod(*map(torch.arange, axes)).tolist():
        found[tuple(at)] = given["mask_mod"](*map(index, at), None, given["aux_tensors"]).values[0]
    assert case.function.flex_mask is not None
    right = everywhere(case.function.flex_mask(case.function.aux(workload, CPU)), workload)
    assert torch.equal(found, right)


@pytest.mark.parametrize("kind", ["mask", "keymask"])
def test_masks_hide_what_flex_hides(kind: str, mods: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[dict[str, Any]] = []

    def tensors(*found: torch.Tensor, block_size: tuple[int, int]) -> Any:
        blocks.append({"size": block_size, "counts": (found[0] + found[2]).flatten().tolist()})
        return "blocks"

    part = types.SimpleNamespace(BlockSparseTensorsTorch=tensors)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", part)  # type: ignore[arg-type]
    workload = Workload.parse(f"{SIZES}-{kind}")
    features = make_inputs(workload, copies=1, seed=1, device=CPU).features[0]
    given = fa4.feature_options(workload, features)
    axes = (workload.batch, workload.nheads, workload.seqlen_q, workload.seqlen_k)
    found = torch.empty(axes, dtype=torch.bool)
    for at in torch.cartesian_prod(*map(torch.arange, axes)).tolist():
        found[tuple(at)] = given["mask_mod"](*map(index, at), None, given["aux_tensors"]).values[0]
    assert torch.equal(found, everywhere(flex.mask_mod(workload, features), workload))
    assert blocks == ([] if kind == "mask" else [{"size": (192, 128), "counts": [1, 1]}])
    assert ("block_sparse_tensors" in given) == (kind == "keymask")
