"""Python's garbage collector, paused where a call is waited for.

Importing torch leaves a full collection due, which walks every object of the process: 0.1 s. What imports flashgen and
what makes the first plan would trigger it in the middle of the first call; afterwards it comes where it would have come
without that call.
"""

from __future__ import annotations

import gc
import threading


class CollectionPaused:
    """No collection within a `with` block; one that was off stays off.

    It is of the process: the first of several threads inside pauses it, the last one lets it go on. Each on its own
    could see that it is off, as another one lets it go on, and leave it off for ever.
    """

    __slots__ = ()

    _lock = threading.RLock()  # a handler of a signal may come within
    _inside = 0
    _was_on = False

    def __enter__(self) -> None:
        with CollectionPaused._lock:
            if not CollectionPaused._inside:
                CollectionPaused._was_on = gc.isenabled()
                gc.disable()
            CollectionPaused._inside += 1

    def __exit__(self, *raised: object) -> None:
        with CollectionPaused._lock:
            CollectionPaused._inside -= 1
            if not CollectionPaused._inside and CollectionPaused._was_on:
                gc.enable()
