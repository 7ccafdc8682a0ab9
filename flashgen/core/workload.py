"""`Workload`: one attention problem, canonical at birth."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter

from flashgen.core.checks import MAX_SIZE, flag, is_name_in, whole_number
from flashgen.core.decode_limits import MAX_SEQLEN_Q
from flashgen.core.errors import WorkloadError
from flashgen.core.keys import (
    ALL_DIRECTIONS,
    BROADCASTS,
    DECODE,
    DTYPE_BYTES,
    SHORT,
    SIZED,
    TOKENS,
    fields_of,
    flag_tokens,
    tokens_of,
)
from flashgen.core.lengths import (
    ALL_PROFILES,
    MIXED,
    PROFILES,
    RAMP,
    lengths_of,
    packed_lengths,
    packed_profiles,
    profiles_of,
)
from flashgen.core.pairs import visible_pairs
from flashgen.core.quoting import shown
from flashgen.core.specialization import Specialization

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

    Of packed sequences (`varlen`), `batch` is their number, `seqlen_q` and `seqlen_k` are bounds of their lengths, and
    `total_q` and `total_k` the rows of all of them: as many as there can be where none are given, and of keys as many
    as of queries where the bounds are the same. `lengths` is as of decoding.

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
    total_q: int | None = None
    total_k: int | None = None

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_features(self)
        _canonical_totals(self)
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
        parts += [f"tq{self.total_q}"] if self.total_q != _rooms(self)[0] else []
        parts += [f"tk{self.total_k}"] if self.total_k != _usual_total_k(self) else []
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
        are given: `dec-b64-h32-hk8-sk8192-d128-page16`. Packed sequences have their rows, if these are fewer than there
        can be: `b16-h32-hk8-tq32768-s8192-d128-causal-varlen`.

        Raises:
            WorkloadError: a token is unknown or repeated, or a needed one is missing.
        """
        values: dict[str, object] = {}
        for token in tokens_of("a shape", text):
            for name, value in fields_of(token, text).items():
                if name in values:
                    raise WorkloadError(f"a shape names each field once, but {token!r} repeats {name} in {text!r}")
                values[name] = value
        decodes = values.get("direction") == DECODE
        if decodes and "seqlen_k" in values:
            values.setdefault("seqlen_q", 1)
        needed = {"batch": "b", "nheads": "h", "seqlen_q": "sk" if decodes else "s (or sq)", "head_dim": "d"}
        missing = [token for name, token in needed.items() if name not in values]
        if missing:
            example = "dec-b64-h32-hk8-sk8192-d128" if decodes else "b4-h32-s4096-d128"
            needs = "b, h, sk and d" if decodes else "b, h, s (or sq) and d"
            raise WorkloadError(f"a shape needs {needs}, e.g. {example}; {text!r} lacks {', '.join(missing)}")
        return cls(**values)  # type: ignore[arg-type]

    @property
    def is_decode(self) -> bool:
        """Whether it is a step of decoding."""
        return self.direction == DECODE

    @property
    def is_packed(self) -> bool:
        """Whether it is a pass over packed sequences."""
        return self.total_q is not None

    @property
    def has_profiles(self) -> bool:
        """Whether the lengths of its sequences reach no host, so that it is measured on profiles of them."""
        return self.is_decode or self.is_packed

    @property
    def each_length(self) -> tuple[int, ...]:
        """Keys of each sequence: of decoding and of packed sequences those of the profile, else `seqlen_k`."""
        if self.total_k is None:
            return lengths_of(self.lengths, self.batch, self.seqlen_k)
        if self._is_self_attention:
            return self.each_seqlen_q
        return packed_lengths(RAMP if self.lengths == MIXED else self.lengths, self.batch, self.seqlen_k, self.total_k)

    @property
    def each_seqlen_q(self) -> tuple[int, ...]:
        """Queries of each sequence: of packed ones those of the profile, else `seqlen_q`."""
        if self.total_q is None:
            return (self.seqlen_q,) * self.batch
        return packed_lengths(self.lengths, self.batch, self.seqlen_q, self.total_q)

    @property
    def _is_self_attention(self) -> bool:
        return (self.total_q, self.seqlen_q) == (self.total_k, self.seqlen_k)

    @property
    def as_dense(self) -> Workload:
        """Of packed sequences the call without any that has as many rows, in sequences as long as the longest one."""
        if self.total_q is None:
            return self
        batch = max(1, round(self.total_q / max(1, self.seqlen_q)))
        return replace(self, varlen=False, lengths="", total_q=None, total_k=None, batch=batch)

    @property
    def keys_reached(self) -> int:
        """The most keys of a sequence that a step of decoding reads: what is before a window it does not; else all."""
        if not self.is_decode or self.window_left is None:
            return self.seqlen_k
        return min(self.seqlen_k, self.window_left + self.seqlen_q)

    @property
    def profiles(self) -> tuple[Workload, ...]:
        """What is measured where `has_profiles`, itself with each of its profiles of lengths; else empty."""
        if self.total_q is not None and self.total_k is not None:
            sides = {(self.seqlen_q, self.total_q): None, (self.seqlen_k, self.total_k): None}
            names = packed_profiles(self.lengths, self.batch, tuple(sides))
        else:
            names = profiles_of(self.lengths, self.batch) if self.is_decode else ()
        return tuple(replace(self, lengths=profile) for profile in names)

    @property
    def visible_pairs(self) -> int:
        """Query-key pairs of one head that the causal mask and the window leave visible; of the longest sequence."""
        return self._pairs(self.seqlen_q, self.seqlen_k)

    @property
    def all_pairs(self) -> int:
        """Those of one head and all sequences."""
        if self.lengths or self.is_packed:
            return sum(map(self._pairs, self.each_seqlen_q, self.each_length))
        return self.batch * self.visible_pairs

    @property
    def flops(self) -> int:
        """Floating-point operations of the visible pairs (two per multiply-add, softmax not counted)."""
        pairs = self.all_pairs
        products = 2 * self.nheads * pairs * (self.head_dim + self.head_dim_v)
        return int(BACKWARD_FLOPS_RATIO * products) if self.direction == "backward" else products

    @property
    def bytes(self) -> int:
        """Fewest bytes moved through device memory: every tensor once, and the fp32 LSE; of a cache visible keys."""
        rows = self.batch * self.seqlen_q if self.total_q is None else self.total_q
        query_rows = self.nheads * rows
        key_rows = self.nheads_k * self._keys_read()
        elements = (query_rows + key_rows) * (self.head_dim + self.head_dim_v)
        copies = 2 if self.direction == "backward" else 1
        return copies * elements * DTYPE_BYTES[self.dtype] + 4 * query_rows

    @property
    def cache_bytes(self) -> int:
        """Fewest bytes of keys and values that are read, once."""
        return self.nheads_k * self._keys_read() * (self.head_dim + self.head_dim_v) * DTYPE_BYTES[self.dtype]

    def _keys_read(self) -> int:
        if self.total_k is not None:
            return self.total_k
        if not self.is_decode:
            return self.batch * self.seqlen_k
        return sum(min(length, self.keys_reached) for length in self.each_length)

    def _pairs(self, seqlen_q: int, seqlen_k: int) -> int:
        return visible_pairs(seqlen_q, seqlen_k, self.window_left, 0 if self.causal else self.window_right)

    @property
    def specialization(self) -> Specialization:
        """What is compiled in for well-aligned tensors and an integer query offset."""
        return Specialization.of(self)

    def with_shape(self, **changes: int) -> Workload:
        """The same problem class at another shape."""
        return replace(self, **changes)  # type: ignore[arg-type]


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


def _is_varlen(w: Workload) -> bool:
    return w.varlen and w.direction != DECODE


def _rooms(w: Workload) -> tuple[int | None, int | None]:
    """The most rows of queries and of keys that packed sequences can have."""
    return (w.batch * w.seqlen_q, w.batch * w.seqlen_k) if _is_varlen(w) else (None, None)


def _usual_total_k(w: Workload) -> int | None:
    """What a key does not say."""
    return w.total_q if w.seqlen_k == w.seqlen_q else _rooms(w)[1]


def _canonical_totals(w: Workload) -> None:
    """Rows that no sequence can have are not there."""
    for name, room in zip(("total_q", "total_k"), _rooms(w), strict=True):
        given = getattr(w, name)
        if room is None:
            if given is not None:
                raise WorkloadError(f"{name} is of packed sequences (varlen), got {shown(given)} without them")
            continue
        if given is None:
            given = room if name == "total_q" else _usual_total_k(w)
        object.__setattr__(w, name, min(whole_number(name, given, 0, None), room))


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
    if w.direction == DECODE and w.seqlen_q > MAX_SEQLEN_Q:
        raise WorkloadError(
            f"a step of decoding has at most {MAX_SEQLEN_Q} queries of each sequence, and sk<n> keys, got {w.seqlen_q}"
        )
    if not is_name_in(w.dtype, DTYPE_BYTES):
        raise WorkloadError(f"dtype is one of {', '.join(DTYPE_BYTES)}, got {shown(w.dtype)}")
    for name, value in zip(_FLAGS, _flag_values(w), strict=True):
        if value is not True and value is not False:
            object.__setattr__(w, name, flag(name, value))
    known = ALL_PROFILES if _is_varlen(w) else tuple(PROFILES) if w.direction == DECODE else ()
    if not is_name_in(w.lengths, ("", *known)):
        raise WorkloadError(
            f"lengths of a decode workload are {', '.join(PROFILES)} or empty for any, of packed sequences (varlen) "
            f"{', '.join(ALL_PROFILES)} or empty, and other workloads have none, got {shown(w.lengths)}"
        )
    for name in ("window_left", "window_right"):
        width = getattr(w, name)
        if width is not None and (type(width) is not int or width < 0):
            object.__setattr__(w, name, whole_number(f"{name} is None (unlimited) or", width, 0, None))
    for name in ("bias", "mask"):
        if not is_name_in(getattr(w, name), BROADCASTS):
            raise WorkloadError(f'{name} is "full", "keys" or empty, got {shown(getattr(w, name))}')
    if w.page_size is not None:
        object.__setattr__(w, "page_size", whole_number("page_size", w.page_size, 1))
