"""Which branches of the templates a kernel is rendered by: what is compiled of them is what a compiler has seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.sandbox import SandboxedEnvironment

from flashgen.codegen import render
from flashgen.core.settings import shipped

if TYPE_CHECKING:
    import pytest

    from flashgen.core.config import Config
    from flashgen.core.workload import Specialization


class Branch(NamedTuple):
    """A condition of a template, the `number`-th in it, and how it was decided. Templates have families in common."""

    family: str
    template: str
    line: int
    number: int
    taken: bool


class Branches:
    """An environment for rendering that writes down how each condition, of a statement or inline, is decided."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._decided: set[tuple[str, int, int, bool]] = set()
        self._known: dict[tuple[Specialization, Config], frozenset[Branch]] = {}
        plain = render._environment()
        watched = _Watched(
            loader=jinja2.FileSystemLoader(shipped("templates")),
            undefined=plain.undefined,
            trim_blocks=plain.trim_blocks,
            lstrip_blocks=plain.lstrip_blocks,
            keep_trailing_newline=plain.keep_trailing_newline,
        )
        watched.globals["decided"] = self._decide
        monkeypatch.setattr(render, "_environment", lambda: watched)

    def _decide(self, template: str, line: int, number: int, value: object) -> object:
        self._decided.add((template, line, number, bool(value)))
        return value

    def of(self, spec: Specialization, config: Config) -> frozenset[Branch]:
        """Those of one kernel."""
        if (spec, config) not in self._known:
            self._decided.clear()
            render.render(spec, config)
            self._known[spec, config] = frozenset(Branch(config.family, *each) for each in self._decided)
        return self._known[spec, config]


class _Watched(SandboxedEnvironment):
    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for number, node in enumerate(tree.find_all((nodes.If, nodes.CondExpr))):
            given = [nodes.Const(name), nodes.Const(node.lineno), nodes.Const(number), node.test]
            node.test = nodes.Call(nodes.Name("decided", "load"), given, [], None, None, lineno=node.lineno)
        return tree.set_environment(self)
