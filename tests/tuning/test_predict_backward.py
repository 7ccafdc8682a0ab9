"""The analytic model of backward passes: levels near what was measured once, and the right sign for every cause."""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.codegen.cost import CostModel
from flashgen.codegen.families import FAMILIES, family, unsupported
from flashgen.codegen.family import KernelFamily
from flashgen.codegen.space import search_space
from flashgen.core.compiled import Compiled, Taken
from flashgen.core.config import Config
from flashgen.core.device import CATALOGUE, Device, find_device
from flashgen.core.errors import UnsupportedError
from flashgen.core.workload import Workload
from flashgen.tuning.candidates import Candidates, by_prediction, related, seed_configs, tile_of
from flashgen.tuning.predict import LAUNCH_MS, cost_model, estimate, predict_all, predict_ms
from flashgen.tuning.seed_lists import by_hand
from flashgen.tuning.workloads import collect

H200 = find_device("h200")
LONG = Workload.parse("bwd-b2-h16-s8192-d128")
SPLIT, FUSED = family("portable_backward_split"), family("portable_backward_fused")
FAST = {"block_m": 64, "block_n": 64, "num_warps": 8, "num_stages": 2, "loads": "descriptor", "split_d": False}
FAST |= {"products": "ieee", "heads_per_tile": 0}
FAST_DQ = {"dq_block_m": 128, "dq_block_n": 64, "dq_num_warps": 8, "dq_num_stages": 3}


def portable(*, fused: bool, **changes: int | str | bool) -> Config:
    if fused:
        return Config.of(FUSED.id, {**FAST, "block_n": 128, "heads_per_group": 1, **changes})
    return Config.of(SPLIT.id, {**FAST, **FAST_DQ, "heads_per_group": 1, **changes})


def tflops(workload: Workload, config: Config, device: Device = H200) -> float:
    return workload.flops / predict_ms(workload, config, device, estimate(workload, config, device)) / 1e9


@pytest.mark.parametrize(
    ("shape", "family_id", "measured"),
    [
        # an H200, 16k tokens and hidden size 2048: single configs, the portable ones of short sweeps
        ("b8-h16-s2048-d128", "portable_backward_split", 380),
        ("b8-h16-s2048-d128-causal", "portable_backward_split", 312),
        ("b8-h32-s2048-d64", "portable_backward_split", 282),
        ("b8-h16-s2048-d128", "portable_backward_fused", 360),
        ("b2-h16-s8192-d128", "portable_backward_fused", 333),
        ("b8-h32-s2048-d64", "portable_backward_fused", 310),
        ("b8-h16-s2048-d128", "hopper_backward_fused", 513),
        ("b8-h16-s2048-d128-causal", "hopper_backward_fused", 444),
        ("b2-h16-s8192-d128-causal", "hopper_backward_fused", 551),
        ("b2-h32-s8192-d64", "hopper_backward_fused", 485),
        ("b32-h16-s512-d128-causal", "hopper_backward_fused", 226),
        ("b8-h16-s2048-d128", "hopper_backward_split", 465),
        ("b8-h32-s2048-d64", "hopper_backward_split", 408),
    ],
)
def test_levels_are_near_what_was_measured(shape: str, family_id: str, measured: float) -> None:
    workload = Workload.parse(f"bwd-{shape}")
    if family_id.startswith("hopper"):
        config = family(family_id).default(workload.specialization, H200)
    else:
        config = portable(fused=family_id == FUSED.id)
    assert 0.7 * measured < tflops(workload, config) < 1.3 * measured


@pytest.mark.parametrize("name", ["h200", "a100", "rtx 4090", "rtx 5090", "mi300x"])
def test_defaults_of_every_preset_are_predicted_below_the_peak(name: str) -> None:
    device = find_device(name)
    for workload in collect(models=["training"]):
        defaults = [row.default(workload.specialization, device) for row in applicable(workload, device)]
        assert defaults, workload.key
        for config in defaults:
            assert cost_model(config)
            compiled = estimate(workload, config, device)
            assert LAUNCH_MS < predict_ms(workload, config, device, compiled) < 1e4
            assert tflops(workload, config, device) < device.peak_tflops


def applicable(workload: Workload, device: Device) -> list[KernelFamily]:
    spec = workload.specialization
    return [row for row in FAMILIES if unsupported(row, spec, device) is None]


@pytest.mark.parametrize("fused", [False, True])
def test_what_makes_a_kernel_slower_makes_the_prediction_slower(fused: bool) -> None:
    config = portable(fused=fused)
    clean = Compiled(registers=168, spills=0, shared_bytes=100_000, occupancy=2)
    base = predict_ms(LONG, config, H200, clean)
    assert predict_ms(LONG, config, H200, dataclasses.replace(clean, spills=400)) > base
    assert predict_ms(LONG, config, H200, dataclasses.replace(clean, occupancy=1)) > base
    assert predict_ms(LONG, config.replace(num_stages=1), H200, clean) > base
    assert predict_ms(LONG, config.replace(loads="pointer"), H200, clean) > base
    assert predict_ms(LONG, config.replace(block_m=16), H200, clean) > base
    half = dataclasses.replace(H200, num_sms=H200.num_sms // 2, peak_tflops=H200.peak_tflops / 2)
    assert predict_ms(LONG, config, half, clean) == pytest.approx(2 * base, rel=0.15)


def test_each_kernel_is_predicted_from_what_it_takes() -> None:
    good = Taken(registers=128, spills=0, shared_bytes=65536, occupancy=2)
    spilling = dataclasses.replace(good, spills=2000)
    config = portable(fused=False)
    times = [
        predict_ms(LONG, config, H200, Compiled.of({f"{SPLIT.id}_dkdv": one, f"{SPLIT.id}_dq": other}))
        for one, other in ((good, good), (spilling, good), (good, spilling), (spilling, spilling))
    ]
    assert times[0] < min(times[1:3])
    assert times[1] + times[2] == pytest.approx(times[0] + times[3])


def test_a_kernel_of_its_own_for_dq_depends_on_its_own_knobs() -> None:
    base, other = portable(fused=False), portable(fused=False, dq_block_n=16)
    times = predict_all(LONG, [base, other], H200)
    assert times[other] > times[base]
    for config in (base, other):
        assert times[config] == pytest.approx(predict_ms(LONG, config, H200, estimate(LONG, config, H200)))
    assert knobs_of(SPLIT.cost_model) == {knob.name for knob in SPLIT.knobs} == dict(base.knobs).keys()
    assert knobs_of(FUSED.cost_model) <= {knob.name for knob in FUSED.knobs}


def knobs_of(model: CostModel | None) -> set[str]:
    assert model is not None
    return {name for kernel in model.kernels for name in kernel.knobs or ()}


def test_masks_windows_and_groups_cost_what_they_show() -> None:
    config = portable(fused=False)

    def ms(shape: str) -> float:
        workload = Workload.parse(shape)
        return predict_ms(workload, config, H200, estimate(workload, config, H200))

    plain, causal = ms("bwd-b2-h16-s8192-d128"), ms("bwd-b2-h16-s8192-d128-causal")
    assert 0.5 * plain < causal < 0.65 * plain
    assert ms("bwd-b2-h16-s8192-d128-causal-wl1023") < 0.4 * causal
    assert ms("bwd-b2-h16-hk4-s8192-d128") == pytest.approx(plain, rel=0.1)
    assert causal < ms("bwd-b2-h16-s8192-d128-causal-softcap") < 2 * causal
    assert plain < ms("bwd-b2-h16-s8192-d128-mask") < 3 * plain
    assert ms("bwd-b2-h16-s8192-d128-causal-sink") == causal
    assert ms("bwd-b0-h16-s8192-d128") == LAUNCH_MS


def test_a_backward_pass_costs_more_than_a_forward_pass() -> None:
    for device in CATALOGUE:
        for shape in ("b8-h16-s2048-d64-causal", "b2-h16-s8192-d128"):
            forward, backward = (Workload.parse(f"{name}-{shape}") for name in ("fwd", "bwd"))
            times = []
            for workload in (forward, backward):
                rows = [row for row in applicable(workload, device) if row.cost_model]
                defaults = [row.default(workload.specialization, device) for row in rows]
                times.append(min(predict_all(workload, defaults, device).values()))
            assert 1.5 < times[1] / times[0] < 8, device.name


# --- candidates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_determinism_decides_which_families_are_searched(deterministic: bool) -> None:
    workload = dataclasses.replace(LONG, deterministic=deterministic)
    found = Candidates.of(workload, H200)
    families = [space.family for space in found.spaces]
    assert SPLIT.id in families
    assert (FUSED.id in families) is not deterministic
    assert all(family(name).direction == "backward" for name in families)
    assert all(family(name).is_deterministic or not deterministic for name in families)


def test_favourites_of_two_kernels_are_different_tiles() -> None:
    found = Candidates.of(LONG, H200)
    liked = [
        config
        for config in dict.fromkeys(c for c, _ in seed_configs(found, LONG, H200, 6, by_hand))
        if config.family == SPLIT.id
    ]
    tiles = [tile_of(config) for config in liked]
    assert len(set(tiles)) == len(tiles) >= 4


def test_the_model_ranks_every_config_of_both_portable_families() -> None:
    for row in (SPLIT, FUSED):
        configs = search_space(row, LONG.specialization, H200)
        default = row.default(LONG.specialization, H200)
        order = by_prediction(configs, default, LONG, H200)
        assert set(order) == set(configs)
        spills = [estimate(LONG, config, H200).spills for config in order]
        assert max(spills[:3]) <= row.tolerated_spills  # what is expected to be rejected waits
        assert max(spills) > min(spills)


def test_a_search_begins_with_winners_of_both_kinds_of_backward_passes() -> None:
    plain, same_bits = (dataclasses.replace(LONG, deterministic=flag).specialization for flag in (False, True))
    assert related(plain) == (plain.workload_class, same_bits.workload_class)
    assert related(same_bits) == (same_bits.workload_class, plain.workload_class)
    forward = dataclasses.replace(LONG, direction="forward").specialization
    assert related(forward) == (forward.workload_class,)


def test_what_no_family_computes_has_no_candidates() -> None:
    with pytest.raises(UnsupportedError, match=SPLIT.id):
        Candidates.of(dataclasses.replace(LONG, page_size=16), H200)
