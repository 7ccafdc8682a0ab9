"""Paged keys and values in the portable forward family: what its template and its parameters need, and what fits."""

from __future__ import annotations

from flashgen.codegen.family import Knob
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

LOAD, HIDDEN = "load", "asm"

PAGE_IDS = Knob(
    name="page_ids",
    values=(LOAD, HIDDEN),
    meaning="paged keys: page ids seen by the software pipeliner, or hidden from it, so that K and V keep its depth",
    default=LOAD,
    implied=True,
)


def page_ids(config: Config) -> str:
    """How a config reads page ids; one that is older than the knob means an ordinary load."""
    return str(config.get(PAGE_IDS.name, LOAD))


def page_ids_values(spec: Specialization) -> tuple[KnobValue, ...]:
    """What a specialization leaves of the knob, on any device."""
    return PAGE_IDS.values if spec.page_size else (LOAD,)


def default_page_ids(spec: Specialization, device: Device) -> str:
    """How page ids are read without a record."""
    return HIDDEN if spec.page_size and device.is_nvidia else LOAD


def over_pages(spec: Specialization, config: Config, device: Device) -> Config:
    """A config that was measured without pages, with page ids read as the default reads them."""
    return config.replace(**{PAGE_IDS.name: default_page_ids(spec, device)})


def holds_tiles(spec: Specialization, block_n: int) -> bool:
    """Whether no tile of keys lies in two pages."""
    return bool(spec.page_size) and (spec.page_size or 0) % block_n == 0


def page_values(spec: Specialization, config: Config) -> dict[str, object]:
    """Values of the template."""
    return {
        "paged": bool(spec.page_size),
        "page_size": spec.page_size or 0,
        "whole_pages": holds_tiles(spec, config.integer("block_n")),
        "hidden_ids": bool(spec.page_size) and page_ids(config) == HIDDEN,
    }


def key_lengths(spec: Specialization) -> tuple[str, ...]:
    """Parameters that say how many keys there are: the rows of all sequences, or what a table has room for."""
    return ("table_keys", "num_pages") if spec.page_size else ("total_k",)


def why_not_paged(spec: Specialization, config: Config, device: Device) -> str | None:
    """The reason why a config cannot read the pages of a specialization, or is another one without them; or None."""
    if page_ids(config) == HIDDEN and not spec.page_size:
        return "without pages no page ids are read"
    if page_ids(config) == HIDDEN and not device.is_nvidia:
        return "inline assembly is NVIDIA's"
    if spec.page_size and config["loads"] == "descriptor" and not holds_tiles(spec, config.integer("block_n")):
        return f"TMA loads tiles of one page, and pages of {spec.page_size} keys do not hold those of block_n"
    return None
