"""The public calls: what they refuse and why, what torch is promised, and what a warm-up makes ready."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashgen
from flashgen.core.config import Config
from flashgen.core.errors import DeviceError, UnsupportedError, WorkloadError
from flashgen.core.workload import Specialization, Workload
from flashgen.launch import decode_passes
from flashgen.runtime.decode import runs as decode_runs
from flashgen.runtime.ops import forward as ops
from flashgen.runtime.ops import helpers, outputs, runs, serve
from flashgen.runtime.ops.calls import Call
from flashgen.runtime.ops.mods import handle_for
from tests.db.samples import H100, RTX_4090
from tests.decoding import Case, make
from tests.fakes.gpu import FakeGpu, OnGpu, qkv, tensor
from tests.runtime.ladders import CAUSAL, Ladder, config, default, faster, measured, predicted
from tests.tiers import first

NO_GPU = r"no kernel family serves fwd-bf16-b1-h4-hk2-sq48-sk64-d64 on cpu: all of them run on GPUs"


def cpu() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tensor(1, 4, 48, 64, on_gpu=False), tensor(1, 2, 64, 64, on_gpu=False), tensor(1, 2, 64, 64, on_gpu=False)


def test_cpu_tensors_are_told_every_family_s_reason() -> None:
    with pytest.raises(UnsupportedError, match=NO_GPU):
        flashgen.attention(*cpu())
    with pytest.raises(UnsupportedError, match=NO_GPU):
        flashgen.attention(*cpu(), return_lse=True)
    with pytest.raises(UnsupportedError, match=NO_GPU):
        flashgen.explain(*cpu())
    assert serve.MEMO == {}


def test_a_rule_that_is_broken_is_said_before_what_is_not_supported() -> None:
    q, k, v = cpu()
    with pytest.raises(WorkloadError, match="share dtype"):
        flashgen.attention(q, k, v.half())
    with pytest.raises(WorkloadError, match="share dtype"):
        flashgen.explain(q, k, v.half())


def test_a_feature_that_is_off_is_no_feature(gpu: FakeGpu) -> None:
    flashgen.attention(*qkv(), window=(None, None), softcap=0.0, deterministic=True, mask=None)
    assert len(gpu.launched) == 1


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_is_finite_and_positive(scale: float, gpu: FakeGpu) -> None:
    with pytest.raises(WorkloadError, match=f"softmax_scale is finite and above 0, got {scale}"):
        flashgen.attention(*qkv(), softmax_scale=scale)


@pytest.mark.parametrize("scale", [2.0**127, 1e300])
def test_a_scale_is_finite_where_kernels_have_it(scale: float, gpu: FakeGpu) -> None:
    """As a number of 32 bits, which a launch could not write."""
    words = re.escape(f"softmax_scale is below 2 ** 127, as kernels have it in float32, got {scale}")
    q, k, v = qkv()
    ends = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(WorkloadError, match=words):
        flashgen.attention(q, k, v, softmax_scale=scale)
    with pytest.raises(WorkloadError, match=words):
        flashgen.attention_varlen(q[0], k[0], v[0], ends, max_seqlen_q=1, softmax_scale=scale)
    call = make(Case(lens=(40, 7)))
    with pytest.raises(WorkloadError, match=words):
        decode_runs.run(replace(call, softmax_scale=scale))


@pytest.mark.parametrize("call", [flashgen.attention, flashgen.explain])
def test_a_layout_has_one_of_two_names(call: Callable[..., object], gpu: FakeGpu) -> None:
    with pytest.raises(WorkloadError, match='layout is "bhsd" or "bshd", got \'bsdh\''):
        call(*qkv(), layout="bsdh")


@pytest.mark.parametrize("call", [flashgen.attention, flashgen.explain])
@pytest.mark.parametrize(
    ("offset", "causal", "message"),
    [
        (3, False, r"shifts a causal mask, a window or ALiBi and needs one of them, got 3 alone"),
        (torch.zeros(1, dtype=torch.int32), False, "needs one of them, got a tensor alone"),
        (torch.zeros(1, dtype=torch.int64), True, r"int32 \(batch,\) .*got torch\.int64 \(1,\) on cpu for batch 1"),
        (torch.zeros(2, dtype=torch.int32), True, r"got torch\.int32 \(2,\) on cpu for batch 1 on cpu"),
        (torch.zeros((), dtype=torch.int32), True, r"got torch\.int32 \(\) on cpu"),
        (torch.zeros(1, dtype=torch.int32, device="meta"), True, r"\(1,\) on meta for batch 1 on cpu"),
    ],
    ids=["not causal", "tensor, not causal", "dtype", "length", "shape", "device"],
)
def test_rules_of_a_query_offset(
    call: Callable[..., object], offset: int | torch.Tensor, causal: bool, message: str, gpu: FakeGpu
) -> None:
    with pytest.raises(WorkloadError, match=message):
        call(*qkv(), causal=causal, q_offset=offset)
    assert gpu.prepared == []


def test_an_offset_tensor_of_any_stride_is_read_contiguously(gpu: FakeGpu) -> None:
    offset = torch.arange(4, dtype=torch.int32)[::2].as_subclass(OnGpu)
    flashgen.attention(*(x.expand(2, -1, -1, -1) for x in qkv()), causal=True, q_offset=offset)
    given = gpu.launched[0].offset
    assert given.is_contiguous()
    assert given.tolist() == [0, 2]


def test_explain_answers_for_the_call_that_it_is_given(gpu: FakeGpu, ladder: Ladder) -> None:
    ladder.user(measured())
    q, k, v = (tensor(4, h, 4096, 128) for h in (32, 8, 8))
    explanation = flashgen.explain(q, k, v, causal=True)
    assert (explanation.served.rung, explanation.served.config) == (3, config())
    assert explanation.workload == CAUSAL
    shifted = flashgen.explain(q, tensor(4, 8, 4096, 128, shift=1), v, causal=True)
    assert (shifted.served.rung, shifted.specialization.aligned16) == (8, False)
    assert flashgen.explain(q, k, v, causal=True, config=config(32)).served.rung == 1
    swapped = flashgen.explain(*(x.transpose(1, 2) for x in (q, k, v)), layout="bshd", causal=True)
    assert swapped.workload == CAUSAL
    assert gpu.compiled == [], "an explanation compiles nothing"


def test_explain_and_attention_agree_on_the_backend(gpu: FakeGpu, ladder: Ladder) -> None:
    ladder.user(measured(baselines=faster("sdpa-cudnn")))
    q, k, v = (tensor(4, h, 4096, 128) for h in (32, 8, 8))
    assert flashgen.explain(q, k, v, causal=True).backend == "sdpa-cudnn"
    assert flashgen.explain(q, k, v, causal=True, q_offset=0).backend == "generated"
    offset = torch.zeros(4, dtype=torch.int32).as_subclass(OnGpu)
    assert flashgen.explain(q, k, v, causal=True, q_offset=offset).backend == "generated"


KEY = "b4-h32-hk8-s4096-d128-causal"
PACKED = [default().replace(packed_heads=heads, masked_blocks="branch") for heads in (2, 4)]
"""What the default becomes where queries are short."""

FULL = "b1-h2-s64-d64"


def with_shares(*configs: Config) -> set[Config]:
    """And those with CTAs that share the keys of a tile, which serve where there are few tiles."""
    return {config.replace(split_keys=shared) for config in configs for shared in (False, True)}


def test_a_warm_up_makes_ready_whatever_the_ladder_can_return(gpu: FakeGpu, ladder: Ladder) -> None:
    short, long = CAUSAL.with_shape(seqlen_q=256, seqlen_k=256), CAUSAL.with_shape(seqlen_k=60_000)
    ladder.user(measured(config=config(32)), measured(short, config=config(1)), predicted(long, config=config(0)))
    ladder.user(measured(replace(CAUSAL, head_dim=64, head_dim_v=64)), measured(device=RTX_4090, config=config(1)))
    ladder.ship(measured(short, H100, config=config(0, "pointer")))
    # 128 tiles or more without packed heads leave no SM to share their keys
    expected = {default(), config(32), config(1), config(0), config(0, "pointer")} | with_shares(*PACKED)
    assert flashgen.warmup([KEY]) == len(expected)
    assert {chosen for _, chosen in gpu.compiled} == {chosen for _, chosen in gpu.loaded} == expected
    assert {spec for spec, _ in gpu.compiled} == {CAUSAL.specialization}
    for shape in (CAUSAL, short, long, CAUSAL.with_shape(seqlen_k=1), CAUSAL.with_shape(seqlen_q=60)):
        assert ladder.resolve(shape).config in expected


def test_a_warm_up_for_lengths_takes_what_serves_them(gpu: FakeGpu, ladder: Ladder) -> None:
    short = CAUSAL.with_shape(seqlen_q=256, seqlen_k=256)
    ladder.user(measured(config=config(32)), measured(short, config=config(1)), predicted(config=config(0)))
    assert flashgen.warmup([KEY], seqlens=[256, 300, 8192]) == 2
    assert {chosen for _, chosen in gpu.compiled} == {config(32), config(1)}
    assert flashgen.warmup([CAUSAL], seqlens=[]) == 1
    assert flashgen.warmup([]) == 0
    assert len(gpu.compiled) == 2, "what is compiled stays"


def test_warmup_compiles_helpers_where_they_are_asked_for(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[str] = []
    monkeypatch.setattr(helpers, "warm", lambda helper, index: warmed.append(helper.id))
    count = flashgen.warmup([KEY])
    assert warmed == []
    assert flashgen.warmup([KEY], training=True, helpers=True) > count
    assert sorted(set(warmed)) == ["append_kv", "merge_states"]
    assert len(warmed) == 9
    warmed.clear()
    monkeypatch.setattr(decode_passes, "endless", lambda index: None)
    flashgen.warmup(["dec-b2-h4-hk2-sk64-d128"], helpers=True)
    assert len(warmed) == 9, "steps of decoding need them first of all"


def test_a_warm_up_can_include_offset_tensors(gpu: FakeGpu) -> None:
    assert flashgen.warmup([KEY, FULL], offset_tensor=True) == 2 * (1 + len(with_shares(*PACKED))) + 2
    keys = sorted({spec.key for spec, _ in gpu.compiled})
    assert keys == ["fwd-bf16-d128-causal", "fwd-bf16-d128-causal-offset", "fwd-bf16-d64"]


def test_a_warm_up_leaves_out_records_that_cannot_serve(gpu: FakeGpu, ladder: Ladder) -> None:
    too_large = config().replace(block_n=256, num_stages=5)
    ladder.user(measured(config=too_large))
    assert flashgen.warmup([KEY]) == 5
    assert {chosen for _, chosen in gpu.compiled} == {default()} | with_shares(*PACKED)


def test_a_warm_up_of_what_nobody_supports_is_an_error(gpu: FakeGpu) -> None:
    with pytest.raises(UnsupportedError, match=r"head_dim is 16 to \d+, not 1024"):
        flashgen.warmup(["b1-h1-s64-d1024"])
    with pytest.raises(WorkloadError, match="lacks"):
        flashgen.warmup(["b1-h1-d64"])
    assert gpu.compiled == []


def test_a_warm_up_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    serve.device_at.cache_clear()
    with pytest.raises(DeviceError, match="needs a GPU that torch can use"):
        flashgen.warmup([KEY])


# --- what torch is promised ---------------------------------------------------------------------------------------

INPUTS: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "contiguous": lambda: (_at(2, 6, 10, 64), _at(2, 3, 7, 64), _at(2, 3, 7, 64)),
    "transposed": lambda: (
        _at(2, 10, 6, 64).transpose(1, 2),
        _at(2, 7, 3, 64).transpose(1, 2),
        _at(2, 7, 3, 64).transpose(1, 2),
    ),
    "head_dim_v": lambda: (_at(2, 6, 10, 64), _at(2, 3, 7, 64), _at(2, 3, 7, 32)),
    "transposed, head_dim_v": lambda: (_at(2, 10, 6, 64).transpose(1, 2), _at(2, 3, 7, 64), _at(2, 3, 7, 128)),
    "packed": lambda: tuple(_at(2, 10, 3, 6, 64)[:, :, i].transpose(1, 2) for i in range(3)),  # type: ignore[return-value]
    "padded rows": lambda: (_at(2, 6, 10, 65)[..., 1:], _at(2, 3, 7, 64), _at(2, 3, 7, 64)),
    "one head": lambda: (_at(2, 10, 1, 64).transpose(1, 2), _at(2, 1, 7, 64), _at(2, 1, 7, 48)),
    "expanded": lambda: (_at(1, 6, 10, 64).expand(2, 6, 10, 64), _at(2, 3, 7, 64), _at(2, 3, 7, 64)),
    "empty": lambda: (_at(0, 6, 10, 64), _at(0, 3, 7, 64), _at(0, 3, 7, 64)),
}


def _at(*shape: int, device: str | None = None) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=device)


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("name", INPUTS)
def test_what_is_promised_is_what_is_allocated(name: str, bshd: bool) -> None:
    """torch.compile builds on the shapes and strides of the fakes; a real call has to keep them."""
    q, k, v = INPUTS[name]()
    if bshd:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = outputs.empty_output(q, v, bshd=bshd), outputs.empty_lse(q, bshd=bshd)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert out.stride(3) == 1
    layout = "bshd" if bshd else "bhsd"
    with FakeTensorMode():
        q, k, v = INPUTS[name]()
        if bshd:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        fake, fake_lse = flashgen.attention(q, k, v, layout=layout, return_lse=True)
        alone = flashgen.attention(q, k, v, layout=layout)
        assert isinstance(alone, torch.Tensor)
    for promised in (fake, alone):
        assert (promised.shape, promised.dtype) == (out.shape, out.dtype)
        assert promised.stride() == out.stride() or out.numel() == 0  # empty_like itself promises others for nothing
    assert fake_lse.shape == (q.shape[0], q.shape[2 if bshd else 1], q.shape[1 if bshd else 2]) == lse.shape
    assert (fake_lse.stride(), fake_lse.dtype) == (lse.stride(), torch.float32)


def test_an_output_keeps_the_memory_order_of_q() -> None:
    """So that the reshape after it, to (batch, seqlen, nheads * head_dim), costs no copy."""
    for dim in (64, 32):
        q, _, _ = INPUTS["transposed"]()
        out = outputs.empty_output(q, _at(2, 3, 7, dim), bshd=False)
        assert out.transpose(1, 2).is_contiguous()
        q, _, _ = INPUTS["contiguous"]()
        assert outputs.empty_output(q, _at(2, 3, 7, dim), bshd=False).is_contiguous()


def test_the_outputs_of_gpu_tensors_are_on_that_gpu() -> None:
    with FakeTensorMode():
        q, k = (_at(2, 10, h, 64, device="cuda:1") for h in (6, 3))
        out, lse = flashgen.attention(q, k, k, layout="bshd", causal=True, return_lse=True)
        assert (out.device, lse.device) == (torch.device("cuda", 1),) * 2
        assert (out.shape, out.stride(), lse.shape) == (q.shape, q.stride(), (2, 6, 10))


def test_meta_tensors_flow_through() -> None:
    q, k, v = (_at(2, h, 10, d, device="meta") for h, d in ((6, 64), (3, 64), (3, 32)))
    out, lse = flashgen.attention(q, k, v, causal=True, q_offset=2, softmax_scale=0.5, return_lse=True)
    assert (out.device.type, out.shape, lse.shape) == ("meta", (2, 6, 10, 32), (2, 6, 10))


def reference(call: Call) -> runs.Run:
    """Attention in plain torch in the place of a kernel, in the output that a kernel would get."""

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        offset: runs.Offset,
        features: Any = None,
    ) -> Any:
        out = outputs.empty_output(q, v, bshd=call.bshd)
        lse = outputs.empty_lse(q, bshd=call.bshd)
        q, k, v, view = (x.transpose(1, 2) if call.bshd else x for x in (q, k, v, out))
        group = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(group, 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if call.causal:
            shift = k.shape[2] - q.shape[2] if offset is None else offset
            shift = shift.view(-1, 1, 1, 1) if isinstance(shift, torch.Tensor) else shift
            hidden = torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None] + shift
            scores = scores.masked_fill(hidden, -math.inf)
        view.copy_(scores.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(group, 1))
        lse.copy_(scores.logsumexp(-1))
        return (out, lse) if call.with_lse else out

    return run


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything of a call but the kernel, on real CPU tensors."""
    monkeypatch.setattr(serve, "prepare", reference)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def numbers(bshd: bool = False, seqlen_q: int = 10) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, s, d, generator=generator) for h, s, d in ((4, seqlen_q, 16), (2, 12, 16), (2, 12, 8)))
    return (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)) if bshd else (q, k, v)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("bshd", [False, True])
def test_torch_compile_finds_one_graph(bshd: bool) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layout = "bshd" if bshd else "bhsd"
        out, lse = flashgen.attention(q * 2, k, v, layout=layout, causal=True, q_offset=1, return_lse=True)
        again = flashgen.attention(q, k, v, layout=layout, softmax_scale=0.5)
        return out + again, lse

    found = torch.compile(model, fullgraph=True, backend=backend)(*numbers(bshd))
    for one, other in zip(found, model(*numbers(bshd)), strict=True):
        torch.testing.assert_close(one, other)
    assert len(graphs) == 1
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("flashgen.attention" in target for target in called) == 2


@pytest.mark.usefixtures("on_cpu")
def test_torch_compile_with_lengths_that_change() -> None:
    compiled = torch.compile(
        lambda q, k, v: flashgen.attention(q, k, v, causal=True) + 1, fullgraph=True, backend="eager", dynamic=True
    )
    for length in (10, 11, 5):
        q, k, v = numbers(seqlen_q=length)
        torch.testing.assert_close(compiled(q, k, v), flashgen.attention(q, k, v, causal=True) + 1)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("bshd", first(1, [False, True]))
def test_the_ops_keep_what_torch_asks_of_ops(bshd: bool) -> None:
    q, k, v = numbers(bshd)
    offset = torch.tensor([1, 2], dtype=torch.int32)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.flashgen.attention.default, (q, k, v, True, 0.3, bshd, 2), test_utils=checks)
    arguments = (q, k, v, True, None, bshd, None, offset)
    torch.library.opcheck(torch.ops.flashgen.attention_lse.default, arguments, test_utils=checks)


class Marked(torch.Tensor):
    """A subclass of tensors, for which torch would have more to do."""


class DoesNothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class PassesOn(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


SEEN_BY_TORCH: dict[str, Callable[[], Any]] = {
    "dispatch mode": DoesNothing,
    "function mode": PassesOn,
    "profiler": torch.profiler.profile,
}


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that were called through torch's dispatcher."""
    seen: list[str] = []

    def counted(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: seen.append(name) or op(*arguments)  # type: ignore[func-returns-value]

    for name in ("attention", "attention_lse", "attention_features", "attention_features_lse"):
        monkeypatch.setattr(ops, f"{name}_op", counted(name, getattr(ops, f"{name}_op")))
    return seen


@pytest.mark.usefixtures("on_cpu")
def test_a_plain_call_saves_the_dispatcher(dispatched: list[str]) -> None:
    q, k, v = numbers()
    expected = flashgen.attention(q, k, v.as_subclass(Marked)).as_subclass(torch.Tensor)
    assert dispatched == ["attention"]
    assert torch.equal(flashgen.attention(q, k, v), expected)
    flashgen.attention(q, k, v, causal=True, q_offset=2, return_lse=True)
    flashgen.attention(q, k, v, softcap=2.0, window=(3, 3))
    flashgen.attention(q, k, v, sinks=torch.nn.Parameter(torch.zeros(4), requires_grad=False), return_lse=True)
    assert dispatched == ["attention"]
    flashgen.attention(q, k, v, sinks=torch.zeros(4).as_subclass(Marked))
    assert dispatched == ["attention", "attention_features"]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", SEEN_BY_TORCH)
def test_what_torch_has_to_see_goes_through_the_dispatcher(name: str, dispatched: list[str]) -> None:
    q, k, v = numbers()
    expected = flashgen.attention(q, k, v)
    assert dispatched == []
    with SEEN_BY_TORCH[name]():
        found = flashgen.attention(q, k, v)
        flashgen.attention(q, k, v, softcap=2.0, return_lse=True)
    assert torch.equal(found, expected)
    assert dispatched == ["attention", "attention_features_lse"]


@pytest.mark.usefixtures("on_cpu")
def test_a_transform_and_a_trace_see_the_op(dispatched: list[str]) -> None:
    q, k, v = numbers()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # vmap calls an op without a rule of its own in a loop, and tracing is deprecated
        mapped = torch.vmap(flashgen.attention)(*(torch.stack([x, 2 * x]) for x in (q, k, v)))
        assert dispatched == ["attention"]
        torch.testing.assert_close(mapped[1], flashgen.attention(2 * q, 2 * k, 2 * v))
        traced = torch.jit.trace(flashgen.attention, (q, k, v), check_trace=False)
    assert "flashgen::attention" in str(traced.graph)
    other = [x + 1 for x in (q, k, v)]
    torch.testing.assert_close(traced(*other), flashgen.attention(*other))


FEATURED: dict[str, Callable[[], dict[str, Any]]] = {
    "values": lambda: {"softcap": 2.0, "window": (4, 1), "causal": True},
    "heads": lambda: {"alibi_slopes": torch.ones(4), "sinks": torch.zeros(4)},
    "scores": lambda: {"bias": torch.ones(10, 12), "mask": torch.ones(12, dtype=torch.bool)},
    "functions": lambda: {"score_mod": scored, "aux": (torch.ones(3),)},
}


def scored(score, b, h, q_idx, k_idx, table):  # type: ignore[no-untyped-def]
    return score + tl.load(table + h)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("with_lse", first(1, [True, False]))
@pytest.mark.parametrize("name", FEATURED)
def test_torch_compile_finds_one_graph_with_features(name: str, with_lse: bool) -> None:
    """Every two of features, an LSE, and dynamic shapes meet."""
    arguments = FEATURED[name]()
    dynamic = with_lse == (list(FEATURED).index(name) % 2 == 0)

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        found = flashgen.attention(q * 2, k, v, return_lse=with_lse, **arguments)
        return found[0] + 1 if isinstance(found, tuple) else found + 1

    torch._dynamo.reset()
    # torch begins anew for each number that it first took for a variable, which one set of features is enough for
    with torch._dynamo.config.patch(specialize_float=name != "heads"):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        torch.testing.assert_close(compiled(*numbers()), model(*numbers()))


@pytest.mark.usefixtures("on_cpu")
def test_the_ops_with_features_keep_what_torch_asks_of_ops() -> None:
    q, k, v = numbers()
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    tensors = (torch.ones(4), torch.zeros(4), torch.ones(10, 12), torch.ones(10, 12, dtype=torch.bool))
    arguments = (q, k, v, True, 0.3, False, None, None, 3, None, 2.0, *tensors)
    for op in (ops.attention_features_op, ops.attention_features_lse_op):
        torch.library.opcheck(op, arguments, test_utils=checks)
    handle = handle_for(scored, None, (torch.float32,))
    given = (q, k, v, False, None, False, None, None, None, None, 0.0, None, None, None, None, handle, [torch.ones(3)])
    torch.library.opcheck(ops.attention_features_op, given, test_utils=checks)


def test_configs_of_a_warm_up_are_values(gpu: FakeGpu) -> None:
    flashgen.warmup([FULL, FULL, Workload.parse(FULL)])
    assert len(gpu.compiled) == 2
    for spec, chosen in gpu.compiled:
        assert isinstance(spec, Specialization)
        assert isinstance(chosen, Config)
