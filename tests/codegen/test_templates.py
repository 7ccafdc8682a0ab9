"""The rules of the templates themselves, read by Jinja's own parser."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from jinja2 import nodes

from flashgen.codegen.families import FAMILIES, unsupported
from flashgen.codegen.family import KernelFamily
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from tests.codegen.templates import ENVIRONMENT, parsed, used

TEMPLATES = ENVIRONMENT.list_templates()
H200 = find_device("h200")


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


def test_ifs_are_one_deep() -> None:
    found = {template: list(nested_ifs(parsed(template))) for template in TEMPLATES}
    nested = {template: lines for template, lines in found.items() if lines}
    assert not nested, f"ifs within an if, by their lines: {nested}; use elif, an included part or a macro"


def test_an_if_within_an_if_is_found() -> None:
    inner = "{% for x in y %}{% if b %}1{% elif c %}2{% endif %}{% endfor %}"
    text = "{% if a %}" + inner + "{% elif d %}{% if e %}3{% endif %}{% endif %}"
    assert len(list(nested_ifs(ENVIRONMENT.parse(text)))) == 2
    assert not list(nested_ifs(ENVIRONMENT.parse("{% if a %}1{% elif b %}2{% endif %}{% if c %}3{% endif %}")))


# --- what templates are given --------------------------------------------------------------------------------------

GIVEN_TO_ALL = {"entry", "title", "command", "kernels", "parameters", "do_not_specialize", "checks"}
"""By `render`, to every entry template."""

CALLS = (
    "fwd-bf16-d128",
    "fwd-fp16-d192-dv128-causal-softcap-sink-window-bias-mask-offset",
    "bwd-bf16-d128",
    "bwd-fp16-d256-causal-window-offset",
    "bwd-fp16-d64-causal-softcap-alibi-bias-mask-window-dbias",
)
ENTRIES = sorted({row.template for row in FAMILIES})


def contexts(entry: str) -> Iterator[tuple[KernelFamily, dict[str, object]]]:
    """What the families of an entry template give it, with the knobs, for several calls."""
    for row in FAMILIES:
        for spec in map(Specialization.parse, CALLS):
            if row.template == entry and unsupported(row, spec, H200) is None:
                yield row, row.template_values(spec, row.default(spec, H200))


@pytest.mark.parametrize("entry", ENTRIES)
def test_templates_are_given_all_that_they_use(entry: str) -> None:
    _, needed = used(entry)
    given = [set(values) for _, values in contexts(entry)]
    assert needed <= set().union(*given) | GIVEN_TO_ALL


@pytest.mark.parametrize("entry", ENTRIES)
def test_templates_use_all_that_they_are_given(entry: str) -> None:
    """A knob may do its work in values that follow from it."""
    names, _ = used(entry)
    for row, values in contexts(entry):
        assert set(values) <= names | {knob.name for knob in row.knobs}, row.id


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_family_gives_the_same_names_whatever_the_call(entry: str) -> None:
    by_family: dict[str, set[frozenset[str]]] = {}
    for row, values in contexts(entry):
        by_family.setdefault(row.id, set()).add(frozenset(values))
    assert by_family
    assert all(len(names) == 1 for names in by_family.values()), entry


CODE = re.compile(r"[-+*/%<>=()\[\]]|\.(?!(bfloat16|float16|float32|uint8)$)")


def texts(value: object) -> Iterator[str]:
    """Every text in a value of a context."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in (*value.keys(), *value.values()):
            yield from texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from texts(each)


@pytest.mark.parametrize("entry", ENTRIES)
def test_templates_are_given_names_and_no_code(entry: str) -> None:
    """Expressions are written where they can be read, beside the lines around them."""
    for row, values in contexts(entry):
        code = {name: text for name, value in values.items() for text in texts(value) if CODE.search(text)}
        assert not code, f"{row.id} gives its template expressions: {code}"
