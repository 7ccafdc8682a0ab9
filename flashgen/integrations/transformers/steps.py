"""The mask of a step over a static cache: lengths that stay on the device, in the form of a mask."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.integrations.transformers.mask import KEPT, check_not_added, note_a_view, whole_of

Tensor = torch.Tensor


class StepMask(torch.Tensor):
    """A bool mask (batch, 1, 1, seqlen_k) of one query a sequence, True where attended, without memory of its own.

    Key j is visible iff `leftpad <= j < seqlens` and `j >= seqlens - 1 - left`. Both are tensors of the device, so that
    a compiled step with a mask like this serves all lengths: torch.compile takes it apart into them. Whatever else a
    model does with it happens to a tensor that is then made of it.
    """

    seqlens: Tensor
    leftpad: Tensor | None
    left: int | None
    found: dict[str, Any]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, seqlens: Tensor, leftpad: Tensor | None, left: int | None, seqlen_k: int) -> Any:
        """A mask of int32 lengths (batch,), of the keys in front that are padding, and of a window's left edge."""
        shape = (len(seqlens), 1, 1, seqlen_k)
        made: StepMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=seqlens.device)
        made.seqlens, made.leftpad, made.left, made.found = seqlens, leftpad, left, {}
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Its shape alone: its lengths are on the device."""
        return f"StepMask({tuple(self.shape)}, left={self.left})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The tensors in it, and what else it is."""
        return ["seqlens", *(["leftpad"] if self.leftpad is not None else [])], (self.left, self.shape[3])

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> StepMask:
        """What `__tensor_flatten__` took apart."""
        left, seqlen_k = context
        return _made(inner["seqlens"], inner.get("leftpad"), left, seqlen_k)

    def materialized(self) -> Tensor:
        """The mask as an ordinary tensor, made once."""
        return whole_of(self.found, lambda: step_tensor(self.seqlens, self.leftpad, self.left, self.shape[3]))

    @property
    def is_changed(self) -> bool:
        """Whether the tensor that was made of it may have been written to, so that it alone says what is visible."""
        return "viewed" in self.found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Keep what does not change the mask; make a tensor for everything else."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in KEPT and isinstance(first, StepMask) and not first.is_changed:
            return _made(first.seqlens, first.leftpad, first.left, first.shape[3])
        check_not_added(func)
        args, kwargs = torch.utils._pytree.tree_map_only(StepMask, StepMask.materialized, (args, kwargs))
        if isinstance(first, StepMask):
            note_a_view(func, first.found)
        return func(*args, **kwargs)


def step_mask(
    offset: int | Tensor, keys: Tensor | None, left: int | None, sizes: tuple[int, int], device: torch.device
) -> StepMask | None:
    """The mask of a causal step, or None where padding lies elsewhere than in front.

    Args:
        offset: place of the query among the keys; a tensor is not read by the host.
        keys: keys that are no padding, bool (batch, seqlen_k), which is waited for once, or None for all.
        left: edge of a window.
        sizes: batch and seqlen_k.
        device: of the mask.
    """
    batch, seqlen_k = sizes
    lengths = torch.as_tensor(offset, device=device).reshape(-1) + 1
    seqlens = lengths.clamp(max=seqlen_k).to(torch.int32).expand(batch).contiguous()
    if keys is None:
        return _made(seqlens, None, left, seqlen_k)
    seen = keys & step_tensor(seqlens, None, None, seqlen_k)[:, 0, 0]
    leftpad = seqlens - seen.sum(1, dtype=torch.int32)
    if not bool((seen == step_tensor(seqlens, leftpad, None, seqlen_k)[:, 0, 0]).all()):
        return None
    return _made(seqlens, leftpad, left, seqlen_k)


def _made(seqlens: Tensor, leftpad: Tensor | None, left: int | None, seqlen_k: int) -> StepMask:
    found: StepMask = StepMask(seqlens, leftpad, left, seqlen_k)
    return found


def step_tensor(seqlens: Tensor, leftpad: Tensor | None, left: int | None, seqlen_k: int) -> Tensor:
    """The mask of a step as an ordinary tensor, bool (batch, 1, 1, seqlen_k)."""
    places = torch.arange(seqlen_k, device=seqlens.device)
    seen = places < seqlens[:, None]
    if leftpad is not None:
        seen = seen & (places >= leftpad[:, None])
    if left is not None:
        seen = seen & (places >= seqlens[:, None] - 1 - left)
    return seen[:, None, None]
