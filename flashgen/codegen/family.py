"""`KernelFamily`: one row of the families table, and the `Knob` and `Parameter` values that describe it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from flashgen.codegen.cost import CostModel
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.errors import ConfigError
from flashgen.core.features import table
from flashgen.core.features.promises import DETERMINISTIC
from flashgen.core.nearest import SHORT, in_blocks
from flashgen.core.workload import Specialization, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One dimension of a search space: its values in order, so that neighbours are one step apart.

    `default` is for a knob that came later: configs that were stored before it existed mean this value. If it is
    `implied`, the text of a kernel does not name it at its default: kernels rendered before keep their digests.
    `former` is the name that it had before, of which a command line is told; databases were migrated.
    """

    name: str
    values: tuple[KnobValue, ...]
    meaning: str
    default: KnobValue | None = None
    implied: bool = False
    former: str = ""

    def allows(self, value: KnobValue) -> bool:
        """Whether `value` is declared; True is not 1 here."""
        return any(value == known and type(value) is type(known) for known in self.values)

    def read(self, text: str) -> KnobValue | None:
        """The declared value that people write as `text`, in letters of any case; None if there is none."""
        return next((value for value in self.values if text.lower() == str(value).lower()), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One run-time parameter of a kernel: its name from the launch vocabulary and its Triton type.

    The names are those of the table in `flashgen.launch.vocabulary`. Types are as in a Triton signature: `*bf16`,
    `i32`, `i64`, `fp32`, `tensordesc<bf16[1, 1, 128, 64]>`. `aligned16` tells the compiler that a pointer is a multiple
    of 16 bytes.
    """

    name: str
    type: str
    aligned16: bool = False

    @property
    def is_integer(self) -> bool:
        """Whether Triton's JIT would specialise on the value (1, multiples of 16), which flashgen never wants."""
        return self.type in ("i32", "i64")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """What goes to the compiler beside the source; `maxnreg` 0 means no limit.

    `num_warps` are those of the launch's first partition: a warp-specialised Gluon kernel adds its own.
    """

    num_warps: int
    num_stages: int
    maxnreg: int = 0


class Sizes(NamedTuple):
    """The sizes of a launch that grids and scratch memory depend on.

    Packed sequences are one batch element: `seqlen_q` and `seqlen_k` are the rows of all of them, and what is known of
    each is that there are `sequences` of them, none longer than `max_seqlen_q` and `max_seqlen_k`. `key_splits` CTAs
    share the keys of a tile of queries.
    """

    batch: int
    nheads: int
    nheads_k: int
    seqlen_q: int
    seqlen_k: int
    sequences: int = 0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    key_splits: int = 1

    @classmethod
    def of(cls, workload: Workload) -> Sizes:
        """Those of a workload; a step of decoding has the keys that it reads."""
        w = workload
        return cls(batch=w.batch, nheads=w.nheads, nheads_k=w.nheads_k, seqlen_q=w.seqlen_q, seqlen_k=w.keys_reached)

    def in_blocks(self) -> Sizes:
        """The sizes that a config is chosen by where nobody measured these: lengths as `core.nearest.in_blocks` says.

        Those of packed sequences are of classes already.
        """
        batch, nheads, nheads_k, rows, keys, sequences, *_ = self  # written out: every call of a new length asks
        if sequences or (rows <= SHORT and keys <= SHORT):
            return self
        is_grouped = nheads != nheads_k
        of_rows = in_blocks(rows, is_grouped=is_grouped)
        of_keys = of_rows if keys == rows else in_blocks(keys, is_grouped=is_grouped)
        return Sizes(batch, nheads, nheads_k, of_rows, of_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """One kernel of a config; a launch of the config runs all of them, one after the other on a stream.

    Attributes:
        entry: the name of its function in the generated text.
        parameters: the run-time parameters, in order.
        options: what the compiler is told.
        programs: the number of programs of a launch.
        language: "triton" or "gluon".
        overlaps: whether its programs may be scheduled before the kernel in front of it has ended: they wait for that
            themselves (griddepcontrol.wait) before they read what it wrote.
    """

    entry: str
    parameters: tuple[Parameter, ...]
    options: CompileOptions
    programs: Callable[[Device, Sizes], int]
    language: str = "triton"
    overlaps: bool = False

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return [parameter.name for parameter in self.parameters]

    @property
    def do_not_specialize(self) -> list[str]:
        """Names of the parameters on whose values nothing that is compiled may depend."""
        return [parameter.name for parameter in self.parameters if parameter.is_integer]


class Scratch(NamedTuple):
    """Device memory that one kernel of a config leaves for the next; contiguous, its contents undefined at first.

    `name` is lower case with underscores (`dq_acc`): kernels get it as a pointer in camel case (`DqAcc`) or as a tensor
    descriptor with `_desc` behind it (`dq_acc_desc`). `dtype` is a name of `DTYPE_BYTES`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "fp32"


TOLERATED_SPILLS = 64
"""Bytes of local memory of a thread: 16 registers that are spilled outside of the loop cost nothing. A family whose
fastest kernels spill more says so with a value of its own."""


def _no_scratch(spec: Specialization, config: Config, sizes: Sizes) -> tuple[Scratch, ...]:
    return ()


def _no_seed_configs(spec: Specialization, device: Device) -> tuple[Config, ...]:
    return ()


def _all_values(spec: Specialization) -> dict[str, tuple[KnobValue, ...]]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobRows:
    """Knobs whose values only work in some combinations, whatever the specialization: enumerated as rows of them."""

    names: tuple[str, ...] = ()
    rows: tuple[tuple[KnobValue, ...], ...] = ((),)


def _no_knob_rows() -> KnobRows:
    return KnobRows()


def _as_it_is(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    return config


def _itself(spec: Specialization, config: Config) -> Config:
    return config


def _unchanged(spec: Specialization, config: Config, device: Device) -> Config:
    return config


def _one(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> int:
    return 1


def _nothing_else(spec: Specialization, config: Config, device: Device) -> tuple[Config, ...]:
    return ()


def _always_fit(config: Config, sizes: Sizes) -> str | None:
    return None


def _any_number(config: Config) -> int | None:
    return None


def _on_none(spec: Specialization, device: Device) -> str | None:
    return None


def _nowhere(spec: Specialization, sizes: Sizes, device: Device) -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFamily:
    """One way to compute attention: a template, the workloads it applies to, its knobs and how it is launched.

    A new kernel is one template and one such row. `id` is permanent: databases name it.

    Attributes:
        features: the names of the features that its kernels compute (`core.features.table`). Whoever asks for another
            one is refused, so a new feature is refused by every family until that family names it.
        unsupported: the reason why the family does not apply to a specialization on a device, or None: of
            architectures, dtypes, head dimensions, and of features in some combinations.
        invalid: the reason why a config of declared values cannot work there, or None.
        default: a config that is valid wherever the family applies, in constant time.
        template_values: what the template needs beside the parameters, by name.
        kernels: the kernels of a config, in the order of their launches.
        scratch: the memory that they share.
        key_splits: how many CTAs share the keys of a tile of queries at some sizes.
        seed_configs: valid configs that won before, for a search to begin with (beside the default).
        allowed_values: values of some knobs in an enumeration, where others are never valid for a specialization
            or follow from sizes that it does not know.
        knob_rows: knobs that are enumerated together, because most combinations of their values are never valid.
        fitted: a valid config as it is best at the sizes of a workload, which a specialization does not know.
        usual: the default at such sizes, where a rule chooses more of it than what follows from them; None is `fitted`.
        slower_on: the reason why the default of the next family that applies is faster on a device, or None.
        slower_at: likewise at some sizes.
        poor_at_sizes: the reason why a valid config is far from the best at some sizes, or None.
        few_waves: programs for each SM up to which a config that won with as few over a family that is preferred serves
            other sizes; 0 is any number.
        most_keys: the keys that a launch of a valid config has at most, or None; above them `poor_at_sizes` says why.
        balanced: a config that was measured at other sizes, with a tile whose CTAs fill the SMs better at these.
        beside: what `balanced` may serve in the place of a config at one size or another.
        over_pages: of a config that was measured without pages, the one most like it for a specialization that has them
            (whether valid or not).
        default_for_functions: whether calls with functions of the caller have its default, and not the config that won
            without them.
        successor: of a config that the family offered once and no more, the one most like it that it offers today
            (whether valid or not); any other config itself.
        exact_sibling: of a config whose LSE is not exact, the one most like it whose LSE is, valid wherever it is
            itself: it serves calls that ask for the LSE, or train; any other config itself.
        tolerated_spills: bytes of local memory of a thread up to which a kernel is worth measuring.
        default_spills: bytes of local memory of a thread that defaults take at most for the plain shapes of
            `scripts/crosscompile.py`, under any supported Triton; above it that fails.
        cost_model: what the analytic model is told of it; without one `tune --target` cannot rank its candidates.
    """

    id: str
    title: str
    template: str
    direction: str
    knobs: tuple[Knob, ...]
    features: frozenset[str]
    unsupported: Callable[[Specialization, Device], str | None]
    invalid: Callable[[Specialization, Config, Device], str | None]
    default: Callable[[Specialization, Device], Config]
    template_values: Callable[[Specialization, Config], dict[str, object]]
    kernels: Callable[[Specialization, Config], tuple[KernelSpec, ...]]
    scratch: Callable[[Specialization, Config, Sizes], tuple[Scratch, ...]] = _no_scratch
    key_splits: Callable[[Specialization, Config, Sizes, Device], int] = _one
    seed_configs: Callable[[Specialization, Device], tuple[Config, ...]] = _no_seed_configs
    allowed_values: Callable[[Specialization], dict[str, tuple[KnobValue, ...]]] = _all_values
    knob_rows: Callable[[], KnobRows] = _no_knob_rows
    fitted: Callable[[Specialization, Config, Sizes, Device], Config] = _as_it_is
    usual: Callable[[Specialization, Config, Sizes, Device], Config] | None = None
    slower_on: Callable[[Specialization, Device], str | None] = _on_none
    slower_at: Callable[[Specialization, Sizes, Device], str | None] = _nowhere
    poor_at_sizes: Callable[[Config, Sizes], str | None] = _always_fit
    few_waves: int = 0
    most_keys: Callable[[Config], int | None] = _any_number
    balanced: Callable[[Specialization, Config, Sizes, Device], Config] = _as_it_is
    beside: Callable[[Specialization, Config, Device], tuple[Config, ...]] = _nothing_else
    over_pages: Callable[[Specialization, Config, Device], Config] = _unchanged
    default_for_functions: bool = False
    successor: Callable[[Specialization, Config], Config] = _itself
    exact_sibling: Callable[[Specialization, Config], Config] = _itself
    tolerated_spills: int = TOLERATED_SPILLS
    default_spills: int = 0
    cost_model: CostModel | None = None

    def __post_init__(self) -> None:
        if unknown := self.features - table.names():
            raise ConfigError(f"features of a family are those of the table, got {sorted(unknown)} in {self.id}")

    @property
    def is_deterministic(self) -> bool:
        """Whether equal inputs give equal bits every time."""
        return DETERMINISTIC.name in self.features

    def parameters(self, spec: Specialization, config: Config) -> tuple[Parameter, ...]:
        """The run-time parameters of the first kernel of a config, which is the only one of a forward pass."""
        return self.kernels(spec, config)[0].parameters
