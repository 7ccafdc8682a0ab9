"""The mask function that transformers calls for models whose attention is flashgen's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import masking_utils

from flashgen.core.features.values import Window
from flashgen.integrations.transformers.coverage import reads_none_as_sdpa, refuse_config
from flashgen.integrations.transformers.mask import CompactMask, Visible
from flashgen.integrations.transformers.patterns import MaskFunction, Pattern, read
from flashgen.integrations.transformers.steps import step_mask

Tensor = torch.Tensor


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **others: Any,
) -> Tensor | None:
    """A mask as transformers asks for it: None, a `CompactMask`, or a tensor (batch, 1, seqlen_q, seqlen_k) of bools.

    None hides nothing. Inside of a graph of torch.compile it may stand for a causal mask as well, where a model of this
    config reads it so. A step over a static cache without gradients has a `StepMask`. A pattern that is not known, and
    every mask that is made inside of such a graph, is a tensor.

    Args:
        batch_size: of the mask.
        q_length: queries.
        kv_length: keys.
        q_offset: position of the first query; a tensor where a static cache is compiled.
        kv_offset: position of the first key.
        mask_function: says of (batch, head, query, key) whether a key is visible.
        attention_mask: keys that are no padding, bool (batch, positions); None is all.
        local_size: unused; the window is in `mask_function`.
        allow_is_causal_skip: whether None may stand for a causal mask, and for no mask of one query.
        allow_is_bidirectional_skip: whether None may stand for no mask.
        use_vmap: whether `mask_function` is the caller's own.
        device: of the mask.
        config: the model's, which is refused where its attention never comes here.
        **others: of other attention functions.

    Raises:
        UnsupportedError: the model computes attention on its own.
    """
    refuse_config(config)
    whole = partial(
        masking_utils.sdpa_mask,
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    is_causal = mask_function is masking_utils.causal_mask_function
    if torch.compiler.is_compiling():
        may_skip = allow_is_causal_skip if is_causal else allow_is_bidirectional_skip
        is_whole = mask_function is masking_utils.bidirectional_mask_function or (
            is_causal and type(q_offset) is int and q_offset == kv_offset and q_length == kv_length
        )
        may_skip = may_skip and is_whole and attention_mask is None
        return None if may_skip and reads_none_as_sdpa(config) else _tensor(whole)
    pattern = None if use_vmap else read(mask_function)
    if pattern is None:
        return _tensor(whole)
    if q_length == 1 and pattern.window[1] == 0 and not allow_is_causal_skip:
        keys = _keys(attention_mask, kv_length, kv_offset)
        if torch.is_grad_enabled() or pattern.sequences is not None or (keys is not None and _is_capturing(keys)):
            return _tensor(whole)
        step = step_mask(q_offset - kv_offset, keys, pattern.window[0], (batch_size, kv_length), torch.device(device))
        return _tensor(whole) if step is None else step
    offset = _number(q_offset) - kv_offset
    visible = _visible(pattern, q_length, kv_length, offset, _keys(attention_mask, kv_length, kv_offset))
    if visible.keys is not None and visible.sequences is not None:
        return _tensor(whole)  # packed sequences have lengths alone, and padding may be anywhere in them
    if visible.keys is None and visible.sequences is None:
        may_skip = allow_is_bidirectional_skip or (allow_is_causal_skip and q_length == 1)
        if visible.window == (None, None) and may_skip:
            return None
    compact: Tensor = CompactMask((batch_size, 1, q_length, kv_length), torch.device(device), visible, whole)
    return compact


def _tensor(whole: Callable[[], Tensor]) -> Tensor:
    found: Tensor = whole()
    return found


def _number(offset: int | Tensor) -> int | Tensor:
    """An offset as a number, which waits for the GPU once for a forward pass, as transformers itself does.

    While a CUDA graph is captured it stays the tensor that kernels read.
    """
    if not isinstance(offset, Tensor) or _is_capturing(offset):
        return offset
    return int(offset)


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _keys(padding: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """Which of the keys of a call are no padding, bool (batch, kv_length)."""
    if padding is None:
        return None
    whole = masking_utils.prepare_padding_mask(padding, kv_length, kv_offset)
    keys: Tensor = whole[:, kv_offset : kv_offset + kv_length]
    return keys


def _visible(pattern: Pattern, q_length: int, kv_length: int, offset: int | Tensor, keys: Tensor | None) -> Visible:
    """What a pattern shows of a call's keys, without edges that hide nothing and padding that is none."""
    if isinstance(offset, Tensor):
        return Visible(window=pattern.window, offset=offset, keys=keys, sequences=pattern.sequences)
    left, right = pattern.window
    end = kv_length if right is None else max(0, min(kv_length, offset + q_length + right))
    if keys is not None and not _is_capturing(keys) and bool(keys[:, :end].all()):
        keys = None
    return Visible(
        window=_narrow((left, right), q_length, kv_length, offset),
        offset=offset,
        keys=keys,
        sequences=pattern.sequences,
    )


def _narrow(window: Window, q_length: int, kv_length: int, offset: int) -> Window:
    """A window without edges that hide nothing: the last query sees the first key, the first query the last one."""
    left, right = window
    if left is not None and offset + q_length - 1 - left <= 0:
        left = None
    if right is not None and offset + right >= kv_length - 1:
        right = None
    return left, right
