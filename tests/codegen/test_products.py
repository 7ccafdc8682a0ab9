"""fp32 tiles that are multiplied in parts: where, by which text, and that nothing else changes."""

from __future__ import annotations

import pytest

from flashgen.cli.arguments import parse_config
from flashgen.codegen.build import compile_kernel
from flashgen.codegen.common_products import PRODUCTS
from flashgen.codegen.families import FAMILIES, family, invalid, validate
from flashgen.codegen.family import KernelFamily
from flashgen.codegen.render import render
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from scripts.machine_loops import disassembled
from tests.tiers import EXHAUSTIVE

ROWS = tuple(row for row in FAMILIES if PRODUCTS in row.knobs)
PORTABLE = family("portable_forward")
H200 = find_device("h200")
FP32 = Specialization.parse("fwd-fp32-d64-causal")


def test_the_portable_families_have_the_knob() -> None:
    assert [row.id for row in ROWS] == [row.id for row in FAMILIES if row.id.startswith("portable")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
@pytest.mark.parametrize("kind", ["tf32x3", "bf16x6"])
def test_parts_are_of_fp32_on_nvidia(row: KernelFamily, kind: str) -> None:
    for dtype, device, expected in (
        ("fp32", "h200", None),
        ("fp32", "a100", None),
        ("fp32", "b200", "traps" if kind == "bf16x6" else None),
        ("fp32", "mi300x", "NVIDIA"),
        ("bf16", "h200", "no parts"),
        ("tf32", "h200", "no parts"),
    ):
        spec = Specialization.parse(f"{row.direction[0]}wd-{dtype}-d64-causal")
        where = find_device(device)
        tile = {"block_m": 32, "block_n": 64} if row.direction == "backward" else {"block_m": 64, "block_n": 32}
        tile |= {"num_warps": 4, "num_stages": 1 if device == "mi300x" else 2, "loads": "pointer"}
        tile |= {"dq_num_warps": 4, "dq_block_m": 32} if "split" in row.id else {}
        reason = invalid(row.default(spec, where).replace(**tile, products=kind), spec, where)
        assert reason is None if expected is None else reason is not None and expected in reason, (device, reason)


def test_defaults_use_them_where_they_are_faster() -> None:
    chosen = {
        (name, head_dim): PORTABLE.default(Specialization.parse(f"fwd-fp32-d{head_dim}"), find_device(name))["products"]
        for name in ("h200", "a100", "b200", "rtx 4090", "mi300x")
        for head_dim in (64, 128, 256)
    }
    assert {key for key, kind in chosen.items() if kind != "ieee"} == {
        (name, head_dim) for name in ("h200", "a100") for head_dim in (64, 128)
    }
    assert set(chosen.values()) == {"ieee", "bf16x6"}


def test_a_record_from_before_the_knob_means_ieee_and_keeps_its_text() -> None:
    shipped = {"block_m": 64, "block_n": 32, "num_warps": 8, "num_stages": 2, "loads": "pointer", "maxnreg": 0}
    older = Config.of(PORTABLE.id, {**shipped, "heads_per_group": 8, "heavy_first": True, "split_d": False})
    source = render(FP32, validate(older))
    assert source.digest == "ebc33d1a910cd234", "what the shipped record keeps"
    assert source.text.count('input_precision="ieee"') == 2
    assert "products" not in source.text


def test_the_command_of_a_kernel_prints_it_again() -> None:
    default = PORTABLE.default(FP32, H200)
    for kind in PRODUCTS.values:
        config = default.replace(products=kind)
        text = render(FP32, config).text
        command = text.partition("\n")[0]
        assert parse_config(command.partition("--config ")[2], FP32, H200) == config
        assert text.count(f'input_precision="{kind}"') == 2


def test_searches_begin_with_both_kinds() -> None:
    for row in ROWS:
        spec = Specialization.parse(f"{row.direction[0]}wd-fp32-d64-causal")
        found = row.seed_configs(spec, H200)
        assert row.id == "portable_backward_split" or {config["products"] for config in found} == {"tf32x3", "bf16x6"}
        assert all(invalid(config, spec, H200) is None for config in found)


@EXHAUSTIVE
def test_tensor_cores_multiply_the_parts() -> None:
    compiled = compile_kernel(FP32, PORTABLE.default(FP32, H200), H200)
    assert "HGMMA" in disassembled(compiled.handle.asm["cubin"])
