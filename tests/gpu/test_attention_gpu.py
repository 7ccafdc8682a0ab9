"""`flashgen.attention` on a GPU: numerics over random shapes, binaries, graphs, streams, torch.compile, layouts."""

from __future__ import annotations

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import flashgen
from flashgen.codegen.families import DECODE_FAMILIES
from flashgen.core.errors import BuildError, LaunchError, UnsupportedError, WorkloadError
from flashgen.core.features.values import Features
from flashgen.core.record import Failure
from flashgen.core.settings import settings
from flashgen.launch import plan as plan_module
from flashgen.launch.binding import Binding
from flashgen.launch.geometry import Geometry
from flashgen.launch.triton_plan import TritonForward
from flashgen.measure.verify import check, oracle_of
from flashgen.runtime.ops import kernel_cache, serve
from tests.gpu.streams import busy_stream

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("generated_kernels")]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def tensors(
    batch: int,
    nheads: int,
    nheads_k: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "bhsd",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def one(heads: int, rows: int) -> torch.Tensor:
        shape = (batch, rows, heads, head_dim) if layout == "bshd" else (batch, heads, rows, head_dim)
        return torch.randn(shape, device="cuda", dtype=dtype)

    return one(nheads, seqlen_q), one(nheads_k, seqlen_k), one(nheads_k, seqlen_k)


def assert_right(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    q_offset: int | torch.Tensor | None = None,
) -> None:
    """The gate that every tuned config passes: float64 oracle, 2x and mean rules, LSE, empty rows."""
    found = check(out, lse, oracle_of(q, k, v, causal=causal, q_offset=q_offset))
    assert not isinstance(found, Failure), str(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_numerics_over_random_shapes(dtype: str, head_dim: int) -> None:
    generator = random.Random(head_dim)
    torch.manual_seed(head_dim)
    for _ in range(12):
        nheads_k = generator.choice([1, 2, 3])
        shape = (generator.randint(1, 3), nheads_k * generator.choice([1, 2, 4]), nheads_k)
        lengths = (generator.choice([1, 17, 113, 128, 300, 1023]), generator.choice([1, 77, 203, 256, 1024]))
        layout, causal = generator.choice(["bhsd", "bshd"]), generator.random() < 0.6
        q, k, v = tensors(*shape, *lengths, head_dim, DTYPES[dtype], layout)
        offset = generator.choice([None, 0, -20, 50]) if causal else None
        out, lse = flashgen.attention(q, k, v, causal=causal, layout=layout, q_offset=offset, return_lse=True)
        assert out.shape == q.shape
        if layout == "bshd":
            q, k, v, out = (x.transpose(1, 2) for x in (q, k, v, out))
        assert_right(q, k, v, out, lse, causal=causal, q_offset=offset)


@pytest.mark.parametrize("head_dim", [16, 72, 80, 96, 160, 192])
def test_head_dimensions_that_are_no_powers_of_two(head_dim: int) -> None:
    q, k, v = tensors(2, 4, 2, 200, 333, head_dim)
    out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
    assert_right(q, k, v, out, lse, causal=True)


def test_unequal_head_dimensions() -> None:
    q, k, _ = tensors(2, 4, 2, 200, 333, 192)
    v = torch.randn(2, 333, 2, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    assert out.shape == (2, 4, 200, 128)
    assert_right(q, k, v, out, lse, causal=False)


def test_strides_that_no_descriptor_takes() -> None:
    base = torch.randn(2, 300, 3, 4, 65, device="cuda", dtype=torch.float16)
    q, k, v = (base[:, :, i, :, 1:].transpose(1, 2) for i in range(3))
    out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
    assert_right(q, k, v, out, lse, causal=True)
    k, v = k[:, :1].expand(2, 4, 300, 64), v[:, :1].expand(2, 4, 300, 64)
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    assert_right(q, k, v, out, lse, causal=False)


def test_expanded_heads_are_read_through_a_stride_of_zero() -> None:
    q, k, v = tensors(2, 4, 1, 200, 300, 128)
    k, v = k.expand(2, 4, 300, 128), v.expand(2, 4, 300, 128)
    out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
    assert_right(q, k, v, out, lse, causal=True)


def test_an_offset_tensor_is_read_at_every_call() -> None:
    q, k, v = tensors(3, 4, 2, 64, 500, 128)
    offset = torch.tensor([-10, 0, 436], device="cuda", dtype=torch.int32)
    for _ in range(2):
        out, lse = flashgen.attention(q, k, v, causal=True, q_offset=offset, return_lse=True)
        assert_right(q, k, v, out, lse, causal=True, q_offset=offset)
        offset += 7


def test_nothing_to_attend_to() -> None:
    q, k, v = tensors(2, 2, 2, 10, 0, 64)
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    assert torch.all(out == 0)
    assert torch.all(torch.isneginf(lse))
    q, k, v = tensors(0, 2, 2, 10, 10, 64)
    assert flashgen.attention(q, k, v).shape == (0, 2, 10, 64)


def test_200_random_shapes_need_one_binary_for_each_config_that_serves_them() -> None:
    generator, configs = random.Random(0), set()
    before = set(plan_module._FUNCTIONS)
    kernels = len(kernel_cache.KERNELS)
    for _ in range(200):
        nheads_k, layout = generator.choice([1, 2, 4]), generator.choice(["bhsd", "bshd"])
        q, k, v = tensors(
            generator.randint(1, 4),
            nheads_k * generator.choice([1, 3, 8]),
            nheads_k,
            generator.randint(1, 600),
            generator.randint(1, 600),
            64,
            torch.float16,
            layout,
        )
        flashgen.attention(q, k, v, layout=layout, softmax_scale=generator.random() + 0.1)
        configs.add(flashgen.explain(q, k, v, layout=layout).served.config)
    torch.cuda.synchronize()
    assert len(configs) < 20  # those of the nearest records of the class
    # whose parts a second kernel merges
    several = sum(config.family in {row.id for row in DECODE_FAMILIES} or config["split_keys"] for config in configs)
    assert len(set(plan_module._FUNCTIONS) - before) <= len(configs) + several
    assert len(kernel_cache.KERNELS) - kernels <= len(configs)


def all_features(q: torch.Tensor, k: torch.Tensor) -> Features:
    batch, nheads, seqlen_q, _ = q.shape
    return Features(
        window=(300, 40),
        softcap=20.0,
        alibi_slopes=torch.rand(batch, nheads, device="cuda"),
        sinks=torch.randn(nheads, device="cuda"),
        bias=torch.randn(1, nheads, seqlen_q, k.shape[2], device="cuda", dtype=q.dtype),
        mask=torch.rand(batch, 1, seqlen_q, k.shape[2], device="cuda") < 0.7,
    )


@pytest.mark.parametrize("loads", ["descriptor", "pointer", "hopper"])
def test_both_kinds_of_plan_give_the_same_bits(loads: str) -> None:
    from flashgen.codegen.build import compile_kernel
    from flashgen.codegen.families import unsupported
    from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
    from flashgen.codegen.portable_forward.family import PORTABLE_FORWARD
    from flashgen.core.workload import Specialization

    hopper = loads == "hopper"
    if hopper and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper family needs sm90")

    device = serve.device_at(0)
    everything = "fwd-bf16-d64-softcap-alibi-sink-bias-mask-window"
    for key in (
        "fwd-bf16-d128-causal",
        "fwd-bf16-d64",
        "fwd-bf16-d64-causal-offset",
        everything,
        f"{everything}-offset",
    ):
        spec = Specialization.parse(key)
        if hopper and unsupported(HOPPER_FORWARD, spec, device):
            continue
        config = (HOPPER_FORWARD if hopper else PORTABLE_FORWARD).default(spec, device)
        config = config if hopper else config.replace(loads=loads)
        q, k, v = tensors(2, 4, 2, 515, 704, spec.head_dim)
        features = all_features(q, k) if spec.bias else Features()
        geometry = Geometry.of(q, k, v, torch.empty_like(q), features)
        compiled = compile_kernel(spec, config, device)
        fast = plan_module.make_plan(compiled, spec, config, geometry, 0)
        slow = TritonForward(Binding.of(compiled, spec, config, geometry), 0)
        assert not isinstance(fast, TritonForward), "the parameter layout of this Triton is unknown"
        offset = torch.tensor([5, -3], device="cuda", dtype=torch.int32) if spec.offset_tensor else None
        results = []
        for launch in (fast, slow):
            out = torch.full_like(q, float("nan"))
            lse = torch.full(q.shape[:3], float("nan"), device="cuda")
            launch(q, k, v, out, lse, 0.1, offset, features)
            results.append((out, lse))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        assert not torch.isnan(results[0][0]).any()


def test_a_graph_is_captured_and_replayed_after_inputs_change() -> None:
    q, k, v = tensors(2, 4, 2, 256, 256, 128)
    expected_before = flashgen.attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, k, v, causal=True)
    for tensor in (q, k, v):
        tensor.normal_()
    graph.replay()
    expected = flashgen.attention(q, k, v, causal=True)
    assert torch.equal(out, expected)
    assert not torch.equal(out, expected_before)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's, for the capture that is refused
def test_a_cold_call_during_capture_is_refused_and_warmup_makes_it_warm() -> None:
    q, k, v = tensors(1, 2, 2, 64, 64, 176)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(LaunchError, match="warmup"), torch.cuda.graph(graph):
        flashgen.attention(q, k, v)
    torch.cuda.synchronize()
    assert flashgen.warmup(["b1-h2-s64-d176"]) >= 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, k, v)
    graph.replay()
    assert torch.equal(out, flashgen.attention(q, k, v))


def test_a_setting_makes_later_compiles_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_NO_COMPILE", "1")
    settings.cache_clear()
    q, k, v = tensors(1, 2, 2, 64, 64, 104)
    with pytest.raises(BuildError, match="FLASHGEN_NO_COMPILE"):
        flashgen.attention(q, k, v)
    flashgen.warmup(["b1-h2-s64-d104"])
    assert flashgen.attention(q, k, v).shape == q.shape


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch.compile uses what torch deprecates
def test_torch_compile_without_graph_breaks() -> None:
    @torch.compile(fullgraph=True)
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flashgen.attention(q * 2, k, v, causal=True, layout="bshd", return_lse=True)
        return out + 1, lse

    q, k, v = tensors(2, 4, 2, 130, 130, 64, layout="bshd")
    out, lse = model(q, k, v)
    expected, expected_lse = flashgen.attention(q * 2, k, v, causal=True, layout="bshd", return_lse=True)
    assert torch.equal(out, expected + 1)
    assert torch.equal(lse, expected_lse)


def test_opcheck() -> None:
    q, k, v = tensors(1, 4, 2, 64, 100, 64)
    flashgen.attention(q, k, v)  # the operators are defined when torch is first needed
    torch.library.opcheck(torch.ops.flashgen.attention.default, (q, k, v, True, 0.125))
    torch.library.opcheck(torch.ops.flashgen.attention_lse.default, (q, k, v))


def test_launches_follow_the_current_stream() -> None:
    q, k, v = tensors(4, 16, 16, 2048, 2048, 128)
    expected = flashgen.attention(q, k, v)
    with busy_stream():
        q.mul_(0).add_(1)
        out = flashgen.attention(q, k, v)
    assert not torch.equal(out, expected)
    assert torch.equal(out, flashgen.attention(q, k, v))


def test_threads_share_a_plan() -> None:
    pairs = [tensors(1, 8, 8, 512, 512, 64) for _ in range(8)]
    expected = [flashgen.attention(*each) for each in pairs]
    torch.cuda.synchronize()

    def repeat(index: int) -> bool:
        return all(torch.equal(flashgen.attention(*pairs[index]), expected[index]) for _ in range(200))

    with ThreadPoolExecutor(8) as pool:  # each thread starts without a CUDA context
        assert all(pool.map(repeat, range(8)))


def test_what_is_not_supported_is_said_with_every_family_s_reason() -> None:
    q, k, v = tensors(1, 2, 2, 64, 64, 64)
    with pytest.raises(UnsupportedError, match="portable_forward: its head_dim is 16 to 512, not 520"):
        flashgen.attention(*tensors(1, 2, 2, 64, 64, 520))
    with pytest.raises(WorkloadError, match="int32"):
        flashgen.attention(q, k, v, causal=True, q_offset=torch.zeros(1, device="cuda"))


def test_explain_says_which_rung_serves() -> None:
    explanation = flashgen.explain(*tensors(1, 2, 2, 640, 640, 64), causal=True)
    text = str(explanation)
    assert "portable_forward: applies" in text
    assert explanation.served.rung in (4, 5, 6, 7, 8)
    assert explanation.backend == "generated"


@pytest.mark.parametrize(
    "program",
    [
        "flashgen.warmup(['b1-h2-s64-d64'])",
        "[t.start() or t.join() for t in (threading.Thread(target=call, args=(n,)) for n in (64, 48))]",
    ],
)
def test_a_process_or_thread_without_a_cuda_context_gets_one(program: str) -> None:
    code = f"""
import threading, torch, flashgen
done = []
def call(rows):
    flashgen.attention(q[:, :, :rows], q, q)
    done.append(rows)
if "Thread" in {program!r}:
    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    {program}
    assert done == [64, 48], done
else:
    {program}
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
