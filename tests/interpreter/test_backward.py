"""Numerics of the rendered backward kernels on a CPU, through Triton's interpreter, against autograd in float64.

`test_backward_covering` has pairs of all features; here are shapes, head dimensions, offsets, what hidden keys hold.
"""

from __future__ import annotations

import math

import pytest
import torch

from flashgen.codegen.family import KernelFamily
from flashgen.codegen.portable_backward.family import PORTABLE_BACKWARD_FUSED, PORTABLE_BACKWARD_SPLIT
from flashgen.core.workload import Specialization
from tests.interpreter.backward import TOLERANCE, check, compare, run
from tests.interpreter.dense import Rules, gradients
from tests.interpreter.forward import tensors
from tests.tiers import every, first

FAMILY = pytest.mark.parametrize("row", [PORTABLE_BACKWARD_SPLIT, PORTABLE_BACKWARD_FUSED], ids=lambda row: row.id[18:])


@pytest.mark.parametrize(
    ("row", "loads", "layout"),
    [(PORTABLE_BACKWARD_SPLIT, "descriptor", "bhsd"), (PORTABLE_BACKWARD_FUSED, "pointer", "bshd")],
    ids=["split", "fused"],
)
@pytest.mark.parametrize("causal", ["", "-causal"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 4, 2, 33, 70), (1, 2, 1, 64, 64), (1, 3, 3, 40, 17)])
def test_shapes(row: KernelFamily, loads: str, layout: str, causal: str, shape: tuple[int, ...]) -> None:
    check(row, f"bwd-fp16-d32{causal}", shape, Rules(causal=bool(causal)), loads=loads, layout=layout)


@FAMILY
@pytest.mark.parametrize(("head_dims", "split"), [((192, 128), True), ((72, 72), True), ((40, 96), False)])
def test_head_dimensions(row: KernelFamily, head_dims: tuple[int, int], split: bool) -> None:
    key = f"bwd-fp16-d{head_dims[0]}-dv{head_dims[1]}-causal"
    check(row, key, (1, 2, 1, 40, 50), Rules(causal=True), split_d=split, loads="descriptor" if split else "pointer")


@FAMILY
@pytest.mark.parametrize(
    ("key", "rules", "knobs"),
    every(
        2,
        [
            ("bwd-fp32-d16", Rules(), {"heads_per_tile": 1}),
            ("bwd-fp16-d40-dv24-causal", Rules(causal=True), {"heads_per_tile": 2}),
            ("bwd-fp16-d72-causal", Rules(causal=True), {"heads_per_tile": 2, "split_d": True, "loads": "descriptor"}),
            ("bwd-fp32-d16-causal-unaligned", Rules(causal=True), {"heads_per_tile": 4, "heads_per_group": 8}),
        ],
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_programs_of_some_heads_of_a_group(
    row: KernelFamily, key: str, rules: Rules, knobs: dict[str, int | str | bool]
) -> None:
    """Of a group of 5, of which the last program has fewer, at keys that fill no block; two sequences."""
    check(row, key, (2, 10, 2, 40, 70), rules, **knobs)


@FAMILY
@pytest.mark.parametrize("offset", [-40, -3, 30, 1000])
def test_rows_that_see_no_key_have_no_gradient(row: KernelFamily, offset: int) -> None:
    rules = Rules(causal=True, q_offset=offset)
    host = {"q_offset": offset}
    got = check(row, "bwd-fp32-d16-causal", (1, 2, 1, 40, 70), rules, host=host, garbage=math.nan, with_dlse=False)
    blind = torch.arange(40) + offset < 0
    assert torch.all(got["dq"][:, :, blind] == 0)
    assert torch.all(got["neg_delta"][:, :, blind] == 0)
    unseen = torch.arange(70) > 39 + offset
    assert torch.all(got["dk"][:, :, unseen] == 0)
    assert torch.all(got["dv"][:, :, unseen] == 0)


@FAMILY
def test_a_sink_is_part_of_the_lse_alone(row: KernelFamily) -> None:
    """Rows that see no key have the LSE of the sink, which is finite."""
    sinks = torch.tensor([0.5, -20.0])
    rules = Rules(causal=True, q_offset=-5, sinks=sinks)
    check(row, "bwd-fp32-d16-causal", (1, 2, 1, 40, 40), rules, host={"q_offset": -5}, garbage=math.inf)


@FAMILY
def test_gradients_over_parts_of_the_keys_add_up_by_the_lse_over_all_of_them(row: KernelFamily) -> None:
    """As context parallelism calls them: rows that see nothing of a part have a finite LSE all the same."""
    spec = Specialization.parse("bwd-fp32-d16-causal")
    q, k, v = tensors((1, 2, 1, 40, 70), 16, 16, torch.float32, "bshd")
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(5))
    right = gradients(q, k, v, dout, None, Rules(causal=True, q_offset=30))
    sums = right["out"].float(), right["lse"].float()
    parts = [
        run(row, spec, {}, q, k[:, :, keys], v[:, :, keys], *sums, dout, q_offset=30 - keys.start)
        for keys in (slice(0, 35), slice(35, 70))
    ]
    (dq, dk, dv, _), others = parts[0], parts[1]
    got = {"dq": dq + others[0], "dk": torch.cat([dk, others[1]], 2), "dv": torch.cat([dv, others[2]], 2)}
    compare(got, right, TOLERANCE[torch.float32])
    assert torch.all(others[0][:, :, :5] == 0)


@FAMILY
@pytest.mark.parametrize("seqlen_k", [33, 64])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of infinities that are not stored
def test_scores_far_below_0_leave_no_infinity_behind_the_last_key(row: KernelFamily, seqlen_k: int) -> None:
    """There the products are 0, and the exponential of 0 minus such an LSE overflows."""
    got = check(row, "bwd-fp16-d16", (1, 1, 1, 40, seqlen_k), Rules(), gain=60.0)
    assert torch.isfinite(got["dq"]).all()


@FAMILY
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_bias_of_minus_infinity_hides_like_a_mask(row: KernelFamily) -> None:
    spec = Specialization.parse("bwd-fp32-d16-bias-dbias")
    q, k, v = tensors((1, 2, 1, 40, 70), 16, 16, torch.float32, "bhsd")
    mask = torch.rand(1, 2, 40, 72, generator=torch.Generator().manual_seed(0))[..., :70] > 0.5
    mask[:, :, 7] = False
    dout = torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(1))
    expected = gradients(q, k, v, dout, None, Rules(mask=mask))
    bias = torch.zeros(1, 2, 40, 72)[..., :70].masked_fill_(~mask, -math.inf)
    out, lse = expected["out"].float(), expected["lse"].float()
    dq, dk, dv, _, dbias = run(row, spec, {}, q, k, v, out, lse, dout, bias=bias)
    compare({"dq": dq, "dk": dk, "dv": dv}, expected, TOLERANCE[torch.float32])
    assert torch.all(dbias[~mask] == 0)


@pytest.mark.parametrize(
    "row", first(1, [PORTABLE_BACKWARD_FUSED, PORTABLE_BACKWARD_SPLIT]), ids=lambda row: row.id[18:]
)
def test_every_program_order_computes_every_block_once(row: KernelFamily) -> None:
    for group in (1, 8):
        check(row, "bwd-fp16-d16-causal", (3, 3, 3, 40, 40), Rules(causal=True), heads_per_group=group)


@FAMILY
def test_any_strides_with_a_contiguous_last_dimension(row: KernelFamily) -> None:
    spec = Specialization.parse("bwd-fp16-d16-unaligned")
    base = torch.randn(2, 30, 3, 3, 17, generator=torch.Generator().manual_seed(0)).half()
    q, k, v = (base[:, :, i, :, 1:].transpose(1, 2) for i in range(3))
    k, v = k[:, :1].expand(2, 3, 30, 16), v[:, :1].expand(2, 3, 30, 16)
    dout = torch.ones(1, 1, 1, 16, dtype=torch.float16).expand(2, 3, 30, 16)  # as the gradient of a sum is
    expected = gradients(q, k, v, dout, None, Rules())
    names = ("dq", "dk", "dv")
    got = run(row, spec, {}, q, k, v, expected["out"].half(), expected["lse"].float(), dout)
    compare(dict(zip(names, got, strict=False)), expected, TOLERANCE[torch.float16])


@FAMILY
@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
@pytest.mark.parametrize("places", first(1, ["causal-window-keymask", "window-keymask"]))
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_keys_that_a_mask_shows_before_every_window_may_hold_anything(
    row: KernelFamily, loads: str, places: str
) -> None:
    """The first window begins within a block, whose keys before it are loaded."""
    spec = Specialization.parse(f"bwd-fp16-d16-{places}")
    mask = (torch.arange(160) % 40 < 36)[:150].view(1, 1, 1, 150)
    window = (20, None if spec.causal else 5)
    rules = Rules(causal=spec.causal, window=window, mask=mask)
    host: dict[str, object] = {"window": window, "mask": mask}
    got = check(row, spec.key, (1, 2, 1, 70, 150), rules, host=host, garbage=math.nan, loads=loads)
    assert torch.all(got["dk"][:, :, :60] == 0)
