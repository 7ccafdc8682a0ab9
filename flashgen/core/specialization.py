"""`Specialization`: what of a workload is compiled into a kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from flashgen.core.checks import whole_number
from flashgen.core.errors import WorkloadError
from flashgen.core.keys import ALL_DIRECTIONS, DECODE, SHORT, VARIANTS, fields_of, flag_tokens, tokens_of
from flashgen.core.lengths import PAGE_CLASSES, page_class
from flashgen.core.score_mods import ScoreMods

if TYPE_CHECKING:
    from flashgen.core.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialization:
    """What is compiled into a kernel; everything else of a `Workload` is a run-time argument.

    Equal specialization and `Config` give byte-identical source and one binary. `aligned16` promises that every
    pointer and every stride of q, k, v and out is a multiple of 16 bytes; `offset_tensor` says that the query offset is
    read from an int32 device tensor of shape (batch,) instead of an integer argument. `aligned_scores` promises that
    bias and mask are contiguous along the keys, with every other stride a multiple of 16 bytes. `bias_dtype` and
    `sink_dtype` are empty where they are usual: that of q for a bias, fp32 for sinks. `mods` is the user's own code.
    `dropout` says that weights are dropped; how many is a number of a launch.
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
    dropout: bool = False
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
        dropout: bool = False,
        mods: ScoreMods | None = None,
    ) -> Specialization:
        """The specialization that serves `workload`."""
        window = workload.window_left is not None or workload.window_right is not None
        layout, dtypes = (aligned16, aligned_scores, offset_tensor), (bias_dtype, sink_dtype)
        return _specialization(_shared(workload), (window, *layout, *dtypes, bias_grad, dropout, mods))

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
    def is_measured(self) -> bool:
        """Whether records may be of exactly this: with functions or dropout, one of the same without is the nearest."""
        return self.mods is None and not self.dropout

    @property
    def workload_class(self) -> str:
        """The class of workloads that may share a tuned config, e.g. `fwd-bf16-d128-causal`.

        Pages of nearly the same size are one class (`core.lengths.page_class`).
        """
        return self._stem(page_class(self.page_size))

    @property
    def page_classes(self) -> tuple[str, ...]:
        """Of a specialization with pages the classes of all pages, its own among them; else empty."""
        return tuple(map(self._stem, PAGE_CLASSES)) if self.page_size else ()

    @property
    def former_class(self) -> str:
        """What `workload_class` was for passes over pages before their sizes had classes, for rows of that time."""
        return self.workload_class if self.direction == DECODE else self._stem(self.page_size)

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


_LAYOUT = ("aligned16", "aligned_scores", "offset_tensor")
_VARIANT = ("window", *_LAYOUT, "bias_dtype", "sink_dtype", "bias_grad", "dropout", "mods")
_SHARED = tuple(f.name for f in fields(Specialization) if f.name not in _VARIANT)
"""What a specialization takes over from its workload."""

_shared = attrgetter(*_SHARED)


@functools.lru_cache(maxsize=1024)
def _specialization(shared: tuple[Any, ...], variant: tuple[Any, ...]) -> Specialization:
    """One object for equal values: every call of a new length asks for it."""
    return Specialization(**dict(zip((*_SHARED, *_VARIANT), (*shared, *variant), strict=True)))


def _has(spec: Specialization, values: dict[str, object]) -> bool:
    return all(getattr(spec, name) == value for name, value in values.items())
