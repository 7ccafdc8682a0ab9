"""The batches of packed sequences that are raced, and their tensors."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

from flashgen.core.workload import Workload

ROTATED_BYTES = 256 * 2**20
MOST_COPIES = 32

SUITE, TRAINING_SUITE, PAGED_SUITE = "varlen", "varlen_training", "varlen_pages"
"""Forward passes, forward passes with the backward pass behind them, and forward passes over a paged cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """A workload of packed sequences with a profile of lengths; of a backward pass, both passes are timed."""

    workload: Workload

    @property
    def trains(self) -> bool:
        """Whether the backward pass is timed, too."""
        return self.workload.direction == "backward"

    @property
    def suite(self) -> str:
        """The suite of its rows."""
        if self.is_paged:
            return PAGED_SUITE
        return TRAINING_SUITE if self.trains else SUITE

    @property
    def is_paged(self) -> bool:
        """Whether keys lie in pages."""
        return self.workload.page_size is not None

    @property
    def num_decodes(self) -> int:
        """Of keys in pages, the sequences in front with one query: steps of decoding beside chunks of prompts."""
        longer = (b for b, rows in enumerate(self.queries) if rows != 1)
        return next(longer, len(self.queries)) if self.is_paged else 0

    @property
    def queries(self) -> tuple[int, ...]:
        """Rows of each sequence."""
        return self.workload.each_seqlen_q

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of each sequence."""
        return self.workload.each_length

    @property
    def is_self_attention(self) -> bool:
        """Whether queries and keys are those of the same rows."""
        return self.queries == self.keys and not self.is_paged

    @property
    def flops(self) -> int:
        """Floating-point operations of what is timed."""
        forward = replace(self.workload, direction="forward").flops
        return self.workload.flops + forward if self.trains else forward

    @property
    def copies(self) -> int:
        """Sets of tensors to rotate."""
        return min(MOST_COPIES, max(1, -(-ROTATED_BYTES // self.workload.bytes)))

    @property
    def dense(self) -> Workload:
        """Without packing: sequences of one length, about as many rows, and as many visible pairs for each row."""
        w, rows = self.workload, sum(self.queries)
        seen = w.all_pairs / max(1, rows)
        length = max(1, round(2 * seen - 1 if w.causal else seen))
        batch = max(1, round(rows / length))
        sizes = {"batch": batch, "seqlen_q": length, "seqlen_k": length}
        return replace(w, varlen=False, lengths="", total_q=None, total_k=None, **sizes)


def _packs(text: str, *profiles: str) -> tuple[Pack, ...]:
    return tuple(Pack(workload=Workload.parse(f"{text}-{profile}")) for profile in profiles)


LLAMA = "h32-hk8-d128-causal-varlen"
TRAINED = (
    (f"b8-tq16384-s8192-{LLAMA}", ("same", "ramp", "tail")),
    (f"b16-tq32768-s8192-{LLAMA}", ("ramp", "tail")),
    (f"b64-tq65536-s4096-{LLAMA}", ("ramp",)),
    ("b32-tq16384-s1024-h12-d64-causal-varlen", ("same", "ramp")),
    ("b64-tq16384-s512-h16-d64-varlen", ("ramp",)),
    ("b64-tq32768-s1024-h16-d64-varlen", ("ramp",)),
)
"""Llama-3.1-8B's heads, GPT-2's, BERT-large's and those of ViT-L on images of different sizes."""

PREFILLED = (
    (f"b4-tq8192-s8192-{LLAMA}", ("ramp", "tail")),
    (f"b64-tq16384-s2048-{LLAMA}", ("ramp", "tail")),
    (f"b8-tq8192-tk65536-sq2048-sk16384-{LLAMA}", ("ramp", "mixed")),
)
"""Several prompts at once, and chunks of prompts behind what was computed before."""

PAGED = (
    *((f"b8-tq8192-tk65536-sq2048-sk16384-{LLAMA}-page{page}", ("ramp",)) for page in (64, 16)),
    *((f"b64-tq2096-tk{64 * keys}-sq512-sk{keys * 2}-{LLAMA}-page16", ("mixed",)) for keys in (512, 4096)),
)
"""The same chunks over pages, and batches of 48 steps of decoding and 16 chunks of 128 queries: shapes with records."""

PACKS: tuple[Pack, ...] = (
    *(pack for text, profiles in (*TRAINED, *PREFILLED) for pack in _packs(text, *profiles)),
    *(pack for text, profiles in TRAINED for pack in _packs(f"bwd-{text}", *profiles)),
    *(pack for text, profiles in PAGED for pack in _packs(text, *profiles)),
)


@dataclass(frozen=True, kw_only=True)
class PackTensors:
    """A batch's tensors, a set for each copy, (rows, heads, head_dim); ends of sequences and pages are those of all.

    With a `table` of pages, k and v are (pages, page_size, nheads_k, head_dim), and `lens_k` the keys of each sequence.
    """

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    dout: list[torch.Tensor]
    ends_q: torch.Tensor
    ends_k: torch.Tensor
    lens_k: torch.Tensor
    table: torch.Tensor | None = None

    def keys_of_last(self, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the last sequence, of the first set."""
        length, size = pack.keys[-1], pack.workload.page_size
        if self.table is None or size is None:
            return self.k[0][-length:], self.v[0][-length:]
        places = torch.arange(length, device=self.table.device)
        pages = self.table[-1][places // size].long()
        return self.k[0][pages, places % size], self.v[0][pages, places % size]


def tensors_of(pack: Pack, device: torch.device) -> PackTensors:
    """Normal random numbers in bfloat16; pages lie in random order."""
    w, rows = pack.workload, sum(pack.queries)
    table = _table(pack)
    keys = (sum(pack.keys),) if table is None else (sum(_pages(pack)), w.page_size or 1)

    def normal(*sizes: int) -> list[torch.Tensor]:
        found = [torch.randn(sizes, device=device, dtype=torch.bfloat16) for _ in range(pack.copies)]
        return [one.requires_grad_(pack.trains) for one in found]

    def ends(lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)

    return PackTensors(
        q=normal(rows, w.nheads, w.head_dim),
        k=normal(*keys, w.nheads_k, w.head_dim),
        v=normal(*keys, w.nheads_k, w.head_dim_v),
        dout=[one.detach() for one in normal(rows, w.nheads, w.head_dim_v)],
        ends_q=ends(pack.queries),
        ends_k=ends(pack.keys),
        lens_k=torch.tensor(pack.keys, dtype=torch.int32, device=device),
        table=None if table is None else table.to(device),
    )


def _pages(pack: Pack) -> list[int]:
    """How many pages each sequence has."""
    return [-(-length // (pack.workload.page_size or 1)) for length in pack.keys]


def _table(pack: Pack) -> torch.Tensor | None:
    """The pages of each sequence; entries behind a length name page 0, which peers may read."""
    if not pack.is_paged:
        return None
    counts = _pages(pack)
    table = torch.zeros((len(counts), max(counts)), dtype=torch.int32)
    for b, part in enumerate(torch.randperm(sum(counts), dtype=torch.int32).split(counts)):
        table[b, : len(part)] = part
    return table


def padded(tensor: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Rows of each sequence in a batch element of its own, 0 behind them: (batch, heads, longest, head_dim)."""
    found = tensor.new_zeros(len(lengths), tensor.shape[1], max(lengths), tensor.shape[2])
    for b, part in enumerate(tensor.detach().split(lengths)):
        found[b, :, : len(part)] = part.transpose(0, 1)
    return found


def unpadded(tensor: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """The rows of `padded` again."""
    return torch.cat([one[:, :length].transpose(0, 1) for one, length in zip(tensor, lengths, strict=True)])
