"""The caller's score_mod and mask_mod, written in Triton's language, evaluated with torch's operations."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.features.values import BlockMask, Features
from flashgen.core.score_mods import UserFunction
from flashgen.runtime.ops.mods import resolve

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreFunctions:
    """The functions of a call with their tensors; `first` is the index of the first sequence that they see."""

    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    aux: tuple[Tensor, ...]
    block_mask: BlockMask | None
    device: torch.device
    first: int = 0

    @classmethod
    def of(cls, features: Features, device: torch.device, first: int = 0) -> ScoreFunctions | None:
        """Those of a call's features, or None."""
        if not features.mods:
            return None
        mods = resolve(features.mods)
        return cls(
            score_mod=None if mods.score_mod is None else _callable(mods.score_mod),
            mask_mod=None if mods.mask_mod is None else _callable(mods.mask_mod),
            aux=features.aux,
            block_mask=features.block_mask,
            device=device,
            first=first,
        )

    def modified(self, scores: Tensor, b: int) -> Tensor:
        """The scores (nheads, seqlen_q, seqlen_k) of a sequence after score_mod."""
        if self.score_mod is None:
            return scores
        found = [
            torch.as_tensor(self.score_mod(one, *self._places(b, h, *one.shape))).to(one.dtype).expand_as(one)
            for h, one in enumerate(scores)
        ]
        return torch.stack(found)

    def visible(self, b: int, nheads: int, rows: int, keys: int) -> Tensor:
        """Which keys mask_mod and the block mask leave visible, (nheads, seqlen_q, seqlen_k)."""
        seen = torch.ones((nheads, rows, keys), dtype=torch.bool, device=self.device)
        if self.mask_mod is not None:
            found = [torch.as_tensor(self.mask_mod(*self._places(b, h, rows, keys))) for h in range(nheads)]
            seen = torch.stack([one.to(self.device).bool().expand(rows, keys) for one in found])
        return seen if self.block_mask is None else _by_blocks(self.block_mask, seen, b)

    def _places(self, b: int, h: int, rows: int, keys: int) -> tuple[Any, ...]:
        """What functions get behind the score: numbers of 32 bits, as in kernels."""

        def number(value: int) -> Tensor:
            return torch.tensor(value, dtype=torch.int32, device=self.device)

        q_idx, k_idx = (torch.arange(size, dtype=torch.int32, device=self.device) for size in (rows, keys))
        aux = (_Pointer(tensor.flatten(), number(0)) for tensor in self.aux)
        return (number(self.first + b), number(h), q_idx[:, None], k_idx[None, :], *aux)


def _by_blocks(mask: BlockMask, seen: Tensor, b: int) -> Tensor:
    """Blocks that are listed as full count as seen, those that are not listed as hidden, whatever mask_mod says."""

    def listed(counts: Tensor, indices: Tensor) -> Tensor:
        of_sequence = (counts[b % len(counts)], indices[b % len(indices)])
        place = torch.arange(indices.shape[-1], device=indices.device)
        flags = torch.zeros(indices.shape[1:], dtype=torch.bool, device=indices.device)
        flags = flags.scatter(-1, of_sequence[1].long(), place < of_sequence[0][..., None])
        wide = flags.repeat_interleave(mask.block_size, 1).repeat_interleave(mask.block_size, 2)
        return wide[:, : seen.shape[1], : seen.shape[2]].expand_as(seen)

    partial = listed(mask.partial_counts, mask.partial_indices)
    return listed(mask.full_counts, mask.full_indices) | (partial & seen)


class _Pointer:
    """An aux tensor as functions get it: they add places to it, and `tl.load` reads there, for autograd to see."""

    def __init__(self, flat: Tensor, place: Tensor) -> None:
        self.flat, self.place = flat, place

    def __add__(self, places: Any) -> _Pointer:
        return _Pointer(self.flat, self.place + places)

    __radd__ = __add__

    def __sub__(self, places: Any) -> _Pointer:
        return _Pointer(self.flat, self.place - places)

    def load(self, mask: Any, other: Any) -> Tensor:
        """What lies there.

        Raises:
            WorkloadError: a place is outside of the tensor.
        """
        read = torch.as_tensor(True if mask is None else mask, device=self.place.device).bool()
        place = self.place.long() + torch.zeros_like(read, dtype=torch.int64)
        if bool((read & ((place < 0) | (place >= self.flat.numel()))).any()):
            raise WorkloadError(
                f"a function loads from 0 to {self.flat.numel() - 1} of its aux tensor, got a place beyond"
            )
        if not self.flat.numel():
            return torch.full_like(place, 0 if other is None else other, dtype=self.flat.dtype)
        return torch.where(read, self.flat[torch.where(read, place, 0)], 0 if other is None else other)


def _load(pointer: _Pointer, mask: Any = None, other: Any = None) -> Tensor:
    return pointer.load(mask, other)


def _pairwise(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: function(*_tensors(a, b))


def _tensors(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Two operands, numbers in the dtype and on the device of the tensor beside them."""
    if isinstance(a, Tensor):
        whole = isinstance(b, Tensor) or (isinstance(b, float) and not a.is_floating_point())
        return a, b if isinstance(b, Tensor) else torch.as_tensor(b, dtype=None if whole else a.dtype, device=a.device)
    if isinstance(b, Tensor):
        return _tensors(b, a)[::-1]
    return torch.as_tensor(a), torch.as_tensor(b)


def _alone(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    return lambda x: function(torch.as_tensor(x))


def _divided(a: Any, b: Any) -> Any:
    """C's division of integers, which rounds to 0."""
    return torch.div(*_tensors(a, b), rounding_mode="trunc") if _is_tensor(a, b) else a // b


def _remainder(a: Any, b: Any) -> Any:
    """C's remainder, which has the sign of the dividend."""
    return torch.fmod(*_tensors(a, b)) if _is_tensor(a, b) else a % b


def _both(a: Any, b: Any) -> Any:
    return torch.logical_and(*_tensors(a, b)) if _is_tensor(a, b) else a and b


def _either(a: Any, b: Any) -> Any:
    return torch.logical_or(*_tensors(a, b)) if _is_tensor(a, b) else a or b


def _negated(a: Any) -> Any:
    return torch.logical_not(a) if isinstance(a, Tensor) else not a


def _is_tensor(*values: Any) -> bool:
    return any(isinstance(value, Tensor) for value in values)


_KNOWN: dict[str, Any] = {
    "load": _load,
    "where": lambda condition, a, b: torch.where(torch.as_tensor(condition), *_tensors(a, b)),
    "maximum": _pairwise(torch.maximum),
    "minimum": _pairwise(torch.minimum),
    "cast": lambda x, dtype: torch.as_tensor(x).to(dtype),
    **{
        name: _alone(getattr(torch, name))
        for name in ("abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "floor", "ceil", "erf")
    },
    "sigmoid": _alone(torch.sigmoid),
    **{f"int{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    "bfloat16": torch.bfloat16,
    "int1": torch.bool,
}


class _Language:
    """What `tl` is to a function."""

    def __getattr__(self, name: str) -> Any:
        if name not in _KNOWN:
            listed = ", ".join(sorted(_KNOWN))
            raise UnsupportedError(f"flashgen.reference evaluates functions that use {listed} of tl, got tl.{name}")
        return _KNOWN[name]


_NAMES: dict[str, Any] = {
    "tl": _Language(),
    "max": _pairwise(torch.maximum),
    "min": _pairwise(torch.minimum),
    "_divided": _divided,
    "_remainder": _remainder,
    "_both": _both,
    "_either": _either,
    "_negated": _negated,
}
_CALLED = {ast.FloorDiv: "_divided", ast.Mod: "_remainder", ast.And: "_both", ast.Or: "_either", ast.Not: "_negated"}


class _InTorch(ast.NodeTransformer):
    """Operators that mean something else for torch's tensors, as calls."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        return _call(node.op, node.left, node.right) if type(node.op) in _CALLED else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        read = ast.parse(ast.unparse(node.target), mode="eval").body
        self.generic_visit(node)
        value = ast.BinOp(read, node.op, node.value)
        return ast.Assign(targets=[node.target], value=self.visit_BinOp(value))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        return functools.reduce(lambda left, right: _call(node.op, left, right), node.values)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return _call(node.op, node.operand) if isinstance(node.op, ast.Not) else node


def _call(operator: ast.AST, *operands: ast.expr) -> ast.expr:
    return ast.Call(func=ast.Name(_CALLED[type(operator)], ast.Load()), args=list(operands), keywords=[])


@functools.cache
def _callable(function: UserFunction) -> Callable[..., Any]:
    """A function whose source was checked when it was registered, to call with torch's tensors."""
    tree = ast.fix_missing_locations(_InTorch().visit(ast.parse(function.source)))
    names = dict(_NAMES)
    exec(compile(tree, f"<{function.label}>", "exec"), names)
    found: Callable[..., Any] = names[function.name]
    return found
