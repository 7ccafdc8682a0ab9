"""The analytic model: levels near what was measured once, and the right sign for every cause it knows."""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.codegen.families import family, unsupported
from flashgen.codegen.space import search_space
from flashgen.core.compiled import Compiled
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import CATALOGUE, Device, find_device
from flashgen.core.errors import TuningError
from flashgen.core.workload import Workload
from flashgen.tuning.predict import LAUNCH_MS, estimate, predict_ms
from flashgen.tuning.workloads import collect
from tests.tiers import first

PORTABLE = family("portable_forward")
H200 = find_device("h200")
LONG = Workload(batch=1, nheads=16, seqlen_q=16384, head_dim=128)
CLEAN = Compiled(registers=168, spills=0, shared_bytes=100_000, occupancy=2)


def tflops(workload: Workload, config: Config, device: Device = H200) -> float:
    return workload.flops / predict_ms(workload, config, device, estimate(workload, config, device)) / 1e9


@pytest.mark.parametrize(
    ("workload", "measured"),
    first(
        1,
        [
            # the best that plain Triton reached on an H200 in short sweeps
            (LONG, 492),
            (dataclasses.replace(LONG, causal=True), 492),
            (Workload(batch=8, nheads=32, seqlen_q=2048, head_dim=64), 419),
            (Workload(batch=8, nheads=32, seqlen_q=2048, head_dim=64, causal=True), 378),
        ],
    ),
)
def test_the_best_prediction_is_near_what_plain_triton_reaches(workload: Workload, measured: float) -> None:
    best = max(tflops(workload, config) for config in search_space(PORTABLE, workload.specialization, H200))
    assert 0.75 * measured < best < 1.25 * measured


@pytest.mark.parametrize("device", CATALOGUE, ids=lambda device: device.slug)
def test_defaults_of_all_devices_are_predicted_below_their_peak(device: Device) -> None:
    for head_dim in (64, 128, 256):
        workload = dataclasses.replace(LONG, head_dim=head_dim, head_dim_v=head_dim)
        config = PORTABLE.default(workload.specialization, device)
        assert 0.1 * device.peak_tflops < tflops(workload, config, device) < device.peak_tflops


def test_what_makes_a_kernel_slower_makes_the_prediction_slower() -> None:
    config = PORTABLE.default(LONG.specialization, H200)
    base = predict_ms(LONG, config, H200, CLEAN)
    assert predict_ms(LONG, config, H200, dataclasses.replace(CLEAN, spills=400)) > 1.1 * base
    assert predict_ms(LONG, config, H200, dataclasses.replace(CLEAN, occupancy=1)) > base
    assert predict_ms(LONG, config.replace(num_stages=1), H200, CLEAN) > base
    assert predict_ms(LONG, config.replace(loads="pointer"), H200, CLEAN) > base
    assert predict_ms(LONG, config.replace(block_n=16), H200, CLEAN) > base
    half = dataclasses.replace(H200, num_sms=H200.num_sms // 2, peak_tflops=H200.peak_tflops / 2)
    assert predict_ms(LONG, config, half, CLEAN) == pytest.approx(2 * base, rel=0.1)


def test_warps_that_share_rows_wait_for_each_other() -> None:
    a100 = find_device("a100")
    config = PORTABLE.default(LONG.specialization, a100).replace(block_m=16, block_n=64, num_warps=4)
    assert predict_ms(LONG, config, a100, CLEAN) > predict_ms(LONG, config.replace(block_m=64), a100, CLEAN)


def test_heavy_programs_first_shorten_the_tail() -> None:
    causal = Workload(batch=1, nheads=8, seqlen_q=8192, head_dim=128, causal=True)
    config = PORTABLE.default(causal.specialization, H200)
    first, last = config.replace(heavy_first=True), config.replace(heavy_first=False)
    assert predict_ms(causal, first, H200, CLEAN) < predict_ms(causal, last, H200, CLEAN)


def test_waves_are_quantised() -> None:
    """One program more than the slots of a wave costs nearly another wave."""
    config = PORTABLE.default(LONG.specialization, H200)
    rows = config.integer("block_m")
    one = dataclasses.replace(CLEAN, occupancy=1)

    def ms(blocks: int) -> float:
        workload = Workload(batch=blocks, nheads=1, seqlen_q=rows, seqlen_k=8192, head_dim=128)
        return predict_ms(workload, config, H200, one) - LAUNCH_MS

    assert ms(132) == pytest.approx(ms(100), rel=0.01)
    assert ms(133) == pytest.approx(2 * ms(132), rel=0.01)


def test_a_tile_larger_than_the_problem_is_work_done_for_nothing() -> None:
    short = Workload(batch=64, nheads=16, seqlen_q=64, head_dim=128)
    config = PORTABLE.default(short.specialization, H200).replace(num_warps=8)
    small, large = config.replace(block_m=64, num_warps=4), config.replace(block_m=256)
    assert predict_ms(short, small, H200, CLEAN) < predict_ms(short, large, H200, CLEAN)


def test_decoding_is_bound_by_memory() -> None:
    decode = Workload(batch=64, nheads=32, seqlen_q=1, seqlen_k=8192, head_dim=128)
    config = PORTABLE.default(decode.specialization, H200)
    lower_bound_ms = decode.bytes / (H200.bandwidth_gbs * 1e6)
    assert predict_ms(decode, config, H200, CLEAN) > lower_bound_ms


def test_nothing_to_do_costs_a_launch() -> None:
    empty = Workload(batch=0, nheads=1, seqlen_q=128, head_dim=64)
    config = PORTABLE.default(empty.specialization, H200)
    assert predict_ms(empty, config, H200, CLEAN) == LAUNCH_MS


# --- features -----------------------------------------------------------------------------------------------------


def ms(workload: Workload, **knobs: KnobValue) -> float:
    """Of one fixed tile, so that only the workload differs."""
    return predict_ms(workload, TILE.replace(**knobs), H200, CLEAN)


TILE = PORTABLE.default(LONG.specialization, H200)
CAUSAL = dataclasses.replace(LONG, causal=True)


@pytest.mark.parametrize(
    "features",
    [{"softcap": True}, {"alibi": True}, {"bias": "keys"}, {"bias": "full"}, {"mask": "keys"}, {"mask": "full"}],
    ids=str,
)
def test_every_feature_of_a_score_costs_something_and_not_everything(features: dict[str, object]) -> None:
    for plain in (LONG, CAUSAL):
        assert ms(plain) < ms(dataclasses.replace(plain, **features)) < 3 * ms(plain)


def test_one_value_for_each_key_is_cheaper_than_one_for_each_pair() -> None:
    for name in ("bias", "mask"):
        assert ms(dataclasses.replace(LONG, **{name: "keys"})) < ms(dataclasses.replace(LONG, **{name: "full"}))


def test_sinks_cost_nothing() -> None:
    assert ms(dataclasses.replace(CAUSAL, sink=True)) == ms(CAUSAL)


def test_the_cost_of_a_window_follows_what_it_shows() -> None:
    """Twice the sequence is twice the work, and a window as wide as the sequence is none."""
    window = dataclasses.replace(CAUSAL, window_left=1023)
    double = dataclasses.replace(window, seqlen_q=2 * window.seqlen_q, seqlen_k=2 * window.seqlen_k)
    assert ms(double) == pytest.approx(2 * ms(window), rel=0.1)
    assert ms(window) < 0.25 * ms(CAUSAL)
    widths = [ms(dataclasses.replace(CAUSAL, window_left=left)) for left in (127, 1023, 4095, CAUSAL.seqlen_k - 1)]
    assert widths == sorted(widths)
    assert widths[-1] == pytest.approx(ms(CAUSAL), rel=0.05)


def test_wide_steps_are_worth_less_behind_a_narrow_window() -> None:
    def gain(workload: Workload) -> float:
        return ms(workload, block_n=32) / ms(workload, block_n=128)

    assert gain(dataclasses.replace(CAUSAL, window_left=63)) < gain(CAUSAL)


def test_a_bias_of_every_pair_is_bound_by_its_bytes_where_heads_are_small() -> None:
    biased = Workload(batch=1, nheads=16, seqlen_q=8192, head_dim=16, bias="full")
    lower_bound_ms = 16 * 8192 * 8192 * 2 / (H200.bandwidth_gbs * 1e6)
    assert predict_ms(biased, TILE, H200, CLEAN) > lower_bound_ms


def test_precisions_are_ordered_as_their_rates() -> None:
    half, tf32, fp32 = (dataclasses.replace(LONG, dtype=dtype) for dtype in ("bf16", "tf32", "fp32"))
    assert ms(half) < ms(tf32) < ms(fp32)
    assert ms(tf32) < 3 * ms(half)


@pytest.mark.parametrize("head_dim", [72, 80, 96, 160, 192])
def test_less_padding_is_less_work(head_dim: int) -> None:
    odd = dataclasses.replace(LONG, head_dim=head_dim, head_dim_v=head_dim)
    assert ms(odd, split_d=True) < ms(odd, split_d=False)
    assert ms(LONG, split_d=True) == ms(LONG, split_d=False)


@pytest.mark.parametrize("name", ["h200", "a100", "rtx 4090", "rtx 5090", "mi300x"])
def test_defaults_of_every_preset_are_predicted_below_the_peak(name: str) -> None:
    device, row = find_device(name), PORTABLE
    served = [w for w in collect(models=["all"], direction="forward") if w.head_dim != 512]
    served = [w for w in served if unsupported(row, w.specialization, device) is None]
    assert len(served) >= 120
    for workload in served:
        config = row.default(workload.specialization, device)
        assert LAUNCH_MS < predict_ms(workload, config, device, estimate(workload, config, device)) < 1e4
        assert tflops(workload, config, device) < device.peak_tflops


def test_what_cannot_be_predicted_is_refused() -> None:
    config = PORTABLE.default(LONG.specialization, H200)
    with pytest.raises(TuningError, match=r"covers .*portable_forward"):
        predict_ms(LONG, Config.of("other", {}), H200, CLEAN)
    with pytest.raises(TuningError, match="fit"):
        predict_ms(LONG, config, H200, dataclasses.replace(CLEAN, occupancy=0))
