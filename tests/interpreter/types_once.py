"""Triton's types of blocks and the shapes of its tensors, made once instead of in every operation.

Nothing ever changes one after it is made, and to make them took the interpreter a third of its time.
"""

from __future__ import annotations

from typing import Any

import pytest
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Sizes = tuple[int, ...]

MAKE_BLOCK, MAKE_TENSOR = core.block_type.__init__, core.tensor.__init__
BROADCAST, PROMOTE = TritonSemantic.broadcast_impl_value, TritonSemantic.binary_op_type_checking_impl

SHAPES: dict[Sizes, Any] = {}
"""One object for all shapes that are equal, which lives as long as the process: its identity tells it from others."""

SIZES: dict[int, Sizes] = {}
"""Sizes of those shapes by their identity."""

BLOCKS: dict[tuple[int, Sizes], dict[str, Any]] = {}
"""Attributes of a block by the identity of its elements' type, which lives in them, and its sizes."""

TENSORS: dict[int, dict[str, Any]] = {}
"""What tensors of one shape have in common, by its identity; a scalar has none."""


def make_types_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks and tensors take what is known of others like them, and operators leave operands that fit."""
    monkeypatch.setattr(core.block_type, "__init__", block)
    monkeypatch.setattr(core.tensor, "__init__", tensor)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast)
    monkeypatch.setattr(TritonSemantic, "binary_op_type_checking_impl", promoted)
    monkeypatch.setattr(interpreter, "_patch_attr", patch_builtin)


def block(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = SIZES.get(id(shape)) or tuple([one.value if isinstance(one, core.constexpr) else one for one in shape])
    known = BLOCKS.get((id(element_ty), sizes))
    if known is not None:
        vars(self).update(known)
        return
    MAKE_BLOCK(self, element_ty, shape)
    self.shape = SHAPES.setdefault(sizes, self.shape)
    SIZES[id(self.shape)] = sizes
    BLOCKS[id(element_ty), sizes] = dict(vars(self))


def tensor(self: Any, handle: Any, type: Any) -> None:
    shape = type.shape if type.is_block() else None
    known = TENSORS.get(id(shape))
    if known is not None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        vars(self).update(known)
        return
    MAKE_TENSOR(self, handle, type)
    if shape is None or id(shape) in SIZES:
        TENSORS[id(shape)] = {"shape": self.shape, "numel": self.numel}


def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    """Operands of one shape stay as they are."""
    if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
        return lhs, rhs
    return BROADCAST(self, lhs, rhs)


def promoted(self: Any, lhs: Any, rhs: Any, *how: bool, **named: bool) -> Any:
    """Operands of one type keep it, but for quotients, the last of `how`: those of halves are floats."""
    if len(how) < 4 and lhs.__class__ is rhs.__class__ is core.tensor:
        scalar = lhs.type.scalar
        if scalar is rhs.type.scalar and not scalar.is_ptr():
            return broadcast(self, lhs, rhs)
    return PROMOTE(self, lhs, rhs, *how, **named)


def patch_builtin(obj: Any, name: str, member: Any, builder: object, scope: Any) -> None:
    """A builtin as kernels call it: what it wraps asks for nothing but the semantics."""
    call = getattr(member, "__wrapped__", member)

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return call(*args, **kwargs)

    scope.set_attr(obj, name, called)
