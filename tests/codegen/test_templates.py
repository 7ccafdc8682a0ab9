"""The rules of the templates themselves, read by Jinja's own parser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jinja2 import nodes

from flashgen.codegen.render import _environment

ENVIRONMENT = _environment()
TEMPLATES = ENVIRONMENT.list_templates()


def parsed(template: str) -> nodes.Template:
    assert ENVIRONMENT.loader is not None
    source, _, _ = ENVIRONMENT.loader.get_source(ENVIRONMENT, template)
    return ENVIRONMENT.parse(source)


def nested_ifs(node: nodes.Node, inside: bool = False) -> Iterator[int]:
    """Lines of every `if` within an `if`; an `elif` is none, and loops and macros do not count."""
    branches = node.elif_ if isinstance(node, nodes.If) else []
    for child in node.iter_child_nodes():
        is_if = isinstance(child, nodes.If) and not any(child is branch for branch in branches)
        if is_if and inside:
            yield child.lineno
        yield from nested_ifs(child, inside or is_if)


def test_there_are_templates() -> None:
    assert len(TEMPLATES) > 50


@pytest.mark.parametrize("template", TEMPLATES)
def test_ifs_are_one_deep(template: str) -> None:
    lines = list(nested_ifs(parsed(template)))
    assert not lines, f"{template} has an if within an if in lines {lines}: use elif, an included part or a macro"


def test_an_if_within_an_if_is_found() -> None:
    inner = "{% for x in y %}{% if b %}1{% elif c %}2{% endif %}{% endfor %}"
    text = "{% if a %}" + inner + "{% elif d %}{% if e %}3{% endif %}{% endif %}"
    assert len(list(nested_ifs(ENVIRONMENT.parse(text)))) == 2
    assert not list(nested_ifs(ENVIRONMENT.parse("{% if a %}1{% elif b %}2{% endif %}{% if c %}3{% endif %}")))
