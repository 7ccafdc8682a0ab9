"""Whether a Triton accepts the text of a kernel: compiled as far as its own IR, in a quarter of the time.

That is what reads the text, checks types, shapes and layouts, and chooses matrix products and pipelines. Machine code,
which LLVM and the assembler make of it, is not made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from flashgen.codegen.build import reason_of, request
from flashgen.codegen.families import family
from flashgen.codegen.generated import load_module
from flashgen.codegen.render import render
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import BuildError
from flashgen.core.workload import Specialization

STAGES = ("ttir", "ttgir")
"""Those of Triton's stages that make IR of its own, for any target."""


class _Accepted(Exception):
    """The IR is there."""


def accept(spec: Specialization, config: Config, device: Device) -> None:
    """Have Triton make its IR of all kernels of a config.

    Raises:
        BuildError: Triton refused one of them; the message has the first line of its reason.
    """
    import triton

    module = load_module(render(spec, config))
    try:
        with _ended_behind_ir():
            for kernel in family(config.family).kernels(spec, config):
                source, target, flags = request(getattr(module, kernel.entry), kernel, device)
                with contextlib.suppress(_Accepted):
                    triton.compile(source, target=target, options=flags)
    except Exception as error:  # Triton raises errors without a common base
        raise BuildError(
            f"Triton {triton.__version__} does not accept {config} for {spec.key} on {device.arch}: {reason_of(error)}"
        ) from error


@contextlib.contextmanager
def _ended_behind_ir() -> Iterator[None]:
    """Let the first stage behind those of IR end a compile, by the hook that Triton has for its stages."""
    import triton

    def end(*_: object) -> None:
        raise _Accepted

    def hook(*asked: Any) -> tuple[str, str] | None:
        if not asked:  # for the key of its cache
            return "IR", "IR"
        stages = asked[1]
        stages.update({name: end for name in stages if name not in STAGES})
        return None

    runtime = triton.knobs.runtime
    before, runtime.add_stages_inspection_hook = runtime.add_stages_inspection_hook, hook
    try:
        yield
    finally:
        runtime.add_stages_inspection_hook = before
