"""Launchers that stand alone, calls that fit them, and every call that they refuse.

Kernels are replaced by something that counts launches, so that nothing here needs a GPU or compiles.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from flashgen.codegen.families import family
from flashgen.codegen.generated import load_module
from flashgen.codegen.render import render_standalone
from flashgen.core.device import find_device
from flashgen.core.score_mods import ScoreMods
from flashgen.core.workload import Specialization
from tests.codegen.goldens import DOCUMENT

BATCH, HEADS, HEADS_K, QUERIES, KEYS = 2, 4, 2, 5, 80
"""Rows of 80 keys are multiples of 16 bytes in every dtype."""

TEXTS = {
    "forward": ("portable_forward", "fwd-fp16-d64-causal-softcap-alibi-sink-bias-keymask-window-dropout"),
    "forward of plain calls": ("portable_forward", "fwd-fp16-d64"),
    "forward with offsets": ("portable_forward", "fwd-fp16-d64-causal-offset"),
    "forward with functions": ("portable_forward", "fwd-fp16-d64"),
    "backward": ("portable_backward_split", "bwd-fp16-d64-causal-softcap-alibi-bias-keymask-window-dbias-dropout"),
    "backward, fused": ("portable_backward_fused", "bwd-fp32-d64-offset-causal"),
    "Hopper": ("hopper_forward", "fwd-bf16-d64-causal-softcap-sink-bias-keymask-window"),
    "Hopper, backward": ("hopper_backward_fused", "bwd-bf16-d64-causal-window"),
    "Hopper, backward, two passes": ("hopper_backward_split", "bwd-bf16-d64"),
}
FUNCTIONS = ScoreMods(mask_mod=DOCUMENT, aux=("i32", "fp32"), block_mask=True)
ANY = {"unaligned": "fwd-fp16-d64-bias-keymask-unaligned-scattered", "packed": "fwd-fp16-d64-bias-keymask"}


class Launches(list[Any]):
    """In the place of a kernel: `kernel[grid](...)` is noted."""

    def __init__(self, arg_names: list[str]) -> None:
        super().__init__()
        self.arg_names = arg_names

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: self.append(grid)


@dataclass(frozen=True, kw_only=True)
class Printed:
    """The host functions of a printed text by name, which launch nothing."""

    call: str
    names: dict[str, Any]
    tree: ast.Module
    launches: list[Launches]

    @classmethod
    @functools.cache
    def of(cls, family_id: str, key: str, mods: ScoreMods | None = None) -> Printed:
        spec = Specialization.parse(key)
        spec = replace(spec, mods=mods)
        config = family(family_id).default(spec, find_device("h200"))
        source = render_standalone(spec, config)
        found = ast.parse(source.text).body
        host = [node for node in found if isinstance(node, ast.FunctionDef) and not node.decorator_list]
        names, launches = dict(vars(load_module(source))), []
        for each in family(family_id).kernels(spec, config):
            launches.append(Launches(each.names))
            names[each.entry] = launches[-1]
        return cls(
            call=f"{family_id}_call", names=names, tree=ast.Module(body=host, type_ignores=[]), launches=launches
        )

    def function(self, tree: ast.Module | None = None) -> Callable[..., Any]:
        """The launcher, or that of a changed text."""
        names = dict(self.names)
        exec(compile(ast.fix_missing_locations(tree or self.tree), "printed", "exec"), names)
        found: Callable[..., Any] = names[self.call]
        return found


def printed(title: str) -> Printed:
    family_id, key = TEXTS[title]
    return Printed.of(family_id, key, FUNCTIONS if title == "forward with functions" else None)


def fitting(title: str) -> dict[str, Any]:
    """Arguments of a call that fits."""
    _, key = TEXTS[title]
    spec = Specialization.parse(key)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[spec.dtype]
    rows = (BATCH, HEADS, QUERIES)
    blocks = SimpleNamespace(seqlen_q=QUERIES, seqlen_k=KEYS)
    for name in ("partial_counts", "full_counts", "partial_indices", "full_indices"):
        setattr(blocks, name, torch.zeros((1, 1, 1, 1)[: 3 + name.endswith("indices")], dtype=torch.int32))
    known = {
        "q": torch.zeros(*rows, 64, dtype=dtype),
        "k": torch.zeros(BATCH, HEADS_K, KEYS, 64, dtype=dtype),
        "v": torch.zeros(BATCH, HEADS_K, KEYS, 64, dtype=dtype),
        "out": torch.zeros(*rows, 64, dtype=dtype),
        "dout": torch.zeros(*rows, 64, dtype=dtype),
        "lse": torch.zeros(rows),
        "window": (9, None),
        "softcap": 20.0,
        "alibi_slopes": torch.zeros(HEADS),
        "sinks": torch.zeros(HEADS),
        "bias": torch.zeros(BATCH, 1, QUERIES, KEYS, dtype=dtype),
        "mask": torch.ones(BATCH, 1, 1, KEYS, dtype=torch.bool),
        "aux": (torch.zeros(4, dtype=torch.int32), torch.zeros(4)),
        "block_mask": blocks,
        "dropout_p": 0.5,
        "rng_state": torch.zeros(2, dtype=torch.int64),
        "q_offset": torch.zeros(BATCH, dtype=torch.int32) if spec.offset_tensor else None,
    }
    return {name: known[name] for name in inspect.signature(printed(title).function()).parameters if name in known}


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A call that differs in one argument, and what it is told."""

    given: dict[str, Any]
    message: str

    def is_told(self, call: Callable[..., Any]) -> bool:
        try:
            call(**self.given)
        except Exception as error:  # noqa: BLE001 without the rule, something behind it may fail in any way
            return isinstance(error, ValueError) and re.search(self.message, str(error)) is not None
        return False


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same strides, one element behind a multiple of 16 bytes."""
    memory = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:]
    return memory.view(tensor.shape)


def wider(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """Rows that lie `columns` elements apart."""
    return torch.zeros(*tensor.shape[:-1], columns, dtype=tensor.dtype)[..., : tensor.shape[-1]]


def other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float64)


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def far(tensor: torch.Tensor) -> torch.Tensor:
    """Rows 2**23 elements apart, in memory that nobody touches."""
    return torch.empty_strided(tensor.shape, (64 * HEADS, 64, 2**23, 1), dtype=tensor.dtype)


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    """Every second element of rows."""
    return torch.stack([tensor, tensor], -1)[..., 0]


ROWS = [
    (lambda x: None, "{name} is a tensor of torch.{dtype}, got None"),
    (other_dtype, "{name} is a tensor of torch.{dtype}, got torch.float64"),
    (doubled, r"the last dimension of {name} is contiguous, got strides \(\d+, \d+, 128, 2\)"),
    (far, r"rows of {name} lie less than 2\*\*23 elements apart, got strides \(256, 64, 8388608, 1\)"),
    (shifted, "{name} starts at a multiple of 16 bytes, got 0x[0-9a-f]+; for others: flashgen render --unaligned"),
    (
        lambda x: wider(x, 66),
        r"strides of {name} are multiples of {step} elements, which are 16 bytes, got .*; for others: .* --unaligned",
    ),
]
"""Of every tensor that has rows of head_dim elements."""


def refusals(title: str) -> Iterator[Refusal]:
    """All of a launcher."""
    _, key = TEXTS[title]
    spec, arguments = Specialization.parse(key), fitting(title)
    dtype = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}[spec.dtype]

    def refuse(argument: str, value: Callable[[Any], Any], message: str) -> Refusal:
        step = 4 if spec.dtype == "fp32" else 8
        given = arguments | {argument: value(arguments.get(argument))}
        return Refusal(given=given, message=message.format(name=argument, dtype=dtype, step=step))

    for name in [name for name in ("q", "k", "v", "out", "dout") if name in arguments]:
        for value, message in ROWS[name in "qk" :]:
            yield refuse(name, value, message)
    for name in [name for name in ("k", "v", "out", "dout") if name in arguments]:
        yield refuse(name, elsewhere, "{name} is on the device of q, cpu, got meta")
    yield refuse("q", lambda q: q[0], r"q and k have four dimensions, got \(4, 5, 64\) and \(2, 2, 80, 64\)")
    yield refuse("k", lambda k: k[0], r"q and k have four dimensions, got .* and \(2, 80, 64\)")
    yield refuse("q", lambda q: q[:, :3], "nheads is a multiple of nheads_k, got 3 and 2")
    yield refuse("k", lambda k: k[:, :0], "nheads is a multiple of nheads_k, got 4 and 0")
    yield refuse("q", lambda q: q[..., :32], r"q has the shape \(2, 4, 5, 64\), got \(2, 4, 5, 32\)")
    yield refuse("k", lambda k: k[..., :32], r"k has the shape \(2, 2, 80, 64\), got \(2, 2, 80, 32\)")
    yield refuse("k", lambda k: k[:1], r"k has the shape \(2, 2, 80, 64\), got \(1, 2, 80, 64\)")
    yield refuse("v", lambda v: v[:, :, 1:], r"v has the shape \(2, 2, 80, 64\), got \(2, 2, 79, 64\)")
    yield refuse("softmax_scale", lambda _: -1.0, "softmax_scale is finite and above 0, got -1.0")
    yield from (refuse(*row) for row in _of_features(spec, arguments))
    yield from (refuse(*row) for row in _of_positions(spec))
    if spec.direction == "backward":
        yield from (refuse(*row) for row in _of_gradients(title))


Row = tuple[str, Callable[[Any], Any], str]


def _of_gradients(title: str) -> list[Row]:
    found: list[Row] = [
        ("out", lambda out: out[:, 1:], r"out has the shape \(2, 4, 5, 64\), got \(2, 3, 5, 64\)"),
        ("dout", lambda dout: dout[:1], r"dout has the shape \(2, 4, 5, 64\), got \(1, 4, 5, 64\)"),
        ("lse", lambda lse: lse.double(), "lse is a tensor of torch.float32, got torch.float64"),
        ("lse", lambda lse: lse[:, :, 1:], r"lse has the shape \(2, 4, 5\), got \(2, 4, 4\)"),
        ("lse", doubled, r"lse is contiguous, got strides \(40, 10, 2\)"),
        ("dlse", lambda _: torch.zeros(BATCH, HEADS), r"dlse has the shape \(2, 4, 5\), got \(2, 4\)"),
    ]
    if "Hopper" not in title:
        found.append(("q", lambda q: q[:, :, :0], "out has the shape"))
    return found


def _of_features(spec: Specialization, arguments: dict[str, Any]) -> list[Row]:
    whole, shared = spec.dtype == "bf16", "the same for all queries, with size 1 along them"
    known: list[Row] = [
        ("window", lambda _: None, "window is .left, right., each None or at least 0, got None"),
        ("window", lambda _: (1, 2, 3), r"got \(1, 2, 3\)"),
        ("window", lambda _: (-1, None), r"got \(-1, None\)"),
        ("softcap", lambda _: 0.0, "softcap is finite and above 0, got 0.0"),
        ("softcap", lambda _: None, "softcap is finite and above 0, got None"),
        ("alibi_slopes", other_dtype, "alibi_slopes is a tensor of torch.float32, got torch.float64"),
        ("alibi_slopes", lambda x: x[1:], r"alibi_slopes has the shape \(4,\) or \(2, 4\), got \(3,\)"),
        ("alibi_slopes", doubled, r"alibi_slopes is contiguous, got strides \(2,\)"),
        ("sinks", other_dtype, "sinks is a tensor of torch.float32, got torch.float64"),
        ("sinks", doubled, r"sinks is contiguous, got strides \(2,\)"),
        ("sinks", lambda x: x[1:], r"sinks has the shape \(4,\), got \(3,\)"),
        ("dropout_p", lambda _: 0.0, "dropout_p is above 0 and below 1, got 0.0"),
        ("dropout_p", lambda _: 1.0, "dropout_p is above 0 and below 1, got 1.0"),
        ("rng_state", lambda x: x.int(), "rng_state is a tensor of torch.int64, got torch.int32"),
        ("rng_state", lambda x: x[:1], r"rng_state has the shape .2,., got .1,."),
        ("bias", lambda _: None, "bias is a tensor of torch.{dtype}, got None"),
        ("bias", other_dtype, "bias is a tensor of torch.{dtype}, got torch.float64"),
        ("bias", lambda x: x[:, :, 1:], r"bias broadcasts to .* here \(2, 4, 5, 80\), got \(2, 1, 4, 80\)"),
        ("bias", lambda x: x[None], r"bias broadcasts to .*, got \(1, 2, 1, 5, 80\)"),
        ("bias", doubled, "bias is contiguous along the keys, got strides .*; for others: flashgen render --scattered"),
        ("bias", lambda x: x[..., :1], "bias is contiguous along the keys"),
        ("bias", shifted, "bias starts at a multiple of 16 bytes, .* for others: flashgen render --scattered"),
        ("bias", lambda x: wider(x, 81), "strides of bias are multiples of 8 elements, .* flashgen render --scattered"),
        ("mask", lambda x: x.float(), "mask is a tensor of torch.bool, got torch.float32"),
        ("mask", lambda x: x.expand(-1, -1, QUERIES, -1).clone(), f"mask is {shared}, got .2, 1, 5, 80."),
        ("mask", lambda x: wider(x, 88), "strides of mask are multiples of 16 elements"),
        ("aux", lambda x: x[1:], "aux are 2 contiguous tensors on cpu, got"),
        ("aux", lambda x: (doubled(x[0]), x[1]), "aux are 2 contiguous tensors on cpu, got"),
        ("block_mask", lambda _: SimpleNamespace(seqlen_q=1, seqlen_k=2), "is of the lengths 5 and 80, got 1 and 2"),
    ]
    if whole:
        known.append(("bias", lambda x: x[:, :, :1], "bias has values of its own for every query"))
    elif spec.bias_grad:
        known.append(
            ("bias", lambda x: x[:, :, :1], "bias is .batch or 1, nheads or 1, seqlen_q, seqlen_k., as dbias is")
        )
        known.append(("bias", lambda x: x[0, 0], r"as dbias is, got \(5, 80\)"))
    return [row for row in known if row[0] in arguments]


def _of_positions(spec: Specialization) -> list[Row]:
    if spec.offset_tensor:
        return [
            ("q_offset", lambda _: None, "q_offset is a tensor of torch.int32, got None"),
            ("q_offset", lambda x: x.long(), "q_offset is a tensor of torch.int32, got torch.int64"),
            ("q_offset", doubled, r"q_offset is contiguous, got strides \(2,\)"),
            ("q_offset", lambda x: x[1:], r"q_offset has the shape \(2,\), got \(1,\)"),
        ]
    if spec.causal:
        return [("q_offset", lambda _: torch.zeros(2), "q_offset is an integer, or None for seqlen_k - seqlen_q, got")]
    return [
        ("q_offset", lambda _: 3, "q_offset shifts a causal mask, a window or ALiBi, and none is compiled in, got 3")
    ]
