"""Packages that benchmarks race beside torch's own kernels, or need for some of their rows.

Each benchmark says `no row` of what is not here and goes on, so a run of all of them asks first: its GPU time would
be spent, and files would be without the rows that the older ones have.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from benchmarks import fa4
from benchmarks.decode_vllm import why_not_installed
from benchmarks.impls import FA3_MODULE

FA3, FA4, VLLM, TRANSFORMERS, ZSTANDARD = "fa3", "fa4", "vllm", "transformers", "zstandard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What is to be installed, in words, and whether it is."""

    what: str
    is_here: Callable[[], bool]


def _found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


PEERS: dict[str, Peer] = {
    FA3: Peer(what=f"the module {FA3_MODULE}", is_here=partial(_found, FA3_MODULE)),
    FA4: Peer(what=f"the package {fa4.PACKAGE}", is_here=fa4.is_installed),
    VLLM: Peer(what="vLLM, or VLLM_CHECKOUT", is_here=lambda: why_not_installed() is None),
    TRANSFORMERS: Peer(what="transformers", is_here=partial(_found, "transformers")),
    ZSTANDARD: Peer(what="zstandard, for the first call with a bundle", is_here=partial(_found, "zstandard")),
}


def absent(names: Iterable[str]) -> list[str]:
    """Those of these names that are not here."""
    return [name for name in names if not PEERS[name].is_here()]
