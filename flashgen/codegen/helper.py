"""Helper kernels: kernels beside the families, of which no search knows.

A family computes attention and has knobs; a helper does one thing around it in one way, so its text follows from what
is compiled in alone. It is rendered, compiled, kept on disk and bundled as the kernels of families are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flashgen.codegen.family import CompileOptions, KernelSpec, Parameter, Sizes
from flashgen.codegen.render import KernelSource, render_template
from flashgen.core.device import Device

MOST_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperKernel:
    """A kernel that is not tuned. Equal ids and keys mean equal text.

    Attributes:
        id: the name of its function, and of the template's folder.
        key: what is compiled in, in words.
        parameters: the run-time parameters, in order.
        rows: what a program takes.
        num_warps: of a program.
        values: what the template receives beside them, by name.
    """

    id: str
    key: str
    parameters: tuple[Parameter, ...] = field(compare=False)
    rows: int = field(compare=False)
    num_warps: int = field(compare=False)
    values: tuple[tuple[str, object], ...] = field(compare=False)

    @property
    def kernel(self) -> KernelSpec:
        """How it is compiled; each launch says its programs."""
        options = CompileOptions(num_warps=self.num_warps, num_stages=1)
        return KernelSpec(entry=self.id, parameters=self.parameters, options=options, programs=_of_the_call)


def _of_the_call(device: Device, sizes: Sizes) -> int:
    return 0


def render_helper(helper: HelperKernel) -> KernelSource:
    """The text of a helper kernel.

    Raises:
        BuildError: the template did not render.
    """
    kernel = helper.kernel
    text = render_template(
        f"{helper.id}/{helper.id}.py.jinja",
        helper.key,
        entry=helper.id,
        command=f"flashgen.{helper.id} ({helper.key})",
        parameters=kernel.names,
        do_not_specialize=kernel.do_not_specialize,
        num_warps=helper.num_warps,
        rows=helper.rows,
        **dict(helper.values),
    )
    return KernelSource(entry=helper.id, text=text)


def rows_of_tile(columns: int, elements: int) -> int:
    """Rows of a program whose widest tile has this many columns, a power of two, and about this many elements."""
    return min(MOST_ROWS, max(1, elements // columns))


def integers(names: str, kind: str) -> tuple[Parameter, ...]:
    """Integer parameters of one type, their names in one text."""
    return tuple(Parameter(name=name, type=kind) for name in names.split())
