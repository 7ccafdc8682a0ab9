"""Python's garbage collector, paused where a call is waited for.

Importing torch leaves a full collection due, which walks every object of the process: 0.1 s. What imports flashgen and
what makes the first plan would trigger it in the middle of the first call; afterwards it comes where it would have come
without that call.
"""

from __future__ import annotations

import gc


class CollectionPaused:
    """No collection within a `with` block; one that was off stays off."""

    __slots__ = ("_was_on",)

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *raised: object) -> None:
        if self._was_on:
            gc.enable()
