"""What lengths and tables of a call hold, for `FLASHGEN_CHECKS=1`."""

from __future__ import annotations

import torch

from flashgen.core.errors import WorkloadError


def refuse(wrong: torch.Tensor, rule: str, values: torch.Tensor, of: str = "sequence") -> None:
    """Wait for the device, and name the first value that is wrong.

    Args:
        wrong: bool (sequences,).
        rule: what values are.
        values: (sequences,).
        of: what each of them belongs to.

    Raises:
        WorkloadError: one is.
    """
    if bool(wrong.any()):
        b = int(wrong.int().argmax())
        raise WorkloadError(f"{rule}; got {int(values[b])} for {of} {b}")
