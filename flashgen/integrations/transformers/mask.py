"""A mask that is known by what it means, and is a tensor of True and False only for those who look into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.features.values import Window
from flashgen.core.quoting import shown
from flashgen.integrations.torch.sdpa_arguments import four_dimensions

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Visible:
    """Which keys each query of a call sees.

    Key j is visible to query i iff `offset + i - left <= j <= offset + i + right` (`window`, inclusive, None for
    unlimited), both are of the same packed sequence, and `keys` is True there.
    """

    window: Window
    offset: int | Tensor = 0
    """Place of the first query among the keys: an int, or a tensor of one."""
    keys: Tensor | None = None
    """Keys that are no padding, bool (batch, seqlen_k)."""
    sequences: Tensor | None = None
    """Numbers of packed sequences, (batch, seqlen)."""
    found: dict[str, Any] = field(default_factory=dict)
    """What was computed from this mask for one layer, and serves the next ones."""

    def to(self, device: torch.device) -> Visible:
        """The same with tensors on a device."""
        moved: dict[str, Any] = {
            name: value.to(device)
            for name in ("offset", "keys", "sequences")
            if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **moved, found={})


class CompactMask(torch.Tensor):
    """A bool mask (batch, 1, seqlen_q, seqlen_k) without memory of its own, True where attended.

    Models hand it from where transformers makes it to each layer. Whatever else they do with it, slices and
    comparisons, happens to a tensor that is then made of it, which serves in its place once it was written to. What
    adds it to scores, as a mask of floats could be, is refused: it would add 1 to visible keys.
    """

    visible: Visible
    whole: Callable[[], Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], device: torch.device, visible: Visible, whole: Callable[[], Tensor]
    ) -> Any:
        """A mask of a shape, with what it means and what makes a tensor of it."""
        made: CompactMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        made.visible, made.whole = visible, whole
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Its shape and what it means; the contents would be as large as the mask."""
        return f"CompactMask({tuple(self.shape)}, window={self.visible.window}, offset={self.visible.offset})"

    def materialized(self) -> Tensor:
        """The mask as an ordinary tensor, made once."""
        return whole_of(self.visible.found, lambda: self.whole().to(self.device))

    @property
    def is_changed(self) -> bool:
        """Whether the tensor that was made of it may have been written to, so that it alone says what is visible."""
        return "viewed" in self.visible.found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Keep what does not change the mask; make a tensor for everything else."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, CompactMask) and not first.is_changed:
            if func in KEPT or (func is torch.ops.aten.slice.Tensor and _is_all(first, *args[1:], **kwargs)):
                return CompactMask(tuple(first.shape), first.device, first.visible, first.whole)
            if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool):
                device = torch.device(kwargs.get("device") or first.device)
                return CompactMask(tuple(first.shape), device, first.visible.to(device), first.whole)
        check_not_added(func)
        args, kwargs = torch.utils._pytree.tree_map_only(CompactMask, CompactMask.materialized, (args, kwargs))
        if isinstance(first, CompactMask):
            note_a_view(func, first.visible.found)
        return func(*args, **kwargs)


def whole_of(found: dict[str, Any], made: Callable[[], Tensor]) -> Tensor:
    """The tensor that is made of a mask, once."""
    if "whole" not in found:
        found["whole"] = made()
    tensor: Tensor = found["whole"]
    return tensor


def note_a_view(func: Any, found: dict[str, Any]) -> None:
    """Remember that an operator wrote to the tensor made of a mask, or gave a view of it, to which somebody may write.

    Versions of tensors do not tell: torch counts none where it asks a subclass.
    """
    if any(one.alias_info is not None for one in (*func._schema.returns, *func._schema.arguments)):
        found["viewed"] = True


def check_not_added(func: Any) -> None:
    """Refuse what adds a mask of bools to scores, as one of floats could be.

    Raises:
        UnsupportedError: the operator does.
    """
    if func in _SUMS:
        raise UnsupportedError(
            "attention of flashgen takes masks of True and False, and this model adds its mask to scores: it "
            "computes attention on its own. Load it with attn_implementation='eager'"
        )


def checked_mask(mask: object) -> Tensor:
    """A mask that is a tensor, in four dimensions: those that are missing in front are 1, as for SDPA.

    Raises:
        WorkloadError: it has fewer than two or more than four dimensions, or is none of bools or floats.
    """
    if (
        not isinstance(mask, Tensor)
        or mask.dim() not in (2, 3, 4)
        or not (mask.dtype == torch.bool or mask.is_floating_point())
    ):
        given = f"{tuple(mask.shape)} of {mask.dtype}" if isinstance(mask, Tensor) else shown(mask)
        raise WorkloadError(
            "attention_mask of a layer has bools or floats, in two to four dimensions that broadcast to (batch, heads, "
            f"seqlen_q, seqlen_k), got {given}"
        )
    return four_dimensions(mask)


def _is_all(mask: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> bool:
    """Whether a slice has all of a dimension."""
    return step == 1 and not start and (end is None or end >= mask.shape[dim])


_aten = torch.ops.aten
KEPT = (_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default)
"""Operators that leave a tensor as it is."""

_SUMS = (_aten.add.Tensor, _aten.add_.Tensor, _aten.baddbmm.default, _aten.addmm.default)
