"""The models of bytes and of least times, and the bound of the speed-up that follows from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.impls import standard_attention, standard_mask
from benchmarks.speedup import COMPILED, STANDARD, speedup_grid, speedup_impls, speedups
from benchmarks.speedup_tables import bound, speedup_parts
from benchmarks.traffic import (
    least_ms,
    score_passes,
    standard_least_ms,
    standard_steps,
    standard_traffic_bytes,
    tiled_bytes,
)
from flashgen.core.device import find_device
from flashgen.core.workload import Workload
from flashgen.measure.inputs import make_inputs
from tests.benchmarks.rows import row

H200 = find_device("h200")
WIDE = Workload(batch=1, nheads=16, seqlen_q=16384, head_dim=128)
SCORES = 2 * 16 * 16384**2
TENSOR = 2 * 16 * 16384 * 128


def test_standard_attention_moves_its_scores_four_times_and_a_mask_twice_more() -> None:
    causal, backward = replace(WIDE, causal=True), replace(WIDE, direction="backward")
    assert standard_traffic_bytes(WIDE) == 4 * SCORES + 6 * TENSOR  # q, q scaled twice, k, v, out
    assert standard_traffic_bytes(causal) == 6 * SCORES + 6 * TENSOR
    assert standard_traffic_bytes(backward) == 7 * SCORES + 10 * TENSOR
    assert [score_passes(w) for w in (WIDE, causal, backward, replace(causal, direction="backward"))] == [4, 6, 7, 9]


class Moved(TorchDispatchMode):
    """Adds up what each operation reads and writes; views move nothing, and a mask is left out as in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if not function.is_view and function.overloadpacket not in VIEWS:
            tensors = [t for t in (*args, found) if isinstance(t, torch.Tensor) and t.dtype != torch.bool]
            self.bytes.append(sum(t.numel() * t.element_size() for t in tensors))
        return found


VIEWS = (torch.ops.aten._unsafe_view, torch.ops.aten.view, torch.ops.aten.detach)


@pytest.mark.parametrize("causal", [False, True])
def test_the_steps_are_those_that_torch_takes(causal: bool) -> None:
    workload = Workload(batch=2, nheads=3, seqlen_q=48, seqlen_k=80, head_dim=32, head_dim_v=16, causal=causal)
    inputs = make_inputs(workload, copies=1, seed=0, device="cpu")
    leaves = [tensor.clone().requires_grad_() for tensor in (inputs.q[0], inputs.k[0], inputs.v[0])]
    mask = standard_mask(workload, inputs)
    with Moved() as forward:
        out = standard_attention(*leaves, mask)
    with Moved() as backward:
        torch.autograd.grad(out, leaves, out.detach())
    assert forward.bytes == [step.bytes for step in standard_steps(workload)]
    gradients = standard_steps(replace(workload, direction="backward"))
    assert sorted(backward.bytes) == sorted(step.bytes for step in gradients)


def test_products_compute_every_pair_masked_or_not() -> None:
    product = 2 * 16 * 16384**2 * 128
    for causal in (False, True):
        backward = replace(WIDE, direction="backward", causal=causal)
        assert sum(step.flops for step in standard_steps(replace(WIDE, causal=causal))) == 2 * product
        assert sum(step.flops for step in standard_steps(backward)) == 4 * product


def test_traffic_grows_with_the_square_of_the_length_and_falls_with_the_block() -> None:
    twice = Workload(batch=1, nheads=16, seqlen_q=32768, head_dim=128)
    assert 3.9 < standard_traffic_bytes(twice) / standard_traffic_bytes(WIDE) < 4
    assert tiled_bytes(WIDE, 16384) == 4 * TENSOR == WIDE.bytes - 4 * 16 * 16384  # all but the LSE
    assert tiled_bytes(WIDE, 64) == (256 * 2 + 2) * TENSOR
    assert tiled_bytes(WIDE, 128) - 2 * TENSOR == (tiled_bytes(WIDE, 64) - 2 * TENSOR) // 2
    odd = Workload(batch=1, nheads=16, seqlen_q=16385, head_dim=128)
    assert tiled_bytes(odd, 16384) == 2 * 16 * 256 * (2 * 16385 + 16385), "a block of one query reads all keys"


def test_a_kernel_takes_the_longer_of_its_bytes_and_its_operations() -> None:
    product_ms, pass_ms = 2 * SCORES / 2 * 128 / 989.4e9, SCORES / 4.8e9
    assert product_ms < pass_ms, "heads of 128 are too narrow for the tensor cores to be the limit"
    assert standard_least_ms(WIDE, H200) == pytest.approx((4 * SCORES + 6 * TENSOR) / 4.8e9)
    assert least_ms(WIDE, H200) == pytest.approx(2 * product_ms)
    assert bound(WIDE, H200) == pytest.approx(3.2584, abs=0.0001)
    wide = replace(WIDE, head_dim=512, head_dim_v=512)
    products = 2 * 4 * product_ms
    assert standard_least_ms(wide, H200) == pytest.approx(products + (2 * SCORES + 8 * TENSOR) / 4.8e9)


def test_every_length_and_head_is_timed_eager_and_compiled() -> None:
    shapes = {(w.head_dim, w.seqlen_k, w.causal) for w in speedup_grid()}
    assert shapes == {(d, s, causal) for d in (64, 128) for s in (2048, 16384) for causal in (False, True)}
    assert {w.nheads * w.head_dim for w in speedup_grid()} == {2048}
    assert {w.batch * w.seqlen_k for w in speedup_grid()} == {16384}
    assert [impl.name for impl in speedup_impls()] == ["flashgen", STANDARD, COMPILED]


def test_compiled_standard_attention_is_kept_from_becoming_a_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(torch, "compile", lambda function, **options: seen.update(options) or function)
    workload = Workload(batch=1, nheads=2, seqlen_q=32, head_dim=16, causal=True)
    inputs = make_inputs(workload, copies=1, seed=0, device="cpu")
    eager, compiled = (impl.prepare(workload, inputs).run(0) for impl in speedup_impls()[1:])
    assert torch.equal(eager, compiled)
    assert seen == {"dynamic": False, "options": {"pattern_matcher": False}}


def test_speedups_are_of_the_same_workload_and_suite() -> None:
    one, two = speedup_grid()[:2]
    rows = [row(one, "flashgen", 500.0, suite="speedup"), row(one, STANDARD, 100.0, suite="speedup")]
    rows += [row(two, STANDARD, 100.0, suite="speedup"), row(two, "flashgen", 500.0)]
    rows += [row(one, COMPILED, 250.0, suite="speedup")]
    assert speedups(rows) == {one.key: pytest.approx(5.0)}
    assert speedups(rows, COMPILED) == {one.key: pytest.approx(2.0)}


def test_the_table_sets_the_limits_of_the_device_beside_what_was_measured() -> None:
    rows = [row(WIDE, "flashgen", 660.0, suite="speedup"), row(WIDE, STANDARD, 165.0, suite="speedup")]
    rows = [replace(each, device="NVIDIA H200") for each in rows]
    _, text, table = speedup_parts(rows)
    assert "4.0 for heads of 128, where the limits give 3.3 and a factor of 5 is 825 TFLOP/s (flashgen has 660)" in text
    assert "4 times without a mask" in text
    assert "compiled" not in text
    assert table.splitlines()[-1] == "| 128 | 16384 | no | 3.33 | 13.3 | 4.0 | 7.24 | 2.22 | 3.3 |"
    rows.append(replace(row(WIDE, COMPILED, 220.0, suite="speedup"), device="NVIDIA H200"))
    assert (
        speedup_parts(rows)[2].splitlines()[-1].startswith("| 128 | 16384 | no | 3.33 | 13.3 | 10 | 4.0 | 3.0 | 7.24")
    )
    unknown = speedup_parts([replace(each, device="Test GPU") for each in rows])
    assert unknown[2].splitlines()[-1].endswith("| 4.0 | 3.0 | - | - | - |")
    assert speedup_parts([row(WIDE, STANDARD, 165.0)]) == []
