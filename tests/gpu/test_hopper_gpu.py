"""The Hopper family alone: its tile counters under streams and graphs, every count of warpgroups at odd shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashgen.codegen.build import compile_kernel
from flashgen.codegen.common_order import ALL_HEADS
from flashgen.codegen.families import fitted, invalid
from flashgen.codegen.family import Sizes
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.features.values import Features
from flashgen.core.record import Failure
from flashgen.core.workload import Specialization
from flashgen.launch.geometry import Geometry
from flashgen.launch.gpu import current_device
from flashgen.launch.plan import Launch, make_plan
from flashgen.measure.odd_shapes import PER_HEAD, OddShape, odd_problem
from flashgen.measure.verify import check, oracle_of
from tests.gpu.gate import assert_passes_the_gate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm90"
    ),
]

ONCE = {"q_stages": 1, "hidden_blocks": "computed"}
WIDE = {
    "warpgroups": 3,
    "block_n": 128,
    "v_stages": 2,
    "barriers": "mbarrier",
    "exp_order": "free",
    "qk_prefetch": "half",
    "q_stages": 1,
    "hidden_blocks": "computed",
}
CROWD = {
    **ONCE,
    "warpgroups": 1,
    "blocks_per_sm": 4,
    "block_n": 64,
    "v_stages": 2,
    "barriers": "mbarrier",
    "exp_order": "free",
    "ping_pong": False,
    "qk_prefetch": "none",
}
PAIR = {**CROWD, "warpgroups": 2, "blocks_per_sm": 2}
SKIPPED = {
    "warpgroups": 2,
    "block_n": 64,
    "v_stages": 3,
    "barriers": "named",
    "exp_order": "free",
    "hidden_blocks": "skipped",
}
VARIANTS = (
    ("fwd-bf16-d64-causal", {**ONCE, "warpgroups": 1, "blocks_per_sm": 3, "block_n": 64, "ping_pong": False}),
    ("fwd-bf16-d64", {"warpgroups": 4, "block_n": 64, "barriers": "mbarrier", "exp_order": "free"}),
    ("fwd-bf16-d64", PAIR),
    ("fwd-fp16-d64-causal", {**PAIR, "masked_blocks": "branch"}),
    ("fwd-fp16-d80", {**PAIR, "split_d": True}),
    ("fwd-fp16-d64-causal-offset", {"warpgroups": 3, "masked_blocks": "branch"}),
    ("fwd-bf16-d128-causal", {"warpgroups": 2, "masked_blocks": "one"}),
    ("fwd-bf16-d128-causal", {"warpgroups": 2, "masked_blocks": "branch", "exp_order": "free"}),
    ("fwd-bf16-d64-causal", {"warpgroups": 3, "q_stages": 2, "hidden_blocks": "skipped"}),
    ("fwd-bf16-d64-causal-offset", {"warpgroups": 4, "block_n": 64, "exp_order": "free", "hidden_blocks": "skipped"}),
    ("fwd-fp16-d64-causal-window", {"warpgroups": 3, "block_n": 64, "q_stages": 2, "hidden_blocks": "skipped"}),
    (
        "fwd-bf16-d64-causal-keymask",
        {"warpgroups": 3, "block_n": 64, "masked_blocks": "branch", "hidden_blocks": "skipped"},
    ),
    (
        "fwd-bf16-d128-causal-sink",
        {
            "warpgroups": 3,
            "block_n": 64,
            "masked_blocks": "branch",
            "hidden_blocks": "skipped",
            "barriers": "mbarrier",
            "exp_order": "free",
        },
    ),
    ("fwd-bf16-d128-causal", {"q_stages": 2}),
    ("fwd-fp16-d64", {"q_stages": 2, "warpgroups": 4, "block_n": 64, "barriers": "mbarrier", "exp_order": "free"}),
    ("fwd-bf16-d256-causal-softcap-window", {}),
    ("fwd-bf16-d64-causal-sink-window", {}),
    ("fwd-fp16-d128-keymask", {}),
    ("fwd-bf16-d128-bias", {}),
    ("fwd-fp16-d128-causal-bias-bias_fp32", {}),
    ("fwd-bf16-d64-bias-window-offset", {"block_n": 64}),
    ("fwd-bf16-d64-bias-keymask", {"barriers": "mbarrier", "exp_order": "free"}),
    ("fwd-bf16-d128-mask", {}),
    ("fwd-fp16-d128-causal-mask", {"masked_blocks": "one"}),
    ("fwd-bf16-d128-causal-mask-offset", {}),
    ("fwd-bf16-d64-mask-window", {"warpgroups": 3, "block_n": 64, "v_stages": 2}),
    ("fwd-bf16-d64-mask", {"warpgroups": 3, "block_n": 64, "barriers": "mbarrier", "exp_order": "free"}),
    ("fwd-fp16-d64-causal-mask", {**ONCE, "warpgroups": 1, "blocks_per_sm": 3, "block_n": 64, "ping_pong": False}),
    ("fwd-bf16-d256-keybias-mask", {}),
    ("fwd-bf16-d128-bias-mask", {}),
    ("fwd-bf16-d64-causal-softcap-alibi-sink-bias-mask-window-bias_fp32", {}),
    ("fwd-bf16-d96", {"split_d": True}),
    ("fwd-bf16-d96", {"split_d": True, "warpgroups": 3, "block_n": 64, "v_stages": 3}),
    ("fwd-fp16-d96-causal", {"split_d": True, "masked_blocks": "one"}),
    ("fwd-bf16-d96-dv192-causal-window", {"split_d": True, "block_n": 64}),
    ("fwd-bf16-d96-keymask-offset", {"split_d": True, "barriers": "mbarrier", "exp_order": "free"}),
    ("fwd-bf16-d192-causal-offset", {"split_d": True}),
    ("fwd-fp16-d192", {"split_d": True, "v_stages": 3, "conditional_rescale": False, "softmax_reference": "running"}),
    ("fwd-bf16-d192-dv128-causal", {"split_d": True, "block_n": 128}),
    ("fwd-bf16-d128-dv96-mask", {"split_d": True}),
    ("fwd-bf16-d192-bias-mask", {"split_d": True}),
    ("fwd-bf16-d40-causal", {}),
    ("fwd-fp16-d72", {}),
    ("fwd-bf16-d80-causal-mask", {}),
    ("fwd-bf16-d80-dv40-window", {}),
    ("fwd-fp16-d160-causal", {}),
    ("fwd-bf16-d216", {}),
    ("fwd-bf16-d128-causal", {"softmax_reference": "running"}),
    ("fwd-bf16-d128", {"softmax_reference": "running", "conditional_rescale": False}),
    ("fwd-bf16-d64-causal", {"softmax_reference": "running"}),
    ("fwd-bf16-d128", WIDE),
    ("fwd-fp16-d128", WIDE),
    ("fwd-fp16-d64", {"warpgroups": 4, "block_n": 64, "barriers": "mbarrier", "exp_order": "free"}),
    ("fwd-bf16-d64-causal-window", {"warpgroups": 3, "block_n": 64, "hidden_blocks": "skipped"}),
    ("fwd-bf16-d128-window-offset", {}),
    ("fwd-bf16-d128-causal-window-sink", {"softmax_reference": "running"}),
    ("fwd-bf16-d128-causal", {**WIDE, "masked_blocks": "branch", "hidden_blocks": "skipped"}),
    ("fwd-bf16-d128-causal", {**WIDE, "barriers": "named", "masked_blocks": "branch", "softmax_reference": "running"}),
    ("fwd-fp16-d128-offset-causal", {**WIDE, "masked_blocks": "branch", "qk_prefetch": "none", "ping_pong": False}),
    ("fwd-bf16-d96-causal-sink", {**WIDE, "split_d": True, "masked_blocks": "branch"}),
    ("fwd-bf16-d96", {**WIDE, "split_d": True, "qk_prefetch": "none"}),
    ("fwd-bf16-d64-causal-softcap-alibi", {**WIDE, "masked_blocks": "branch"}),
    ("fwd-bf16-d64-causal-sink-window", {**CROWD, "heads_per_group": 1}),
    ("fwd-fp16-d64-window", {**CROWD, "qk_prefetch": "half"}),
    ("fwd-bf16-d64-causal", {**CROWD, "masked_blocks": "one", "heads_per_group": 32}),
    ("fwd-bf16-d128-causal-window", {**SKIPPED, "heads_per_group": 1}),
    ("fwd-fp16-d128-causal-window-offset", {**SKIPPED, "warpgroups": 3}),
    ("fwd-bf16-d128-window", {**SKIPPED, "warpgroups": 3, "barriers": "mbarrier", "ping_pong": False}),
    ("fwd-bf16-d64-window-keymask", SKIPPED),
    ("fwd-bf16-d96-window-sink", {**SKIPPED, "split_d": True, "barriers": "mbarrier"}),
    ("fwd-bf16-d256-causal-softcap", {}),
    ("fwd-bf16-d128-softcap", {"softmax_reference": "running"}),
    ("fwd-bf16-d128-softcap-sink", {}),
    ("fwd-fp16-d128-softcap", {}),
    ("fwd-bf16-d64-causal-softcap-sink-window", SKIPPED),
)


H200 = find_device("h200")


def row_sums(key: str, changes: dict[str, int | str | bool]) -> Config:
    """The default with these changes, whose references follow the row sums."""
    changes = {**changes, "softmax_reference": "row_sums", "conditional_rescale": True, "max_chains": 1}
    return HOPPER_FORWARD.default(Specialization.parse(key), H200).replace(**changes)


def refused(key: str, changes: dict[str, int | str | bool]) -> str | None:
    """Why the default with these changes is no config of today."""
    spec = Specialization.parse(key)
    return invalid(HOPPER_FORWARD.default(spec, H200).replace(**changes), spec, H200)


STALE = [(key, changes, why) for key, changes in VARIANTS if (why := refused(key, changes))]
assert not STALE, STALE  # where tests are only collected, since no GPU is there to run them

ROW_SUMS = tuple(
    (key, changes) for key, changes in VARIANTS if not invalid(row_sums(key, changes), Specialization.parse(key), H200)
)


def launch_of(
    key: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, config: Config | None = None
) -> Launch:
    spec, device = Specialization.parse(key), current_device()
    config = config or HOPPER_FORWARD.default(spec, device)
    compiled = compile_kernel(spec, config, device)
    return make_plan(compiled, spec, config, Geometry.of(q, k, v, out), 0)


@pytest.mark.parametrize(("key", "changes"), VARIANTS, ids=str)
def test_every_kind_of_kernel_passes_the_gate(key: str, changes: dict[str, int | str | bool]) -> None:
    assert_passes_the_gate(key, HOPPER_FORWARD.default(Specialization.parse(key), current_device()).replace(**changes))


@pytest.mark.parametrize(("key", "changes"), ROW_SUMS, ids=str)
def test_references_that_follow_row_sums_pass_the_gate(key: str, changes: dict[str, int | str | bool]) -> None:
    assert_passes_the_gate(key, row_sums(key, changes))


def hard_data(kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k and v whose scores have a standard deviation, or one key or a ramp of this height, in natural units."""
    generator = torch.Generator(device="cuda").manual_seed(11)
    q, k, v = (torch.randn(shape, device="cuda", generator=generator) for _ in range(3))
    name, height = kind.split("-")
    if name == "std":
        q *= float(height)
    else:  # the first column adds the same to all scores of a key
        q[..., 0], k[..., 0] = 16.0, 0.0
        rise = float(height) / (16.0 * shape[3] ** -0.5)
        if name == "sink":
            k[..., 3, 0] = rise
        else:
            k[..., 0] = rise * (1 - torch.arange(shape[2], device="cuda") / shape[2])
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("kind", ["std-8", "std-20", "std-100", "sink-60", "sink-400", "ramp-200", "ramp-4000"])
@pytest.mark.parametrize(
    "key", ["fwd-bf16-d64-causal", "fwd-bf16-d128", "fwd-fp16-d128-causal", "fwd-fp16-d256", "fwd-bf16-d96-causal"]
)
def test_scores_that_grow_are_right_and_repeat(key: str, kind: str) -> None:
    """Where rows grow a little at each step, a lot at once, or by more than fp32 holds and their tile is recomputed."""
    spec = Specialization.parse(key)
    config = row_sums(key, {"split_d": "d96" in key})
    shape, dtype = (2, 3, 1500, spec.head_dim), torch.float16 if spec.dtype == "fp16" else torch.bfloat16
    q, k, v = hard_data(kind, shape, dtype)
    out, again, lse = torch.empty_like(q), torch.empty_like(q), torch.empty(shape[:3], device="cuda")
    launch = launch_of(key, q, k, v, out, config)
    launch(q, k, v, out, lse)
    launch(q, k, v, again, lse)
    assert torch.equal(out, again)
    verdict = check(out, lse, oracle_of(q, k, v, causal=spec.causal))
    assert not isinstance(verdict, Failure), str(verdict)


@pytest.mark.parametrize("seqlen", [300, 700, 1000])
def test_tiles_that_turn_back_have_the_bits_of_any_order(seqlen: int) -> None:
    """With one, two and three CTAs on most SMs, all of which run at once."""
    key = "fwd-bf16-d64-causal"
    generator = torch.Generator(device="cuda").manual_seed(5)
    q, k, v = (
        torch.randn(2, 12, seqlen, 64, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3)
    )
    default = HOPPER_FORWARD.default(Specialization.parse(key), current_device())
    outs = {heads: torch.full_like(q, float("nan")) for heads in (8, ALL_HEADS)}
    for heads, out in outs.items():
        launch_of(key, q, k, v, out, default.replace(**{**CROWD, "heads_per_group": heads}))(q, k, v, out)
    assert torch.equal(outs[8], outs[ALL_HEADS])
    assert not outs[8].isnan().any()


@pytest.mark.parametrize("height", [40, 60, 75, 95])
@pytest.mark.parametrize("key", ["fwd-bf16-d64", "fwd-bf16-d128", "fwd-bf16-d256"])
def test_a_key_that_takes_all_weight_has_an_exact_one(key: str, height: int) -> None:
    """Read last: sums grow by less than one factor brings back to 2**-64, and by more."""
    config = row_sums(key, {})
    shape = (2, 3, 1500, Specialization.parse(key).head_dim)
    q, k, v = hard_data(f"sink-{height}", shape, torch.bfloat16)
    out, lse = torch.empty_like(q), torch.empty(shape[:3], device="cuda")
    launch_of(key, q, k, v, out, config)(q, k, v, out, lse)
    assert torch.equal(out, v[:, :, 3:4].expand_as(out))


# specialization, packed heads, knobs: each at every shape of PACKED_SHAPES
PACKED = (
    ("fwd-bf16-d128-causal", 4, {}),
    ("fwd-bf16-d128-causal", 8, {"warpgroups": 1, "blocks_per_sm": 2, "block_n": 64, "ping_pong": False}),
    ("fwd-fp16-d64", 2, {}),
    ("fwd-fp16-d64-causal-offset", 16, {"q_stages": 2}),
    ("fwd-bf16-d256-causal-softcap-window", 4, {}),
    ("fwd-bf16-d64-causal-sink-window-sink_bf16", 8, {}),
    ("fwd-bf16-d128-alibi-sink", 4, {"barriers": "mbarrier", "exp_order": "free"}),
    ("fwd-bf16-d192-dv128-causal", 4, {"split_d": True, "block_n": 128}),
    ("fwd-bf16-d128-causal", 4, {"softmax_reference": "row_sums"}),
    ("fwd-bf16-d64-causal-sink-window-sink_bf16", 8, {"softmax_reference": "row_sums"}),
)
PACKED_SHAPES = (
    OddShape(seqlen_q=1, seqlen_k=1023, nheads=8, nheads_k=2, batch=3, window=(200, None)),
    OddShape(seqlen_q=5, seqlen_k=333, nheads=8, nheads_k=1, layout="bshd", window=(100, 50)),
    OddShape(seqlen_q=16, seqlen_k=400, nheads=14, nheads_k=2, window=(17, None), form=PER_HEAD),  # groups of seven
    OddShape(seqlen_q=64, seqlen_k=64, nheads=3, nheads_k=3, layout="bshd", form=PER_HEAD),  # no groups at all
    OddShape(seqlen_q=100, seqlen_k=77, nheads=8, nheads_k=2, layout="bshd", window=(64, 0)),  # some rows see no key
    OddShape(seqlen_q=128, seqlen_k=640, nheads=40, nheads_k=2, q_offset=300, window=(129, 3)),
)


@pytest.mark.parametrize(("key", "heads", "changes"), PACKED, ids=str)
def test_packed_heads_pass_the_gate(key: str, heads: int, changes: dict[str, int | str | bool]) -> None:
    spec, device = Specialization.parse(key), current_device()
    config = HOPPER_FORWARD.default(spec, device).replace(packed_heads=heads, **changes)
    kind = "branch" if spec.causal or spec.window else "one"
    config = config.replace(masked_blocks=kind, hidden_blocks="computed")
    problems = []
    for shape in PACKED_SHAPES:
        left, right = shape.window if spec.window else (None, None)
        form = replace(shape.form, sink_dtype=spec.sink_dtype)
        seen = replace(shape, window=(left, None if spec.causal else right), form=form)
        problems.append((seen, odd_problem(spec, seen, "cuda")))
    assert_passes_the_gate(key, config, problems, repeats=2)


def test_a_decoding_step_is_served_with_packed_heads() -> None:
    """What equal heads of a group get is what one of them gets alone, from a kernel that packs none."""
    generator = torch.Generator(device="cuda").manual_seed(7)
    k, v = (torch.randn(4, 8, 3000, 128, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(2))
    q = torch.randn(4, 8, 1, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
    grouped = q.repeat_interleave(4, 1)
    out, alone = torch.empty_like(grouped), torch.empty_like(q)
    lse, lse_alone = (torch.empty(4, heads, 1, device="cuda") for heads in (32, 8))
    spec, device = Specialization.parse("fwd-bf16-d128-causal"), current_device()
    default = HOPPER_FORWARD.default(spec, device)
    sizes = Sizes(batch=4, nheads=32, nheads_k=8, seqlen_q=1, seqlen_k=3000)
    config = fitted(default, spec, sizes, device)
    assert config["packed_heads"] == 4
    launch_of("fwd-bf16-d128-causal", grouped, k, v, out, config)(grouped, k, v, out, lse)
    launch_of("fwd-bf16-d128-causal", q, k, v, alone)(q, k, v, alone, lse_alone)
    assert torch.equal(out, out[:, ::4].repeat_interleave(4, 1))
    torch.testing.assert_close(out[:, ::4], alone, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(lse[:, ::4], lse_alone, rtol=1e-5, atol=1e-5)


def test_two_graphs_on_two_streams_at_once() -> None:
    """A tile counter shared by two launches at once would hand some tiles out twice and others never."""
    generator = torch.Generator(device="cuda").manual_seed(3)
    q, k, v = (
        torch.randn(2, 16, 2048, 128, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3)
    )
    outs = [torch.empty_like(q) for _ in range(3)]
    launch = launch_of("fwd-bf16-d128-causal", q, k, v, outs[2])
    launch(q, k, v, outs[2])
    streams = [torch.cuda.Stream() for _ in range(2)]
    graphs = []
    for stream, out in zip(streams, outs[:2], strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(8):
                launch(q, k, v, out)
        graphs.append(graph)
    for _ in range(20):
        for out in outs[:2]:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(outs[0], outs[2])
        assert torch.equal(outs[1], outs[2])


def test_two_streams_without_graphs() -> None:
    q, k, v = (torch.randn(1, 8, 4096, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    outs = [torch.full_like(q, float("nan")) for _ in range(3)]
    launch = launch_of("fwd-fp16-d64", q, k, v, outs[0])
    launch(q, k, v, outs[2])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(50):
        for stream, out in zip(streams, outs[:2], strict=True):
            with torch.cuda.stream(stream):
                launch(q, k, v, out)
    torch.cuda.synchronize()
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[2])


@pytest.mark.parametrize("key", ["fwd-bf16-d64-mask", "fwd-bf16-d96-causal-mask"])
def test_tiles_that_hidden_values_spoil_come_again(key: str) -> None:
    """More tiles than SMs, of which those of one batch element overflow, or all, the last included."""
    spec = Specialization.parse(key)
    generator = torch.Generator(device="cuda").manual_seed(5)
    shape = (2, 24, 1500, spec.head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3))
    mask = (torch.rand(2, 1, 1500, 1504, device="cuda", generator=generator) < 0.5)[..., :1500]
    mask[1, :, :, 100:300] = False
    mask[0, :, :, 700:710] = False
    features, out = Features(mask=mask), torch.empty_like(q)
    device = current_device()
    config = HOPPER_FORWARD.default(spec, device)
    launch = make_plan(compile_kernel(spec, config, device), spec, config, Geometry.of(q, k, v, out, features), 0)
    v[1, :, 100:300], v[0, :, 700:710] = 0, 0
    launch(q, k, v, out, features=features)
    expected = out.clone()
    for overflowing in ([(1, 100, 300)], [(0, 700, 710)], [(1, 100, 300), (0, 700, 710)]):
        hidden = v.clone()
        for b, first, last in overflowing:
            hidden[b, :, first:last] = float("nan")
        for _ in range(3):
            out.fill_(float("nan"))
            launch(q, k, hidden, out, features=features)
            assert torch.equal(out, expected)
