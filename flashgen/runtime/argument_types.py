"""What kind of value each argument of a call is; asked where a call has failed, so that one that succeeds pays nothing.

So a flag that is neither True nor False may be taken by its truth where torch's dispatcher does not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from flashgen.core.checks import MAX_INTEGER, instance, items, real_number, text, torch_tensor, whole_number
from flashgen.core.errors import FlashgenError, WorkloadError
from flashgen.core.features.positions import checked_window
from flashgen.core.features.values import BlockMask
from flashgen.core.quoting import shown

UNEXPECTED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What Python and torch raise for values of a wrong type, among other things."""


_NAMES_ELSEWHERE = {
    "attn_mask": "a mask of bools is mask=, one of numbers to add is bias=",
    "is_causal": "it is causal=, aligned to the bottom right; with q_offset=0 to the top left, as in torch",
    "scale": "it is softmax_scale=",
    "sm_scale": "it is softmax_scale=",
    "enable_gqa": "k and v may have fewer heads than q, and nothing has to be said",
    "window_size": "it is window=(left, right), with None, not -1, for an unlimited edge",
    "return_attn_probs": "return_lse=True returns the log-sum-exp; probabilities are never in memory",
    "s_aux": "it is sinks=",
    "cache_seqlens": "it is seqlens=, with the new keys among them",
    "cache_batch_idx": "it is batch_idx=",
    "cache_leftpad": "it is leftpad=",
    "page_table": "it is block_table=",
    "num_splits": "flashgen splits work itself; fixed_split_size= of attention_decode has the same bits in any batch",
}
"""Names that torch's SDPA and FlashAttention have, and what they are here."""

_OF_SEQUENCES = ("attention_varlen", "attention_decode")

_NAMES_OF_SEQUENCES = {
    **_NAMES_ELSEWHERE,
    "attn_mask": "lengths, causal= and window= say what a sequence sees, and no mask is a tensor",
    "is_causal": "it is causal=, aligned to the bottom right",
}
"""The same for calls of sequences of different lengths."""


def explain_failure(error: Exception, arguments: Mapping[str, object]) -> None:
    """Raise what is wrong with the arguments of a call, if it failed for one that has a wrong type.

    Args:
        error: what it failed with.
        arguments: its arguments by name, and others, which are not looked at.

    Raises:
        WorkloadError: an argument has a wrong type.
    """
    if not isinstance(error, (FlashgenError, torch.OutOfMemoryError)):
        check_types(arguments)


def check_types(arguments: Mapping[str, object]) -> None:
    """Refuse arguments of a wrong type.

    Raises:
        WorkloadError: there is one; the message says what it must be, and the value.
    """
    for name, rule in _RULES.items():
        if name in arguments:
            rule(name, arguments[name])


def refuse_names(function: str, names: Iterable[str]) -> None:
    """Refuse arguments that a function does not have; those of torch and FlashAttention are answered with a hint.

    Raises:
        TypeError: there is one.
    """
    for name in names:
        hint = (_NAMES_OF_SEQUENCES if function in _OF_SEQUENCES else _NAMES_ELSEWHERE).get(name)
        raise TypeError(f"{function}() has no argument {name!r}{f': {hint}' if hint else ''}")


def check_tensor(name: str, value: object) -> None:
    """Refuse what is no dense tensor: kernels know an address and strides, and nothing else.

    Raises:
        WorkloadError: it is none.
    """
    torch_tensor(name, value)
    assert isinstance(value, torch.Tensor)
    kind = "nested" if value.is_nested else "quantized" if value.is_quantized else str(value.layout)
    if kind != "torch.strided":
        raise WorkloadError(f"{name} must be a dense tensor, got a {kind} one")


def check_tensors(name: str, value: object) -> None:
    """The same of every tensor of a list.

    Raises:
        WorkloadError: it is no list, or one of them is none.
    """
    for number, one in enumerate(items(name, value)):
        check_tensor(f"{name}[{number}]", one)


def _optional(rule: Callable[[str, object], object]) -> Callable[[str, object], object]:
    return lambda name, value: None if value is None else rule(name, value)


def _flag(name: str, value: object) -> None:
    if value is not True and value is not False:  # torch's ops do not take numpy's
        raise WorkloadError(f"{name} must be True or False, got {shown(value)}")


def _offset(name: str, value: object) -> None:
    if isinstance(value, torch.Tensor):
        check_tensor(name, value)
    else:
        whole_number(f"{name}, where it is no tensor,", value, -MAX_INTEGER, MAX_INTEGER)


def _lengths(name: str, value: object) -> None:
    if isinstance(value, torch.Tensor):
        check_tensor(name, value)
    else:
        whole_number(f"{name}, where it is no tensor,", value, 0)


def _states(name: str, value: object) -> None:
    if isinstance(value, torch.Tensor):
        check_tensor(name, value)
    else:
        check_tensors(name, value)


_INDEX_TENSORS = ("block_table", "slot_mapping", "batch_idx", "leftpad", "rotary_cos", "rotary_sin", "rotary_seqlens")

_RULES: dict[str, Callable[[str, object], object]] = {
    **dict.fromkeys("qkv", check_tensor),
    "layout": text,
    "causal": _flag,
    "q_offset": _optional(_offset),
    "window": lambda name, value: checked_window(value),
    "softmax_scale": _optional(real_number),
    "softcap": real_number,
    **dict.fromkeys(("alibi_slopes", "sinks", "bias", "mask"), _optional(check_tensor)),
    "aux": check_tensors,
    "block_mask": _optional(lambda name, value: instance(name, value, BlockMask)),
    "dropout_p": real_number,
    "rng_state": _optional(check_tensor),
    "deterministic": _flag,
    "return_lse": _flag,
    "fixed_split_size": _optional(lambda name, value: whole_number(name, value, 1)),
    **dict.fromkeys(("k_cache", "v_cache"), check_tensor),
    "seqlens": _optional(_lengths),
    **dict.fromkeys(_INDEX_TENSORS, _optional(check_tensor)),
    "cu_seqlens_q": check_tensor,
    **dict.fromkeys(("cu_seqlens_k", "seqused_q", "seqused_k"), _optional(check_tensor)),
    "num_decodes": lambda name, value: whole_number(name, value, 0),
    "max_seqlen_q": lambda name, value: whole_number(name, value, 0),
    "max_seqlen_k": _optional(lambda name, value: whole_number(name, value, 0)),
    **dict.fromkeys(("rotary_interleaved", "q_causal"), _flag),
    **dict.fromkeys(("outs", "lses"), _states),
    "dtype": _optional(lambda name, value: instance(name, value, torch.dtype)),
}
