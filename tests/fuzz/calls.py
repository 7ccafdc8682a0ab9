"""Public callables with calls of them that are right, and values that are wrong in most places."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

import flashgen
from flashgen import flash_attn, reference
from flashgen.core.config import Config
from flashgen.core.device import Device, find_device
from flashgen.core.features.values import BlockMask
from flashgen.core.workload import Specialization, Workload
from flashgen.tuning.budget import Budget
from flashgen.tuning.context import Options
from flashgen.tuning.finals import Finals
from flashgen.tuning.plan import plan
from flashgen.tuning.shards import Shard
from flashgen.tuning.workloads import collect, load_file, preset
from tests.fakes.gpu import OnGpu

Make = Callable[[], Any]

_TEXTS = ("", "x", "0", "cuda", "\x1b[31m", "d" * 5000, "fwd-bf16-b1", "~", "a\0")
_NUMBERS = (True, False, 0, 1, -1, 3, 2**31, 2**63, -(2**70), 0.0, 0.5, -0.5, math.nan, math.inf, 1e308, 5e-324, 1j)
_LISTS = ([], [1], ["x"], (None, None), (1, 2, 3), (-1, 2**70), (2**70, 0), {}, {"a": 1}, {1: None}, set(), (0, None))
_OTHERS = (None, b"", b"x", ..., int, len, 10**5000, Path("/nowhere"), object())
_NUMPY = (numpy.int64(3), numpy.float32(0.5), numpy.bool_(True), numpy.zeros((1, 4, 48, 64)), numpy.array(["x", "y"]))


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Zeros of a class that torch's dispatcher sees, as a tensor of a GPU under a profiler would be."""
    return torch.zeros(shape, dtype=dtype).as_subclass(OnGpu)


@functools.cache
def values() -> dict[str, Any]:
    """Values of every kind, by name."""
    found = {repr(value)[:16] + f" {type(value).__name__}": value for value in (*_TEXTS, *_NUMBERS, *_LISTS, *_NUMPY)}
    found |= {f"other {number}": value for number, value in enumerate(_OTHERS)}
    found |= {f"tensor of rank {rank}": on_gpu(*(2,) * rank) for rank in range(7)}
    size = (1, 4, 48, 64)
    for dtype in (torch.int32, torch.bool, torch.complex64, torch.float64, torch.float8_e4m3fn, torch.bfloat16):
        found |= {
            f"on a GPU {dtype}": on_gpu(*size, dtype=dtype),
            f"on the CPU {dtype}": torch.zeros(size, dtype=dtype),
        }
    found["empty"] = torch.zeros(0)
    found["meta"] = torch.zeros(size, dtype=torch.bfloat16, device="meta")
    found["with a gradient"] = torch.zeros(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that these kinds may change
        found["sparse"] = torch.zeros(size, dtype=torch.bfloat16).to_sparse()
        found["sparse rows"] = torch.eye(3).to_sparse_csr()
        found["quantized"] = torch.quantize_per_tensor(torch.zeros(size), 0.1, 0, torch.quint8)
        found["nested"] = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)])
        found["ragged"] = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged)
        found["packed for a CPU"] = torch.zeros(size).to_mkldnn()
    found["a workload"], found["a config"], found["a device"] = SMALL, CONFIG, find_device("h200")
    return found


def score(score, b, h, q_idx, k_idx, table):  # type: ignore[no-untyped-def]
    return score + h * 0.5


def visible(b, h, q_idx, k_idx, table):  # type: ignore[no-untyped-def]
    return q_idx >= k_idx


SMALL = Workload.parse("b1-h4-hk2-s64-d64-causal")
CONFIG = Config.of("portable_forward", {"block_m": 3})
_LISTED = {"partial_counts": (1, 1, 1), "partial_indices": (1, 1, 1, 1)}


def blocks(new: Callable[..., torch.Tensor] = on_gpu) -> BlockMask:
    lists = {name: new(*shape, dtype=torch.int32) for name, shape in _LISTED.items()}
    full = {name.replace("partial", "full"): tensor.clone() for name, tensor in lists.items()}
    return BlockMask(**lists, **full, seqlen_q=48, seqlen_k=64)


def _qkv(new: Callable[..., torch.Tensor], **changes: Any) -> dict[str, Any]:
    return {"q": new(1, 4, 48, 64), "k": new(1, 2, 64, 64), "v": new(1, 2, 64, 64), **changes}


def _plain_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _attention(new: Callable[..., torch.Tensor]) -> dict[str, Make]:
    """Calls of `attention`: plain, with all features, with functions, and with gradients."""
    fp32 = functools.partial(new, dtype=torch.float32)
    mask = functools.partial(new, dtype=torch.bool)
    features = {"causal": True, "window": (8, 0), "softcap": 2.0, "q_offset": 3, "softmax_scale": 0.5}
    state = functools.partial(new, dtype=torch.int64)
    return {
        "plain": lambda: _qkv(new, causal=True),
        "features": lambda: {
            **_qkv(new, **features, alibi_slopes=fp32(4), sinks=fp32(4), bias=new(48, 64), mask=mask(48, 64)),
            "dropout_p": 0.5,
            "rng_state": state(2),
        },
        "functions": lambda: _qkv(new, score_mod=score, mask_mod=visible, aux=(fp32(3),), block_mask=blocks(new)),
        "training": lambda: _qkv(new, q=new(1, 4, 48, 64).requires_grad_(), bias=new(48, 64)),
    }


def _decode() -> dict[str, Make]:
    """Calls of `attention_decode` over a contiguous cache with everything that it takes, and over pages."""
    ints = functools.partial(_plain_tensor, dtype=torch.int32)
    fp32 = functools.partial(_plain_tensor, dtype=torch.float32)

    def cache() -> dict[str, Any]:
        new = {"q": _plain_tensor(2, 1, 4, 64), "seqlens": ints(2)}
        return new | {name: _plain_tensor(2, 32, 2, 64) for name in ("k_cache", "v_cache")}

    scores = {"causal": True, "window": (8, 0), "softcap": 2.0, "softmax_scale": 0.5, "fixed_split_size": 128}
    return {
        "contiguous": lambda: {
            **cache(),
            **scores,
            "alibi_slopes": fp32(4),
            "sinks": fp32(4),
            "leftpad": ints(2),
            "batch_idx": ints(2),
        },
        "paged": lambda: {**cache(), "block_table": ints(2, 1), "return_lse": True},
        "prefix": lambda: {**cache(), "prefix": flashgen.Prefix(**_prefix())},
    }


def _prefix() -> dict[str, Any]:
    """The fields of a prefix of two groups."""
    ints = functools.partial(_plain_tensor, dtype=torch.int32)
    pages = {name: _plain_tensor(2, 32, 2, 64) for name in ("k", "v")}
    return {"seqlens": ints(2), "block_table": ints(2, 1), "group_starts": (0, 1), **pages}


def _varlen() -> dict[str, Make]:
    """Calls of `attention_varlen` with everything that it takes, and with functions."""
    ints = functools.partial(_plain_tensor, dtype=torch.int32)
    fp32 = functools.partial(_plain_tensor, dtype=torch.float32)

    def packed() -> dict[str, Any]:
        new = {"q": _plain_tensor(48, 4, 64), "k": _plain_tensor(64, 2, 64), "v": _plain_tensor(64, 2, 64)}
        return new | {"cu_seqlens_q": ints(3), "cu_seqlens_k": ints(3), "max_seqlen_q": 48, "max_seqlen_k": 64}

    scores = {"causal": True, "window": (8, 0), "softcap": 2.0, "softmax_scale": 0.5, "return_lse": True}
    return {
        "scores": lambda: {
            **packed(),
            **scores,
            "alibi_slopes": fp32(4),
            "sinks": fp32(4),
            "seqused_q": ints(2),
            "seqused_k": ints(2),
            "dropout_p": 0.5,
            "rng_state": _plain_tensor(2, dtype=torch.int64),
        },
        "functions": lambda: {**packed(), "score_mod": score, "mask_mod": visible, "aux": (fp32(3),)},
    }


def _append() -> dict[str, Make]:
    """Calls of `append_kv` to a contiguous cache with rotary embeddings, to pages, and to slots."""
    ints = functools.partial(_plain_tensor, dtype=torch.int32)

    def cache(*shape: int) -> dict[str, Any]:
        return {
            **{name: _plain_tensor(*shape, 2, 64) for name in ("k", "v")},
            **{name: _plain_tensor(2, 32, 2, 64) for name in ("k_cache", "v_cache")},
        }

    rotary = {"rotary_interleaved": True, "q_causal": True}
    return {
        "rotary": lambda: {
            **cache(2, 3),
            **rotary,
            "seqlens": ints(2),
            "q": _plain_tensor(2, 3, 4, 64),
            "leftpad": ints(2),
            "rotary_cos": _plain_tensor(32, 16),
            "rotary_sin": _plain_tensor(32, 16),
        },
        "pages": lambda: {**cache(2, 3), "seqlens": ints(2), "block_table": ints(2, 1)},
        "rows": lambda: {**cache(2, 3), "seqlens": 0, "batch_idx": ints(2)},
        "slots": lambda: {**cache(5), "slot_mapping": _plain_tensor(5, dtype=torch.int64)},
    }


def _merge() -> dict[str, Make]:
    """Calls of `merge_states` with states in one tensor and apart."""
    fp32 = functools.partial(_plain_tensor, dtype=torch.float32)
    return {
        "stacked": lambda: {"outs": _plain_tensor(3, 1, 4, 8, 64), "lses": fp32(3, 1, 4, 8), "layout": "bhsd"},
        "apart": lambda: {
            "outs": [_plain_tensor(1, 4, 8, 64)] * 2,
            "lses": [fp32(1, 4, 8)] * 2,
            "dtype": torch.float32,
        },
    }


def _references() -> dict[str, tuple[Callable[..., Any], dict[str, Make]]]:
    """One of these calls for each reference in plain torch, whose rules are those of the calls above."""
    made = {
        "attention": _attention(_plain_tensor)["features"],
        "attention_decode": _decode()["contiguous"],
        "attention_varlen": _varlen()["scores"],
        "append_kv": _append()["rotary"],
        "merge_states": _merge()["apart"],
    }
    return {f"reference.{name}": (getattr(reference, name), {"one": make}) for name, make in made.items()}


def _doors() -> dict[str, tuple[Callable[..., Any], dict[str, Make]]]:
    """Calls of FlashAttention-2's functions, one of each kind."""
    ints = functools.partial(_plain_tensor, dtype=torch.int32)
    rows = {name: _plain_tensor(48, 2, 64) for name in "qkv"}
    places = {"cu_seqlens_q": ints(3), "cu_seqlens_k": ints(3), "max_seqlen_q": 48, "max_seqlen_k": 48}

    def cached() -> dict[str, Any]:
        new = {name: _plain_tensor(2, 1, 2, 64) for name in "qkv"}
        new |= {
            name: _plain_tensor(2, 32, 2, 64)
            for name in (
                "k_cache",
                "v_cache",
            )
        }
        rotary = {name: _plain_tensor(32, 16) for name in ("rotary_cos", "rotary_sin")}
        return {**new, **rotary, "cache_seqlens": ints(2), "causal": True, "cache_leftpad": ints(2)}

    return {
        "flash_attn.flash_attn_func": (
            flash_attn.flash_attn_func,
            {"dense": lambda: {**{name: _plain_tensor(1, 48, 2, 64) for name in "qkv"}, "causal": True}},
        ),
        "flash_attn.flash_attn_varlen_func": (
            flash_attn.flash_attn_varlen_func,
            {"packed": lambda: {**rows, **places}},
        ),
        "flash_attn.flash_attn_with_kvcache": (flash_attn.flash_attn_with_kvcache, {"cached": cached}),
    }


def with_shape(batch: int) -> Workload:
    return SMALL.with_shape(batch=batch)


def replace(a: int | str | bool) -> Config:
    return CONFIG.replace(a=a)


_SIZES = {"batch": 1, "nheads": 4, "seqlen_q": 32, "head_dim": 64}
_DEVICE = {"name": "x", "arch": "sm90", "num_sms": 1, "memory_gb": 1, "smem_per_block": 1, "smem_per_sm": 1}
_PLAN = {"workloads": [SMALL], "store": None, "budget": Budget(trials=3), "measured": True, "jobs": 1}

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Make]]] = {
    "attention": (
        flashgen.attention,
        {
            **{f"{name} by the dispatcher": make for name, make in _attention(on_gpu).items()},
            **{f"{name} past it": make for name, make in _attention(_plain_tensor).items()},
        },
    ),
    "explain": (flashgen.explain, _attention(on_gpu)),
    "block_mask": (
        flashgen.block_mask,
        {"on a CPU": lambda: {"mask_mod": visible, "seqlen_q": 48, "seqlen_k": 64, "aux": (torch.zeros(3),)}},
    ),
    "attention_decode": (flashgen.attention_decode, _decode()),
    "Prefix": (flashgen.Prefix, {"one": _prefix}),
    "attention_varlen": (flashgen.attention_varlen, _varlen()),
    "append_kv": (flashgen.append_kv, _append()),
    "merge_states": (flashgen.merge_states, _merge()),
    **_references(),
    **_doors(),
    "warmup": (flashgen.warmup, {"one": lambda: {"workloads": [SMALL], "seqlens": [64]}}),
    "BlockMask": (BlockMask, {"one": lambda: {name: getattr(blocks(), name) for name in BlockMask.__slots__}}),
    "Workload": (Workload, {"sizes": lambda: dict(_SIZES)}),
    "Workload.parse": (Workload.parse, {"key": lambda: {"text": SMALL.key}}),
    "Workload.with_shape": (with_shape, {"batch": lambda: {"batch": 3}}),
    "Specialization.parse": (Specialization.parse, {"key": lambda: {"text": "fwd-bf16-d64"}}),
    "Config": (Config, {"knobs": lambda: {"family": "f", "knobs": (("a", 1),)}}),
    "Config.of": (Config.of, {"knobs": lambda: {"family": "f", "knobs": {"a": 1}}}),
    "Config.from_json": (Config.from_json, {"text": lambda: {"family": "f", "text": '{"a": 1}'}}),
    "Config.replace": (replace, {"knob": lambda: {"a": 1}}),
    "Config.integer": (CONFIG.integer, {"knob": lambda: {"knob": "block_m"}}),
    "Device": (Device, {"fields": lambda: dict(_DEVICE)}),
    "find_device": (find_device, {"name": lambda: {"text": "h200"}}),
    "collect": (collect, {"shapes": lambda: {"shapes": [SMALL.key]}, "models": lambda: {"models": ["gpt2"]}}),
    "preset": (preset, {"name": lambda: {"name": "gpt2"}}),
    "load_file": (load_file, {"path": lambda: {"path": Path("/nowhere")}}),
    "Budget": (Budget, {"trials": lambda: {"trials": 3}, "seconds": lambda: {"seconds": 3.0}}),
    "Budget.parse": (Budget.parse, {"text": lambda: {"text": "30s"}}),
    "Shard": (Shard, {"part": lambda: {"index": 0, "count": 2}}),
    "Shard.parse": (Shard.parse, {"text": lambda: {"text": "0/2"}}),
    "Options": (Options, {"defaults": dict}),
    "Finals": (Finals, {"defaults": dict}),
    "plan": (plan, {"one": lambda: {**_PLAN, "device": find_device("h200")}}),
}
"""Every public callable, and right calls of it: what makes their arguments, by name."""


def parameters(name: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of a callable by name; those that `explain` hands on are those of `attention`.

    Left out is what takes all other names, to refuse them.
    """
    call, _ = CALLS[name]
    found = dict(inspect.signature(call).parameters)
    if found.pop("call", None) is not None:
        found |= {
            key: each for key, each in inspect.signature(flashgen.attention).parameters.items() if key not in found
        }
    return {key: each for key, each in found.items() if each.kind is not inspect.Parameter.VAR_KEYWORD}


_KINDS: dict[str, Callable[[Any], bool]] = {
    "None": lambda value: value is None,
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, (bool, numpy.bool_)),
    "int": lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool),
    "Tensor": lambda value: isinstance(value, torch.Tensor),
    "torch.Tensor": lambda value: isinstance(value, torch.Tensor),
    "torch.device": lambda value: False,
    "Window": lambda value: isinstance(value, (tuple, list)),
    "UserCallable": callable,
    "Path": lambda value: isinstance(value, (str, Path)),
    "object": lambda value: True,
}
_ITEMS = ("tuple[", "Iterable[", "Sequence[", "Mapping[")


def is_of_its_type(value: object, parameter: inspect.Parameter) -> bool:
    """Whether a value has a type that the annotation of a parameter names, as far as a value of `values` can."""
    if value is None and parameter.default is None:
        return True
    for kind in _split(str(parameter.annotation)):
        if kind in _KINDS:
            fits = _KINDS[kind](value)
        elif kind.startswith(_ITEMS):
            fits = hasattr(value, "__iter__") and not isinstance(value, (str, bytes))
        else:
            fits = type(value).__name__ == kind
        if fits:
            return True
    return False


def _split(annotation: str) -> list[str]:
    """The types of a union; those within brackets stay together."""
    kinds, depth = [""], 0
    for part in annotation.split(" | "):
        kinds[-1] += part if not depth else f" | {part}"
        depth += part.count("[") - part.count("]")
        if not depth:
            kinds.append("")
    return kinds[:-1]
