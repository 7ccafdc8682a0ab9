"""`register`: flashgen's attention and masks under a name of transformers, and continuous batching with it."""

from __future__ import annotations

from functools import wraps
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

import flashgen
from flashgen.core.checks import flag, text
from flashgen.core.errors import WorkloadError
from flashgen.core.quoting import shown
from flashgen.integrations.transformers.attend import Attention
from flashgen.integrations.transformers.coverage import refuse_config
from flashgen.integrations.transformers.masks import attention_mask

NAME = "fgen"
"""transformers takes every name with "flash" in it for a FlashAttention package that it imports."""

_PAGED = "paged|"
_SWITCH = "switch_to_cb_friendly_attn"
_CHOICE = "get_correct_attn_implementation"
_TABLES = "ensure_decode_fast_path_is_available"
_TAKES_PAGED_NAMES = _PAGED + "sdpa" in AttentionInterface._global_mapping
"""Whether continuous batching has names of its own, as it had up to transformers 5.17 or so."""


def register(name: str = NAME, *, reference: bool = False) -> None:
    """Let models of transformers attend by flashgen: `attn_implementation=name` when they are made or loaded.

    Also `model.set_attn_implementation(name)`, and continuous batching (`generate_batch`), up to transformers 5.17 or
    so under `"paged|" + name` as well. Calling it again changes nothing.

    Args:
        name: of the attention function; without "flash".
        reference: attend by `flashgen.reference` on whatever device the model is: exact, slow, and the only way on a
            CPU.

    Raises:
        WorkloadError: the name is taken, has "flash" in it, or begins with "paged|".
    """
    text("name", name)
    flag("reference", reference)
    if not name or "flash" in name or name.startswith(_PAGED):
        raise WorkloadError(
            f"name of an attention function has neither 'flash' nor {_PAGED!r} in it, got {shown(name)}"
        )
    taken = AttentionInterface._global_mapping.get(name) or AttentionMaskInterface._global_mapping.get(name)
    if name == "eager" or (taken is not None and not isinstance(taken, Attention)):
        raise WorkloadError(f"name of an attention function is not yet taken, got {shown(name)}")
    calls: Any = flashgen
    if reference:
        from flashgen import reference as calls
    attention = Attention(calls=calls, is_reference=reference)
    for each in (name, _PAGED + name):
        AttentionInterface.register(each, attention)
    AttentionMaskInterface.register(name, attention_mask)
    _refuse_when_made()
    _batch_continuously()
    _read_by_tables()


def unregister(name: str = NAME) -> None:
    """Take back `register`; models that use it cannot run until it is called again.

    Raises:
        WorkloadError: nothing of flashgen is registered under this name.
    """
    known = AttentionInterface._global_mapping
    if not isinstance(known.get(text("name", name)), Attention):
        raise WorkloadError(f"name was registered by flashgen, got {shown(name)}")
    for each in (name, _PAGED + name):
        known.pop(each, None)
    AttentionMaskInterface._global_mapping.pop(name, None)
    if not any(isinstance(one, Attention) for one in known.values()):
        _unwrap(PreTrainedModel, _CHOICE)
        _unwrap(_manager(), _SWITCH)
        _unwrap(_initialization(), _TABLES)


def _refuse_when_made() -> None:
    """Refuse models that compute attention on their own when they are made, before they fail or compute wrongly."""
    choice = getattr(PreTrainedModel, _CHOICE, None)
    if choice is None or hasattr(choice, "__wrapped__"):
        return

    @wraps(choice)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *args: Any, **named: Any) -> Any:
        if isinstance(AttentionInterface._global_mapping.get(requested_attention), Attention):
            refuse_config(self.config)
        return choice(self, requested_attention, *args, **named)

    setattr(PreTrainedModel, _CHOICE, get_correct_attn_implementation)


def _batch_continuously() -> None:
    """Let continuous batching keep flashgen's attention, where transformers would refuse every name but its own.

    It then hands over lengths in place of masks, as it does to FlashAttention.
    """
    switch = getattr(_manager(), _SWITCH, None)
    if switch is None or hasattr(switch, "__wrapped__"):
        return

    @wraps(switch)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **named: Any) -> None:
        given = model.config._attn_implementation
        if given.startswith(_PAGED) or not isinstance(AttentionInterface._global_mapping.get(given), Attention):
            switch(self, model, *args, **named)
        elif _TAKES_PAGED_NAMES:
            model.set_attn_implementation(_PAGED + given)
            self._original_attn_impl = given

    setattr(_manager(), _SWITCH, switch_to_cb_friendly_attn)


def _read_by_tables() -> None:
    """Let continuous batching give tables of blocks, which it gives to FlashAttention on a GPU alone.

    transformers up to 5.22 or so decides that elsewhere, and gathers.
    """
    names = (_TABLES, "ATTN_TYPE_TO_ALLOCATOR", "group_layers_by_attn_type")
    module: Any = _initialization()
    if not all(hasattr(module, name) for name in names):
        return
    ensure, allocators, kinds_of = (getattr(module, name) for name in names)
    if hasattr(ensure, "__wrapped__"):
        return

    @wraps(ensure)
    def ensure_decode_fast_path_is_available(config: Any, *args: Any, **named: Any) -> None:
        ours = isinstance(AttentionInterface._global_mapping.get(config._attn_implementation), Attention)
        if not (ours and all(allocators[kind].supports_block_table for kind in kinds_of(config))):
            ensure(config, *args, **named)

    setattr(module, _TABLES, ensure_decode_fast_path_is_available)


def _initialization() -> Any:
    import importlib

    try:
        return importlib.import_module("transformers.generation.continuous_batching.initialization")
    except ImportError:
        return None


def _manager() -> Any:
    from transformers.generation.continuous_batching import continuous_api

    return continuous_api.ContinuousBatchingManager


def _unwrap(owner: Any, name: str) -> None:
    """Put back what a wrapper stands in for."""
    wrapper: Any = getattr(owner, name, None)
    if hasattr(wrapper, "__wrapped__"):
        setattr(owner, name, wrapper.__wrapped__)
