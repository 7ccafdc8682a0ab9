"""What a decode call's lengths and page ids hold, for `FLASHGEN_CHECKS=1`: the only look at data, and it waits for it.

Without it a length beyond the cache counts as all of the cache, and a page id below 0 as page 0.
"""

from __future__ import annotations

import torch

from flashgen.runtime.decode.call import DecodeCall
from flashgen.runtime.ops.contents import refuse, refuse_pages


def check_contents(call: DecodeCall, first_keys: torch.Tensor | None = None) -> None:
    """Refuse lengths and indices that lead out of the caches; nothing is checked while a CUDA graph is captured.

    Args:
        call: a call whose other rules hold.
        first_keys: the first visible key of each sequence, where the window does not say it.

    Raises:
        WorkloadError: there is one; the message has the first sequence with it.
    """
    if call.q.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    rows, slots = call.k_cache.shape[:2]
    keys = slots if call.block_table is None else slots * call.block_table.shape[1]
    lens = call.seqlens.long()
    refuse((lens < 0) | (lens > keys), f"seqlens are 0 to {keys}, as many keys as there is room for", lens)
    if call.leftpad is not None:
        pads = call.leftpad.long()
        refuse((pads < 0) | (pads > lens), "leftpad is 0 to the length of its sequence", pads)
    if call.batch_idx is not None:
        ids = call.batch_idx.long()
        refuse((ids < 0) | (ids >= rows), f"batch_idx is 0 to {rows - 1}, a row of the caches", ids)
    if call.block_table is not None:
        table = call.block_table
        left = keys if call.features.window[0] is None else min(call.features.window[0], keys)
        first = (lens - call.q.shape[1] - left).clamp(min=0)
        first = first if first_keys is None else torch.maximum(first, first_keys)
        place = torch.arange(table.shape[1], device=table.device) * slots
        used = (place < lens[:, None]) & (place + slots > first[:, None])
        refuse_pages(used, table, rows, "keys that are visible")
