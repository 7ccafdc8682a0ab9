"""The torch.library ops of `flashgen.merge_states`: for states in one tensor, and for one tensor a state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from flashgen.codegen.merge_states import MOST_SEPARATE, MergeSpec, merge_kernel
from flashgen.core.checks import MAX_SIZE
from flashgen.core.errors import WorkloadError
from flashgen.core.quoting import shown
from flashgen.runtime.ops.batching import map_one_by_one
from flashgen.runtime.ops.calls import DTYPES
from flashgen.runtime.ops.forward import LIBRARY
from flashgen.runtime.ops.helpers import has_aligned_rows, launcher, remember, used_strides
from flashgen.runtime.ops.keys import layout_of
from flashgen.runtime.ops.outputs import dense_like

if TYPE_CHECKING:
    from flashgen.launch.helper_launch import HelperRun

Tensor = torch.Tensor
States = Tensor | Sequence[Tensor]
Merged = tuple[Tensor, Tensor]
Run = Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], Merged]
"""Serves every call of one key of the memo: outputs and LSEs, each one tensor of all states or one for each."""

LAYOUTS = ("bhsd", "bshd", "thd")
_LSE_AXES = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1), "thd": (1, 0)}
"""For each axis of the rows of an output, that of its LSE."""

_OPTIONS = "str layout='bhsd', ScalarType? dtype=None"
LIBRARY.define(f"merge_states(Tensor outs, Tensor lses, {_OPTIONS}) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]
LIBRARY.define(  # type: ignore[no-untyped-call]
    f"merge_states_list(Tensor[] outs, Tensor[] lses, {_OPTIONS}) -> (Tensor, Tensor)"
)

_MEMO: dict[tuple[Any, ...], Run] = {}
_remembered = _MEMO.get


def merge(outs: States, lses: States, layout: str = "bhsd", dtype: torch.dtype | None = None) -> Merged:
    """The output and the LSE over all states.

    Raises:
        WorkloadError: an argument breaks a rule.
        UnsupportedError: the tensors are not on a GPU.
        BuildError, LaunchError: there is no kernel, and none can be made now.
    """
    is_stacked = isinstance(outs, Tensor) and isinstance(lses, Tensor)
    if not is_stacked and (isinstance(outs, Tensor) or isinstance(lses, Tensor) or len(outs) > MOST_SEPARATE):
        check(outs, lses, layout, dtype)
        outs, lses, is_stacked = stacked(outs), stacked(lses), True
    one, two = tensors_of(outs), tensors_of(lses)
    addresses = 0
    for tensor in one:
        addresses |= tensor.data_ptr()
    key = (is_stacked, len(one), layout, dtype, not addresses & 15, *map(layout_of, one), *map(layout_of, two))
    run = _remembered(key)
    if run is None:
        check(outs, lses, layout, dtype)
        run = _prepared(one, two, layout, dtype, is_stacked=is_stacked, aligned=not addresses & 15)
        remember(_MEMO, key, run)
    return run(one, two)


def stacked(states: States) -> Tensor:
    """States as one tensor."""
    return states if isinstance(states, Tensor) else torch.stack(tuple(states))


def check(outs: States, lses: States, layout: str, dtype: torch.dtype | None) -> None:
    """Check what arguments must be wherever they are: also of tensors without memory.

    Raises:
        WorkloadError: a number, a shape, a dtype or a device breaks a rule.
    """
    one, two = each_of(outs), each_of(lses)
    if len(one) != len(two) or not one:
        raise WorkloadError(
            f"there is at least one state, and an LSE for each, got {len(one)} outputs, {len(two)} LSEs"
        )
    axes = _LSE_AXES[layout]
    first = one[0]
    for out, lse in zip(one, two, strict=True):
        if out.dim() != len(axes) + 1 or out.shape != first.shape or not first.shape[-1]:
            words = "(tokens, nheads, head_dim)" if layout == "thd" else f"of four dimensions, {layout},"
            raise WorkloadError(
                f"the outputs of states are {words} and of one shape, got {tuple(first.shape)} and {tuple(out.shape)}"
            )
        shape = tuple(first.shape[axis] for axis in axes)
        if tuple(lse.shape) != shape or lse.dtype != torch.float32 or lse.device != first.device:
            raise WorkloadError(
                f"the LSE of a state is float32 {shape} for an output {tuple(first.shape)} in {layout}, on its device, "
                f"got {lse.dtype} {tuple(lse.shape)} on {lse.device} and the output on {first.device}"
            )
        if out.dtype not in DTYPES or out.dtype != first.dtype or out.device != first.device:
            raise WorkloadError(
                f"states share a device and a dtype, bfloat16, float16 or float32, got {first.dtype} on {first.device} "
                f"and {out.dtype} on {out.device}"
            )
    if dtype is not None and dtype not in DTYPES:
        raise WorkloadError(f"the dtype of the output is bfloat16, float16 or float32, got {shown(dtype)}")
    if math.prod(first.shape[:-1]) > MAX_SIZE:
        raise WorkloadError(f"rows of a state are at most {MAX_SIZE}, got {tuple(first.shape)}")


def tensors_of(states: States) -> tuple[Tensor, ...]:
    """The tensors that a call gives: one of all states, or one for each."""
    return (states,) if isinstance(states, Tensor) else tuple(states)


def each_of(states: States) -> tuple[Tensor, ...]:
    """One tensor a state."""
    return tuple(states.unbind()) if isinstance(states, Tensor) and states.dim() else tensors_of(states)


def _prepared(
    outs: tuple[Tensor, ...],
    lses: tuple[Tensor, ...],
    layout: str,
    dtype: torch.dtype | None,
    *,
    is_stacked: bool,
    aligned: bool,
) -> Run:
    for out in outs:
        if out.shape[-1] > 1 and out.stride(-1) != 1 and out.numel():
            raise WorkloadError(f"the last dimension of a state is contiguous, got strides {out.stride()}")
    first = outs[0][0] if is_stacked else outs[0]
    dtype = first.dtype if dtype is None else dtype
    result = empty_merged(first, layout, dtype)
    spec = MergeSpec(
        dtype=DTYPES[first.dtype],
        out_dtype=DTYPES[dtype],
        head_dim=first.shape[-1],
        separate=0 if is_stacked else len(outs),
        aligned16=aligned and all(map(has_aligned_rows, (*outs, result[0]))),
    )
    kernel, num_rows = merge_kernel(spec), math.prod(first.shape[:-1])
    with_numbers = launcher(kernel, first)
    if not num_rows:
        return lambda outs, lses: empty_merged(outs[0][0] if is_stacked else outs[0], layout, dtype)
    numbers = _numbers(outs, lses, result, layout, is_stacked=is_stacked)
    return _run(with_numbers(-(-num_rows // kernel.rows), numbers), result)


def _run(launch: HelperRun, result: Merged) -> Run:
    """What serves all calls with a result like this one."""
    dtype, shape, strides, lse_shape = result[0].dtype, result[0].shape, result[0].stride(), result[1].shape

    def run(outs: tuple[Tensor, ...], lses: tuple[Tensor, ...]) -> Merged:
        beside = outs[0]
        out = beside.new_empty_strided(shape, strides, dtype=dtype)
        lse = beside.new_empty(lse_shape, dtype=torch.float32)
        launch((*outs, *lses, out, lse), ())
        return out, lse

    return run


def empty_merged(first: Tensor, layout: str, dtype: torch.dtype) -> Merged:
    """The uninitialised result of states like this one."""
    shape = [first.shape[axis] for axis in _LSE_AXES[layout]]
    return dense_like(first, dtype=dtype), first.new_empty(shape, dtype=torch.float32)


def _numbers(
    outs: tuple[Tensor, ...], lses: tuple[Tensor, ...], result: Merged, layout: str, *, is_stacked: bool
) -> list[int]:
    """The numbers among the parameters of the kernel: sizes, and strides of the axes of rows, the outer one first."""
    axes = _LSE_AXES[layout]
    step = int(is_stacked)  # of one tensor of all states, the first axis is not of rows
    strides = used_strides(outs[0])[step:]
    # in the order in which they lie in memory, so that neighbours are read by one program
    order = sorted(range(len(axes)), key=lambda axis: strides[axis], reverse=True)
    sizes = [outs[0].shape[step + axis] for axis in order]
    found = [math.prod(sizes), sizes[-1], sizes[-2], *([outs[0].shape[0]] if is_stacked else [])]
    rows = [(used_strides(out)[step:], order) for out in outs]
    rows += [(used_strides(lse)[step:], [axes[axis] for axis in order]) for lse in lses]
    rows += [(used_strides(result[0]), order), (used_strides(result[1]), [axes[axis] for axis in order])]
    for given, picked in rows:
        found += [0] * (3 - len(picked)) + [given[axis] for axis in picked]  # packed rows have two axes
    return found + ([used_strides(outs[0])[0], used_strides(lses[0])[0]] if is_stacked else [])


def _fake(outs: States, lses: States, layout: str = "bhsd", dtype: torch.dtype | None = None) -> Merged:
    if layout not in LAYOUTS:
        raise WorkloadError(f'layout is "bhsd", "bshd" or "thd", got {layout!r}')
    check(outs, lses, layout, dtype)
    # more of them are stacked by the call, too
    first = (outs if isinstance(outs, Tensor) or len(outs) <= MOST_SEPARATE else torch.stack(tuple(outs)))[0]
    return empty_merged(first, layout, first.dtype if dtype is None else dtype)


for _name in ("merge_states", "merge_states_list"):
    for _key in ("CPU", "CUDA"):  # the CPU's raises an error, or interprets
        LIBRARY.impl(_name, merge, _key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"flashgen::{_name}", _fake, lib=LIBRARY)
    map_one_by_one(_name, LIBRARY)

merge_op = torch.ops.flashgen.merge_states.default
merge_list_op = torch.ops.flashgen.merge_states_list.default
