"""The source of a user's function, where it is the text that Python compiled into the function.

What is written into a kernel must be what the program would execute. `inspect` finds a text by file and line: after a
decorator, an edited file or a replaced code object it is another function's. So the text that was found is compiled
again, and what comes of it is compared with the function's own code.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from flashgen.core.errors import WorkloadError

_FUTURE_FLAGS = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
_ARGUMENT_FLAGS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
_COUNTS = ("co_name", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount")
_TABLES = ("co_names", "co_varnames", "co_cellvars", "co_freevars")


def function_node(function: FunctionType, kind: str) -> ast.FunctionDef:
    """The tree of the text of a function, as it stands in its file.

    Raises:
        WorkloadError: a decorator wraps it, its text cannot be read, or what lies where Python looks for it is no
            function.
    """
    if "__wrapped__" in vars(function):
        raise WorkloadError(
            f"{kind} is the function that is compiled, got {function.__name__}, which a decorator wraps around another "
            "(functools.wraps): pass the function itself"
        )
    try:
        # of the code, as inspect unwraps functions; a text that is indented stays as it is, strings and all
        text = inspect.getsource(function.__code__)
        body = ast.parse(f"if 1:\n{text}" if text[:1].isspace() else text).body[0]
    except (OSError, SyntaxError) as error:
        raise WorkloadError(
            f"the source of {kind} is in a file or a notebook cell, where Python can read it; that of "
            f"{function.__name__} cannot be read: {error}"
        ) from error
    node = body.body[0] if isinstance(body, ast.If) and text[:1].isspace() else body
    if not isinstance(node, ast.FunctionDef):
        raise WorkloadError(f"{kind} is a function defined with def, got {ast.unparse(node).splitlines()[0]!r}")
    return node


def check_source(function: FunctionType, node: ast.FunctionDef, kind: str) -> None:
    """Refuse a function whose code is not that of the text in `node`.

    Args:
        function: the Python function.
        node: the tree of its text.
        kind: "score_mod" or "mask_mod".

    Raises:
        WorkloadError: they disagree.
    """
    if not any(_same_code(code, function.__code__) for code in _compiled(function, node)):
        raise WorkloadError(
            f"{kind} is compiled from its source, which must be that of its code: {function.__name__} at "
            f"{function.__code__.co_filename}:{function.__code__.co_firstlineno} does something else than the text "
            "there, as after a decorator, an edited file or a replaced __code__; import it again, or pass the function "
            "itself"
        )


def check_meaning(function: FunctionType, names: Iterable[str], kind: str) -> None:
    """Refuse a function in which `tl`, or a name of Python's own among `names`, is not what Triton takes it for.

    Raises:
        WorkloadError: where it is defined they are others.
    """
    module = getattr(_meaning(function, "tl"), "__name__", "triton.language")
    if module != "triton.language":
        raise WorkloadError(f"tl is triton.language in {kind}; where {function.__name__} is defined it is {module}")
    for name in names:
        if _meaning(function, name) is not getattr(builtins, name):
            raise WorkloadError(f"{name} is Python's own in {kind}; where {function.__name__} is defined it is another")


def _meaning(function: FunctionType, name: str) -> Any:
    """The object that a name stands for in a function: of the functions around it, of its module, or a builtin."""
    code = function.__code__
    if name in code.co_freevars and function.__closure__ is not None:
        cell = function.__closure__[code.co_freevars.index(name)]
        try:
            return cell.cell_contents
        except ValueError:  # it has no value yet
            return None
    return function.__globals__.get(name, getattr(builtins, name, None))


def _compiled(function: FunctionType, node: ast.FunctionDef) -> Iterator[CodeType]:
    """The code of the text, compiled where the names of the functions around it are what they are there.

    CPython calls an attribute of a name in another way if the file imports that name. A notebook compiles statement by
    statement, where nothing is imported.
    """
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    imported = sorted(names & _imported_names(function))
    for variant in (imported, []) if imported else ([],):
        module = ast.parse("".join(f"import {name}\n" for name in variant))
        around = ast.parse(f"def around({', '.join(function.__code__.co_freevars)}):\n    pass").body[0]
        assert isinstance(around, ast.FunctionDef)
        around.body = [_without_decorators(node)]
        module.body.append(around)
        flags = function.__code__.co_flags & _FUTURE_FLAGS
        with contextlib.suppress(SyntaxError, ValueError):
            outer = compile(module, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
            yield from (code for each in _codes_in(outer) for code in _codes_in(each) if code.co_name == node.name)


def _imported_names(function: FunctionType) -> set[str]:
    """The names that the file of a function imports, outside of functions and classes."""
    try:
        lines, _ = inspect.findsource(function.__code__)
        pending: list[ast.AST] = [ast.parse("".join(lines))]
    except (OSError, SyntaxError):
        return set()
    found = set()
    while pending:
        part = pending.pop()
        if isinstance(part, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in part.names}
        elif not isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            pending.extend(ast.iter_child_nodes(part))
    return found


def _without_decorators(node: ast.FunctionDef) -> ast.FunctionDef:
    fields = {name: getattr(node, name) for name in node._fields}
    return ast.copy_location(ast.FunctionDef(**{**fields, "decorator_list": []}), node)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield from (each for each in code.co_consts if isinstance(each, CodeType))


def _same_code(one: CodeType, other: CodeType) -> bool:
    """Whether two pieces of code compute the same in the same words; where they stand is no part of it."""
    return (
        one.co_code == other.co_code
        and all(getattr(one, name) == getattr(other, name) for name in (*_COUNTS, *_TABLES))
        and one.co_flags & _ARGUMENT_FLAGS == other.co_flags & _ARGUMENT_FLAGS
        and _same_constants(one.co_consts, other.co_consts)
    )


def _same_constants(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return len(one) == len(other) and all(_same_constant(*pair) for pair in zip(one, other, strict=True))


def _same_constant(one: object, other: object) -> bool:
    """1, 1.0 and True are equal, as are 0.0 and -0.0: for a kernel they are not."""
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return _same_code(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return _same_constants(one, other)
    if isinstance(one, frozenset) and isinstance(other, frozenset):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    return repr(one) == repr(other)
