"""Dropout in the rendered kernels on a CPU: the bits of `flashgen.reference`, whatever the tiles."""

from __future__ import annotations

import math

import pytest
import torch

from flashgen.codegen.family import KernelFamily
from flashgen.codegen.portable_backward.family import PORTABLE_BACKWARD_FUSED, PORTABLE_BACKWARD_SPLIT
from flashgen.core.features.dropout import keep_scale
from flashgen.core.workload import Specialization
from flashgen.reference.philox import kept
from tests.interpreter.backward import check
from tests.interpreter.dense import Rules, attention, unseen_keys
from tests.interpreter.forward import compare, config_for, run, tensors
from tests.interpreter.packed import differentiated, gradient_of, interpreted
from tests.packing import Case, assert_gradients, assert_right, gradients, make
from tests.tiers import every

STATE = torch.tensor([-(2**62) + 12345, 2**40 - 3])
P = 0.3
GIVEN = {"dropout_p": P, "rng_state": STATE}
SPLIT, FUSED = PORTABLE_BACKWARD_SPLIT, PORTABLE_BACKWARD_FUSED


def dropped(shape: tuple[int, ...], dropout_p: float = P) -> torch.Tensor:
    """Factors of the weights, (batch, nheads, seqlen_q, seqlen_k)."""
    batch, nheads, _, seqlen_q, seqlen_k = shape
    heads = torch.arange(batch * nheads).view(batch, nheads)
    return kept(STATE, dropout_p, heads, seqlen_q, seqlen_k) * keep_scale(dropout_p)


@pytest.mark.parametrize("dropout_p", [1e-9, 2**-16, 0.5, 1 - 2**-20])
def test_every_weight_is_dropped_as_the_definition_says(dropout_p: float) -> None:
    """The identity as values makes the outputs the weights."""
    shape = (1, 2, 1, 21, 64)
    spec = Specialization.parse("fwd-fp32-d64-dropout")
    q, k, _ = tensors(shape, 64, 64, torch.float32, "bhsd")
    out, _ = run(
        spec,
        config_for(spec, block_n=16),
        q,
        k,
        torch.eye(64).expand(1, 1, 64, 64),
        dropout_p=dropout_p,
        rng_state=STATE,
    )
    assert torch.equal(out == 0, dropped(shape, dropout_p) == 0)


@pytest.mark.parametrize(("block_m", "block_n", "loads"), [(32, 16, "pointer"), (16, 64, "descriptor")])
@pytest.mark.parametrize("key", ["causal", "causal-window"])
def test_forward_passes_of_any_tiles(key: str, block_m: int, block_n: int, loads: str) -> None:
    shape, window = (2, 2, 1, 33, 40), (21, None) if "window" in key else None
    spec = Specialization.parse(f"fwd-fp16-d32-{key}-dropout")
    q, k, v = tensors(shape, 32, 32, torch.float16, "bshd")
    host = {**GIVEN, **({"window": window} if window else {})}
    rules = Rules(causal=True, q_offset=0, window=window, dropped=dropped(shape))
    hidden = unseen_keys(q, k, rules)
    k, v = k.masked_fill(hidden, math.nan), v.masked_fill(hidden, math.nan)
    got = run(spec, config_for(spec, loads=loads, block_m=block_m, block_n=block_n), q, k, v, q_offset=0, **host)
    compare(got, attention(q, k, v, rules))


@pytest.mark.parametrize(
    ("row", "key", "knobs"),
    [
        (SPLIT, "causal", {"dq_block_m": 16, "loads": "descriptor"}),
        (SPLIT, "bias-dbias-mask", {"block_m": 16, "dq_block_n": 16}),
        (FUSED, "causal", {"block_m": 16, "loads": "descriptor"}),
        (FUSED, "softcap-alibi", {"block_n": 16}),
    ],
)
def test_gradients(row: KernelFamily, key: str, knobs: dict[str, int | str | bool]) -> None:
    shape = (2, 2, 1, 33, 40)
    generator = torch.Generator().manual_seed(2)
    host: dict[str, object] = {}
    if "bias" in key:
        host["bias"] = torch.randn(1, 2, 33, 48, generator=generator).half()[..., :40]
        host["mask"] = (torch.rand(2, 1, 33, 48, generator=generator) > 0.3)[..., :40]
    if "alibi" in key:
        host |= {"softcap": 2.0, "alibi_slopes": torch.rand(2, generator=generator)}
    rules = Rules(causal=key == "causal", dropped=dropped(shape), **host)  # type: ignore[arg-type]
    check(row, f"bwd-fp16-d32-{key}-dropout", shape, rules, host=host | GIVEN, **knobs)


PACKED = {
    "causal": Case(queries=(5, 0, 20), keys=(9, 4, 24), options={"causal": True, **GIVEN}, poison=(0,)),
    "used": Case(queries=(20, 5), used_q=(17, 5), used_k=(18, 0), sinks=True, options=dict(GIVEN)),
}


@pytest.mark.parametrize("name", every(2, PACKED))
@pytest.mark.parametrize("family_id", ["portable_backward_split", "portable_backward_fused"])
def test_packed_sequences(name: str, family_id: str) -> None:
    packed = make(PACKED[name])
    out, lse = interpreted(packed, block_m=32)
    assert_right(packed, out, lse)
    right = gradients(packed, gradient_of(packed, out))
    assert_gradients(packed, differentiated(packed, family_id), right)
