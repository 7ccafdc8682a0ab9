"""What lengths, tables and slots of an `append_kv` hold, for `FLASHGEN_CHECKS=1`: the only look at data.

Without it a token whose place lies outside of the cache is left out.
"""

from __future__ import annotations

import torch

from flashgen.runtime.ops.append_rules import AppendArguments
from flashgen.runtime.ops.contents import refuse, refuse_pages


def check_contents(given: AppendArguments) -> None:
    """Refuse places outside of the cache, and positions behind the rotary tables; nothing while a graph is captured.

    A negative slot is a token that has none.

    Args:
        given: a call whose other rules hold.

    Raises:
        WorkloadError: there is one; the message has the first sequence (or, of slots, token) with it.
    """
    k = given.k
    if k.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    lens = _lengths(given)
    if given.slot_mapping is not None:
        slots, room = given.slot_mapping.flatten(), given.k_cache.shape[0] * given.page_size
        refuse(slots >= room, f"slots are below {room}, as many as the cache has, or negative for none", slots, "token")
    elif lens is not None:
        room = given.capacity - given.seqlen_new
        rule = f"seqlens are 0 to {room}: {given.capacity} slots less {given.seqlen_new} new keys"
        refuse((lens < 0) | (lens > room), rule, lens)
        _check_rows(given, lens)
    first = lens if given.rotary_seqlens is None else given.rotary_seqlens.long()
    if given.rotary_cos is not None and first is not None:
        _check_angles(given, first, len(given.rotary_cos))


def _check_angles(given: AppendArguments, first: torch.Tensor, positions: int) -> None:
    """The positions of new keys, where slots are given of those that have one."""
    if given.slot_mapping is None:
        most = positions - given.seqlen_new
        rule = f"the positions of {given.seqlen_new} new keys begin at 0 to {most}, as the rotary tables end"
        refuse((first < 0) | (first > most), rule, first)
        return
    most, slots = positions - 1, given.slot_mapping.view(given.batch, -1)
    places = first[:, None] + torch.arange(slots.shape[1], device=slots.device)
    wrong = (slots >= 0) & ((places < 0) | (places > most))
    rule = f"new keys with a slot are at positions 0 to {most}, as the rotary tables end"
    refuse(wrong.flatten(), rule, places.flatten(), "token")


def _lengths(given: AppendArguments) -> torch.Tensor | None:
    if given.seqlens is not None:
        return given.seqlens.long()
    if given.seqlen is None:
        return None
    return torch.full((given.batch,), given.seqlen, device=given.k.device)


def _check_rows(given: AppendArguments, lens: torch.Tensor) -> None:
    """The rows of the cache that new keys go to: those of a `batch_idx`, or pages of a `block_table`."""
    rows = given.k_cache.shape[0]
    if given.batch_idx is not None:
        ids = given.batch_idx.long()
        refuse((ids < 0) | (ids >= rows), f"batch_idx is 0 to {rows - 1}, a row of the caches", ids)
    if given.block_table is not None and given.seqlen_new:
        place = torch.arange(given.num_pages, device=lens.device)
        written = (place >= (lens // given.page_size)[:, None]) & (
            place <= ((lens + given.seqlen_new - 1) // given.page_size)[:, None]
        )
        refuse_pages(written, given.block_table, rows, "new keys")
