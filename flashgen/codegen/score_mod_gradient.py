"""The derivative of a user's score_mod, as source in Triton's language beside the function's own.

Forward-mode differentiation (Wengert 1964) over Python's syntax tree: the gradient of the modified score goes in as the
tangent of `score`, and each name that depends on the score gets a tangent of its own. A score_mod makes each score of
that score alone, so the tangent of what it returns is the gradient of the score.
"""

from __future__ import annotations

import ast
import functools

from flashgen.core.errors import UnsupportedError
from flashgen.core.score_mods import UserFunction

NAME = "score_mod_bwd"
"""Of the function that kernels call."""

LN2 = 0.6931471805599453

Tangent = ast.expr | None
"""None of what does not depend on the score, or depends on it in steps."""

_OPERATORS = {ast.Pow: "**", ast.Mod: "%", ast.FloorDiv: "//", ast.MatMult: "@", ast.Not: "not", ast.Invert: "~"}
_ELEMENTWISE = {
    "exp": "{d} * tl.exp({x})",
    "exp2": f"{{d}} * (tl.exp2({{x}}) * {LN2})",
    "log": "{d} / {x}",
    "log2": f"{{d}} / ({{x}} * {LN2})",
    "sqrt": "{d} * 0.5 / tl.sqrt({x})",
    "sigmoid": "{d} * (tl.sigmoid({x}) * (1.0 - tl.sigmoid({x})))",
    "abs": "tl.where({x} > 0.0, {d}, tl.where({x} < 0.0, -{d}, 0.0))",
}
_PAIRS = {"maximum": ">", "minimum": "<"}


@functools.cache
def gradient_source(function: UserFunction) -> str:
    """The source of `score_mod_bwd(grad, score, b, h, q_idx, k_idx, *aux)`, which gives the gradient of `score`.

    Where the function adds something to its score, that is `grad` itself, bit by bit. At the ties of tl.maximum and
    tl.minimum either side gets half, and at 0 tl.abs has the derivative 0, as in torch.

    Raises:
        UnsupportedError: something that depends on the score goes through an operation that is not derived.
    """
    definition = ast.parse(function.source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    return Derivation(definition).source()


def why_no_gradient(function: UserFunction) -> str | None:
    """The operation through which `gradient_source` finds no derivative, and its line, or None."""
    try:
        gradient_source(function)
    except UnsupportedError as error:
        return str(error)
    return None


class Derivation:
    """One function: its statements as they are, each after those that compute the tangent of what it assigns."""

    subject = "what depends on the score"

    def __init__(self, definition: ast.FunctionDef) -> None:
        """The derivation by the first parameter."""
        self.body = definition.body
        self.used = names_in(definition)
        self.parameters = [arg.arg for arg in definition.args.args]
        self.grad = self._free("grad")
        self.tangents: dict[str, ast.expr] = {self.parameters[0]: _name(self.grad)}
        self.lines: list[str] = []
        self.statement: ast.stmt = definition

    def source(self) -> str:
        """The source of the derivative.

        Raises:
            UnsupportedError: there is an operation that is not derived.
        """
        for statement in self.body:
            self.statement = statement
            if isinstance(statement, ast.Return):
                self.finish(None if statement.value is None else self.tangent(statement.value))
                break
            self._take(statement)
        else:
            raise UnsupportedError("a score_mod with a gradient ends with a return, and its last statement is none")
        text = "\n".join(self.lines)
        return "\n".join([self.head(), *(f"    {line}" for line in text.splitlines())]) + "\n"

    def head(self) -> str:
        """Its first line."""
        return f"def {NAME}({', '.join([self.grad, *self.parameters])}):"

    def finish(self, tangent: Tangent) -> None:
        """Write what stands in the place of the return, from the tangent of what is returned."""
        self.lines.append(f"return {f'tl.zeros_like({self.grad})' if tangent is None else ast.unparse(tangent)}")

    def _take(self, statement: ast.stmt) -> None:
        """Write a statement, behind the tangents of the names that it assigns."""
        if isinstance(statement, ast.AugAssign):
            read = ast.parse(ast.unparse(statement.target), mode="eval").body
            self.assign([statement.target], ast.BinOp(read, statement.op, statement.value))
        elif isinstance(statement, ast.Assign):
            self.assign(statement.targets, statement.value)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self.assign([statement.target], statement.value)
        elif not isinstance(statement, (ast.Expr, ast.Pass, ast.Assert)):
            parts = list(ast.walk(statement))
            if self._depends(statement) or any(isinstance(part, ast.Return) for part in parts):
                raise self._refused(type(statement).__name__.lower())
        self.lines.append(ast.unparse(statement))

    def assign(self, targets: list[ast.expr], value: ast.expr) -> None:
        """Write the tangents of the names that a statement is about to assign."""
        found = self.tangent(value)
        names = [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
        if found is None:
            for name in names:
                self.tangents.pop(name, None)
        elif len(targets) == 1 and isinstance(targets[0], ast.Name):
            self.tangents[names[0]] = self._kept(found)
        else:
            raise self._refused("an assignment to several names")

    def tangent(self, node: ast.expr) -> Tangent:
        """The tangent of an expression.

        Raises:
            UnsupportedError: an operation in it is not derived.
        """
        if any(isinstance(part, ast.NamedExpr) for part in ast.walk(node)):
            raise self._refused(":=")
        if not self._depends(node) or _is_type(node):
            return None
        if isinstance(node, ast.Name):
            return self.tangents[node.id]
        if isinstance(node, ast.BinOp):
            return self._of_operator(node, self.tangent(node.left), self.tangent(node.right))
        if isinstance(node, ast.UnaryOp):
            return self._of_sign(node, self.tangent(node.operand))
        if isinstance(node, ast.Compare):
            return None  # a step, whose derivative is 0 beside it
        if isinstance(node, ast.BoolOp) and all(self.tangent(value) is None for value in node.values):
            return None
        if isinstance(node, ast.Call):
            return self._of_call(node)
        raise self._refused(type(node).__name__.lower())

    def _of_operator(self, node: ast.BinOp, left: Tangent, right: Tangent) -> Tangent:
        if left is None and right is None:
            return None
        if isinstance(node.op, (ast.Add, ast.Sub)):
            return _sum(left, right, node.op)
        if isinstance(node.op, ast.Mult):
            parts = [ast.BinOp(left, ast.Mult(), node.right)] if left is not None else []
            parts += [ast.BinOp(right, ast.Mult(), node.left)] if right is not None else []
            return _sum(parts[0], parts[1], ast.Add()) if len(parts) == 2 else parts[0]
        if isinstance(node.op, ast.Div):
            first = None if left is None else ast.BinOp(left, ast.Div(), node.right)
            second = None if right is None else _parsed("{d} / {y} * ({x} / {y})", d=right, x=node.left, y=node.right)
            return _sum(first, second, ast.Sub())
        raise self._refused(_OPERATORS.get(type(node.op), type(node.op).__name__))

    def _of_sign(self, node: ast.UnaryOp, operand: Tangent) -> Tangent:
        if operand is None or isinstance(node.op, ast.UAdd):
            return operand
        if isinstance(node.op, ast.USub):
            return ast.UnaryOp(ast.USub(), operand)
        raise self._refused(_OPERATORS[type(node.op)])

    def _of_call(self, node: ast.Call) -> Tangent:
        """A function of tl, or `.to(tl.float32)`, which changes nothing."""
        called = ast.unparse(node.func)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to" and called != "tl.to":
            inner = self.tangent(node.func.value)
            if inner is None or [ast.unparse(one) for one in (*node.args, *node.keywords)] == ["tl.float32"]:
                return inner
            raise self._refused(ast.unparse(node))
        inputs = [*node.args, *(keyword.value for keyword in node.keywords)]
        found = [self.tangent(one) for one in inputs]
        name = called.removeprefix("tl.")
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if owner is not None and called != f"tl.{name}" and self._depends(owner):
            raise self._refused(called)
        if name == "where" and len(node.args) == 3 and not node.keywords:
            return self._of_choice(node, found)
        if all(one is None for one in found):
            return None
        derived = called == f"tl.{name}" and not node.keywords
        if derived and name in _ELEMENTWISE and len(node.args) == 1 and found[0] is not None:
            tangent = self._kept(found[0]) if name == "abs" else found[0]
            return _parsed(_ELEMENTWISE[name], d=tangent, x=node.args[0])
        if derived and name in _PAIRS and len(node.args) == 2:
            return self._of_pair(node, _PAIRS[name], found)
        raise self._refused(called)

    def _of_choice(self, node: ast.Call, found: list[Tangent]) -> Tangent:
        """The tangent of the side that was chosen: no product, as the other side may be infinite or NaN."""
        if found[1] is None and found[2] is None:
            return None
        return _parsed("tl.where({c}, {d}, {e})", c=node.args[0], d=_or_zero(found[1]), e=_or_zero(found[2]))

    def _of_pair(self, node: ast.Call, wins: str, found: list[Tangent]) -> ast.expr:
        d, e = (_or_zero(one if one is None else self._kept(one)) for one in found)
        template = f"tl.where({{x}} == {{y}}, 0.5 * ({{d}} + {{e}}), tl.where({{x}} {wins} {{y}}, {{d}}, {{e}}))"
        return _parsed(template, d=d, e=e, x=node.args[0], y=node.args[1])

    def _kept(self, tangent: ast.expr) -> ast.expr:
        """The tangent under a name, as it is read more than once."""
        if isinstance(tangent, ast.Name):
            return tangent
        name = self._free("tangent")
        self.lines.append(f"{name} = {ast.unparse(tangent)}")
        return _name(name)

    def _depends(self, node: ast.AST) -> bool:
        return any(isinstance(part, ast.Name) and part.id in self.tangents for part in ast.walk(node))

    def _free(self, wanted: str) -> str:
        """A name that the function does not use; none is given twice."""
        return free_name(wanted, self.used)

    def _refused(self, operation: str) -> UnsupportedError:
        return refusal(operation, self.subject, self.statement)


def names_in(node: ast.AST) -> set[str]:
    """The names that a piece of source uses, those of parameters among them."""
    used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return used | {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}


def free_name(wanted: str, used: set[str]) -> str:
    """A name that is not among those used, which it is from now on."""
    numbered = (f"{wanted}{i or ''}" for i in range(len(used) + 1))
    name = next(name for name in numbered if name not in used)
    used.add(name)
    return name


def refusal(operation: str, subject: str, statement: ast.stmt) -> UnsupportedError:
    """The error of an operation that is not derived, with its line."""
    words = ast.unparse(statement).splitlines()[0]
    return UnsupportedError(
        f"no gradient through {operation} of {subject}, in line {statement.lineno} of the score_mod without comments: "
        f"{words!r}"
    )


def _sum(left: Tangent, right: Tangent, operator: ast.operator) -> Tangent:
    if left is None and right is not None and isinstance(operator, ast.Sub):
        return ast.UnaryOp(ast.USub(), right)
    return ast.BinOp(left, operator, right) if left is not None and right is not None else left or right


def _is_type(node: ast.expr) -> bool:
    """Whether it is `score.dtype` or `score.shape`, which no value changes."""
    return isinstance(node, ast.Attribute) and node.attr in ("dtype", "shape")


def _or_zero(tangent: Tangent) -> ast.expr:
    return ast.Constant(0.0) if tangent is None else tangent


def _name(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def _parsed(template: str, **parts: ast.expr) -> ast.expr:
    return ast.parse(
        template.format(**{name: f"({ast.unparse(one)})" for name, one in parts.items()}), mode="eval"
    ).body
