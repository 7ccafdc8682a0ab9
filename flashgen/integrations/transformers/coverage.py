"""Which attention of a model is flashgen's to compute: models are read, since transformers does not say."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flashgen.core.errors import UnsupportedError

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""What attention has in its source that asks transformers for the function that computes it."""

_OWN = re.compile(r"softmax|scaled_dot_product_attention|\bbaddbmm|MultiheadAttention\(")
_ATTENTION_CLASS = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)
_MASKS = re.compile(r"\bcreate_(?:\w+_)?masks?(?:_\w+)?\(")


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The attention classes of a model, by name, in order."""

    served: tuple[str, ...]
    """They call the registered function."""
    own: tuple[str, ...]
    """They compute attention on their own: right, and not by flashgen."""


def check(model: torch.nn.Module) -> Coverage:
    """Say which classes of a model call the attention function that is registered, and which compute on their own.

    Args:
        model: a model of transformers, on any device.

    Raises:
        UnsupportedError: none calls it, so that flashgen would serve nothing; the message has the model and its
            classes.
    """
    served, own = set(), set()
    kinds: set[Any] = {type(module) for module in model.modules()}
    for kind in kinds:
        source = _source(kind)
        if INTERFACE in source:
            served.add(kind.__name__)
        elif "ttention" in kind.__name__ and _OWN.search(source):
            own.add(kind.__name__)
    found = Coverage(served=tuple(sorted(served)), own=tuple(sorted(own)))
    if not found.served:
        of_its_own = f"{', '.join(found.own)} computes it on its own" if found.own else "it has no attention"
        raise UnsupportedError(_refusal(type(model).__name__, of_its_own))
    return found


def refuse_config(config: Any) -> None:
    """Refuse the model of a config if all its attention is of its own and needs masks as tensors of floats.

    Raises:
        UnsupportedError: it is such a model; without flashgen it would compute with the wrong mask.
    """
    kind: Any = type(config)
    reason = None if config is None else _reason(kind)
    if reason is not None:
        raise UnsupportedError(_refusal(f"model {config.model_type!r}", reason))


@cache
def _reason(config: Any) -> str | None:
    """Why the model of a config is refused; it lies beside the config, in a file of the same name."""
    package, _, name = str(config.__module__).rpartition(".")
    if not name.startswith("configuration_"):
        return None
    try:
        spec = importlib.util.find_spec(f"{package}.{name.replace('configuration_', 'modeling_', 1)}")
    except ImportError:
        return None
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).read_text(encoding="utf-8")
    own = _ATTENTION_CLASS.search(source)
    if INTERFACE in source or own is None or _MASKS.search(source) is None:
        return None
    return f"{own.group().split()[1].partition('(')[0]} computes it on its own"


@cache
def _source(kind: Any) -> str:
    """The source of a class of modules; its forward pass where it inherits one."""
    try:
        own = inspect.getsource(kind)
        return own if "forward" in vars(kind) else own + inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return ""


def _refusal(name: str, reason: str) -> str:
    return (
        f"flashgen serves models whose attention asks transformers for a function, and {name} does not: {reason}. "
        "Load it with attn_implementation='eager'"
    )
