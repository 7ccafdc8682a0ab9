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
_BY_NAME = re.compile(r"\b(\w*ATTENTION_CLASSES)\[")
_AS_SDPA = re.compile(r"_supports_sdpa = True")
_FOR_SDPA_ALONE = re.compile(r"_attn_implementation\b.*[\"']sdpa[\"']")


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
    reason = None if config is None else _reading(type(config))[0]
    if reason is not None:
        raise UnsupportedError(_refusal(f"model {config.model_type!r}", reason))


def reads_none_as_sdpa(config: Any) -> bool:
    """Whether the model of a config means by a mask that is None what SDPA does: causal where its modules say so.

    One without SDPA has been run with eager attention alone, where None hides nothing. One that asks whether its
    attention is called "sdpa" may do for that name alone what makes None right.
    """
    return config is not None and _reading(type(config))[1]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator] # no file is read, and no graph broken
def _reading(kind: Any) -> tuple[str | None, bool]:
    return _read(kind)


@cache
def _read(kind: Any) -> tuple[str | None, bool]:
    """Why the model of a kind of config is refused, if it is, and whether it means by None what SDPA does."""
    source = _modeling(kind)
    own, by_name = _ATTENTION_CLASS.search(source), _BY_NAME.search(source)
    as_sdpa = _AS_SDPA.search(source) is not None and _FOR_SDPA_ALONE.search(source) is None
    reason = None
    if INTERFACE not in source and own is not None and _MASKS.search(source) is not None:
        reason = f"{own.group().split()[1].partition('(')[0]} computes it on its own"
    elif by_name is not None:
        reason = f"it chooses from its own {by_name.group(1)}"
    return reason, as_sdpa


def _modeling(kind: Any) -> str:
    """The source of the model of a kind of config, which lies beside it in a file of the same name; "" without one."""
    package, _, name = str(kind.__module__).rpartition(".")
    if not name.startswith("configuration_"):
        return ""
    try:
        spec = importlib.util.find_spec(f"{package}.{name.replace('configuration_', 'modeling_', 1)}")
    except ImportError:
        return ""
    return "" if spec is None or spec.origin is None else Path(spec.origin).read_text(encoding="utf-8")


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
