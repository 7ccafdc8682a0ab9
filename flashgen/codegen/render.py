"""Rendering: a pure function from (specialization, config) to the text of one kernel. The only user of jinja2.

It is imported by the first rendering: a process that finds its kernels on disk does without.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.codegen.families import family, validate
from flashgen.codegen.launch_checks import LaunchChecks
from flashgen.core.config import Config
from flashgen.core.errors import BuildError
from flashgen.core.settings import shipped
from flashgen.core.workload import Specialization, Workload

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment

DIGEST_LENGTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """The text of one config: `entry` is the id of its family, and the name of a forward pass's one kernel."""

    entry: str
    text: str

    @property
    def digest(self) -> str:
        """The first 16 hexadecimal digits of the text's SHA-256."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:DIGEST_LENGTH]

    @property
    def module(self) -> str:
        """The name under which the text is stored and imported."""
        return f"{self.entry}_{self.digest}"


def render(spec: Specialization, config: Config) -> KernelSource:
    """The kernel of `config` for `spec`, as flashgen imports it; equal arguments give byte-identical text.

    Raises:
        ConfigError: the config did not pass `families.validate`.
        BuildError: the template needs a value that its family does not give.
    """
    return _render(spec, config, stands_alone=False)


def render_standalone(spec: Specialization, config: Config) -> KernelSource:
    """The same kernel for use without flashgen: its launcher refuses a call that it was not compiled for.

    Of calls of its own flashgen knows that they are right, and no record is out of date because of what is checked
    here: the text and the digest of `render` have no checks.

    Raises:
        ConfigError: the config did not pass `families.validate`.
        BuildError: the template needs a value that its family does not give.
    """
    return _render(spec, config, stands_alone=True)


def _render(spec: Specialization, config: Config, *, stands_alone: bool) -> KernelSource:
    row = family(validate(config).family)
    kernels = row.kernels(spec, config)
    text = render_template(
        row.template,
        f"{spec.key}, {config}",
        entry=row.id,
        title=row.title,
        command=render_command(spec, config),
        kernels={kernel.entry: kernel for kernel in kernels},
        parameters=kernels[0].names,
        do_not_specialize=kernels[0].do_not_specialize,
        checks=LaunchChecks.of(row, spec, kernels) if stands_alone else None,
        **row.template_values(spec, config),
    )
    return KernelSource(entry=row.id, text=text)


def source_digest(workload: Workload, config: Config) -> str:
    """What a record keeps of its source: the digest of the kernel of aligned tensors, with the gradient of a bias.

    Raises:
        ConfigError: the config did not pass `families.validate`.
        BuildError: the template needs a value that its family does not give.
    """
    return render(Specialization.of(workload, bias_grad=True), config).digest


def render_template(template: str, purpose: str, **values: object) -> str:
    """The text of a template with these values; `purpose` is for the message of an error.

    Raises:
        BuildError: the template is missing, or needs a value that is not given.
    """
    import jinja2

    try:
        return _environment().get_template(template).render(**values)
    except jinja2.TemplateError as error:
        raise BuildError(f"template {template} did not render for {purpose}: {error}") from error


def render_command(spec: Specialization, config: Config) -> str:
    """The canonical command that prints this kernel again; no command has the functions of a running program."""
    implied = {(knob.name, knob.default) for knob in family(config.family).knobs if knob.implied}
    knobs = ",".join(f"{name}={str(value).lower()}" for name, value in config.knobs if (name, value) not in implied)
    command = "flashgen.attention with functions of its caller:" if spec.mods else "flashgen render"
    return f"{command} {spec.key} --config {config.family}:{knobs}"


@functools.cache
def _environment() -> SandboxedEnvironment:
    import jinja2
    from jinja2.sandbox import SandboxedEnvironment

    return SandboxedEnvironment(
        loader=jinja2.FileSystemLoader(shipped("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        optimized=False,  # what folding constants saves a render is less than it costs each process
    )
