"""Functions that every call goes through, written out from the table of features when this module is imported.

A loop over the table would take microseconds of each call, where all of it has ten. The texts are what one would write
by hand: one expression for each field.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from flashgen.core.features import table
from flashgen.core.features.declaration import Argument, OpArgument, Value, itself
from flashgen.core.features.functions import FUNCTIONS
from flashgen.core.features.pages import PAGES
from flashgen.core.features.sequences import VARLEN
from flashgen.core.features.values import Features

_NUMBERS = tuple(value.name for value in table.values(trains=True) if value.is_number)


@functools.lru_cache(maxsize=1024)
def of_numbers(*numbers: Any) -> Features:
    """The features of a call whose features are numbers: one object for equal numbers."""
    return Features(**dict(zip(_NUMBERS, numbers, strict=True)))


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of one number for every head, without gaps between them: kernels know no stride of it."""
    return tensor.contiguous() if tensor.dim() and tensor.stride(-1) != 1 else tensor


def feature_key_function() -> Callable[[Features], tuple[Any, ...]]:
    """What makes the part of a key that a call's features are."""
    parts = ", ".join(_key_part(value) for value in table.values())
    found: Callable[[Features], tuple[Any, ...]]
    found = _function("feature_key", "features", [f"return ({parts},)"], several=_several)
    return found


def requires_grad_function(fields: Iterable[str]) -> Callable[[Features], bool]:
    """Whether the tensor of one of these fields requires a gradient."""
    asked = " or ".join(f"((t := features.{field}) is not None and t.requires_grad)" for field in fields)
    found: Callable[[Features], bool] = _function("requires_grad", "features", [f"return {asked or False}"])
    return found


def flat_arguments(
    values: tuple[Value, ...], beside: tuple[OpArgument, ...], *late: tuple[Value, ...]
) -> list[OpArgument]:
    """The arguments of an op for these fields and others, in order: late ones behind all that were there before."""
    early, behind = (
        [one for value in some for one in value.op] for some in (values, (value for group in late for value in group))
    )
    return [*early, *beside, *behind]


def restore_function(
    values: tuple[Value, ...], arguments: list[OpArgument], beside: tuple[OpArgument, ...]
) -> Callable[..., tuple[Any, ...]]:
    """What makes `Features` from their flat arguments, and hands on those beside them; all have their defaults.

    Numbers that have no argument are absent.
    """
    known = {f"default_{each.name}": each.default for each in arguments}
    fields = {value.name: _restored(value) for value in values}
    absent = [_is_absent(each.name, each.default) for v in values if v.name not in _NUMBERS for each in v.op]
    rest = "".join(f"{argument.name}, " for argument in beside)
    found: Callable[..., tuple[Any, ...]] = _function(
        "restored",
        ", ".join(f"{each.name}=default_{each.name}" for each in arguments),
        [
            f"if {' and '.join(absent)}:",
            *_of_numbers(f"return (of_numbers({', '.join(fields.get(n, f'absent_{n}') for n in _NUMBERS)}), {rest})"),
            f"return (Features({', '.join(f'{name}={made}' for name, made in fields.items())}), {rest})",
        ],
        **known,
        **{f"absent_{value.name}": value.default for value in table.values()},
        **{f"restore_{value.name}": value.restore for value in values},
    )
    return found


def features_function(with_functions: Callable[..., Features]) -> Callable[..., Features]:
    """What makes `Features` from arguments of the public call, all of them by name, and checks them.

    `is_traced` says that torch.compile looks on. `with_functions` takes the arguments of functions in their order, then
    the other fields by name.
    """
    with_arguments = [feature for feature in table.FEATURES if feature.values and feature.arguments]
    values = [value for feature in with_arguments if feature is not FUNCTIONS for value in feature.values]
    arguments = [one for feature in with_arguments for one in feature.arguments]
    functions = [argument for argument in arguments if argument in FUNCTIONS.arguments]
    others = [argument for argument in arguments if argument not in functions]
    fields = ", ".join(f"{value.name}={value.name}" for value in values)
    own = [value.name for value in values]
    numbers = ", ".join(name if name in own else f"absent_{name}" for name in _NUMBERS)
    absent = [_is_absent(value.name, value.default) for value in values if value.name not in _NUMBERS]
    names = ", ".join(argument.name for argument in arguments)
    found: Callable[..., Features] = _function(
        "features_of",
        f"*, {names}, is_traced=False",
        [
            *(line for argument in others for line in _checked(argument)),
            *(f"if {v.name} is not None: {v.name} = packed({v.name})" for v in values if v.packed),
            f"if not ({' and '.join(_is_absent(one.name, one.default) for one in functions)}):",
            f"    return with_functions({', '.join(one.name for one in functions)}, {fields})",
            f"if not is_traced and {' and '.join(absent)}:",
            *_of_numbers(f"return of_numbers({numbers})"),
            f"return Features({fields})",
        ],
        with_functions=with_functions,
        **{f"absent_{value.name}": value.default for value in table.values()},
        **{f"default_{one.name}": one.default for one in others},
        **{f"check_{one.name}": one.check for one in others},
    )
    return found


def of_scores_function() -> Callable[[Features], Features]:
    """What leaves packed sequences out of features."""
    added = [value.name for feature in (VARLEN, PAGES) for value in feature.values]
    kept = {value.name: f"features.{value.name}" for value in table.values() if value.name not in added}
    found: Callable[[Features], Features] = _function("of_scores", "features", [_constructed(kept)])
    return found


def with_sequences_function(*, is_traced: bool = False) -> Callable[..., Features]:
    """What adds packed sequences to the features of scores: `(features, *VARLEN's values, block_table)`.

    `is_traced` is for calls on which torch.compile looks, which knows the constructor of `Features` alone.
    """
    added = [value.name for feature in (VARLEN, PAGES) for value in feature.values]
    fields = {value.name: f"features.{value.name}" for value in table.values()} | {name: name for name in added}
    body = [_constructed(fields)] if is_traced else _made(fields)
    found: Callable[..., Features] = _function("with_sequences", f"features, {', '.join(added)}", body)
    return found


def features_from_function(names: tuple[str, ...]) -> Callable[..., Features]:
    """What makes `Features` from the fields of these names, in their order, and leaves the others absent."""
    fields = {value.name: value.name if value.name in names else f"NONE.{value.name}" for value in table.values()}
    found: Callable[..., Features]
    found = _function("features_from", ", ".join(names), _made(fields), NONE=Features())
    return found


class _Blank:
    """What becomes `Features`: the constructor of a frozen dataclass sets its fields one by one, at 0.2 us each."""

    __slots__ = tuple(field.name for field in dataclasses.fields(Features))


def _made(fields: Mapping[str, str]) -> list[str]:
    """Lines that return `Features` of these fields, made in a ninth of the constructor's time."""
    return [
        "made = Blank()",
        *(f"made.{name} = {text}" for name, text in fields.items()),
        "made.__class__ = Features",
        "return made",
    ]


def _constructed(fields: Mapping[str, str]) -> str:
    return f"return Features({', '.join(f'{name}={text}' for name, text in fields.items())})"


def _function(name: str, parameters: str, body: Iterable[str], **known: Any) -> Any:
    """The function of this text, in which these names are known."""
    text = "\n    ".join([f"def {name}({parameters}):", *body])
    names = {"Features": Features, "Blank": _Blank, "of_numbers": of_numbers, "packed": packed, **known}
    exec(compile(f"{text}\n", f"<{name} of {__name__}>", "exec"), names)
    return names[name]


def _of_numbers(line: str) -> list[str]:
    """Lines below an `if` that do this line, or go on behind them: symbolic numbers of a graph have no hash."""
    return ["    try:", f"        {line}", "    except TypeError:", "        pass"]


def _key_part(value: Value) -> str:
    field = f"features.{value.name}"
    return {
        "value": field,
        "is_on": f"{field} > 0",
        "layout": f"None if (t := {field}) is None else ({_LAYOUT})",
        "tensors": f"None if {_is_absent(field, value.default)} else several({value.name!r}, {field})",
    }[value.chooses_code]


_LAYOUT = "t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() & 15"
_layout = _function("layout", "t", [f"return ({_LAYOUT})"])
_READS = {value.name: tuple(argument.read for argument in value.op) for value in table.values()}


def _several(name: str, given: Any) -> tuple[Any, ...]:
    """The part of a key for the field of this name, which has several tensors."""
    parts = []
    for read in _READS[name]:
        part = read(given)
        if isinstance(part, list):
            part = tuple(_layout(each) if isinstance(each, torch.Tensor) else each for each in part)
        parts.append(part)
    return tuple(parts)


def _is_absent(name: str, default: object) -> str:
    return f"{name} is None" if default is None else f"not {name}"


def _restored(value: Value) -> str:
    name, *others = (argument.name for argument in value.op)
    if value.packed:
        return f"{name} if {name} is None else packed({name})"
    if value.restore is itself:
        return name
    return f"restore_{value.name}({', '.join([name, *others])})"


def _checked(argument: Argument) -> list[str]:
    """Lines that refuse a bad value, and take a good one as `Features` has it."""
    if argument.check is None:
        return []
    name = argument.name
    return [f"if {name} != default_{name}: {name} = check_{name}({name})"]
