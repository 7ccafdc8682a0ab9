"""Forward features through `flashgen.attention` on a GPU, against the float64 oracle, and their graphs and memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch

import flashgen
from flashgen.codegen.families import applicable
from flashgen.core.config import Config
from flashgen.core.features.values import Features
from flashgen.core.record import Failure
from flashgen.core.workload import Specialization, Workload
from flashgen.launch.gpu import current_device
from flashgen.measure.bench import Bench, Candidate
from flashgen.measure.feature_inputs import alibi_slopes
from flashgen.measure.odd_shapes import check_odd, odd_problem, odd_problems
from flashgen.measure.reference import oracle
from flashgen.measure.timing import CudaStopwatch
from flashgen.measure.toolchain import GpuToolchain
from flashgen.measure.verify import check, oracle_of
from tests.covering import ForwardCase, forward_cases
from tests.gpu.public import PublicCall, call_arguments, compile_ahead

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CASES = forward_cases()
GATED = (
    "fwd-bf16-d128-causal",
    "fwd-bf16-d128-causal-window",
    "fwd-bf16-d64-causal-sink-window",
    "fwd-bf16-d256-causal-softcap-window",
    "fwd-bf16-d64-bias",
    "fwd-fp16-d80-mask",
    "fwd-bf16-d128-keymask",
    "fwd-bf16-d96-causal-alibi-keybias-offset",
    "fwd-fp16-d128-softcap-alibi-sink-bias-mask-window-scattered",
    "fwd-bf16-d512-causal-mask-window",
)
"""Specializations that pass the whole gate with every family and kind of loads."""

_AHEAD: set[str] = set()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Generated kernels only, and nothing remembered from another test's database."""
    monkeypatch.setenv("FLASHGEN_POLICY", "generated")
    monkeypatch.setenv("FLASHGEN_QUIET", "1")
    torch.manual_seed(7)
    flashgen.reload()
    yield
    flashgen.reload()


@pytest.fixture
def compiled(fresh: None) -> None:
    """All kernels of the covering array and of the gate are in Triton's cache: once, in many processes."""
    if _AHEAD:
        return
    _AHEAD.add("done")
    served = (PublicCall(spec=c.spec, layout=c.layout).served(odd_problem(c.spec, c.shape, "cuda")) for c in CASES)
    gated = ((Specialization.parse(key), config) for key in GATED for config in gated_configs(key))
    compile_ahead(itertools.chain(served, gated), current_device())


def gated_configs(key: str) -> list[Config]:
    """The default of every family that applies, with each kind of loads where the family has a choice."""
    spec, device, found = Specialization.parse(key), current_device(), []
    for family in applicable(spec, device):
        default = family.default(spec, device)
        kinds = [knob.values for knob in family.knobs if knob.name == "loads"]
        variants = [default.replace(loads=loads) for loads in kinds[0]] if kinds else [default]
        found += [config for config in variants if family.invalid(spec, config, device) is None]
    return found


def tensors(
    batch: int, nheads: int, nheads_k: int, seqlen_q: int, seqlen_k: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes = ((nheads, seqlen_q), (nheads_k, seqlen_k), (nheads_k, seqlen_k))
    q, k, v = (torch.randn(batch, heads, rows, head_dim, device="cuda", dtype=dtype) for heads, rows in sizes)
    return q, k, v


def assert_right(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    features: Features,
    *,
    causal: bool = False,
    q_offset: int | torch.Tensor | None = None,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the public call and judge it as the gate judges every tuned config."""
    options = {"causal": causal, "q_offset": q_offset, "softmax_scale": softmax_scale}
    found = flashgen.attention(q, k, v, **options, **call_arguments(features), return_lse=True)
    verdict = check(*found, oracle_of(q, k, v, **options, features=features))
    assert not isinstance(verdict, Failure), str(verdict)
    return found


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_every_two_values_meet(case: ForwardCase) -> None:
    problem = odd_problem(case.spec, case.shape, "cuda")
    verdict = problem.run(PublicCall(spec=case.spec, layout=case.layout).factory)
    assert not isinstance(verdict, Failure), str(verdict)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("key", GATED)
def test_every_family_and_kind_of_loads_passes_the_gate(key: str) -> None:
    spec, toolchain = Specialization.parse(key), GpuToolchain(current_device(), 0)
    problems = odd_problems(spec, "cuda")
    configs = gated_configs(key)
    assert configs
    for config in configs:
        verdict = check_odd(toolchain.factory(spec, config), problems)
        assert verdict is None, f"{config}: {verdict}"


def test_rows_that_see_no_key_are_zero_and_their_lse_the_sink() -> None:
    q, k, v = tensors(2, 4, 2, 200, 300, 64, torch.bfloat16)
    mask = torch.ones(2, 1, 200, 300, device="cuda", dtype=torch.bool)
    mask[1, :, 50:120] = False
    sinks = torch.randn(4, device="cuda")
    out, lse = assert_right(q, k, v, Features(mask=mask), causal=True)
    assert not out[1, :, 50:120].any()
    assert torch.isneginf(lse[1, :, 50:120]).all()
    out, lse = assert_right(q, k, v, Features(mask=mask, sinks=sinks), causal=True)
    assert not out[1, :, 50:120].any()
    torch.testing.assert_close(lse[1, :, 50:120], sinks[:, None].expand(4, 70))
    bias = torch.where(mask, 0.0, -math.inf).bfloat16()
    out, lse = assert_right(q, k, v, Features(bias=bias))
    assert not out[1, :, 50:120].any()
    out, lse = assert_right(q, k, v, Features(window=(5, 5)), q_offset=10_000)
    assert not out.any()


def test_no_key_at_all_leaves_the_sink() -> None:
    q, k, v = tensors(2, 4, 2, 20, 0, 64, torch.float16)
    sinks = torch.randn(4, device="cuda")
    out, lse = flashgen.attention(q, k, v, sinks=sinks, return_lse=True)
    assert not out.any()
    torch.testing.assert_close(lse, sinks.view(1, 4, 1).expand(2, 4, 20))
    q, k, v = tensors(0, 4, 2, 20, 30, 64, torch.float16)
    assert flashgen.attention(q, k, v, sinks=sinks, window=(3, 3)).shape == q.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("feature", ["mask", "keymask", "window", "alibi", "bias", "sinks"])
def test_scores_far_below_any_big_negative_number_win_over_hidden_ones(feature: str, dtype: torch.dtype) -> None:
    q, k, v = tensors(1, 4, 2, 130, 200, 64, dtype)
    q, k = 4e3 * q.abs(), -4e3 * k.abs()  # about -1e9: in units of log2 below 2^31, where exp2 of an ulp overflows
    features = {
        "mask": Features(mask=torch.rand(1, 1, 130, 200, device="cuda") < 0.5),
        "keymask": Features(mask=torch.rand(1, 1, 1, 200, device="cuda") < 0.5),
        "window": Features(window=(30, 0)),
        "alibi": Features(alibi_slopes=alibi_slopes(4, "cuda"), window=(30, 0)),
        "bias": Features(bias=torch.randn(1, 4, 130, 200, device="cuda", dtype=dtype), window=(30, 0)),
        "sinks": Features(sinks=torch.full((4,), -1e9, device="cuda"), window=(30, 0)),
    }[feature]
    out, lse = assert_right(q, k, v, features, softmax_scale=1.0)
    assert lse.max() < -1e8
    # one key has all the weight, or the sink: the gate allows scores of this size far more
    expected = oracle(q, k, v, softmax_scale=1.0, features=features)[0]
    rounding = 8e-3 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["cache", "cache per sequence", "keymask", "mask", "window"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_no_query_sees_does_not_reach_the_output(kind: str, head_dim: int, value: float) -> None:
    q, k, v = tensors(2, 4, 2, 70, 500, head_dim, torch.bfloat16)
    lengths = torch.tensor([333, 130], device="cuda")
    unseen = torch.arange(500, device="cuda") >= (333 if kind == "cache" else lengths[:, None])
    features, offset = Features(), None
    if kind == "keymask":
        features = Features(mask=~unseen[:, None, None])
    elif kind == "mask":
        unseen[:, 17] = unseen[:, 128:140] = True
        features = Features(mask=(~unseen[:, None, None]).expand(2, 1, 70, 500).clone())
    elif kind == "window":
        unseen = torch.ones(2, 500, device="cuda", dtype=torch.bool)
        unseen[:, 173:272] = False  # rows 0 to 69 at 200, 27 to the left and 2 to the right
        features, offset = Features(window=(27, 2)), 200
    else:
        offset = 333 - 70 if kind == "cache" else (lengths - 70).int()
    unseen = unseen.expand(2, 500)
    for tensor in (k, v):
        tensor.masked_fill_(unseen[:, None, :, None], value)
    assert_right(q, k, v, features, causal=kind.startswith("cache"), q_offset=offset)


@pytest.mark.parametrize("offset", [-2000, -60, 0, 200, 1000, 10**9])
@pytest.mark.parametrize("feature", ["window", "alibi", "causal-window"])
def test_offsets_move_windows_and_slopes(feature: str, offset: int) -> None:
    q, k, v = tensors(3, 4, 2, 100, 400, 64, torch.float16)
    if feature == "alibi" and abs(offset) > 2000:
        pytest.skip("scores of 1e9 say nothing")
    features = Features(alibi_slopes=alibi_slopes(4, "cuda")) if feature == "alibi" else Features(window=(70, 20))
    causal = feature.startswith("causal")
    assert_right(q, k, v, features, causal=causal, q_offset=offset)
    steps = torch.tensor([0, 77, -30], device="cuda")
    assert_right(q, k, v, features, causal=causal, q_offset=(offset + steps).clamp(-(2**31), 2**31 - 1).int())


def every_feature(dtype: torch.dtype) -> Features:
    return Features(
        window=(90, 40),
        softcap=30.0,
        alibi_slopes=alibi_slopes(4, "cuda"),
        sinks=torch.randn(4, device="cuda"),
        bias=torch.randn(1, 4, 130, 200, device="cuda", dtype=dtype),
        mask=torch.rand(2, 1, 130, 200, device="cuda") < 0.8,
    )


def test_a_graph_reads_features_again_at_each_replay() -> None:
    q, k, v = tensors(2, 4, 2, 130, 200, 64, torch.bfloat16)
    features = every_feature(torch.bfloat16)
    arguments = call_arguments(features)
    before = flashgen.attention(q, k, v, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, k, v, **arguments)
    for tensor in (q, k, v, features.sinks, features.bias):
        tensor.normal_()
    features.mask.logical_not_()
    features.alibi_slopes.mul_(0.5)
    graph.replay()
    assert torch.equal(out, flashgen.attention(q, k, v, **arguments))
    assert not torch.equal(out, before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch.compile uses what torch deprecates
def test_torch_compile_without_graph_breaks() -> None:
    q, k, v = tensors(2, 4, 2, 130, 200, 64, torch.bfloat16)
    arguments = call_arguments(every_feature(torch.bfloat16))

    @torch.compile(fullgraph=True)
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flashgen.attention(q * 2, k, v, **arguments, return_lse=True)
        return out + 1, lse

    out, lse = model(q, k, v)
    expected, expected_lse = flashgen.attention(q * 2, k, v, **arguments, return_lse=True)
    assert torch.equal(out, expected + 1)
    assert torch.equal(lse, expected_lse)


def needs_bytes(count: float) -> None:
    if torch.cuda.get_device_properties(0).total_memory < count:
        pytest.skip(f"needs a GPU with {count / 1e9:.0f} GB")


def test_keys_beyond_two_to_the_31_elements() -> None:
    needs_bytes(60e9)
    q, k, v = tensors(17, 8, 8, 16, 131072, 128, torch.bfloat16)
    assert k.numel() > 2**31
    last = slice(16, 17)  # its keys start at element 2**31
    out, lse = flashgen.attention(q, k, v, causal=True, window=(100_000, 0), return_lse=True)
    expected = oracle_of(q[last], k[last], v[last], causal=True, features=Features(window=(100_000, 0)))
    verdict = check(out[last], lse[last], expected)
    assert not isinstance(verdict, Failure), str(verdict)


def test_a_bias_beyond_two_to_the_31_elements() -> None:
    needs_bytes(60e9)
    q, k, v = tensors(1, 8, 2, 20_000, 20_000, 64, torch.bfloat16)
    bias = torch.empty(1, 8, 20_000, 20_000, device="cuda", dtype=torch.bfloat16).normal_()
    assert bias.numel() > 2**31
    out, lse = flashgen.attention(q, k, v, bias=bias, return_lse=True)
    rows = slice(19_800, 20_000)
    expected = oracle_of(q[:, :, rows], k, v, features=Features(bias=bias[:, :, rows]))
    verdict = check(out[:, :, rows], lse[:, :, rows], expected)
    assert not isinstance(verdict, Failure), str(verdict)


@pytest.mark.parametrize("kind", ["keys", "full"])
def test_a_mask_with_grouped_heads_takes_no_memory_that_grows_with_the_square(kind: str) -> None:
    """The call for which users of torch report 45 GB."""
    needs_bytes(40e9)
    length = 32_768
    q, k, v = tensors(1, 32, 8, length, length, 128, torch.bfloat16)
    mask = torch.ones(1, 1, length if kind == "full" else 1, length, device="cuda", dtype=torch.bool)
    mask[..., length - 1000 :] = False
    flashgen.attention(q, k, v, mask=mask)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    out = flashgen.attention(q, k, v, mask=mask)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - held < out.numel() * out.element_size() + 2**20


@pytest.mark.parametrize(
    "key",
    [
        "bf16-b1-h8-s1024-d64-bias",
        "bf16-b2-h8-hk2-s1000-d64-causal-mask",
        "bf16-b2-h8-s1024-d64-keymask",
        "bf16-b1-h8-hk2-s2048-d128-wl255-causal-softcap-sink",
        "tf32-b1-h4-s512-d64-alibi",
    ],
)
def test_a_workload_with_features_is_measured(key: str) -> None:
    device, workload = current_device(), Workload.parse(key)
    toolchain = GpuToolchain(device, 0)
    bench = Bench(device, torch.device("cuda", 0), toolchain, CudaStopwatch(), 8e9)
    state = bench.state(workload)
    config = toolchain.default(workload)
    candidate = bench.candidate(state, config, lambda stage: None)
    assert isinstance(candidate, Candidate), candidate
    reference = bench.reference(state)
    assert reference is not None
    assert 0 < reference.call_ms < 100
    if workload.bias and not workload.causal:
        assert bench.sdpa(state, "sdpa-efficient") is not None
