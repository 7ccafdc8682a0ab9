"""Gradients of packed sequences by the Hopper families: features, poison, graphs, bits, rate.

Each test has the backward pass of `attention_varlen` served by the families' configs where tensors allow it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashgen
from flashgen.codegen import families
from flashgen.codegen.family import KernelFamily
from flashgen.codegen.hopper_backward.family import HOPPER_BACKWARD_FUSED, HOPPER_BACKWARD_SPLIT
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization
from flashgen.launch.scratch import ScratchPlan
from flashgen.runtime.lookup import packed_ladder, records
from flashgen.runtime.ops import kernel_cache
from tests.covering import covering_array
from tests.gpu.clock import times
from tests.gpu.packed_cases import BF16, KEYS, WIDE, case_of
from tests.packing import Case, Packed, assert_gradients, gradients, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm90"
    ),
]

FUSED, SPLIT = HOPPER_BACKWARD_FUSED, HOPPER_BACKWARD_SPLIT
Serve = Callable[..., None]

CHANGES: dict[str, dict[str, KnobValue]] = {
    "default": {},
    "together": {"stagger_warpgroups": False},
    "late starts": {"accumulator_init": "interleaved"},
    "scores ahead": {"qk_prefetch": True, "accumulator_init": "interleaved", "stagger_warpgroups": False},
    "half the queries": {"block_m": 64},
    "three slots": {"q_stages": 3},
    "few heads": {"heads_per_group": 2},
    "all heads": {"heads_per_group": 16},
    "one head a tile": {"heads_per_tile": 1},
    "two heads a tile": {"heads_per_tile": 2},
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "family": (FUSED.id, SPLIT.id),
    "dims": ((128, 128), (64, 64), (96, 80), (192, 128), (256, 256)),
    "dtype": (BF16, torch.float16),
    "heads": ((8, 2), (4, 4), (5, 1)),
    "keys": (None, KEYS),
    "position": ("none", "causal", "window", "causal window"),
    "used": (False, True),
    "sinks": (False, True),
    "layout": ("packed", "heads"),
    "spare": (0, 200),
    "poison": ((), (1, 5)),
    "changes": tuple(CHANGES),
}
CASES = covering_array(FACTORS)


@pytest.fixture
def served_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """What has a config of a family serve every backward call that it can, without a record."""
    monkeypatch.setenv("FLASHGEN_QUIET", "1")
    monkeypatch.setattr(records.Records, "of", lambda *_: ())
    monkeypatch.setattr(kernel_cache, "KERNELS", {})  # other tests of this process have kernels of other families there

    def serve_by(row: KernelFamily = FUSED, **changes: KnobValue) -> None:
        def default(spec: Specialization, device: Device, only: tuple[str, ...] = ()) -> Config:
            if spec.direction != "backward":
                return families.default_config(spec, device, only)
            one = row if families.unsupported(row, spec, device) is None else SPLIT
            usual = one.default(spec, device)
            found = usual.replace(**{name: value for name, value in changes.items() if name in dict(usual.knobs)})
            return found if one.invalid(spec, found, device) is None else usual

        monkeypatch.setattr(records, "default_config", default)
        # the config as it is, whatever the sizes
        monkeypatch.setattr(packed_ladder, "usual", lambda config, *_: config)
        monkeypatch.setattr(packed_ladder, "balanced", lambda config, *_: config)
        flashgen.reload()

    serve_by()
    yield serve_by
    compiled = [config for spec, config, _ in kernel_cache.KERNELS if spec.direction == "backward"]
    assert all(config.family in (FUSED.id, SPLIT.id) for config in compiled)
    monkeypatch.undo()
    flashgen.reload()


@pytest.fixture
def stale_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has NaN in all memory that kernels share: the first one leaves out blocks without a row."""
    allocate = ScratchPlan.allocate

    def stale(plan: ScratchPlan, beside: torch.Tensor) -> torch.Tensor:
        memory = allocate(plan, beside)
        memory.view(torch.uint8).fill_(255)
        return memory

    monkeypatch.setattr(ScratchPlan, "allocate", stale)


def inputs(packed: Packed) -> dict[str, torch.Tensor]:
    """What has a gradient."""
    given = {name: getattr(packed, name).detach().requires_grad_() for name in "qkv"}
    if "sinks" in packed.named:
        given["sinks"] = packed.named["sinks"].clone().requires_grad_()
    return given


def gradient_of(packed: Packed, out: torch.Tensor) -> torch.Tensor:
    """One of an output, NaN in rows that do not count."""
    found = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    counts = torch.zeros(len(out), dtype=torch.bool)
    for b, queries, _ in packed.sequences():
        counts[queries] = b not in packed.case.poison
    found[~counts] = math.nan
    return found


@pytest.mark.usefixtures("stale_scratch")
@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_pair_of_features_is_right(number: int, served_by: Serve) -> None:
    row = CASES[number]
    family = FUSED if row["family"] == FUSED.id else SPLIT
    served_by(family, **CHANGES[row["changes"]])
    packed = make(case_of(row), "cuda")
    given = inputs(packed)
    is_fixed = family is SPLIT
    out, lse = flashgen.attention_varlen(**{**packed.named, **given}, return_lse=True, deterministic=is_fixed)
    dout = gradient_of(packed, out)
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(4)).to(lse)
    dlse[dout[:, :, 0].T.isnan()] = math.nan
    found = torch.autograd.grad((out, lse), tuple(given.values()), (dout, dlse), retain_graph=True)
    right = gradients(packed, dout, dlse)
    if packed.case.poison:
        right.pop("sinks", None)  # of sequences of NaN, too
    assert_gradients(packed, dict(zip(given, found, strict=True)), right, whole=True)
    if is_fixed:
        again = torch.autograd.grad((out, lse), tuple(given.values()), (dout, dlse))
        assert all(torch.equal(one.nan_to_num(), two.nan_to_num()) for one, two in zip(found, again, strict=True))


@pytest.mark.usefixtures("stale_scratch")
@pytest.mark.parametrize("row", [FUSED, SPLIT], ids=lambda row: row.id)
@pytest.mark.parametrize("batch", [1, 31, 32, 33, 255, 256, 511, 512, 1500])
def test_many_sequences(batch: int, row: KernelFamily, served_by: Serve) -> None:
    served_by(row)
    lengths = tuple(random.Random(batch).choice((0, 1, 2, 15, 16, 17, 130)) for _ in range(batch))
    packed = make(Case(queries=lengths, nheads=2, nheads_k=1, head_dim=64, options={"causal": True}), "cuda")
    given = inputs(packed)
    out = flashgen.attention_varlen(**{**packed.named, **given}, deterministic=row is SPLIT)
    dout = gradient_of(packed, out)
    found = torch.autograd.grad(out, tuple(given.values()), dout)
    assert_gradients(packed, dict(zip(given, found, strict=True)), gradients(packed, dout))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_bits_of_a_sequence_follow_from_itself_alone(causal: bool, served_by: Serve) -> None:
    served_by(SPLIT)
    options = {"causal": causal, "deterministic": True}
    whole = make(Case(queries=(400, 3000, 7, 1290), options=options, **WIDE), "cuda")
    rows = slice(400, 3400)
    alone = torch.tensor([0, 3000], dtype=torch.int32, device="cuda")

    def of(part: slice, **changes: Any) -> tuple[torch.Tensor, ...]:
        given = [one[part].detach().requires_grad_() for one in (whole.q, whole.k, whole.v)]
        out = flashgen.attention_varlen(*given, **{**whole.named, **changes})
        return torch.autograd.grad(out, given, out.detach())

    one = of(rows, cu_seqlens_q=alone, max_seqlen_q=3000, max_seqlen_k=3000)
    for _ in range(3):
        assert all(torch.equal(a[rows], b) for a, b in zip(of(slice(None)), one, strict=True))


@pytest.mark.parametrize("row", [FUSED, SPLIT], ids=lambda row: row.id)
def test_one_captured_graph_serves_all_lengths(row: KernelFamily, served_by: Serve) -> None:
    served_by(row)
    batch, rows = 9, 4096
    packed = make(Case(queries=(rows // batch,) * batch, spare=rows % batch, options={"causal": True}, **WIDE), "cuda")
    packed = replace(packed, **{name: getattr(packed, name).nan_to_num() for name in "qkv"})
    given = inputs(packed)
    named = {**packed.named, "max_seqlen_q": rows, "max_seqlen_k": rows, "deterministic": row is SPLIT}

    def differentiate() -> tuple[torch.Tensor, ...]:
        out = flashgen.attention_varlen(**{**named, **given})
        return torch.autograd.grad(out, tuple(given.values()), dout)

    dout = torch.randn(rows, 8, 128, dtype=BF16, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        differentiate()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = differentiate()
    draw = random.Random(0)
    for _ in range(20):
        ends = sorted(draw.randint(0, rows) for _ in range(batch))
        named["cu_seqlens_q"].copy_(torch.tensor([0, *ends], dtype=torch.int32))
        for one in found:
            one.fill_(math.nan)
        graph.replay()
        lengths = tuple(end - start for start, end in zip([0, *ends[:-1]], ends, strict=True))
        drawn = replace(packed, case=replace(packed.case, queries=lengths, spare=rows - ends[-1]))
        assert_gradients(drawn, dict(zip(given, found, strict=True)), gradients(drawn, dout))
        assert not any(one[ends[-1] :].any() for one in found)


@pytest.mark.parametrize("row", [FUSED, SPLIT], ids=lambda row: row.id)
def test_ends_that_lead_out_of_the_tensors_do_not(row: KernelFamily, served_by: Serve) -> None:
    served_by(row)
    packed = make(Case(queries=(200, 330, 50), options={"causal": True}, **WIDE), "cuda")
    given = inputs(packed)

    def differentiate(**changes: Any) -> tuple[torch.Tensor, ...]:
        named = {**packed.named, **given, **changes, "deterministic": row is SPLIT}
        out = flashgen.attention_varlen(**named)
        return torch.autograd.grad(out, tuple(given.values()), torch.ones_like(out))

    right = differentiate()
    for wild in ([-5, 700, 300, 2**31 - 1], [9, 3, 2, 1], [580, 580, 580, 580]):
        differentiate(cu_seqlens_q=torch.tensor(wild, dtype=torch.int32, device="cuda"), max_seqlen_q=2000)
    torch.cuda.synchronize()
    for one, two in zip(differentiate(), right, strict=True):  # and the tile counter is where it was
        torch.testing.assert_close(one, two, atol=0.02, rtol=0.02)


@pytest.mark.alone
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences_have_the_rate_of_dense_tensors(
    head_dim: int, length: int, causal: bool, served_by: Serve
) -> None:
    """At equal visible pairs: sequences of one length, of which a dense call is a batch. Printed by `-rP`."""
    served_by(FUSED)
    batch, nheads = 16384 // length, 2048 // head_dim
    given = [torch.randn(batch, length, nheads, head_dim, dtype=BF16, device="cuda") for _ in range(3)]
    dense = [x.detach().requires_grad_() for x in given]
    rows = [x.flatten(0, 1).detach().requires_grad_() for x in given]
    ends = torch.arange(0, 16385, length, dtype=torch.int32, device="cuda")
    packed_out = flashgen.attention_varlen(rows[0], rows[1], rows[2], ends, max_seqlen_q=length, causal=causal)
    dense_out = flashgen.attention(dense[0], dense[1], dense[2], layout="bshd", causal=causal)
    packed_dout, dense_dout = torch.randn_like(packed_out), torch.randn_like(dense_out)
    packed, equal = times(
        [
            lambda: torch.autograd.grad(packed_out, rows, packed_dout, retain_graph=True),
            lambda: torch.autograd.grad(dense_out, dense, dense_dout, retain_graph=True),
        ]
    )
    work = 10 * 16384 * length * 2048 / (2 if causal else 1) * 1e-9
    print(f"packed {work / packed:.0f} TFLOP/s, dense {work / equal:.0f}, {equal / packed:.3f} of it")
    assert equal / packed >= 0.96, f"{equal:.3f} ms dense, {packed:.3f} ms packed"  # 0.97 to 1.00 on an H200
