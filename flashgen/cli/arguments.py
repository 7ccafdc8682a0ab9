"""Arguments that several commands share: shapes, targets and configs, from text to values."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cli import completion, output
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device, find_among, find_device
from flashgen.core.errors import ConfigError, DeviceError, FlashgenError, WorkloadError
from flashgen.core.input_copies import has_aligned_rows
from flashgen.core.names import meant
from flashgen.core.quoting import shown
from flashgen.core.record import PROVENANCES
from flashgen.core.workload import Specialization, Workload
from flashgen.measure.protocol import specialization

if TYPE_CHECKING:
    from flashgen.codegen.family import Knob

Shape = Annotated[str, typer.Argument(help="A workload, e.g. b4-h32-hk8-s4096-d128-causal.", metavar="SHAPE")]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="A GPU (h100, 'RTX 4090', sm_86, gfx942). Default: the GPU here, else h100.",
        metavar="GPU",
        autocompletion=completion.gpus,
    ),
]
ConfigText = Annotated[
    str | None,
    typer.Option("--config", help="family:knob=value,... (knobs left out have their default).", metavar="CONFIG"),
]
Family = Annotated[
    str | None,
    typer.Option(
        "--family",
        help="The default config of this kernel family, whatever would serve.",
        metavar="ID",
        autocompletion=completion.families,
    ),
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="A backward pass that gives the same bits every time.")
]
Unaligned = Annotated[
    bool,
    typer.Option(
        "--unaligned", help="q, k and v may start anywhere and have any strides, not only at multiples of 16 bytes."
    ),
]
Scattered = Annotated[
    bool,
    typer.Option("--scattered", help="A bias or a mask may start anywhere and have any strides, also along the keys."),
]
DeviceName = Annotated[
    str | None,
    typer.Option("--device", help="Only of this GPU, e.g. h200.", metavar="GPU", autocompletion=completion.gpus),
]
Provenance = Annotated[
    str | None,
    typer.Option(
        "--provenance",
        help="Only `measured` or only `predicted` ones.",
        autocompletion=completion.provenances,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

FALLBACK_TARGET = "h100"


class CommandLineError(Exception):
    """The command line is wrong: exit code 2, where an error of flashgen has 1."""


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Around what reads the command line: a rule that is broken there was broken by whoever wrote it.

    Raises:
        CommandLineError: with the message of the rule.
    """
    try:
        yield
    except FlashgenError as error:
        raise CommandLineError(str(error)) from error


def named_device(text: str | None, stored: Sequence[Device] | None = None) -> Device | None:
    """The device of `--device`, None without one: a catalogued GPU, else one that databases have.

    Args:
        text: its name.
        stored: the devices of what the command reads; without, those of all databases that serve.

    Raises:
        CommandLineError: no GPU has that name, or several have.
    """
    if text is None:
        return None
    with contextlib.suppress(DeviceError):  # no database needs to be opened for a catalogued one
        return find_device(text)
    known = stored_devices() if stored is None else stored
    with reading():
        return find_among(text, known)


def stored_devices() -> list[Device]:
    """The devices of all databases that serve."""
    from flashgen.db.layers import Layers

    found: list[Device] = []
    with Layers.open() as layers:
        for layer in layers.layers:
            try:
                with layer.store as store:
                    found += store.devices()
            except FlashgenError as error:  # noqa: PERF203 - one that cannot be read costs no name of the others
                output.note(f"no GPU of {layer.name} can be named: {error}")
    return found


def named_provenance(text: str | None) -> str | None:
    """The provenance of `--provenance`, None without one.

    Raises:
        CommandLineError: there is no such provenance.
    """
    if text is not None and text not in PROVENANCES:
        raise CommandLineError(f"--provenance is measured or predicted, got {text!r}{meant(text, PROVENANCES)}")
    return text


def parse_shape(
    text: str, *, deterministic: bool = False, unaligned: bool = False, scattered: bool = False
) -> tuple[Workload | None, Specialization]:
    """Read a workload, or the key of a specialization (`fwd-bf16-d128-causal`), which has no sizes.

    `deterministic`, `unaligned` and `scattered` say what the tokens of these names in a key do. What is asked for is
    unaligned anyway where rows of packed tensors are no multiples of 16 bytes. A backward workload with a bias is meant
    with the gradient of the bias, as it is tuned.

    Raises:
        WorkloadError: it is neither, determinism is asked of a forward pass, or there is nothing to be scattered.
    """
    try:
        workload = Workload.parse(text)
    except WorkloadError as error:
        try:
            spec = Specialization.parse(text)
        except WorkloadError:
            raise error from None
        spec = replace(spec, deterministic=_determinism(spec, deterministic))
        return None, _laid_out(spec, unaligned or not has_aligned_rows(spec), scattered)
    workload = replace(workload, deterministic=_determinism(workload, deterministic))
    return workload, _laid_out(specialization(workload), unaligned, scattered)


def _laid_out(spec: Specialization, unaligned: bool, scattered: bool) -> Specialization:
    if scattered and not (spec.bias or spec.mask):
        raise WorkloadError(f"--scattered is about a bias or a mask, and {spec.key} has none")
    return replace(
        spec, aligned16=spec.aligned16 and not unaligned, aligned_scores=spec.aligned_scores and not scattered
    )


def _determinism(asked: Workload | Specialization, deterministic: bool) -> bool:
    if deterministic and asked.direction == "forward":
        raise WorkloadError(f"--deterministic is about backward passes (bwd-...), and {asked.key} is a forward pass")
    return deterministic or asked.deterministic


def pick_device(target: str | None) -> tuple[Device, str]:
    """The GPU that `target` names, else the GPU here, else a common one; and a note if it was not chosen by anybody.

    Raises:
        CommandLineError: no GPU has that name.
    """
    named = named_device(target)
    if named is not None:
        return named, ""
    here = device_here()
    if here is not None:
        return here, ""
    device = find_device(FALLBACK_TARGET)
    return device, f"no GPU here: this is for {device.name}; --target names another one"


def device_here() -> Device | None:
    """The first GPU of this machine; None without one, or without torch."""
    try:
        import torch
    except ImportError:
        return None
    from flashgen.launch.gpu import current_device

    return current_device() if torch.cuda.is_available() else None


def parse_config(text: str, spec: Specialization, device: Device) -> Config:
    """Read `family:knob=value,...`; a knob left out keeps the value of the family's default for `spec` on `device`.

    The command in the first line of a rendered kernel names all knobs but those at an implied value: of a config that
    names all others, these are meant.

    Raises:
        ConfigError: the family or a knob is unknown, or a value is not declared.
    """
    from flashgen.codegen.families import family, validate

    name, _, assignments = text.partition(":")
    row = family(name.strip())
    declared = {knob.name: knob for knob in row.knobs}
    given: dict[str, KnobValue] = {}
    for assignment in filter(None, (part.strip() for part in assignments.split(","))):
        knob, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or knob not in declared or knob in given:
            rule = f"a config is {row.id}:knob=value,... with each of {', '.join(declared)} at most once, got {text!r}"
            raise ConfigError(rule + ("" if knob in declared else _now(knob, row.knobs) or meant(knob, declared)))
        given[knob] = _value(row.id, declared[knob], value)
    if given.keys() >= {knob.name for knob in row.knobs if not knob.implied}:
        return validate(Config.of(row.id, given))
    return validate(row.default(spec, device).replace(**given))


def family_default(name: str, workload: Workload | None, spec: Specialization, device: Device) -> Config:
    """The default config of a family, as it is best at the sizes of a workload where there is one.

    Raises:
        UnsupportedError: the family does not serve `spec` on `device`; the message has its reason.
    """
    from flashgen.codegen.families import default_config, usual
    from flashgen.codegen.family import Sizes

    config = default_config(spec, device, (name,))
    return config if workload is None else usual(config, spec, Sizes.of(workload), device)


def parse_database(path: Path) -> Path:
    """The path of a database, which need not be there.

    Raises:
        CommandLineError: no file can have it, or FLASHGEN_DB, by which the file would serve, could not name it.
    """
    if os.pathsep in str(path):
        raise CommandLineError(
            f"--db is one file whose path has no {os.pathsep!r}, which separates the files of FLASHGEN_DB, got "
            f"{shown(str(path))}"
        )
    try:
        path.stat()
    except (FileNotFoundError, PermissionError):  # what writes there says whether it can
        return path
    except (OSError, ValueError) as error:
        raise CommandLineError(f"--db is the path of a file, got {shown(str(path))}: {error.args[-1]}") from error
    return path


def _now(name: str, knobs: Sequence[Knob]) -> str:
    """What has become of a knob that once had this name; empty if none had."""
    return next((f"; {name} is {knob.name} now: {knob.meaning}" for knob in knobs if knob.former == name), "")


def _value(family_id: str, knob: Knob, text: str) -> KnobValue:
    """The declared value that is written as `text`."""
    value = knob.read(text)
    if value is not None:
        return value
    likely = meant(text, [value for value in knob.values if isinstance(value, str)])
    raise ConfigError(f"knob {knob.name} of {family_id} is one of {knob.values}, got {text!r}{likely}")
