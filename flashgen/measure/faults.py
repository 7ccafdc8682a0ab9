"""From an exception to a `Failure` with a reason that a person can use, and whether the process survives it."""

from __future__ import annotations

import torch

from flashgen.core.errors import BuildError
from flashgen.core.record import Failure


def failure_of(error: Exception, stage: str) -> Failure:
    """What went wrong, at `stage` (build, launch or verify) unless the error tells better."""
    text = _first_line(error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return Failure(stage="memory", reason=text)
    if isinstance(error, BuildError):
        return Failure(stage="build", reason=text)
    # Triton's OutOfResources (not imported: its module moved between versions) and the driver's own code for it
    if type(error).__name__ == "OutOfResources" or "OUT_OF_RESOURCES" in text or "out of resource" in text:
        return Failure(stage="resources", reason=text)
    return Failure(stage=stage, reason=text)


def gpu_is_lost() -> bool:
    """Whether the CUDA context is broken for good, as after an illegal access: then only a new process helps."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
