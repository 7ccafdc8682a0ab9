"""A softcap's tanh by the GPU's own instruction: where, by which text, and what serves where it must not."""

from __future__ import annotations

import pytest

from flashgen.cli.bundles import jobs_of
from flashgen.codegen.build import compile_kernel
from flashgen.codegen.common_softcap import TANH
from flashgen.codegen.families import FAMILIES, exact_sibling, family, invalid
from flashgen.codegen.family import KernelFamily
from flashgen.codegen.render import render
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.record import TuningRecord
from flashgen.core.workload import Specialization, Workload
from scripts.crosscompile_jobs import ONE_WARPGROUP
from scripts.machine_loops import disassembled
from tests.tiers import EXHAUSTIVE, first

ROWS = tuple(row for row in FAMILIES if TANH in row.knobs)
H200 = find_device("h200")
CAPPED = Specialization.parse("fwd-bf16-d128-causal-softcap")


def test_forward_families_have_the_knob() -> None:
    assert [row.id for row in ROWS] == [row.id for row in FAMILIES if row.direction == "forward"]


@pytest.mark.parametrize(
    ("key", "device", "expected"),
    [
        ("fwd-bf16-d128-causal-softcap", "h200", None),
        ("fwd-fp16-d128-softcap", "h200", None),
        ("fwd-bf16-d128-softcap", "a100", None),
        ("fwd-bf16-d128-causal", "h200", "without a softcap"),
        ("fwd-fp32-d64-softcap", "h200", "outputs of fp32"),
        ("fwd-tf32-d64-softcap", "h200", "outputs of tf32"),
        ("fwd-bf16-d128-softcap", "mi300x", "no instruction"),
    ],
)
def test_it_is_for_softcaps_and_outputs_of_16_bits_on_nvidia(key: str, device: str, expected: str | None) -> None:
    spec, where = Specialization.parse(key), find_device(device)
    portable = family("portable_forward")
    reason = invalid(portable.default(spec, where).replace(tanh="hardware"), spec, where)
    assert reason is None if expected is None else reason is not None and expected in reason


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_it_is_searched_and_never_the_default(row: KernelFamily) -> None:
    default = row.default(CAPPED, H200)
    assert default["tanh"] == "exact"
    assert row.allowed_values(CAPPED)["tanh"] == ("exact", "hardware")
    plain = Specialization.parse("fwd-bf16-d128-causal")
    assert row.allowed_values(plain)["tanh"] == ("exact",)
    assert all(config["tanh"] == "exact" for config in row.seed_configs(plain, H200))
    if row.id == "hopper_forward":
        seeds = row.seed_configs(CAPPED, H200)
        assert seeds[0] == default.replace(tanh="hardware")
        assert len(seeds) == len({exact_sibling(config, CAPPED) for config in seeds}) * 2 - 1, "each both ways"


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.id)
def test_an_exact_sibling_differs_in_nothing_else(row: KernelFamily) -> None:
    spec = CAPPED if row.direction == "forward" else Specialization.parse("bwd-bf16-d128-causal-softcap")
    default = row.default(spec, H200)
    assert exact_sibling(default, spec) == default
    if row in ROWS:
        assert exact_sibling(default.replace(tanh="hardware"), spec) == default


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_the_exact_text_does_not_know_the_knob(row: KernelFamily) -> None:
    default = row.default(CAPPED, H200)
    older = Config.of(row.id, {name: value for name, value in default.knobs if name != "tanh"})
    assert render(CAPPED, older).text == render(CAPPED, default).text
    assert "tanh=" not in render(CAPPED, default).text
    text = render(CAPPED, default.replace(tanh="hardware")).text
    assert text.count("tanh.approx.f32") == 1
    assert "exp2(s * softcap_rate)" not in text


@EXHAUSTIVE
@pytest.mark.parametrize("row", first(1, ROWS), ids=lambda row: row.id)
def test_one_special_function_a_score_instead_of_two(row: KernelFamily) -> None:
    spec = Specialization.parse("fwd-bf16-d64-softcap")  # of few products and no masked blocks: a third of the time
    few = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2}
    if row.id == "hopper_forward":
        few = {**ONE_WARPGROUP, "blocks_per_sm": 3}
    config = row.default(spec, H200).replace(**few)
    assert invalid(config, spec, H200) is None
    exact, hardware = (
        disassembled(compile_kernel(spec, config.replace(tanh=kind), H200).handle.asm["cubin"])
        for kind in ("exact", "hardware")
    )
    assert exact.count("MUFU.TANH") == 0 < hardware.count("MUFU.TANH")
    assert hardware.count("MUFU.EX2") + hardware.count("MUFU.TANH") <= exact.count("MUFU.EX2")


def test_a_bundle_has_what_serves_calls_with_an_lse() -> None:
    workload = Workload.parse("bf16-b1-h16-s4096-d128-causal-softcap")
    hardware = family("portable_forward").default(CAPPED, H200).replace(tanh="hardware")
    record = TuningRecord(workload=workload, device=H200, config=hardware, provenance="predicted")
    shared = hardware.replace(split_keys=True)
    able = [each for config in (hardware, shared) for each in (config, exact_sibling(config, CAPPED))]
    assert [config for _, config, _ in jobs_of([record])] == able
