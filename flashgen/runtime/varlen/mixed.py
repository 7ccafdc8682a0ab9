"""Mixed batches: sequences with one query in front, computed as a step of decoding, and chunks of prompts behind them.

Both read the same cache and write parts of one output, and neither waits for the other on the host. Whether there are
two launches a record says, or a rule of what the host knows (`flashgen.runtime.lookup.mixed`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flashgen.core.checks import whole_number
from flashgen.core.errors import WorkloadError
from flashgen.core.features.pages import later_sequences
from flashgen.core.features.sequences import sequences_of
from flashgen.core.features.values import Features
from flashgen.runtime.decode.runs import attend_into
from flashgen.runtime.lookup.mixed import launches
from flashgen.runtime.ops import forward as ops
from flashgen.runtime.ops import mods as user_mods
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.batching import map_one_by_one
from flashgen.runtime.ops.calls import Call
from flashgen.runtime.ops.fakes import check
from flashgen.runtime.ops.generated import of_scores_function
from flashgen.runtime.ops.keys import WITH_LSE, feature_key, layout_of
from flashgen.runtime.ops.outputs import empty_lse, empty_output
from flashgen.runtime.ops.schemas import SERVED

Tensor = torch.Tensor
_of_scores = of_scores_function()

MEMO_LIMIT = 8192

APART: dict[tuple[Any, ...], bool] = {}
"""By what the host knows of a call whose rules hold: whether its steps of decoding have launches of their own."""

serve.FORGETTING.append(APART.clear)


def attend_mixed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    num_decodes: int,
    return_lse: bool,
    features: Features,
    keeps: bool = True,
) -> Any:
    """The output of a mixed batch, (1, total_q, nheads, head_dim_v), and its LSE where that is asked for.

    Args:
        q: (1, total_q, nheads, head_dim).
        k: pages, (pages, page_size, nheads_k, head_dim).
        v: likewise.
        causal: as in `flashgen.attention_varlen`.
        softmax_scale: as there.
        num_decodes: sequences with one query, from the first on.
        return_lse: whether the LSE is asked for.
        features: packed sequences with a block table, and those of scores.
        keeps: whether memory may be kept for the next call.

    Raises:
        WorkloadError: a rule is broken.
        UnsupportedError, BuildError, LaunchError: as `flashgen.attention_varlen`.
    """
    addresses = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15  # what is odd has other kernels, and so records
    key = (num_decodes, causal, addresses, q.shape, q.stride(), q.dtype, q.get_device(), *layout_of(k), *layout_of(v))
    key += feature_key(features)
    apart = APART.get(key)
    if apart is None:
        with serve.LOCK:  # what `reload` forgets while this thread asks would else be remembered behind it
            apart = _is_apart(q, k, v, causal, num_decodes, features)
            if len(APART) >= MEMO_LIMIT:
                APART.clear()
            APART[key] = apart
    if not apart:
        given = (causal, softmax_scale, True, None, None, features, WITH_LSE if return_lse else 0)
        return ops.attention_features_kernel(q, k, v, *given)
    out, lse = _prefilled(q, k, v, causal, softmax_scale, num_decodes, return_lse, features)
    _decode(q[0], k, v, causal, softmax_scale, num_decodes, features, (out[0], lse), keeps)
    return (out, lse) if return_lse else out


def check_decodes(num_decodes: int, q: Tensor, features: Features) -> None:
    """Refuse more steps of decoding than there are sequences or queries, and such without pages.

    Raises:
        WorkloadError: that is so.
    """
    most = min(sequences_of(features), q.shape[1])
    if type(num_decodes) is not int or not 0 <= num_decodes <= most:
        whole_number("num_decodes", num_decodes, 0, most)
    if features.block_table is None:
        raise WorkloadError(
            f"num_decodes counts sequences over a paged cache: it needs a block_table, got {num_decodes}"
        )


def _is_apart(q: Tensor, k: Tensor, v: Tensor, causal: bool, num_decodes: int, features: Features) -> bool:
    """Whether a call whose rules hold, which are checked here, has launches of their own for its steps of decoding.

    In the order of the op's fake: of two broken rules both name the same one.
    """
    check(q, k, v, bshd=True, offset=None, features=features)
    check_decodes(num_decodes, q, features)
    mods = user_mods.resolve(features.mods) if features.mods else None
    problem, device, _ = serve.placed(Call(q=q, k=k, v=v, causal=causal, bshd=True, features=features, mods=mods))
    # a step of decoding computes its query whether it is used or not, and its bits follow from all lengths of the batch
    if features.seqused_q is not None or features.batch_invariant:
        return False
    has_chunks = num_decodes < q.shape[1]
    return launches(problem.workload, problem.spec, device, serve.records(), has_chunks=has_chunks).are_two


def _prefilled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    num_decodes: int,
    return_lse: bool,
    features: Features,
) -> tuple[Tensor, Tensor | None]:
    """Output and LSE of all rows, of which those of the first sequences hold nothing yet."""
    if num_decodes == q.shape[1]:
        return empty_output(q, v, bshd=True), empty_lse(q, bshd=True) if return_lse else None
    rest = later_sequences(features, num_decodes)
    given = (causal, softmax_scale, True, None, None, rest, WITH_LSE if return_lse else 0)
    found = ops.attention_features_kernel(q, k, v, *given)
    return (found[0], found[1]) if return_lse else (found, None)


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    num_decodes: int,
    features: Features,
    written: tuple[Tensor, Tensor | None],
    keeps: bool,
) -> None:
    """Write the first rows of an output (total_q, nheads, head_dim_v) and of its LSE (1, nheads, total_q)."""
    first = slice(0, num_decodes)
    out, lse = written
    assert features.block_table is not None
    lens, ends = features.seqused_k, features.cu_seqlens_k
    if lens is None:
        assert ends is not None
        lens = ends[1:] - ends[:-1]
    scores, slopes = _of_scores(features), features.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        scores = replace(scores, alibi_slopes=slopes[first])
    step_lse = None if lse is None else lse.new_empty((num_decodes, lse.shape[1], 1))
    attend_into(
        (out[first].unsqueeze(1), step_lse),
        (q[first].unsqueeze(1), k, v, lens[first], features.block_table[first], causal, softmax_scale, scores),
        keeps=keeps,
    )
    if lse is not None and step_lse is not None:
        lse[0, :, first] = step_lse.squeeze(2).t()


_INPUTS = "Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale, SymInt num_decodes, bool return_lse"
LIBRARY = torch.library.Library("flashgen", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define(f"attention_mixed({_INPUTS}, {SERVED.schema}) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]
OP: Any = torch.ops.flashgen.attention_mixed.default
"""The output and the LSE, which is empty where it is not asked for."""


def attend_mixed_by_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    num_decodes: int,
    return_lse: bool,
    features: Features,
) -> Any:
    """`attend_mixed` by torch's dispatcher."""
    out, lse = OP(q, k, v, causal, softmax_scale, num_decodes, return_lse, *SERVED.flat(features))
    return (out, lse) if return_lse else out


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    num_decodes: int,
    return_lse: bool,
    *flat: Any,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    features, *_ = SERVED.restored(*flat, **named)
    found = attend_mixed(q, k, v, causal, softmax_scale, num_decodes, return_lse, features, keeps=False)
    return found if return_lse else (found, q.new_empty(0, dtype=torch.float32))


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    num_decodes: int,
    return_lse: bool,
    *flat: Any,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    features, *_ = SERVED.restored(*flat, **named)
    check(q, k, v, bshd=True, offset=None, features=features)
    check_decodes(num_decodes, q, features)
    lse = empty_lse(q, bshd=True) if return_lse else q.new_empty(0, dtype=torch.float32)
    return empty_output(q, v, bshd=True), lse


for _key in ("CUDA", "CPU"):  # the CPU's raises an error
    LIBRARY.impl("attention_mixed", _run, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("flashgen::attention_mixed", _fake, lib=LIBRARY)
map_one_by_one("attention_mixed", LIBRARY)
