"""Dropout in the text of kernels: who computes it, and what its bits cost."""

from __future__ import annotations

import pytest

from flashgen.codegen.build import compile_kernel
from flashgen.codegen.families import FAMILIES, default_config, family, unsupported
from flashgen.codegen.render import render_command
from flashgen.core.device import find_device
from flashgen.core.errors import WorkloadError
from flashgen.core.workload import Specialization, Workload
from tests.codegen.goldens import kernel
from tests.tiers import only

H200 = find_device("h200")
PHILOX_ROUNDS, PRODUCTS_A_ROUND, WEIGHTS_A_CALL = 7, 2, 8


def test_portable_families_have_it_and_others_refuse_it() -> None:
    for row in FAMILIES:
        spec = Specialization.parse(f"{'bwd' if row.direction == 'backward' else 'fwd'}-bf16-d64-dropout")
        assert unsupported(row, spec, H200) == (None if "portable" in row.id else "it has no dropout")


def test_a_specialization_has_it_and_no_workload() -> None:
    spec = Specialization.parse("fwd-bf16-d128-causal-varlen-dropout")
    assert spec.key == "fwd-bf16-d128-causal-varlen-dropout"
    assert spec.workload_class == "fwd-bf16-d128-causal-varlen"
    assert spec.key in render_command(spec, kernel("forward_d64_dropout_h200")[1])
    with pytest.raises(WorkloadError, match="'dropout'"):
        Workload.parse("b1-h1-s64-d64-dropout")


@pytest.mark.parametrize(
    ("name", "part", "loops", "shared_by"),
    only(
        [
            ("forward_d64_dropout_h200", 0, 2, 8),  # whole blocks, and those with masks
            ("backward_split_dropout_a100", 1, 1, 4),  # a transposed tile, where bit 0 of the key is another thread's
            ("backward_split_dropout_a100", 2, 2, 8),
        ],
        ("backward_split_dropout_a100", 1, 1, 4),
        ("backward_split_dropout_a100", 2, 2, 8),
    ),
)
def test_weights_of_a_thread_share_calls_of_philox(name: str, part: int, loops: int, shared_by: int) -> None:
    spec, config = kernel(name)
    block = {"block_m": 0, "block_n": 0} if part < 2 else {"dq_block_m": 0, "dq_block_n": 0}
    warps = config.integer("num_warps" if part < 2 else "dq_num_warps")
    weights = 1
    for knob in block:
        weights *= config.integer(knob)
    products = compile_kernel(spec, config, H200).parts[part].handle.asm["ptx"].count("mul.hi.u32")
    calls = weights // (32 * warps) // shared_by
    assert 0 < products <= loops * calls * PHILOX_ROUNDS * PRODUCTS_A_ROUND


@pytest.mark.parametrize("key", only(["bwd-bf16-d128-dropout", "bwd-bf16-d64-causal-dropout"], "bwd-bf16-d128-dropout"))
def test_defaults_share_them_beside_indices_of_their_own(key: str) -> None:
    """Under Triton 3.6 the kernel of dQ with heads of 128 asked for 13 calls where 4 are enough."""
    spec = Specialization.parse(key)
    config = family("portable_backward_split").default(spec, H200)
    dq = compile_kernel(spec, config, H200).parts[2].handle.asm["ptx"]
    rows, keys, warps = (config.integer(f"dq_{name}") for name in ("block_m", "block_n", "num_warps"))
    calls = rows * keys // (32 * warps) // WEIGHTS_A_CALL
    assert 0 < dq.count("mul.hi.u32") <= 2 * calls * PHILOX_ROUNDS * PRODUCTS_A_ROUND


def test_weights_are_dropped_before_they_are_packed() -> None:
    """Halves of a register would be taken apart, chosen and put together again: 3 instructions a weight more."""
    spec = Specialization.parse("fwd-bf16-d64-dropout")
    config = family("portable_forward").default(spec, H200)
    assert "selp.b16" not in compile_kernel(spec, config, H200).handle.asm["ptx"]


@pytest.mark.parametrize("name", ["h200", "a100"])
def test_a_backward_pass_with_dropout_has_one_pass_or_two(name: str) -> None:
    """Two passes where wgmma has a use for their longer steps."""
    device, spec = find_device(name), Specialization.parse("bwd-bf16-d128-causal-dropout")
    assert default_config(spec, device).family == f"portable_backward_{'split' if device.has_wgmma else 'fused'}"
    assert default_config(spec, device, ["portable_backward_fused"]).family == "portable_backward_fused"
    for one_pass in ("bwd-fp32-d128-causal-dropout", "bwd-bf16-d64-causal-dropout"):
        assert default_config(Specialization.parse(one_pass), device).family == "portable_backward_fused"
    packed = Specialization.parse("bwd-bf16-d64-causal-varlen-dropout")
    assert default_config(packed, device).family == default_config(spec, device).family


@pytest.mark.parametrize("head_dim", only([64, 128, 256], 256))
def test_the_default_of_two_passes_has_registers_for_dropout(head_dim: int) -> None:
    """Twice as many rows of a step would spill 136 to 384 bytes of a thread at heads of 128 and 256."""
    spec = Specialization.parse(f"bwd-bf16-d{head_dim}-causal-dropout")
    config = family("portable_backward_split").default(spec, H200)
    assert config.integer("block_m") >= 32
    assert compile_kernel(spec, config, H200).spills <= 48


def test_beside_other_features_steps_are_as_short_as_without_dropout() -> None:
    alone, beside = (
        family("portable_backward_split").default(Specialization.parse(f"bwd-bf16-d64-{rest}"), H200)
        for rest in ("dropout", "alibi-dropout")
    )
    assert alone.integer("block_m") == 2 * beside.integer("block_m")
