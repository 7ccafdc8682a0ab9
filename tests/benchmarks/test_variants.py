"""Variants of an implementation: which of them races, on a fake clock, and what FlexAttention's promise and compute."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch

from benchmarks import fa4, flex, flex_variants
from benchmarks.flex_variants import DEFAULT, FlexVariants, Variant, class_of, plan, sound_options, with_flex
from benchmarks.impls import IMPLS, Call, Impl
from benchmarks.training_impls import BACKWARD, alone
from flashgen.core.workload import Workload
from flashgen.measure.inputs import make_inputs
from tests.benchmarks.races import CPU, FEATURES, FakeGpu, close, impl_of, raced
from tests.tiers import first

CAUSAL = Workload(batch=4, nheads=16, seqlen_q=4096, head_dim=128, causal=True)
LONGER = CAUSAL.with_shape(batch=1, seqlen_q=16384, seqlen_k=16384)


@dataclass
class Listed:
    """Tries each of `entrants` once; `seen` is what it was last told."""

    entrants: list[Impl]
    seen: dict[str, float] = field(default_factory=dict)

    def next(self, workload: Workload, seen: Mapping[str, float]) -> Impl | None:
        self.seen = dict(seen)
        return next((each for each in self.entrants if each.version() not in seen), None)


def variant_of(gpu: FakeGpu, version: str, ms: float, *, error: float = 0.0, fail_at: int = 0) -> Impl:
    made = impl_of(gpu, "various", ms, error=error, fail_at=fail_at)
    return replace(made, version=lambda: version)


def test_the_fastest_variant_races_and_one_that_fails_costs_itself() -> None:
    gpu = FakeGpu()
    listed = Listed(
        [
            variant_of(gpu, "1 slow", 3.0),
            variant_of(gpu, "1 nan", 0.1, error=float("nan")),
            variant_of(gpu, "1 refused", 0.1, fail_at=1),
            variant_of(gpu, "1 fast", 2.0),
            variant_of(gpu, "1 breaks in its trial", 2.5, fail_at=20),
        ]
    )
    various = replace(impl_of(gpu, "various", 1.0), variants=listed)
    other, found = raced(gpu, impl_of(gpu, "other", 1.0), various)
    assert (found.impl.name, found.impl.version(), found.reason) == ("various", "1 fast", None)
    assert (other.median_ms, found.median_ms) == pytest.approx((1.0, 2.0))
    assert found.trials == (
        "1 slow: 3.0000 ms",
        "1 nan: its output is not finite everywhere",
        "1 refused: RuntimeError: it broke",
        "1 fast: 2.0000 ms",
        "1 breaks in its trial: RuntimeError: it broke",
    )
    assert other.trials == ()
    assert listed.seen == {
        "1 slow": pytest.approx(3.0),
        "1 nan": math.inf,
        "1 refused": math.inf,
        "1 fast": pytest.approx(2.0),
        "1 breaks in its trial": math.inf,
    }


def test_if_all_variants_fail_each_says_why() -> None:
    gpu = FakeGpu()
    entrants = [variant_of(gpu, "1 a", 1.0, fail_at=1), variant_of(gpu, "1 b", 1.0, error=0.1)]
    various = replace(impl_of(gpu, "various", 1.0), variants=Listed(entrants))
    (found,) = raced(gpu, various)
    assert found.reason == "1 a: RuntimeError: it broke; 1 b: it computes something else (relative error 0.1)"
    refusing = replace(various, unsupported=lambda workload: "not today")
    assert raced(gpu, refusing)[0].reason == "not today"


def tried(variants: FlexVariants, workload: Workload, times: Mapping[str, float]) -> list[str]:
    """The names of the variants in the order of a trial that gives these times; any other fails."""
    seen: dict[str, float] = {}
    while (chosen := variants.next(workload, seen)) is not None:
        name = chosen.version().removeprefix(torch.__version__).strip()
        seen[chosen.version()] = times.get(name, math.inf)
    return [version.removeprefix(torch.__version__).strip() for version in seen]


def as_impl(variant: Variant) -> Impl:
    return replace(IMPLS[0], version=lambda: variant.version)


FIRST, SECOND = "TMA 64x64 3s 4w", "TMA 128x64 3s 8w"


def test_only_what_comes_near_is_refined_and_tried_on_the_next_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "is_installed", lambda: True)
    ahead = FlexVariants(as_impl)
    assert tried(ahead, CAUSAL, {"FLASH": 1.0, FIRST: 1.3}) == ["FLASH", FIRST]
    assert tried(ahead, LONGER, {"FLASH": 1.0, FIRST: 1.3}) == ["FLASH"]
    close_by = FlexVariants(as_impl)
    assert tried(close_by, CAUSAL, {"FLASH": 1.0, FIRST: 1.05, SECOND: 0.99, "": 1.5}) == ["FLASH", FIRST, SECOND, ""]
    assert tried(close_by, LONGER, {"FLASH": 1.0, FIRST: 1.05, SECOND: 0.99}) == ["FLASH", FIRST, SECOND]
    behind = FlexVariants(as_impl)
    assert tried(behind, CAUSAL, {FIRST: 1.0, SECOND: 1.2, "": 1.3}) == ["FLASH", FIRST, SECOND, ""]
    assert tried(behind, LONGER, {"FLASH": 0.8, FIRST: 1.0}) == ["FLASH", FIRST]  # a queue may hide its host there


def test_the_default_is_left_if_all_others_fail() -> None:
    variants = FlexVariants(as_impl)
    assert tried(variants, CAUSAL, {"": 1.0}) == [FIRST, SECOND, ""]
    assert tried(variants, LONGER, {"": 1.0}) == [FIRST, ""]
    changed = FlexVariants(as_impl)
    tried(changed, CAUSAL, {FIRST: 1.0})
    assert tried(changed, LONGER, {"": 1.0}) == [FIRST, ""]


def test_plans_follow_the_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(workload: Workload, **options: bool) -> list[str]:
        made = plan(workload, **options)
        return [variant.name for variant in (*made.first, *made.finer)]

    monkeypatch.setattr(fa4, "is_installed", lambda: True)
    wide = replace(CAUSAL, head_dim=256, head_dim_v=256)
    assert names(CAUSAL) == ["FLASH", FIRST, SECOND, DEFAULT.name]
    assert names(CAUSAL, flash=False) == [FIRST, SECOND, DEFAULT.name]
    assert names(replace(CAUSAL, sink=True)) == [FIRST, SECOND, DEFAULT.name]
    assert names(replace(CAUSAL, window_left=127))[2] == f"{FIRST} mask 64x64"
    assert names(wide)[:2] == ["FLASH", "TMA 64x32 3s 4w"]
    assert names(replace(CAUSAL, direction="backward"))[2:] == [f"{FIRST} bwd 64x64", DEFAULT.name]
    assert names(replace(CAUSAL, head_dim=512, head_dim_v=512))[0] == "TMA 64x32 3s 4w"
    # tiles of FlashAttention-4: forward, and of both passes
    assert plan(wide).first[0].block_size == (128, 80)
    assert plan(replace(wide, direction="backward")).first[0].block_size == (128, 64)
    assert plan(replace(CAUSAL, head_dim=64, head_dim_v=64)).first[0].block_size == (192, 128)


def test_classes_hold_lengths_together_and_kinds_apart() -> None:
    others = [
        replace(CAUSAL, causal=False),
        replace(CAUSAL, softcap=True),
        replace(CAUSAL, nheads_k=4),
        replace(CAUSAL, dtype="fp16"),
        replace(CAUSAL, window_left=127),
        replace(CAUSAL, window_left=4095),
        CAUSAL.with_shape(seqlen_q=4000, seqlen_k=4000),
    ]
    kinds = {class_of(workload) for workload in (CAUSAL, *others)}
    assert len(kinds) == 1 + len(others)
    assert class_of(LONGER) == class_of(CAUSAL)
    assert class_of(replace(CAUSAL, window_left=255)) == class_of(replace(CAUSAL, window_left=127))


PROMISES = {
    "b1-h1-sq384-sk384-d32-causal": True,
    "b1-h1-sq200-sk430-d32-causal": True,
    "b1-h1-sq430-sk200-d32-causal": False,
    "b1-h1-sq512-sk512-d32-wl150-causal": False,
    "b1-h1-sq512-sk512-d32-wl100-wr30": False,
    "b1-h1-sq256-sk256-d32-mask": False,
}


@pytest.mark.parametrize(("key", "promised"), PROMISES.items())
def test_promises_are_kept(key: str, promised: bool) -> None:
    """Blocks that follow one another, and a key for every row in the first of those that are partly hidden."""
    workload = Workload.parse(key)
    options = sound_options(workload)
    assert {options.get(name, False) for name in ("BLOCKS_ARE_CONTIGUOUS", "ROWS_GUARANTEED_SAFE")} == {promised}
    visible = flex.mask_mod(workload, make_inputs(workload, copies=1, seed=1, device=CPU).features[0])
    assert visible is not None
    lengths = (workload.seqlen_q, workload.seqlen_k)
    blocks = flex.flex_module().create_block_mask(visible, None, None, *lengths, device="cpu")
    zero = torch.zeros((), dtype=torch.int64)
    seen = visible(zero, zero, torch.arange(lengths[0])[:, None], torch.arange(lengths[1]))
    partial, full = (blocks.kv_num_blocks, blocks.kv_indices), (blocks.full_kv_num_blocks, blocks.full_kv_indices)
    kept = True
    for counts, indices in (partial, full):
        for count, found in zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True):
            kept &= found[:count] == list(range(found[0], found[0] + count))
    for block, found in enumerate(partial[1][0, 0].tolist()):
        part = seen[128 * block : 128 * (block + 1), 128 * found[0] : 128 * found[0] + 128]
        kept &= bool(part.any(dim=1).all())
    assert kept or not promised


def test_the_scale_stays_where_a_function_sees_scores() -> None:
    assert sound_options(CAUSAL)["PRESCALE_QK"]
    assert all("PRESCALE_QK" not in sound_options(replace(CAUSAL, **{name: True})) for name in ("softcap", "alibi"))
    assert "PRESCALE_QK" not in sound_options(replace(CAUSAL, bias="full"))
    packed = Workload.parse("b8-tq16384-s8192-h32-hk8-d128-causal-varlen-ramp")  # a document may begin within a block
    assert sound_options(packed) == {"PRESCALE_QK": True}
    assert (64, 64) in [variant.block_size for variant in plan(packed).finer]


@pytest.mark.parametrize("block_size", first(1, map(pytest.param, [(64, 64), (192, 80)])), ids=str)
@pytest.mark.parametrize("workload", FEATURES[::4], ids=lambda w: w.key)
def test_blocks_of_any_size_give_the_same(workload: Workload, block_size: tuple[int, int]) -> None:
    inputs = make_inputs(workload, copies=2, seed=1, device=CPU)
    inputs = replace(inputs, features=(inputs.features[0],) * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(Call(run=flex.flex_call(flex.attend, workload, inputs, block_size=block_size)), workload, inputs)


def test_flex_is_called_with_the_options_of_a_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Mapping[str, object]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Mapping[str, object]) -> torch.Tensor:
        asked.append(options["kernel_options"])
        return q

    monkeypatch.setattr(flex_variants, "compiled_flex", lambda: attend)
    impls = with_flex([impl for impl in IMPLS if impl.name in ("flex", "standard")], "triton")
    theirs = next(impl for impl in impls if impl.name == "flex")
    small = Workload(batch=1, nheads=1, seqlen_q=16, head_dim=32, causal=True)
    assert theirs.variants is not None
    chosen = theirs.variants.next(small, {})
    assert chosen is not None
    assert chosen.version() == f"{torch.__version__} {FIRST}"
    chosen.prepare(small, make_inputs(small, copies=1, seed=1, device=CPU)).run(0)
    assert (asked[0]["USE_TMA"], asked[0]["fwd_BLOCK_M"], asked[0]["fwd_num_warps"]) == (True, 64, 4)
    assert all(impl.variants is None for impl in with_flex(impls[:1], "default") if impl.name != "flex")
    assert with_flex(IMPLS, "default") == IMPLS


def test_a_backward_pass_has_variants_of_its_own() -> None:
    theirs = next(impl for impl in with_flex(BACKWARD, "triton", alone) if impl.name == "flex")
    assert theirs.variants is not None
    workload = replace(CAUSAL, direction="backward")
    chosen = theirs.variants.next(workload, {})
    assert chosen is not None
    assert (chosen.unsupported(workload), chosen.unsupported(CAUSAL)) == (None, "a forward pass is not training")


def test_a_bias_that_is_too_large_for_triton_is_left_to_the_other_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    large = replace(LONGER, causal=False, bias="full")
    reason = f"a bias of {16 * 16384**2} elements is beyond its 32-bit indices"
    theirs = next(impl for impl in with_flex(IMPLS, "best") if impl.name == "flex")
    assert theirs.variants is not None
    assert theirs.unsupported(large) == reason
    monkeypatch.setattr(fa4, "is_installed", lambda: True)
    assert theirs.unsupported(large) is None
    flash = theirs.variants.next(large, {})
    assert flash is not None
    assert (flash.version().split()[-1], flash.unsupported(large)) == ("FLASH", None)
    triton = theirs.variants.next(large, {flash.version(): math.inf})
    assert triton is not None
    assert triton.unsupported(large) == reason
    alone_with_triton = next(impl for impl in with_flex(IMPLS, "triton") if impl.name == "flex")
    assert alone_with_triton.unsupported(large) == reason
