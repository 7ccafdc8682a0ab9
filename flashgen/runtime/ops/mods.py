"""User-defined scores: Python functions in Triton's language to `UserFunction`s, and a table of handles for the ops.

A score_mod or mask_mod is an ordinary function, or one under `@triton.jit`, of its arguments, `tl` and literals. Its
source is read from the running program, checked, renamed and written into the rendered kernel.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch

from flashgen.core.errors import WorkloadError
from flashgen.core.quoting import shown
from flashgen.core.score_mods import ScoreMods, UserFunction
from flashgen.runtime.ops.mod_source import check_meaning, check_source, function_node

ARGUMENTS = {
    "score_mod": ("score", "b", "h", "q_idx", "k_idx"),
    "mask_mod": ("b", "h", "q_idx", "k_idx"),
}
"""What the two kinds of function get, before the aux tensors. Names are free, order is not."""

TRITON_BUILTINS = frozenset({"float", "int", "len", "max", "min", "range"})
"""Names of Python that Triton's compiler knows without an import."""

_IN_TL = frozenset({"abs", "sum", "where", "exp", "exp2", "log", "log2", "sqrt", "sin", "cos", "load"})
"""Names that are probably meant to be Triton's."""

AUX_TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
"""Triton's names of the element types that an aux tensor may have."""

UserCallable = Callable[..., Any]
_FORBIDDEN = (
    ast.AsyncFunctionDef,
    ast.Await,
    ast.ClassDef,
    ast.Delete,
    ast.Global,
    ast.Import,
    ast.ImportFrom,
    ast.Lambda,
    ast.Nonlocal,
    ast.Raise,
    ast.Starred,
    ast.Try,
    ast.With,
    ast.Yield,
    ast.YieldFrom,
)

_FUNCTIONS: dict[tuple[CodeType, str, int], _Converted] = {}
_JIT_TYPES: set[type] = set()
_HANDLES: dict[tuple[UserFunction | None, UserFunction | None, tuple[str, ...], bool], int] = {}
_MODS: dict[int, ScoreMods] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Converted:
    """A function, the names of its module, and which of Python's own it uses.

    `globals` is None inside of other functions, whose names may be others at every call.
    """

    function: UserFunction
    globals: dict[str, Any] | None
    builtins: tuple[str, ...]


def handle_for(
    score_mod: UserCallable | None,
    mask_mod: UserCallable | None,
    aux_dtypes: tuple[torch.dtype, ...] = (),
    block_mask: bool = False,
) -> int:
    """The handle of what a call's functions compile to; repeated calls read no source.

    Raises:
        WorkloadError: a function or the type of an aux tensor breaks a rule.
    """
    return register(score_mods(score_mod, mask_mod, aux_dtypes, block_mask))


# a constant to torch.compile, which cannot trace it: functions and dtypes are constants of a graph
handle_for._dynamo_marked_constant = True  # type: ignore[attr-defined]


def register(mods: ScoreMods) -> int:
    """A handle by which the ops name `mods`: made of the source, so that it is the same in every process."""
    key = (mods.score_mod, mods.mask_mod, mods.aux, mods.block_mask)
    handle = _HANDLES.get(key)
    if handle is None:
        sources = [function.source if function else "" for function in (mods.score_mod, mods.mask_mod)]
        text = "\0".join([*sources, *mods.aux, str(mods.block_mask)])
        handle = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1  # 63 bits: a schema's int
        _MODS[handle] = mods
        _HANDLES[key] = handle
    return handle


def resolve(handle: int) -> ScoreMods:
    """What `register` was given.

    Raises:
        WorkloadError: this process has not registered it.
    """
    found = _MODS.get(handle)
    if found is None:
        raise WorkloadError(
            "user score functions are known to the process that called flashgen.attention with them (source travels in "
            f"no file); handle {handle} is unknown here"
        )
    return found


def score_mods(
    score_mod: UserCallable | None,
    mask_mod: UserCallable | None,
    aux_dtypes: Sequence[torch.dtype] = (),
    block_mask: bool = False,
) -> ScoreMods:
    """What is compiled in for these functions of a call.

    Raises:
        WorkloadError: a function or the type of an aux tensor breaks a rule.
    """
    for dtype in aux_dtypes:
        if dtype not in AUX_TYPES:
            listed = ", ".join(str(known).removeprefix("torch.") for known in AUX_TYPES)
            raise WorkloadError(f"an aux tensor is one of {listed}, got {dtype}")
    count = len(aux_dtypes)
    return ScoreMods(
        score_mod=None if score_mod is None else user_function(score_mod, "score_mod", count),
        mask_mod=None if mask_mod is None else user_function(mask_mod, "mask_mod", count),
        aux=tuple(AUX_TYPES[dtype] for dtype in aux_dtypes),
        block_mask=block_mask,
    )


@functools.cache
def loaded_aux(function: UserFunction) -> frozenset[int]:
    """Which aux tensors a score_mod names, by number."""
    definition = ast.parse(function.source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    named = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}
    own = len(ARGUMENTS["score_mod"])
    return frozenset(number for number, each in enumerate(definition.args.args[own:]) if each.arg in named)


def user_function(function: UserCallable, kind: str, aux: int = 0) -> UserFunction:
    """The source of `function`, ready to be written into a kernel under the name `kind`.

    Decorators, annotations, comments, a docstring and the format of the text are dropped, and the name is `kind`: what
    computes the same in the same words is the same kernel.

    Args:
        function: a Python function, plain or under `@triton.jit`.
        kind: "score_mod" or "mask_mod".
        aux: the number of aux tensors, which follow the function's own arguments.

    Raises:
        WorkloadError: it is no such function, takes other arguments, or uses a name that is neither its own, nor `tl`,
            nor a builtin that Triton knows.
    """
    inner = function if type(function) is FunctionType else _python_function(function, kind)
    key = (inner.__code__, kind, aux)
    found = _FUNCTIONS.get(key)
    if found is None:
        found = _FUNCTIONS[key] = _converted(inner, kind, aux)
    elif found.globals is not inner.__globals__:
        # equal code of another module, or inside of another function, may mean something else by the same names
        check_meaning(inner, found.builtins, kind)
    return found.function


def _python_function(function: UserCallable, kind: str) -> FunctionType:
    """The Python function of Triton's object for it, which keeps it as `fn`."""
    if type(function) in _JIT_TYPES:
        return function.fn  # type: ignore[attr-defined, no-any-return]
    inner = getattr(function, "fn", None)
    if not isinstance(inner, FunctionType) or not type(function).__module__.startswith("triton."):
        raise WorkloadError(
            f"{kind} is a function defined with def, plain or under @triton.jit, got {type(function).__name__} "
            f"{shown(function)}; values that a partial or an object would hold are aux tensors or literals"
        )
    _JIT_TYPES.add(type(function))
    return inner


def _converted(function: FunctionType, kind: str, aux: int) -> _Converted:
    name = function.__name__
    if function.__code__.co_name == "<lambda>":
        raise WorkloadError(f"{kind} is a function defined with def, got a lambda: its source cannot be told apart")
    whole = function_node(function, kind)
    node = _bare(copy.deepcopy(whole))
    _check_arguments(node, kind, aux)
    for part in ast.walk(node):
        if isinstance(part, _FORBIDDEN) or (part is not node and isinstance(part, ast.FunctionDef)):
            raise WorkloadError(f"{kind} is one function of expressions and assignments, got {_words(part)} in {name}")
    builtins = _checked_names(function, node, kind)
    check_meaning(function, builtins, kind)
    check_source(function, whole, kind)
    if not any(isinstance(part, ast.Return) and part.value is not None for part in ast.walk(node)):
        raise WorkloadError(f"{kind} returns a value, got {name} without a return of one")
    node.name = kind
    source = UserFunction(name=kind, source=ast.unparse(node) + "\n", label=name)
    names = None if function.__closure__ else function.__globals__
    return _Converted(function=source, globals=names, builtins=builtins)


def _bare(node: ast.FunctionDef) -> ast.FunctionDef:
    """The function's tree without what computes nothing: decorators, annotations of the arguments, docstring."""
    node.decorator_list = []
    node.returns = None
    node.args.args = [*node.args.posonlyargs, *node.args.args]
    node.args.posonlyargs = []
    for argument in node.args.args:
        argument.annotation = None
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:]
    return node


def _check_arguments(node: ast.FunctionDef, kind: str, aux: int) -> None:
    own = ARGUMENTS[kind]
    wanted = ", ".join([*own, *(f"aux{i}" for i in range(aux))])
    given = node.args
    if given.vararg or given.kwarg or given.kwonlyargs or given.defaults:
        raise WorkloadError(
            f"{kind} takes positional arguments alone, without defaults, * or **: ({wanted}); got "
            f"({ast.unparse(given)}) in {node.name}"
        )
    if len(given.args) != len(own) + aux:
        raise WorkloadError(
            f"{kind} takes {len(own)} arguments and one for each of the {aux} aux tensors: ({wanted}); got "
            f"({ast.unparse(given)}) in {node.name}"
        )


def _checked_names(function: FunctionType, node: ast.FunctionDef, kind: str) -> tuple[str, ...]:
    """The names of Python's own that a function uses."""
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    own = {name.id for name in names if not isinstance(name.ctx, ast.Load)} | {arg.arg for arg in node.args.args}
    if "tl" in own:
        raise WorkloadError(f"tl is triton.language in {kind}; {function.__name__} has a variable of this name")
    for name in sorted({name.id for name in names} - own - TRITON_BUILTINS - {"tl"}):
        raise WorkloadError(
            f"{kind} uses its arguments, tl and literals alone; {function.__name__} uses {name}: "
            + (f"write tl.{name}" if name in _IN_TL else "write a number as a literal, and pass data as an aux tensor")
        )
    return tuple(sorted({name.id for name in names} & TRITON_BUILTINS - own))


def _words(node: ast.AST) -> str:
    """A piece of source as it is quoted in a message: its first line."""
    return repr(ast.unparse(node).splitlines()[0])
