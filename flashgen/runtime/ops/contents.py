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


def refuse_pages(used: torch.Tensor, table: torch.Tensor, pages: int, keys: str) -> None:
    """Refuse page ids outside of a cache, of those that are used.

    Args:
        used: bool (sequences, pages of each).
        table: the ids, likewise.
        pages: of the cache.
        keys: whose ids they are.

    Raises:
        WorkloadError: there is one; the message has the first sequence with it.
    """
    if not table.shape[1]:
        return
    ids = table.long()
    wrong = used & ((ids < 0) | (ids >= pages))
    worst = ids.gather(1, wrong.int().argmax(1, keepdim=True))[:, 0]
    refuse(wrong.any(1), f"page ids of {keys} are 0 to {pages - 1}", worst)
