"""FlexAttention for any workload: its score and mask functions written as its own examples write them.

Hidden blocks are skipped through a block mask that is built once; sinks follow the way of Hugging Face, which
scales the output by sigmoid(lse - sink) afterwards, because FlexAttention has none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashgen.core.features.values import Features
from flashgen.core.workload import Workload
from flashgen.measure.inputs import Inputs

ScoreMod = Callable[..., torch.Tensor]
MaskMod = Callable[..., torch.Tensor]
Attention = Callable[..., Any]

COMPILE_LIMIT = 4096
"""torch gives up compiling after a few shapes of one function; a benchmark has many."""

BLOCK_SIZE = (128, 128)
"""Of a block mask, queries and keys: FlexAttention's own default."""


def flex_module() -> Any:
    """Imported late: it takes a second."""
    return importlib.import_module("torch.nn.attention.flex_attention")


def forget_compiled() -> None:
    """Give back what was compiled before, with the masks and biases that it keeps alive."""
    torch._dynamo.reset()


def compiled_flex() -> Attention:
    """`attend` around flex_attention, compiled for exactly one shape, which is the most favourable way to use it."""
    torch._dynamo.config.recompile_limit = COMPILE_LIMIT
    torch._dynamo.config.accumulated_recompile_limit = COMPILE_LIMIT
    compiled: Attention = torch.compile(attend, dynamic=False)
    return compiled


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, sinks: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """`flex_attention`, with attention sinks (nheads,) where they are given."""
    flex_attention = flex_module().flex_attention
    if sinks is None:
        plain: torch.Tensor = flex_attention(q, k, v, **options)
        return plain
    out, lse = flex_attention(q, k, v, return_lse=True, **options)
    share = torch.sigmoid(lse - sinks[None, :, None])
    scaled: torch.Tensor = out * share[..., None].to(out.dtype)
    return scaled


def flex_call(
    function: Attention,
    workload: Workload,
    inputs: Inputs,
    *,
    kernel_options: Mapping[str, Any] | None = None,
    block_size: tuple[int, int] = BLOCK_SIZE,
) -> Callable[[int], torch.Tensor]:
    """One call for each set of inputs.

    The block mask is that of the first set of inputs: a mask tensor is one and the same for all sets.

    Args:
        function: `attend`, compiled or not.
        workload: what it computes.
        inputs: what it is called on.
        kernel_options: `flex_attention`'s, which are performance alone.
        block_size: queries and keys of a block of the block mask.
    """
    features = inputs.features[0]
    device = inputs.q[0].device
    block_mask = None
    visible = mask_mod(workload, features)
    if visible is not None:
        batch = workload.batch if workload.mask else None
        lengths = (workload.seqlen_q, workload.seqlen_k)
        block_mask = flex_module().create_block_mask(
            visible, batch, None, *lengths, device=device, BLOCK_SIZE=block_size
        )
    score = score_mod(workload, features)
    options: dict[str, Any] = {"block_mask": block_mask, "enable_gqa": workload.nheads != workload.nheads_k}
    if score is not None:
        options["score_mod"] = score
    if kernel_options:
        options["kernel_options"] = dict(kernel_options)
    if workload.sink:
        options["sinks"] = features.sinks
    return lambda n: function(inputs.q[n], inputs.k[n], inputs.v[n], **options)


def score_mod(workload: Workload, features: Features) -> ScoreMod | None:
    """What happens to a score before the mask, or None."""
    steps: list[ScoreMod] = []
    if workload.softcap:
        steps.append(_softcap(features.softcap))
    if workload.alibi and features.alibi_slopes is not None:
        steps.append(_alibi(features.alibi_slopes, workload.seqlen_k - workload.seqlen_q))
    if workload.bias and features.bias is not None:
        steps.append(_bias(features.bias.expand(-1, workload.nheads, workload.seqlen_q, workload.seqlen_k)))
    if len(steps) < 2:
        return steps[0] if steps else None
    first, second = steps[:2]

    def both(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return second(first(score, b, h, i, j), b, h, i, j)

    return both


def _softcap(cap: float) -> ScoreMod:
    def softcap(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return softcap


def _alibi(slopes: torch.Tensor, offset: int) -> ScoreMod:
    def alibi(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return score - slopes[h] * (i + offset - j).abs()

    return alibi


def _bias(bias: torch.Tensor) -> ScoreMod:
    shared = bias.shape[0] == 1

    def of_head(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return score + bias[0, h, i, j]

    def of_batch(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return score + bias[b, h, i, j]

    return of_head if shared else of_batch


def mask_mod(workload: Workload, features: Features) -> MaskMod | None:
    """Which keys are visible, or None where all are."""
    steps: list[MaskMod] = []
    offset = workload.seqlen_k - workload.seqlen_q
    if workload.causal:
        steps.append(_causal(offset))
    if workload.window_left is not None:
        steps.append(_window_left(offset, workload.window_left))
    if workload.window_right is not None:
        steps.append(_window_right(offset, workload.window_right))
    if workload.mask == "keys" and features.mask is not None:
        steps.append(_key_mask(features.mask[:, 0, 0]))
    elif workload.mask and features.mask is not None:
        steps.append(_full_mask(features.mask[:, 0]))
    return flex_module().and_masks(*steps) if len(steps) > 1 else (steps[0] if steps else None)


def _causal(offset: int) -> MaskMod:
    def causal(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return i >= j  # type: ignore[no-any-return]

    def bottom_right(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return i + offset >= j  # type: ignore[no-any-return]

    return bottom_right if offset else causal


def _window_left(offset: int, width: int) -> MaskMod:
    def window_left(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return i + offset - j <= width  # type: ignore[no-any-return]

    return window_left


def _window_right(offset: int, width: int) -> MaskMod:
    def window_right(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return j - i - offset <= width  # type: ignore[no-any-return]

    return window_right


def _key_mask(mask: torch.Tensor) -> MaskMod:
    def key_mask(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return mask[b, j]

    return key_mask


def _full_mask(mask: torch.Tensor) -> MaskMod:
    def full_mask(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return mask[b, i, j]

    return full_mask
