"""What the declaration of a feature says: `Feature` and its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from flashgen.core.score_mods import ScoreMods

if TYPE_CHECKING:
    import torch

    from flashgen.core.features.values import Features


@dataclass(frozen=True, kw_only=True, eq=False)
class Argument:
    """An argument of the public call.

    `check` returns a value as `Features` has it, or raises `WorkloadError` by rules that need no shapes.
    """

    name: str
    default: object = None
    check: Callable[[Any], Any] | None = None


def itself(value: Any) -> Any:
    """The value as it is."""
    return value


@dataclass(frozen=True, kw_only=True, eq=False)
class OpArgument:
    """A flat argument of the torch.library ops: its schema text, its default, and what it is of its field's value."""

    schema: str
    default: object
    read: Callable[[Any], Any] = itself

    @property
    def name(self) -> str:
        """The name in the schema text."""
        return self.schema.split("=")[0].split()[-1]


@dataclass(frozen=True, kw_only=True, eq=False)
class Value:
    """A field of `Features`.

    Attributes:
        name: of the field.
        default: what the field is where the feature is absent.
        chooses_code: what of it may choose code, so that the key of a plan has it: its "value", whether it "is_on", the
            "layout" of a tensor (shape, strides, dtype, device, alignment), or those of several "tensors".
        op: the flat arguments that it travels in through an op.
        restore: the value from these arguments.
        packed: a tensor with one number a head, which kernels read without a stride.
        is_late: its flat arguments stand behind all others of an op, which exported programs may have without it.
        is_last_in_training: in the ops of training they stand behind these, as those had them last.
    """

    name: str
    default: object = None
    chooses_code: Literal["value", "is_on", "layout", "tensors"] = "layout"
    op: tuple[OpArgument, ...] = ()
    restore: Callable[..., Any] = itself
    packed: bool = False
    is_late: bool = False
    is_last_in_training: bool = False

    @property
    def is_tensor(self) -> bool:
        """Whether it is one tensor or None."""
        return self.chooses_code == "layout"

    @property
    def is_number(self) -> bool:
        """Whether it is neither a tensor nor holds any."""
        return self.chooses_code in ("value", "is_on")

    @property
    def reads(self) -> tuple[Callable[[Any], Any], ...]:
        """What makes its flat arguments, in order."""
        return tuple(argument.read for argument in self.op)

    def is_in(self, features: Features) -> bool:
        """Whether a call brings it."""
        value = getattr(features, self.name)
        return value is not None and (self.is_tensor or value != self.default)


@dataclass(frozen=True, kw_only=True, eq=False)
class CallFacts:
    """What rules may need of a call beside its features.

    Attributes:
        q: the queries, for dtype and device.
        sizes: batch, nheads, seqlen_q and seqlen_k.
        mods: the user's functions.
        page_size: keys of a page, where keys lie in pages.
        has_own_offset: whether the call has a query offset other than the default.
    """

    q: torch.Tensor
    sizes: tuple[int, int, int, int]
    mods: ScoreMods | None = None
    page_size: int | None = None
    has_own_offset: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Token:
    """A token of the keys: `text` stands for `value` in `field`. Without a value it is a prefix of the number there."""

    text: str
    field: str
    value: object = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """A token that the key of a specialization has beside that of its workload.

    `place` orders them: whether a window is compiled in belongs to the class of workloads, what follows it does not.
    """

    text: str
    field: str
    value: object
    place: Literal["class", "alignment", "offset", "dtype", "gradient"]


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelTensor:
    """A pointer parameter of kernels, and the tensor that a launch writes there."""

    name: str
    of: Callable[[Features], torch.Tensor | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelNumbers:
    """Parameters that a launch writes, numbers of the Triton type `type`.

    `of(features, scale, sizes, causal)` gives one for each name: `scale` is the softmax scale, `sizes` has the lengths
    by name. `follows(features, scale)` is what they follow from between calls of one shape. `of` raises `LaunchError`
    where the call has none.
    """

    names: tuple[str, ...]
    type: Literal["i32", "fp32"]
    of: Callable[[Features, float, Mapping[str, int], bool], tuple[float, ...]]
    follows: Callable[[Features, float], object]


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradient:
    """How the gradient of a tensor argument is made: by a "kernel", or by a "formula" from what kernels leave.

    `needed` is the op argument that asks for it.
    """

    field: str
    by: Literal["kernel", "formula"]
    needed: OpArgument


@dataclass(frozen=True, kw_only=True, eq=False)
class Support:
    """A row of docs/supported.md: its group, its name, and the fields of the specialization that stands for it."""

    group: str
    name: str
    fields: Mapping[str, object]


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


def _no_words(_: Any) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Feature:
    """One row of the table; `name` is what families list.

    Attributes:
        name: of the feature.
        fields: those of `Workload` and `Specialization` that ask for it where they are not None, False or "".
        absent: the reason of a family that does not declare it.
        absent_backward: the same of a family of backward passes, where it differs.
        arguments: of the public call.
        values: fields of `Features`.
        options: flat arguments of every op, with which plain calls come, too.
        checked: values in the form that the slow path needs, once the rules that need shapes have been checked.
        workload: fields of the `Workload` of a call.
        specialization: fields of its `Specialization` beside those of the workload.
        tokens: in the keys of workloads and specializations.
        variants: in the keys of specializations alone.
        tensors: pointer parameters of kernels.
        numbers: number parameters that a launch writes.
        sizes: number parameters that follow from the shapes and strides of tensors.
        has_far_reach: whether scores go on changing with a query offset beyond the lengths.
        trains: whether calls with it have a backward pass.
        gradient: what it adds to the gradients of a call.
        no_gradient: what a call is told that would need one, where there is none.
        words: of a workload, for people.
        specialization_words: of a specialization, for people.
        first_words: whether its words come before those of other features.
        support: rows of docs/supported.md.
        gradient_support: rows that only backward passes have.
    """

    name: str
    fields: tuple[str, ...]
    absent: str
    absent_backward: str = ""
    arguments: tuple[Argument, ...] = ()
    values: tuple[Value, ...] = ()
    options: tuple[OpArgument, ...] = ()
    checked: Callable[[Features, CallFacts], dict[str, Any]] = _nothing
    workload: Callable[[Features, CallFacts], dict[str, Any]] = _nothing
    specialization: Callable[[Features], dict[str, Any]] = _nothing
    tokens: tuple[Token, ...] = ()
    variants: tuple[Variant, ...] = ()
    tensors: tuple[KernelTensor, ...] = ()
    numbers: tuple[KernelNumbers, ...] = ()
    sizes: tuple[str, ...] = ()
    has_far_reach: bool = False
    trains: bool = True
    gradient: Gradient | None = None
    no_gradient: str = ""
    words: Callable[[Any], tuple[str, ...]] = _no_words
    specialization_words: Callable[[Any], tuple[str, ...]] = _no_words
    first_words: bool = False
    support: tuple[Support, ...] = ()
    gradient_support: tuple[Support, ...] = ()

    def is_asked(self, value: object) -> bool:
        """Whether a `Workload` or a `Specialization` asks for it."""
        for field in self.fields:
            found = getattr(value, field, None)
            if found is not None and found is not False and found != "":
                return True
        return False

    def is_in(self, features: Features) -> bool:
        """Whether a call brings it."""
        return any(value.is_in(features) for value in self.values)

    def absence(self, direction: str) -> str:
        """The reason of a family of this direction that does not declare it."""
        return self.absent_backward or self.absent if direction == "backward" else self.absent
