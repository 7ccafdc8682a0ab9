"""`Workload`: one attention problem, canonical at birth; `Specialization`: what of it is compiled in."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from flashgen.core.checks import MAX_SIZE, flag, is_name_in, whole_number
from flashgen.core.errors import WorkloadError
from flashgen.core.keys import (
    ALL_DIRECTIONS,
    BROADCASTS,
    DECODE,
    DTYPE_BYTES,
    SHORT,
    SIZED,
    TOKENS,
    VARIANTS,
    fields_of,
    flag_tokens,
    tokens_of,
)
from flashgen.core.lengths import PROFILES, lengths_of, page_class, profiles_of
from flashgen.core.quoting import shown
from flashgen.core.score_mods import ScoreMods

__all__ = ["BACKWARD_FLOPS_RATIO", "BROADCASTS", "DECODE", "DTYPE_BYTES", "Specialization", "Workload"]

BACKWARD_FLOPS_RATIO = 2.5
"""Five matrix products instead of two (FlashAttention-2, section 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One attention problem: what is computed, not how.

    Shapes are `q (batch, nheads, seqlen_q, head_dim)`, `k (batch, nheads_k, seqlen_k, head_dim)` and
    `v (batch, nheads_k, seqlen_k, head_dim_v)`. The causal mask is aligned to the bottom right: key j is
    visible to query i iff `j <= i + seqlen_k - seqlen_q`. The softmax scale is an argument of a call,
    not part of its identity, and so are the values of softcap, slopes, sinks, bias and mask. `bias` and `mask` name
    a kind: "full" has a value for every query and key, "keys" one for every key alone (broadcast over the queries).
    `deterministic` asks a backward pass for the same bits every time; forward passes always give them.

    A step of decoding has what a host knows of it: `seqlen_q` queries of each sequence at most, and `seqlen_k` keys
    that there is room for. `lengths` names the profile of lengths that it is measured on (`core.lengths`), or is empty
    for batches of any lengths. A single query is the last one, and neither causal nor a right edge matters.

    Raises:
        WorkloadError: a field breaks a rule; the message names the rule and the value.
    """

    direction: str = "forward"
    dtype: str = "bf16"
    batch: int
    nheads: int
    nheads_k: int = None  # type: ignore[assignment]  # nheads, if it is not given; an int once the value is made
    seqlen_q: int
    seqlen_k: int = None  # type: ignore[assignment]  # seqlen_q, likewise
    head_dim: int
    head_dim_v: int = None  # type: ignore[assignment]  # head_dim, likewise
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    softcap: bool = False
    alibi: bool = False
    sink: bool = False
    bias: str = ""
    mask: str = ""
    varlen: bool = False
    page_size: int | None = None
    deterministic: bool = False
    lengths: str = ""

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_features(self)
        if self.direction != "backward":
            object.__setattr__(self, "deterministic", False)
        if self.is_decode and self.seqlen_q == 1:
            object.__setattr__(self, "causal", False)
            object.__setattr__(self, "window_right", None)
        _canonical_window(self)

    @property
    def key(self) -> str:
        """A readable identity, e.g. `fwd-bf16-b4-h32-hk8-sq4096-sk4096-d128-causal`; `parse` reads it back."""
        parts = [SHORT[self.direction], self.dtype, f"b{self.batch}", f"h{self.nheads}", f"hk{self.nheads_k}"]
        parts += [f"sq{self.seqlen_q}", f"sk{self.seqlen_k}", f"d{self.head_dim}"]
        if self.head_dim_v != self.head_dim:
            parts.append(f"dv{self.head_dim_v}")
        sized = ((prefix, getattr(self, field)) for prefix, field in SIZED.items())
        parts += [f"{prefix}{value}" for prefix, value in sized if value is not None]
        return "-".join([*parts, *flag_tokens(self), *([self.lengths] if self.lengths else [])])

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Read a key or its shorthand, in which tokens may come in any order and defaults may be left out.

        `s4096` sets both sequence lengths: `b4-h32-hk8-s4096-d128-causal`. A step of decoding has one query where none
        are given: `dec-b64-h32-hk8-sk8192-d128-page16`.

        Raises:
            WorkloadError: a token is unknown or repeated, or a needed one is missing.
        """
        values: dict[str, object] = {}
        for token in tokens_of("a shape", text):
            for name, value in fields_of(token, text).items():
                if name in values:
                    raise WorkloadError(f"a shape names each field once, but {token!r} repeats {name} in {text!r}")
                values[name] = value
        if values.get("direction") == DECODE and "seqlen_k" in values:
            values.setdefault("seqlen_q", 1)
        missing = [name for name in ("batch", "nheads", "seqlen_q", "head_dim") if name not in values]
        if missing:
            raise WorkloadError(
                f"a shape needs b, h, s (or sq) and d, e.g. b4-h32-s4096-d128; {text!r} lacks {missing}"
            )
        return cls(**values)  # type: ignore[arg-type]

    @property
    def is_decode(self) -> bool:
        """Whether it is a step of decoding."""
        return self.direction == DECODE

    @property
    def each_length(self) -> tuple[int, ...]:
        """Keys of each sequence: of decoding those of the profile, else `seqlen_k`."""
        return lengths_of(self.lengths, self.batch, self.seqlen_k)

    @property
    def keys_reached(self) -> int:
        """The most keys of a sequence that a step of decoding reads: what is before a window it does not; else all."""
        if not self.is_decode or self.window_left is None:
            return self.seqlen_k
        return min(self.seqlen_k, self.window_left + self.seqlen_q)

    @property
    def profiles(self) -> tuple[Workload, ...]:
        """What of a step of decoding is measured, itself with each of its profiles of lengths; empty for passes."""
        if not self.is_decode:
            return ()
        return tuple(replace(self, lengths=profile) for profile in profiles_of(self.lengths, self.batch))

    @property
    def visible_pairs(self) -> int:
        """Query-key pairs of one head that the causal mask and the window leave visible; of the longest sequence."""
        return self._pairs(self.seqlen_k)

    @property
    def flops(self) -> int:
        """Floating-point operations of the visible pairs (two per multiply-add, softmax not counted)."""
        pairs = sum(map(self._pairs, self.each_length)) if self.lengths else self.batch * self.visible_pairs
        products = 2 * self.nheads * pairs * (self.head_dim + self.head_dim_v)
        return int(BACKWARD_FLOPS_RATIO * products) if self.direction == "backward" else products

    @property
    def bytes(self) -> int:
        """Fewest bytes moved through device memory: every tensor once, and the fp32 LSE; of a cache visible keys."""
        query_rows = self.batch * self.nheads * self.seqlen_q
        key_rows = self.nheads_k * self._keys_read()
        elements = (query_rows + key_rows) * (self.head_dim + self.head_dim_v)
        copies = 2 if self.direction == "backward" else 1
        return copies * elements * DTYPE_BYTES[self.dtype] + 4 * query_rows

    @property
    def cache_bytes(self) -> int:
        """Fewest bytes of keys and values that are read, once."""
        return self.nheads_k * self._keys_read() * (self.head_dim + self.head_dim_v) * DTYPE_BYTES[self.dtype]

    def _keys_read(self) -> int:
        if not self.is_decode:
            return self.batch * self.seqlen_k
        return sum(min(length, self.keys_reached) for length in self.each_length)

    def _pairs(self, seqlen_k: int) -> int:
        if not self.seqlen_q or not seqlen_k:
            return 0
        offset = seqlen_k - self.seqlen_q
        right = 0 if self.causal else self.window_right
        end = self.seqlen_q * seqlen_k
        if right is not None:
            end = _clamped_sum(self.seqlen_q, offset + right + 1, seqlen_k)
        start = 0
        if self.window_left is not None:
            start = _clamped_sum(self.seqlen_q, offset - self.window_left, seqlen_k)
        return end - start

    @property
    def specialization(self) -> Specialization:
        """What is compiled in for well-aligned tensors and an integer query offset."""
        return Specialization.of(self)

    def with_shape(self, **changes: int) -> Workload:
        """The same problem class at another shape."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialization:
    """What is compiled into a kernel; everything else of a `Workload` is a run-time argument.

    Equal specialization and `Config` give byte-identical source and one binary. `aligned16` promises that every
    pointer and every stride of q, k, v and out is a multiple of 16 bytes; `offset_tensor` says that the query offset is
    read from an int32 device tensor of shape (batch,) instead of an integer argument. `aligned_scores` promises that
    bias and mask are contiguous along the keys, with every other stride a multiple of 16 bytes. `bias_dtype` and
    `sink_dtype` are empty where they are usual: that of q for a bias, fp32 for sinks. `mods` is the user's own code.
    `bias_grad` says that a backward pass also computes the gradient of the bias. A backward kernel knows no sinks: they
    are part of the LSE that it starts from, and their own gradient follows from that. Of decoding, causal and a window
    are numbers of a launch.
    """

    direction: str
    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window: bool = False
    softcap: bool = False
    alibi: bool = False
    sink: bool = False
    bias: str = ""
    mask: str = ""
    varlen: bool = False
    page_size: int | None = None
    deterministic: bool = False
    aligned16: bool = True
    aligned_scores: bool = True
    offset_tensor: bool = False
    bias_dtype: str = ""
    sink_dtype: str = ""
    bias_grad: bool = False
    mods: ScoreMods | None = None

    def __post_init__(self) -> None:
        if self.direction == "backward":
            object.__setattr__(self, "sink", False)
        if self.direction == DECODE:
            object.__setattr__(self, "causal", False)
            object.__setattr__(self, "window", False)
        if self.direction != "backward" or not self.bias:
            object.__setattr__(self, "bias_grad", False)
        storage = "fp32" if self.dtype == "tf32" else self.dtype
        if not self.bias or self.bias_dtype == storage:
            object.__setattr__(self, "bias_dtype", "")
        if not self.sink or self.sink_dtype == "fp32":
            object.__setattr__(self, "sink_dtype", "")
        if not (self.bias or self.mask):
            object.__setattr__(self, "aligned_scores", True)

    @classmethod
    def of(
        cls,
        workload: Workload,
        *,
        aligned16: bool = True,
        aligned_scores: bool = True,
        offset_tensor: bool = False,
        bias_dtype: str = "",
        sink_dtype: str = "",
        bias_grad: bool = False,
        mods: ScoreMods | None = None,
    ) -> Specialization:
        """The specialization that serves `workload`."""
        window = workload.window_left is not None or workload.window_right is not None
        variant = (window, aligned16, aligned_scores, offset_tensor, bias_dtype, sink_dtype, bias_grad, mods)
        return _specialization(_shared(workload), variant)

    @classmethod
    def parse(cls, text: str) -> Specialization:
        """Read a `key` back.

        Raises:
            WorkloadError: a token is unknown, or the direction, dtype or head_dim is missing. A user's score function
            is named by its digest only and cannot be read back.
        """
        values: dict[str, object] = {}
        for token in tokens_of("a specialization", text):
            if token in ALL_DIRECTIONS:
                values["direction"] = ALL_DIRECTIONS[token]
            else:
                values |= VARIANTS[token] if token in VARIANTS else fields_of(token, text)
        values.setdefault("head_dim_v", values.get("head_dim"))
        known = {f.name for f in fields(cls)}
        missing = [name for name in ("direction", "dtype", "head_dim") if name not in values]
        if missing or values.keys() - known:
            raise WorkloadError(f"a specialization is like fwd-bf16-d128-causal, got {text!r}")
        for name in ("head_dim", "head_dim_v"):
            whole_number(name, values[name], 1)
        return cls(**values)  # type: ignore[arg-type]

    @property
    def workload_class(self) -> str:
        """The class of workloads that may share a tuned config, e.g. `fwd-bf16-d128-causal`.

        Of decoding, pages of nearly the same size are one class (`core.lengths.page_class`).
        """
        return self._stem(page_class(self.page_size) if self.direction == DECODE else self.page_size)

    def _stem(self, page_size: int | None) -> str:
        parts = [SHORT[self.direction], self.dtype, f"d{self.head_dim}"]
        if self.head_dim_v != self.head_dim:
            parts.append(f"dv{self.head_dim_v}")
        if page_size:
            parts.append(f"page{page_size}")
        return "-".join([*parts, *flag_tokens(self), *(["window"] if self.window else [])])

    @property
    def key(self) -> str:
        """As `workload_class`, with the page size, then what is unusual: alignments, dtypes, digests of functions."""
        parts = [self._stem(self.page_size)]
        parts += [token for token, value in VARIANTS.items() if token != "window" and _has(self, value)]
        return "-".join(parts + ([self.mods.key] if self.mods else []))


_SHARED = tuple(f.name for f in fields(Specialization) if f.name in {g.name for g in fields(Workload)})
"""What a specialization takes over from its workload."""

_shared = attrgetter(*_SHARED)
_VARIANT = ("window", "aligned16", "aligned_scores", "offset_tensor", "bias_dtype", "sink_dtype", "bias_grad", "mods")


@functools.lru_cache(maxsize=1024)
def _specialization(shared: tuple[Any, ...], variant: tuple[Any, ...]) -> Specialization:
    """One object for equal values: every call of a new length asks for it."""
    return Specialization(**dict(zip((*_SHARED, *_VARIANT), (*shared, *variant), strict=True)))


def _has(spec: Specialization, values: dict[str, object]) -> bool:
    return all(getattr(spec, name) == value for name, value in values.items())


def _canonical_window(workload: Workload) -> None:
    """A causal mask is the right edge of a window, and an edge that hides nothing is no edge."""
    if workload.causal:
        object.__setattr__(workload, "window_right", None)
    if workload.varlen:
        return  # lengths are bounds of those that calls have, and what is compiled in must not follow them
    reach = workload.seqlen_k + workload.seqlen_q
    for side in ("window_left", "window_right"):
        width = getattr(workload, side)
        if width is not None and width >= reach:
            object.__setattr__(workload, side, None)


_SIZES = (
    ("batch", 0, ""),
    ("nheads", 1, ""),
    ("nheads_k", 1, "nheads"),
    ("seqlen_q", 0, ""),
    ("seqlen_k", 0, "seqlen_q"),
    ("head_dim", 1, ""),
    ("head_dim_v", 1, "head_dim"),
)
"""Sizes, the least that each can be, and the one whose value it has where it is not given."""

_FLAGS = tuple(token.field for token in TOKENS if token.value is True)

_sizes = attrgetter(*(name for name, _, _ in _SIZES))
_flag_values = attrgetter(*_FLAGS)


def _check_sizes(w: Workload) -> None:
    for (name, least, same), value in zip(_SIZES, _sizes(w), strict=True):
        if value is None and same:
            object.__setattr__(w, name, getattr(w, same))
        elif type(value) is not int or not least <= value <= MAX_SIZE:
            object.__setattr__(w, name, whole_number(name, value, least))
    if w.nheads % w.nheads_k:
        raise WorkloadError(f"nheads must be a multiple of nheads_k, got {w.nheads} and {w.nheads_k}")


def _check_features(w: Workload) -> None:
    if not is_name_in(w.direction, ALL_DIRECTIONS.values()):
        raise WorkloadError(f"direction is forward, backward or decode, got {shown(w.direction)}")
    if not is_name_in(w.lengths, ("", *PROFILES)) or (w.lengths and not w.is_decode):
        known = ", ".join(PROFILES)
        raise WorkloadError(f"lengths of a decode workload are {known} or empty for any, got {shown(w.lengths)}")
    if not is_name_in(w.dtype, DTYPE_BYTES):
        raise WorkloadError(f"dtype is one of {', '.join(DTYPE_BYTES)}, got {shown(w.dtype)}")
    for name, value in zip(_FLAGS, _flag_values(w), strict=True):
        if value is not True and value is not False:
            object.__setattr__(w, name, flag(name, value))
    for name in ("window_left", "window_right"):
        width = getattr(w, name)
        if width is not None and (type(width) is not int or width < 0):
            object.__setattr__(w, name, whole_number(f"{name} is None (unlimited) or", width, 0, None))
    for name in ("bias", "mask"):
        if not is_name_in(getattr(w, name), BROADCASTS):
            raise WorkloadError(f'{name} is "full", "keys" or empty, got {shown(getattr(w, name))}')
    if w.page_size is not None:
        object.__setattr__(w, "page_size", whole_number("page_size", w.page_size, 1))


def _clamped_sum(rows: int, start: int, limit: int) -> int:
    """Sum of min(max(i + start, 0), limit) over i in [0, rows)."""
    first = min(max(-start, 0), rows)  # rows before it add 0
    last = min(max(limit - start, first), rows)  # rows from it on add limit
    count = last - first
    return count * start + (first + last - 1) * count // 2 + (rows - last) * limit
