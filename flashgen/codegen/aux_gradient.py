"""The gradients of what a user's score_mod loads from its tensors, as source in Triton's language.

The value of each `tl.load` from a tensor that has a gradient gets a name of its own, and the function is differentiated
by that name as `score_mod_gradient` does by the score: the gradient of the modified score goes in as its tangent, and
what comes out is added at the place that was loaded, in a tensor of fp32 beside the one that is read.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass, field

from flashgen.codegen.score_mod_gradient import Derivation, Tangent, free_name, names_in, refusal
from flashgen.core.errors import UnsupportedError
from flashgen.core.score_mods import UserFunction

NAME = "score_mod_aux_bwd"
"""Of the functions that kernels call, with the number of the load behind it."""

SUBJECT = "what depends on an aux tensor with a gradient"

FIRST_AUX = 5
"""Arguments of a score_mod before its tensors."""

_HINTS = frozenset({"cache_modifier", "eviction_policy", "volatile"})


@functools.cache
def aux_gradient_sources(function: UserFunction, numbers: tuple[int, ...]) -> tuple[str, ...]:
    """For each load the source of `score_mod_aux_bwd<n>(grad, score, b, h, q_idx, k_idx, *aux, *daux, seen)`.

    It adds the gradient of what is loaded by `_add_to_aux` to a tensor of `daux`, which has one for each of `numbers`.
    `grad` is that of the modified scores, and `seen` says which of them count.

    Args:
        function: a score_mod.
        numbers: which of its tensors have a gradient, in order.

    Raises:
        UnsupportedError: what is loaded goes through an operation that is not derived, or a tensor is read by other
            means than `tl.load` from it plus a place.
    """
    definition = ast.parse(function.source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    loads = _Loads.of(definition, numbers)
    found = (_OfLoad(definition, loads, number).source() for number in range(len(loads.sites)))
    return tuple(source for source in found if source)


def why_no_aux_gradient(function: UserFunction, numbers: tuple[int, ...]) -> str | None:
    """The operation through which `aux_gradient_sources` finds no derivative, and its line, or None."""
    try:
        aux_gradient_sources(function, numbers)
    except UnsupportedError as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """One load: the name of what it gives, of the place where its gradient is added, and of its mask, if it has one."""

    value: str
    place: str
    mask: str = ""


@dataclass(slots=True, kw_only=True)
class _Loads:
    """The statements of a function with each of these loads under a name, and with the places of their gradients.

    `pointers` are the names that point into a tensor with a gradient, and what points to the same place of its sum.
    """

    used: set[str]
    pointers: dict[str, str]
    daux: list[str]
    statements: list[ast.stmt] = field(default_factory=list)
    sites: list[_Site] = field(default_factory=list)
    statement: ast.stmt | None = None

    @classmethod
    def of(cls, definition: ast.FunctionDef, numbers: tuple[int, ...]) -> _Loads:
        parameters = [argument.arg for argument in definition.args.args]
        used = names_in(definition)
        daux = [free_name("d" + parameters[FIRST_AUX + number], used) for number in numbers]
        pointers = {parameters[FIRST_AUX + number]: name for number, name in zip(numbers, daux, strict=True)}
        found = cls(used=used, pointers=pointers, daux=daux)
        for statement in definition.body:
            found._take(statement)
        return found

    def _take(self, statement: ast.stmt) -> None:
        self.statement = statement
        simple = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr, ast.Assert)
        if not isinstance(statement, simple) and self._points(statement):
            raise self._refused(type(statement).__name__.lower())
        loaded = _Hoisting(self).visit(ast.parse(ast.unparse(statement)).body[0])
        loaded.lineno = statement.lineno
        moves = isinstance(loaded, ast.AugAssign) and names_in(loaded.target) & self.pointers.keys()
        if self._points(loaded) or moves:
            self._follow(loaded)
        for name in names_in(loaded) & self.pointers.keys() if not self._points(loaded) and not moves else ():
            raise self._refused(f"an assignment to {name}")
        self.statements.append(loaded)

    def _follow(self, statement: ast.stmt) -> None:
        """A name for another place of a tensor, and the same place of its sum."""
        value: ast.expr | None = None
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
        elif isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
            target, value = statement.target, ast.BinOp(_read(statement.target), ast.Add(), statement.value)
        if value is None or not isinstance(target, ast.Name) or not self._is_place(value):
            raise self._refused("other uses than tl.load")
        place = free_name("d" + target.id, self.used)
        self._write(place, self.sums(value))
        self.pointers[target.id] = place

    def load(self, call: ast.Call) -> ast.expr:
        """The name of what a call of tl.load gives, if that is from a tensor with a gradient; else the call."""
        if not call.args or not self._points(call.args[0]):
            return call
        if not self._is_place(call.args[0]):
            raise self._refused("tl.load from no sum of the tensor and a place")
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        named |= dict(zip(("mask", "other"), call.args[1:], strict=False))
        if named.keys() - _HINTS - {"mask", "other"}:
            raise self._refused(ast.unparse(call))
        number = len(self.sites)
        site = _Site(
            value=free_name(f"loaded{number}", self.used),
            place=free_name(f"place{number}", self.used),
            mask=free_name(f"shown{number}", self.used) if "mask" in named else "",
        )
        self._write(site.place, self.sums(call.args[0]))
        if site.mask:
            self._write(site.mask, named["mask"])
        self._write(site.value, call)
        self.sites.append(site)
        return ast.Name(site.value, ast.Load())

    def sums(self, node: ast.expr) -> ast.expr:
        """A place of a tensor as one of its sum."""
        copy = ast.parse(ast.unparse(node), mode="eval").body
        for part in ast.walk(copy):
            if isinstance(part, ast.Name) and part.id in self.pointers:
                part.id = self.pointers[part.id]
        return copy

    def _write(self, name: str, value: ast.expr) -> None:
        statement = ast.Assign(targets=[ast.Name(name, ast.Store())], value=value)
        statement.lineno = self.statement.lineno if self.statement else 0
        self.statements.append(ast.fix_missing_locations(statement))

    def _points(self, node: ast.AST) -> bool:
        names = (part for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load))
        return any(name.id in self.pointers for name in names)

    def _is_place(self, node: ast.expr) -> bool:
        """Whether it is a tensor with a gradient plus, or minus, what has nothing to do with one."""
        if isinstance(node, ast.Name):
            return node.id in self.pointers
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.Add, ast.Sub)):
            return False
        if self._points(node.left):
            return self._is_place(node.left) and not self._points(node.right)
        return isinstance(node.op, ast.Add) and self._is_place(node.right)

    def _refused(self, operation: str) -> UnsupportedError:
        assert self.statement is not None
        return refusal(operation, SUBJECT, self.statement)


class _Hoisting(ast.NodeTransformer):
    """Puts the names of loads in their place, the inner ones first."""

    def __init__(self, loads: _Loads) -> None:
        self.loads = loads

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        return self.loads.load(node) if ast.unparse(node.func) == "tl.load" else node


class _OfLoad(Derivation):
    """The function as it adds the gradient of one load."""

    subject = SUBJECT

    def __init__(self, definition: ast.FunctionDef, loads: _Loads, number: int) -> None:
        super().__init__(definition)
        self.used |= loads.used
        self.site, self.number, self.daux = loads.sites[number], number, loads.daux
        self.written = {statement.lineno: statement for statement in definition.body}
        self.tangents: dict[str, ast.expr] = {}
        self.body = loads.statements
        self.seen = free_name("seen", self.used)
        self.adds = False

    def source(self) -> str:
        """The source; empty where the score does not depend on what is loaded."""
        text = super().source()
        return text if self.adds else ""

    def head(self) -> str:
        names = [self.grad, *self.parameters, *self.daux, self.seen]
        return f"def {NAME}{self.number}({', '.join(names)}):"

    def finish(self, tangent: Tangent) -> None:
        if tangent is None:
            return
        seen = f"{self.seen} & {self.site.mask}" if self.site.mask else self.seen
        add = "_add_to_some_aux" if self.site.mask else "_add_to_aux"
        self.lines.append(f"{add}({self.site.place}, {ast.unparse(tangent)}, {seen})")
        self.adds = True

    def assign(self, targets: list[ast.expr], value: ast.expr) -> None:
        super().assign(targets, value)
        if isinstance(targets[0], ast.Name) and targets[0].id == self.site.value:
            self.tangents[self.site.value] = ast.Name(self.grad, ast.Load())

    def _refused(self, operation: str) -> UnsupportedError:
        return refusal(operation, self.subject, self.written[self.statement.lineno])


def _read(target: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(target), mode="eval").body
