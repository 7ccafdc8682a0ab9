"""flashgen as an attention backend of diffusers, by the name "flashgen"; nothing is registered on import.

from flashgen.integrations.diffusers import register

register()
pipeline.transformer.set_attention_backend("flashgen")
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

import flashgen
from flashgen.core.errors import UnsupportedError
from flashgen.integrations.torch.sdpa_arguments import arguments, why_not

Tensor = torch.Tensor

NAME = "flashgen"
MEMBER = "FLASHGEN"


def register(*, activate: bool = False) -> None:
    """Make "flashgen" known to diffusers' dispatcher of attention; doing it twice is doing it once.

    Its names are a closed enumeration, which gets one more member.

    Args:
        activate: also make it the backend of models for which none is set, in this process. The variable
            DIFFUSERS_ATTN_BACKEND cannot: diffusers reads it on import, when the name is not yet known.

    Raises:
        ImportError: diffusers is not installed, or has no such dispatcher.
    """
    dispatch: Any = import_module("diffusers.models.attention_dispatch")
    name = _member(dispatch.AttentionBackendName)
    dispatch._AttentionBackendRegistry.register(name)(_attend)
    if activate:
        dispatch._AttentionBackendRegistry.set_active_backend(name)


def _member(names: Any) -> Any:
    """The name as a member of diffusers' enumeration of strings."""
    if MEMBER in names.__members__:
        return names[MEMBER]
    member = str.__new__(names, NAME)
    member._name_, member._value_ = MEMBER, NAME
    type.__setattr__(names, MEMBER, member)
    names._member_names_.append(MEMBER)
    names._member_map_[MEMBER] = names._value2member_map_[NAME] = member
    return member


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: object = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What diffusers calls: tensors are (batch, seqlen, nheads, head_dim), and masks those of SDPA.

    Two dimensions that are (batch, seqlen_k) are a mask of keys, as in diffusers' own backends.

    Returns:
        The output in the same order; with `return_lse`, also the LSE, fp32 (batch, seqlen_q, nheads).

    Raises:
        UnsupportedError: flashgen does not take the call; another backend serves it.
    """
    if _parallel_config is not None:
        raise UnsupportedError("flashgen's diffusers backend does not support _parallel_config, context parallelism")
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if isinstance(attn_mask, Tensor) and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    given: tuple[Any, ...] = (q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    reason = why_not(*given)
    if reason is not None:
        raise UnsupportedError(f"flashgen's diffusers backend does not take this call of attention: {reason}")
    attend: Any = flashgen.attention
    found = attend(**arguments(*given), return_lse=return_lse)
    if return_lse:
        return found[0].transpose(1, 2), found[1].transpose(1, 2)
    return found.transpose(1, 2)  # type: ignore[no-any-return]
