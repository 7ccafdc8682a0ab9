"""Triton's types of blocks, the shapes of its tensors and constants, made once instead of in every operation.

Nothing ever changes one after it is made, and to make them took the interpreter half of its time.
"""

from __future__ import annotations

from typing import Any

import pytest
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Sizes = tuple[int, ...]

MAKE_BLOCK, MAKE_TENSOR = core.block_type.__init__, core.tensor.__init__
MAKE_HANDLE = interpreter.TensorHandle.__init__
BROADCAST, PROMOTE = TritonSemantic.broadcast_impl_value, TritonSemantic.binary_op_type_checking_impl

SHAPES: dict[Sizes, Any] = {}
"""One object for all shapes that are equal, which lives as long as the process: its identity tells it from others."""

SIZES: dict[int, Sizes] = {}
"""Sizes of those shapes by their identity."""

BLOCKS: dict[tuple[int, Sizes], dict[str, Any]] = {}
"""Attributes of a block by the identity of its elements' type, which lives in them, and its sizes."""

TENSORS: dict[int, tuple[Any, Any]] = {}
"""Shape and size, which tensors of one shape have in common, by its identity; a scalar has none."""

CONSTANTS: dict[tuple[int, type, Any], Any] = {}
"""Numbers as tensors, by the type of the operand that they take, which lives in them."""

SPLATS: dict[tuple[int, int], Any] = {}
"""Blocks of them by their identity and that of a shape; not to be written to."""

KEPT: set[int] = set()
"""The identities of CONSTANTS."""

NUMBERS = (int, float, bool)

JOINED: dict[tuple[int, int], tuple[Any, bool, bool]] = {}
"""What becomes of two shapes side by side, by their identities, and which of them is another one."""


def make_types_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks and tensors take what is known of others like them, and operators leave operands that fit."""
    monkeypatch.setattr(core.block_type, "__init__", block)
    monkeypatch.setattr(core.tensor, "__init__", tensor)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast)
    monkeypatch.setattr(TritonSemantic, "binary_op_type_checking_impl", promoted)
    monkeypatch.setattr(interpreter, "_patch_attr", patch_builtin)
    monkeypatch.setattr(interpreter.TensorHandle, "__init__", handle)


def block(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = SIZES.get(id(shape)) or tuple([one.value if isinstance(one, core.constexpr) else one for one in shape])
    known = BLOCKS.get((id(element_ty), sizes))
    if known is not None:
        self.__dict__.update(known)
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
        self.shape, self.numel = known
        return
    MAKE_TENSOR(self, handle, type)
    if shape is None or id(shape) in SIZES:
        TENSORS[id(shape)] = self.shape, self.numel


def handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    """What a tensor holds; data that may be too wide for its type is checked as ever."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if data.itemsize > 1 and dtype.__class__ is not core.pointer_type and data.itemsize * 8 > dtype.primitive_bitwidth:
        self.__post_init__()


def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    """Operands of one shape stay as they are, and how others meet is known from those before them."""
    one, other = lhs.type, rhs.type
    if not (one.is_block() and other.is_block()):
        if one.is_block():
            return lhs, splat(self, rhs, one)
        return (splat(self, lhs, other), rhs) if other.is_block() else (lhs, rhs)
    if one.shape is other.shape:
        return lhs, rhs
    key = id(one.shape), id(other.shape)
    if key not in JOINED:
        found = BROADCAST(self, lhs, rhs)
        shape = found[0].type.shape
        if id(one.shape) in SIZES and id(other.shape) in SIZES and shape is found[1].type.shape:
            JOINED[key] = shape, shape is not one.shape, shape is not other.shape
        return found
    shape, is_wider, is_wider_than_other = JOINED[key]
    return (spread(self, lhs, shape) if is_wider else lhs), (spread(self, rhs, shape) if is_wider_than_other else rhs)


def spread(self: Any, value: Any, shape: Any) -> Any:
    """`value` in a shape that numpy gives it, too."""
    kind = core.block_type(value.type.scalar, shape)
    return core.tensor(self.builder.create_broadcast(value.handle, SIZES[id(shape)]), kind)


def splat(self: Any, value: Any, like: Any) -> Any:
    """A scalar as a block of the shape of another one."""
    key = id(value), id(like.shape)
    if key in SPLATS:
        return SPLATS[key]
    kind = like.with_element_ty(value.type.scalar)
    made = core.tensor(self.builder.create_splat(kind.to_ir(self.builder), value.handle), kind)
    if id(value) in KEPT and id(like.shape) in SIZES:
        made.handle.data.flags.writeable = False
        SPLATS[key] = made
    return made


def promoted(self: Any, lhs: Any, rhs: Any, *how: bool, **named: bool) -> Any:
    """Operands of one type keep it, but for quotients, the last of `how`: those of halves are floats.

    What becomes of a number follows from its value and from the type of the other operand, if that keeps it.
    """
    if len(how) < 4 and lhs.__class__ is rhs.__class__ is core.tensor:
        scalar = lhs.type.scalar
        if scalar is rhs.type.scalar and not scalar.is_ptr():
            return broadcast(self, lhs, rhs)
    elif len(how) < 3 and not named:
        if lhs.__class__ is core.tensor and rhs.__class__ in NUMBERS:
            constant = constant_for(self, lhs, rhs, how)
            return PROMOTE(self, lhs, rhs, *how) if constant is None else broadcast(self, lhs, constant)
        if rhs.__class__ is core.tensor and lhs.__class__ in NUMBERS:
            constant = constant_for(self, rhs, lhs, how)
            return PROMOTE(self, lhs, rhs, *how) if constant is None else broadcast(self, constant, rhs)
    return PROMOTE(self, lhs, rhs, *how, **named)


def constant_for(self: Any, operand: Any, number: Any, how: tuple[bool, ...]) -> Any:
    """`number` beside an operand, or None where that is cast, too, or is a pointer."""
    scalar = operand.type.scalar
    key = id(scalar), number.__class__, number
    if key not in CONSTANTS:
        if scalar.is_ptr() or PROMOTE(self, operand, number, *how)[0].type.scalar is not scalar:
            return None
        constant = CONSTANTS[key] = self.scalar_constant(number, dtype=scalar)
        KEPT.add(id(constant))
    return CONSTANTS[key]


def patch_builtin(obj: Any, name: str, member: Any, builder: object, scope: Any) -> None:
    """A builtin as kernels call it: what it wraps asks for nothing but the semantics."""
    call = getattr(member, "__wrapped__", member)

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return call(*args, **kwargs)

    scope.set_attr(obj, name, called)
