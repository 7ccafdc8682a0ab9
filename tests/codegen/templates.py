"""Templates as Jinja's own parser reads them."""

from __future__ import annotations

import functools

from jinja2 import meta, nodes

from flashgen.codegen.render import _environment

ENVIRONMENT = _environment()


@functools.cache  # many entries include the same parts
def parsed(template: str) -> nodes.Template:
    assert ENVIRONMENT.loader is not None
    source, _, _ = ENVIRONMENT.loader.get_source(ENVIRONMENT, template)
    return ENVIRONMENT.parse(source)


def parts(entry: str) -> dict[str, nodes.Template]:
    """The syntax of a template and of all that it includes or imports, by name."""
    found: dict[str, nodes.Template] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = parsed(name)
            named = list(meta.find_referenced_templates(found[name]))
            assert None not in named, f"{name} includes a template whose name is computed"
            waiting += [each for each in named if each is not None]
    return found


def made(part: nodes.Template) -> set[str]:
    """Names that a template sets, imports, loops over or defines, for itself and for what it includes."""
    names = {name.name for name in part.find_all(nodes.Name) if name.ctx in ("store", "param")}
    names |= {macro.name for macro in part.find_all(nodes.Macro)}
    imports = [name for each in part.find_all(nodes.FromImport) for name in each.names]
    return names | {name if isinstance(name, str) else name[1] for name in imports}


def used(entry: str) -> tuple[set[str], set[str]]:
    """Names that the templates of a family take from their context, and those of them that no template sets."""
    found = parts(entry).values()
    names = set().union(*map(meta.find_undeclared_variables, found))
    return names, names - set().union(*map(made, found))
