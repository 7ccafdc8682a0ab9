"""Dense keys as a cache of decoding, interpreted: forward passes in both layouts against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.launch.decode_passes import decode_shape
from flashgen.launch.geometry import Geometry
from flashgen.runtime.decode.call import CheckedDecode, DecodeCall
from flashgen.runtime.lookup.few_queries import decode_specialization
from flashgen.runtime.ops.outputs import empty_lse, empty_output
from tests.decoding import assert_right
from tests.interpreter.decode import launched, small_config
from tests.tiers import only

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "causal": (2, {"causal": True}, {}),
    "all queries see all": (3, {"softmax_scale": 0.3}, {}),
    "window": (2, {}, {"window": (30, 1)}),
    "more queries than keys": (80, {"causal": True}, {}),
    "scores": (1, {"causal": True}, {"softcap": 3.0, "sinks": torch.randn(4), "alibi_slopes": torch.rand(2, 4)}),
}


IN_BSHD = ("window", "scores")


@pytest.mark.parametrize("name", only(CASES, "causal", "all queries see all", "window", "scores"))
def test_a_forward_pass_is_a_step_of_decoding(name: str) -> None:
    seqlen_q, options, given = CASES[name]
    bshd = name in IN_BSHD
    torch.manual_seed(0)
    features, seqlen_k = Features(**given), 75
    q, k, v = (
        torch.randn(2, heads, rows, 32, dtype=torch.float16)
        for heads, rows in ((4, seqlen_q), (2, seqlen_k), (2, seqlen_k))
    )
    if bshd:  # the same numbers in another order of memory
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
    out, lse = empty_output(q, v, bshd=bshd).fill_(torch.nan), empty_lse(q, bshd=bshd).fill_(torch.nan)
    views = [tensor.transpose(1, 2) if bshd else tensor for tensor in (q, k, v, out)]
    geometry = Geometry.of(*views, features)
    scores = {"softcap": bool(features.softcap), "alibi": "alibi_slopes" in given, "sink": "sinks" in given}
    spec = Specialization(
        direction="forward",
        dtype="fp16",
        head_dim=32,
        head_dim_v=32,
        causal=bool(options.get("causal")),
        window=features.window != (None, None),
        **scores,
    )
    shape = decode_shape(geometry, spec, features, options.get("softmax_scale"), has_lse=True)
    checked = CheckedDecode(spec=decode_specialization(spec), shape=shape)
    rows = [view.transpose(1, 2) for view in views]
    call = DecodeCall(
        q=rows[0],
        k_cache=rows[1],
        v_cache=rows[2],
        seqlens=torch.full((2,), seqlen_k, dtype=torch.int32),
        features=features,
        **options,
    )
    endless = replace(call, seqlens=torch.full((1024,), 2**31 - 1, dtype=torch.int32))
    launched(endless, checked, small_config(checked), rows[3], lse)
    # the oracle of decoding has slopes of heads alone
    for b in range(2):
        slopes = features.alibi_slopes[b] if features.alibi_slopes is not None else None
        one = {name: getattr(call, name)[b : b + 1] for name in ("q", "k_cache", "v_cache", "seqlens")}
        alone = replace(call, **one, features=replace(features, alibi_slopes=slopes))
        assert_right(alone, rows[3][b : b + 1], lse[b : b + 1])
