"""Functions of the caller by the Hopper forward family: every kind of config and hard data, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl

import flashgen
from flashgen.codegen.families import invalid
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.core.config import KnobValue
from flashgen.core.features.values import BlockMask, Features
from flashgen.launch.gpu import current_device
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.calls import Call
from flashgen.runtime.ops.mods import handle_for, resolve
from tests.packing import Case, assert_right, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("generated_kernels"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm90"
    ),
]

LISTED = [False, True]
"""Without and with a block mask."""

Formula = Callable[..., torch.Tensor]


def document(b, h, q_idx, k_idx, doc):
    return tl.load(doc + q_idx) == tl.load(doc + k_idx)


def causal_document(b, h, q_idx, k_idx, doc):
    return (tl.load(doc + q_idx) == tl.load(doc + k_idx)) & (k_idx <= q_idx)


def by_head(b, h, q_idx, k_idx):
    return (k_idx <= q_idx + 300) & ((h >= 2) | (q_idx - k_idx < 200)) & (k_idx >= 64 * b)


def late_rows(b, h, q_idx, k_idx):
    return (q_idx >= 100) & (k_idx <= q_idx)


def nothing(b, h, q_idx, k_idx):
    return k_idx < q_idx - 100000


def odd_keys(b, h, q_idx, k_idx):
    return (k_idx % 2 == 1) & (k_idx < 900)


def local_causal(b, h, q_idx, k_idx):
    return (k_idx <= q_idx) & (k_idx % 5 != 4)


def relative(score, b, h, q_idx, k_idx, table):
    return score + tl.load(table + h * 16384 + k_idx - q_idx + 8192)


def hides(score, b, h, q_idx, k_idx):
    return tl.where(k_idx % 3 == q_idx % 3, float("-inf"), score * 0.5)


def shifted(score, b, h, q_idx, k_idx):
    return score * 0.5 + k_idx % 3


def of_keys(score, b, h, q_idx, k_idx):
    return k_idx % 7


MASKS: dict[str, tuple[Any, Formula]] = {
    "document": (document, lambda doc: lambda b, h, i, j: doc[i] == doc[j]),
    "causal_document": (causal_document, lambda doc: lambda b, h, i, j: (doc[i] == doc[j]) & (j <= i)),
    "by_head": (
        by_head,
        lambda doc: lambda b, h, i, j: (j <= i + 300) & ((h >= 2) | (i - j < 200)) & (j >= 64 * b),
    ),
    "late_rows": (late_rows, lambda doc: lambda b, h, i, j: (i >= 100) & (j <= i)),
    "nothing": (nothing, lambda doc: lambda b, h, i, j: j < i - 100000),
    "odd_keys": (odd_keys, lambda doc: lambda b, h, i, j: (j % 2 == 1) & (j < 900)),
}
WITH_DOC = ("document", "causal_document")

CONFIGS: dict[str, dict[str, KnobValue]] = {
    "default": {},
    "mbarriers": {"barriers": "mbarrier", "exp_order": "free"},
    "three warpgroups": {"warpgroups": 3, "block_n": 64, "v_stages": 2},
    "always rescaled": {"conditional_rescale": False},
    "one warpgroup": {
        "warpgroups": 1,
        "blocks_per_sm": 2,
        "block_n": 64,
        "ping_pong": False,
        "exp_order": "free",
        "v_stages": 2,
        "q_stages": 1,
    },
}


def tensors(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, nheads, nheads_k, seqlen_q, seqlen_k, head_dim = shape
    torch.manual_seed(0)
    q = torch.randn(batch, nheads, seqlen_q, head_dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(batch, nheads_k, seqlen_k, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    return q, k, v


def documents(length: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.sort(torch.randint(0, 7, (length,), generator=generator, device="cuda", dtype=torch.int32))[0]


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score: Formula | None = None,
    mask: Formula | None = None,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and LSE in float64, and which keys no query of their head of keys sees (batch, nheads_k, seqlen_k)."""
    group = q.shape[1] // k.shape[1]
    keys, values = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    s = q.double() @ keys.mT * q.shape[-1] ** -0.5
    places = [
        torch.arange(n, device=q.device).view([-1 if i == axis else 1 for i in range(4)])
        for axis, n in enumerate(s.shape)
    ]
    s = s if score is None else score(s, *places)
    if mask is not None:
        s = s.masked_fill(~mask(*places), -math.inf)
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    hidden = (s == -math.inf).unflatten(1, (-1, group)).all(2).all(2)
    return torch.softmax(s, -1).nan_to_num(0.0) @ values, torch.logsumexp(s, -1), hidden


def attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux: tuple[torch.Tensor, ...] = (),
    block_mask: BlockMask | None = None,
    causal: bool = False,
    changes: dict[str, KnobValue] | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE by a config of the Hopper family."""
    handle = handle_for(score_mod, mask_mod, tuple(one.dtype for one in aux), block_mask is not None)
    features = Features(mods=handle, aux=aux, block_mask=block_mask, **others)
    call = Call(q=q, k=k, v=v, causal=causal, with_lse=True, features=features, mods=resolve(handle))
    spec, device = call.checked().spec, current_device()
    config = HOPPER_FORWARD.default(spec, device).replace(**(changes or {}))
    if reason := invalid(config, spec, device):
        pytest.skip(reason)
    call = Call(q=q, k=k, v=v, causal=causal, with_lse=True, features=features, mods=resolve(handle), config=config)
    out, lse = serve.prepare(call)(q, k, v, None, None, features)[:2]
    return out, lse


def assert_close(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, ...]) -> None:
    torch.testing.assert_close(got[0].double(), expected[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(got[1].double(), expected[1], atol=5e-3, rtol=1e-3)


def listed(mask_mod: Any, q: torch.Tensor, k: torch.Tensor, aux: tuple[torch.Tensor, ...], wanted: bool) -> Any:
    if not wanted:
        return None
    heads = (q.shape[0], q.shape[1]) if mask_mod is by_head else (None, None)
    return flashgen.block_mask(mask_mod, *heads, seqlen_q=q.shape[2], seqlen_k=k.shape[2], aux=aux)


SHAPES = [
    (2, 4, 2, 1000, 1000, 64),
    (1, 4, 4, 129, 1000, 128),
    (1, 2, 1, 63, 4097, 128),
    (1, 4, 1, 1000, 129, 96),
    (1, 2, 2, 300, 257, 256),
    (1, 1, 1, 1, 1, 64),
]


@pytest.mark.parametrize("blocks", LISTED)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, shape: tuple[int, ...], blocks: bool) -> None:
    q, k, v = tensors(*shape)
    doc = documents(max(shape[3], shape[4]))
    aux = (doc,) if name in WITH_DOC else ()
    mask_mod, formula = MASKS[name]
    got = attended(q, k, v, mask_mod=mask_mod, aux=aux, block_mask=listed(mask_mod, q, k, aux, blocks))
    assert_close(got, reference(q, k, v, mask=formula(doc)))


@pytest.mark.parametrize("blocks", LISTED)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_configs(dtype: torch.dtype, head_dim: int, config: str, blocks: bool) -> None:
    """Hidden keys and values hold NaN: documents from the fourth on are of neither side."""
    q, k, v = tensors(2, 4, 2, 700, 1000, head_dim, dtype=dtype)
    doc, aux = documents(1000), (documents(1000),)
    expected = reference(q, k, v, mask=lambda b, h, i, j: doc[i] == doc[j])
    assert bool(expected[2].any())
    k[expected[2]], v[expected[2]] = math.nan, math.nan
    found = listed(document, q, k, aux, blocks)
    got = attended(q, k, v, mask_mod=document, aux=aux, block_mask=found, changes=CONFIGS[config])
    assert_close(got, expected)
    again = attended(q, k, v, mask_mod=document, aux=aux, block_mask=found, changes=CONFIGS[config])
    assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))


@pytest.mark.parametrize("blocks", LISTED)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["peak", "rising", "falling"])
def test_hard_data(kind: str, head_dim: int, causal: bool, blocks: bool) -> None:
    """One key 60 above the rest, or scores that rise by 200 to either end."""
    q, k, v = tensors(1, 4, 2, 900, 1100, head_dim)
    q[..., 0] = head_dim**0.5
    ends = {"peak": (0.0, 0.0), "rising": (200.0, 0.0), "falling": (0.0, 200.0)}[kind]
    k[..., 0] = torch.linspace(*ends, 1100, device="cuda").bfloat16()
    k[:, :, 400, 0] += 60.0
    doc, aux = documents(1100), (documents(1100),)
    inside = torch.ones(900, 1100, device="cuda", dtype=torch.bool).tril(200) if causal else None
    expected = reference(q, k, v, mask=lambda b, h, i, j: doc[i] == doc[j], seen=inside)
    got = attended(q, k, v, mask_mod=document, aux=aux, causal=causal, block_mask=listed(document, q, k, aux, blocks))
    torch.testing.assert_close(got[0].double(), expected[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(got[1].double(), expected[1], atol=2e-2, rtol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 2, 777, 1203, 64), (1, 2, 2, 1000, 300, 128), (1, 2, 1, 4097, 513, 256)])
@pytest.mark.parametrize("name", ["relative", "hides", "of_keys"])
def test_scores(name: str, shape: tuple[int, ...], causal: bool) -> None:
    q, k, v = tensors(*shape)
    table = torch.randn(shape[1], 16384, device="cuda")
    wide = table.double()
    score_mod, formula = {
        "relative": (relative, lambda s, b, h, i, j: s + wide[h, j - i + 8192]),
        "hides": (hides, lambda s, b, h, i, j: torch.where(j % 3 == i % 3, -math.inf, s * 0.5)),
        "of_keys": (of_keys, lambda s, b, h, i, j: (j % 7).double().expand_as(s)),
    }[name]
    aux = (table,) if name == "relative" else ()
    inside = torch.ones(shape[3], shape[4], device="cuda", dtype=torch.bool).tril(shape[4] - shape[3])
    got = attended(q, k, v, score_mod=score_mod, aux=aux, causal=causal)
    assert_close(got, reference(q, k, v, score=formula, seen=inside if causal else None))


@pytest.mark.parametrize("blocks", LISTED)
def test_features_beside_functions(blocks: bool) -> None:
    """A causal mask with a window, softcap, ALiBi, sinks and a bias; keys that nobody sees hold NaN."""
    q, k, v = tensors(1, 4, 2, 700, 900, 128)
    doc, aux = documents(900), (documents(900),)
    slopes, sinks = torch.rand(4, device="cuda"), torch.randn(4, device="cuda")
    bias = torch.randn(1, 4, 700, 904, device="cuda", dtype=torch.bfloat16)[..., :900]
    ahead = torch.arange(900, device="cuda") - torch.arange(700, device="cuda")[:, None] - 200

    def score(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return 20 * torch.tanh(s / 20) - slopes.double().view(-1, 1, 1) * ahead.abs() + bias.double()

    inside = (ahead <= 0) & (ahead >= -300)
    out, lse, hidden = reference(q, k, v, score=score, mask=lambda b, h, i, j: doc[i] == doc[j], seen=inside)
    total = torch.logaddexp(lse, sinks.double().view(1, -1, 1))
    out = out * (lse - total).exp().unsqueeze(-1)
    k[hidden], v[hidden] = math.nan, math.nan
    given = {"window": (300, None), "softcap": 20.0, "alibi_slopes": slopes, "sinks": sinks, "bias": bias}
    blocks_of = listed(document, q, k, aux, blocks)
    explained = flashgen.explain(q, k, v, causal=True, mask_mod=document, aux=aux, block_mask=blocks_of, **given)
    assert explained.served.config.family == "hopper_forward"
    call = {"causal": True, "mask_mod": document, "aux": aux, "block_mask": blocks_of, "return_lse": True}
    assert_close(flashgen.attention(q, k, v, **call, **given), (out, total))


def test_a_query_offset_moves_the_causal_mask_alone() -> None:
    q, k, v = tensors(1, 2, 2, 300, 700, 64)
    for offset in (-100, 0, 123, 1000):
        inside = torch.ones(300, 700, device="cuda", dtype=torch.bool).tril(offset)
        expected = reference(q, k, v, mask=lambda b, h, i, j: (j % 2 == 1) & (j < 900), seen=inside)
        call = {"causal": True, "q_offset": offset, "mask_mod": odd_keys, "return_lse": True}
        assert_close(flashgen.attention(q, k, v, **call), expected)


@pytest.mark.parametrize("blocks", LISTED)
@pytest.mark.parametrize("length", [1, 63, 129, 1000, 4097])
def test_calls_are_served_by_the_hopper_family(length: int, blocks: bool) -> None:
    q, k, v = tensors(1, 4, 2, length, length, 128)
    doc, aux = documents(length), (documents(length),)
    call = {"mask_mod": causal_document, "aux": aux, "block_mask": listed(causal_document, q, k, aux, blocks)}
    assert flashgen.explain(q, k, v, **call).served.config.family == "hopper_forward"
    got = flashgen.attention(q, k, v, **call, return_lse=True)
    assert_close(got, reference(q, k, v, mask=lambda b, h, i, j: (doc[i] == doc[j]) & (j <= i)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("score_mod", [None, shifted])
def test_packed_sequences(score_mod: Any, head_dim: int, causal: bool) -> None:
    """Places are those in a sequence; a sequence may have no keys, and rows that do not count hold NaN."""
    case = Case(
        queries=(1, 300, 0, 128, 17, 513, 9),
        keys=(5, 300, 7, 300, 0, 513, 9),
        spare=100,
        nheads=4,
        nheads_k=2,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        poison=(5,),
        mod=local_causal,
        score_mod=score_mod,
        options={"causal": causal},
    )
    packed = make(case, device="cuda")
    out, lse = flashgen.attention_varlen(packed.q, packed.k, packed.v, **packed.named, return_lse=True)
    assert_right(packed, out, lse)
