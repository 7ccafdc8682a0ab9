"""A user's function is compiled from the text of its own code, or it is refused; attacks on the way to that text."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
import triton
import triton.language as tl

from flashgen.core.errors import WorkloadError
from flashgen.runtime.ops import mod_source, mods
from flashgen.runtime.ops.mods import user_function

DISAGREES = "is compiled from its source, which must be that of its code"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mods, "_FUNCTIONS", {})


def imported(path: Path, text: str) -> ModuleType:
    path.write_text(text)
    linecache.checkcache()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def doubled(score, b, h, q_idx, k_idx):
    return score * 2.0


def tripled(score, b, h, q_idx, k_idx):
    return score * 3.0


def wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def clean(score, b, h, q_idx, k_idx):
        return score * 5.0

    return clean


def replacing(function: Callable[..., Any]) -> Callable[..., Any]:
    def other(score, b, h, q_idx, k_idx):
        return score * 7.0

    return other


@wrapping
def wrapped(score, b, h, q_idx, k_idx):
    return score * 2.0


@replacing
def replaced(score, b, h, q_idx, k_idx):
    return score * 2.0


def test_a_wrapped_function_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"got wrapped, which a decorator wraps around another \(functools.wraps\)"):
        user_function(wrapped, "score_mod")
    with pytest.raises(WorkloadError, match="which a decorator wraps"):
        user_function(wrapping(doubled), "score_mod")


def test_what_a_decorator_puts_in_place_of_a_function_is_compiled_from_its_own_text() -> None:
    assert "score * 7.0" in user_function(replaced, "score_mod").source


def test_an_attribute_named_fn_is_not_followed() -> None:
    """Triton's decorator keeps the function there; so do others, around another one."""
    other: Any = replacing(doubled)
    other.fn = doubled
    assert "score * 7.0" in user_function(other, "score_mod").source

    class Holder:
        fn = staticmethod(doubled)

    with pytest.raises(WorkloadError, match="defined with def"):
        user_function(Holder(), "score_mod")


def test_code_that_was_replaced_is_refused() -> None:
    def mine(score, b, h, q_idx, k_idx):
        return score * 2.0

    mine.__code__ = mine.__code__.replace(co_consts=(None, 9.0))
    with pytest.raises(WorkloadError, match=DISAGREES):
        user_function(mine, "score_mod")
    mine.__code__ = tripled.__code__
    assert "3.0" in user_function(mine, "score_mod").source, "it is the text of the code that is executed"


@pytest.mark.parametrize(
    ("constant", "other"), [("1", 1.0), ("1", True), ("0.0", -0.0), ("2.0", 2), ("(1, 2)[0]", 1.0), ("-0.0", 0.0)]
)
def test_equal_constants_of_other_types_are_other_code(tmp_path: Path, constant: str, other: object) -> None:
    module = imported(
        tmp_path / "constants.py", f"def f(score, b, h, q_idx, k_idx):\n    return score + ({constant})\n"
    )
    user_function(module.f, "score_mod")
    mods._FUNCTIONS.clear()
    code: CodeType = module.f.__code__
    consts = tuple(other if type(each) in (int, float) else each for each in code.co_consts)
    module.f.__code__ = code.replace(co_consts=consts)
    with pytest.raises(WorkloadError, match=DISAGREES):
        user_function(module.f, "score_mod")


@pytest.mark.parametrize(
    "edited",
    [
        "def f(score, b, h, q_idx, k_idx):\n    return score * 4.0\n",
        "def f(score, b, h, q_idx, k_idx):\n    return score + 2.0\n",
        "def f(score, b, h, q_idx, k_idx):\n    return tl.exp2(score) * 2.0\n",
        "def f(score, b, h, k_idx, q_idx):\n    return score * 2.0\n",
        "def g(score, b, h, q_idx, k_idx):\n    return score * 2.0\n",
        "# a line more\ndef g(score, b, h, q_idx, k_idx):\n    return score * 4.0\n",
        "x = 3\n",
        "",
    ],
    ids=["constant", "operator", "code", "arguments", "name", "line", "no function", "empty"],
)
def test_a_file_that_was_edited_since_its_import_is_refused(tmp_path: Path, edited: str) -> None:
    path = tmp_path / "edited.py"
    module = imported(path, "import triton.language as tl\ndef f(score, b, h, q_idx, k_idx):\n    return score * 2.0\n")
    path.write_text("import triton.language as tl\n" + edited)
    with pytest.raises(WorkloadError, match=f"{DISAGREES}|cannot be read|defined with def"):
        user_function(module.f, "score_mod")


def test_an_edit_that_changes_no_code_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "commented.py"
    text = "import triton.language as tl\ndef f(score, b, h, q_idx, k_idx):\n    return tl.abs(score)\n"
    module = imported(path, text)
    path.write_text(f"{text}    # a comment\n\nX = 3\n")
    assert "tl.abs(score)" in user_function(module.f, "score_mod").source


def test_executed_text_that_names_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "innocent.py"
    path.write_text("def f(score, b, h, q_idx, k_idx):\n    return score * 2.0\n")
    space: dict[str, Any] = {}
    exec(compile("def f(score, b, h, q_idx, k_idx):\n    return score * 8.0\n", str(path), "exec"), space)
    with pytest.raises(WorkloadError, match=DISAGREES):
        user_function(space["f"], "score_mod")


def test_lambdas_are_refused_under_any_name() -> None:
    one, other = lambda s, b, h, q, k: s * 2.0, lambda s, b, h, q, k: s * 3.0
    for function in (one, other):
        function.__name__ = "named"
        with pytest.raises(WorkloadError, match="got a lambda"):
            user_function(function, "score_mod")


def test_a_name_that_was_changed_is_no_other_function() -> None:
    function = FunctionType(doubled.__code__, globals(), "another")
    assert user_function(function, "score_mod").source == user_function(doubled, "score_mod").source


# --- what is written in many ways is taken ------------------------------------------------------------------------


def around() -> list[Callable[..., Any]]:
    import triton.language as tl

    def nested(score, b, h, q_idx, k_idx):
        """A docstring
        of two lines."""
        return tl.where(q_idx >= k_idx, tl.exp2(score), -0.0)

    @triton.jit
    def jitted(score, b, h, q_idx, k_idx):
        return tl.abs(score)  # fmt: skip

    return [nested, jitted]


class Owner:
    @staticmethod
    def static(score, b, h, q_idx, k_idx):
        return tl.abs(score)


if sys.version_info:

    def conditional(score, b, h, q_idx: int, k_idx) -> float:
        first, second = 1, (1, 2.0, "x")
        wanted = h.to(tl.int32) + first
        for _ in range(2):
            wanted += max(0, 1) + second[0]
        return tl.where(wanted in (1, 2), score, float("-inf")) if True else score


def one_liner(score, b, h, q_idx, k_idx): return score  # fmt: skip


@pytest.mark.parametrize("function", [*around(), Owner.static, Owner().static, conditional, one_liner, doubled])
def test_functions_as_people_write_them_are_taken(function: Any) -> None:
    assert user_function(function, "score_mod").source.startswith("def score_mod(score, b, h, q_idx, k_idx):\n")


NOTEBOOK = [
    "import triton.language as tl\n\ndef f(score, b, h, q_idx, k_idx):\n    return tl.abs(score).to(tl.float32)\n",
    "def f(score, b, h, q_idx, k_idx):\n    return tl.abs(score).to(tl.float32)\n",
]


@pytest.mark.parametrize("cell", NOTEBOOK, ids=["with its import", "without"])
@pytest.mark.parametrize("by_statement", [True, False])
def test_a_cell_of_a_notebook_is_taken(cell: str, by_statement: bool) -> None:
    """Which compiles every statement on its own; CPython has other code for calls of what a file imports."""
    import ast

    name = "<ipython-input-1-abc>"
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    space: dict[str, Any] = {"tl": tl}
    tree = ast.parse(cell)
    for body in [[each] for each in tree.body] if by_statement else [tree.body]:
        exec(compile(ast.Module(body=body, type_ignores=[]), name, "exec"), space)
    assert "tl.abs(score).to(tl.float32)" in user_function(space["f"], "score_mod").source


# --- names that mean something else -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("import triton.language as tl\nmax = min\n", "max is Python's own in score_mod; where f is defined it is"),
        ("import math as tl\n", "where f is defined it is math"),
    ],
)
def test_equal_code_of_another_module_is_not_taken_for_this_one_s(tmp_path: Path, head: str, message: str) -> None:
    text = "def f(score, b, h, q_idx, k_idx):\n    return tl.abs(score) * max(1, 2)\n"
    padding = "\n" * (head.count("\n") - 1)
    first = imported(tmp_path / "one.py", f"import triton.language as tl\n{padding}{text}")
    other = imported(tmp_path / "two.py", f"{head}{text}")
    assert first.f.__code__ == other.f.__code__
    user_function(first.f, "score_mod")
    with pytest.raises(WorkloadError, match=message):
        user_function(other.f, "score_mod")


def test_a_tl_of_a_function_around_it_is_looked_at() -> None:
    def maker(tl):
        def f(score, b, h, q_idx, k_idx):
            return tl.abs(score)

        return f

    user_function(maker(tl), "score_mod")
    with pytest.raises(WorkloadError, match="where f is defined it is math"):
        user_function(maker(__import__("math")), "score_mod")


def test_max_of_triton_is_not_max_of_python(tmp_path: Path) -> None:
    text = "import triton.language as tl\nmax = min\ndef f(score, b, h, q_idx, k_idx):\n    return tl.max(score)\n"
    user_function(imported(tmp_path / "own.py", text).f, "score_mod")


def test_a_known_function_reads_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    user_function(doubled, "score_mod")
    monkeypatch.setattr(mod_source, "inspect", None)
    monkeypatch.setattr(mods, "function_node", None)
    user_function(doubled, "score_mod")
