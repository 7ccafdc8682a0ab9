"""From tensors to a launch: the memo and its key, the slow path, and what a process says and refuses."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen
from flashgen.core.errors import BuildError, LaunchError, UnsupportedError, WorkloadError
from flashgen.core.settings import settings
from flashgen.launch.geometry import Geometry
from flashgen.launch.sdpa import BACKENDS
from flashgen.runtime.lookup.handover import SDPA_IMPLS
from flashgen.runtime.ops import log, outputs, runs, serve
from flashgen.runtime.ops.calls import Call, CheckedCall
from tests.db.samples import H100
from tests.fakes.gpu import MARK, FakeGpu, OnGpu, qkv, tensor
from tests.runtime.ladders import CAUSAL, Ladder, config, default, faster, measured, predicted


def test_a_repeated_shape_is_prepared_once_and_launched_each_time(gpu: FakeGpu) -> None:
    q, k, v = qkv()
    outs = [flashgen.attention(q, k, v) for _ in range(3)]
    other = [flashgen.attention(*qkv()) for _ in range(2)]
    assert len(gpu.prepared) == len(gpu.compiled) == len(gpu.planned) == 1
    assert len(gpu.launched) == 5
    for out in outs + other:
        assert out.shape == q.shape
        assert torch.all(out == MARK)
    assert len({out.data_ptr() for out in outs}) == 3
    assert gpu.launched[0].q == q.data_ptr()
    assert gpu.launched[3].q != q.data_ptr()


KEYS: dict[str, Callable[[], Any]] = {
    "the usual": lambda: flashgen.attention(*qkv()),
    "batch": lambda: flashgen.attention(*qkv(batch=2)),
    "length of q": lambda: flashgen.attention(*qkv(seqlen_q=49)),
    "length of k": lambda: flashgen.attention(*qkv(seqlen_k=65)),
    "heads of k": lambda: flashgen.attention(*qkv(nheads_k=4)),
    "strides of q": lambda: flashgen.attention(tensor(1, 4, 48, 64, swap=True), *qkv()[1:]),
    "strides of k": lambda: flashgen.attention(qkv()[0], tensor(1, 2, 64, 64, swap=True), qkv()[2]),
    "strides of v": lambda: flashgen.attention(*qkv()[:2], tensor(1, 2, 64, 64, swap=True)),
    "start of q": lambda: flashgen.attention(tensor(1, 4, 48, 64, shift=1), *qkv()[1:]),
    "start of v, by 8 bytes": lambda: flashgen.attention(*qkv()[:2], tensor(1, 2, 64, 64, shift=4)),
    "dtype": lambda: flashgen.attention(*(x.half() for x in qkv())),
    "causal": lambda: flashgen.attention(*qkv(), causal=True),
    "bshd": lambda: flashgen.attention(*(x.transpose(1, 2) for x in qkv()), layout="bshd"),
    "an offset": lambda: flashgen.attention(*qkv(), causal=True, q_offset=3),
    "an offset tensor": lambda: flashgen.attention(
        *qkv(), causal=True, q_offset=torch.zeros(1, dtype=torch.int32).as_subclass(OnGpu)
    ),
    "lse": lambda: flashgen.attention(*qkv(), return_lse=True),
    "head_dim_v": lambda: flashgen.attention(*qkv()[:2], tensor(1, 2, 64, 128)),
}


def test_whatever_chooses_code_is_in_the_key(gpu: FakeGpu) -> None:
    for number, call in enumerate(KEYS.values(), start=1):
        call()
        assert len(gpu.planned) == len(serve.MEMO) == number
    for call in KEYS.values():
        call()
    assert len(gpu.planned) == len(KEYS)
    assert len(gpu.launched) == 2 * len(KEYS)


def test_what_is_an_argument_of_the_launch_is_not(gpu: FakeGpu) -> None:
    q, k, v = qkv()
    for scale in (None, 0.1, 2.0):
        flashgen.attention(q, k, v, softmax_scale=scale)
    for offset in (0, -5, 1 << 40):
        flashgen.attention(q, k, v, causal=True, q_offset=offset)
    aligned = tensor(1, 4, 48, 64, shift=8)  # 16 bytes on
    flashgen.attention(aligned, k, v)
    assert len(gpu.prepared) == 2
    assert [done.scale for done in gpu.launched] == [None, 0.1, 2.0, None, None, None, None]
    assert [done.offset for done in gpu.launched] == [None, None, None, 0, -5, 1 << 40, None]


def test_an_offset_tensor_reaches_the_launch_as_it_is(gpu: FakeGpu) -> None:
    offset = torch.tensor([4, 9], dtype=torch.int32).as_subclass(OnGpu)
    flashgen.attention(*qkv(batch=2), causal=True, q_offset=offset)
    assert gpu.launched[0].offset.data_ptr() == offset.data_ptr()
    assert gpu.planned[0][0].offset_tensor


def test_output_and_lse_have_the_layout_of_the_call(gpu: FakeGpu) -> None:
    for swap in (False, True):
        q, k, v = (x.transpose(1, 2) if swap else x for x in qkv(batch=2))
        out, lse = flashgen.attention(q, k, v, layout="bshd" if swap else "bhsd", return_lse=True)
        assert out.shape == q.shape
        assert lse.shape == (2, 4, 48)
        assert lse.dtype == torch.float32
        assert lse.is_contiguous()
        assert torch.all(lse == MARK)
        assert torch.all(out == MARK)
        assert gpu.planned[-1][2].q_shape == (2, 4, 48, 64)
        assert gpu.planned[-1][2].tensor("o")[1] == (out.transpose(1, 2) if swap else out).stride()
    assert flashgen.attention(*qkv()[:2], tensor(1, 2, 64, 128)).shape == (1, 4, 48, 128)
    assert gpu.launched[-1].lse is None


def test_a_call_that_fails_is_not_remembered(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise BuildError("ptxas failed")

    with monkeypatch.context() as patch:
        patch.setattr("flashgen.codegen.build.compile_kernel", broken)
        for _ in range(2):
            with pytest.raises(BuildError, match="ptxas failed"):
                flashgen.attention(*qkv())
    assert serve.MEMO == {}
    flashgen.attention(*qkv())
    assert len(gpu.prepared) == 3


def test_the_memo_starts_over_rather_than_growing_for_ever(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MEMO_LIMIT", 3)
    for length in (10, 11, 12, 13, 14):
        flashgen.attention(*qkv(seqlen_q=length))
        assert 1 <= len(serve.MEMO) <= 3
    assert len(serve.MEMO) == 2
    flashgen.attention(*qkv(seqlen_q=14))
    flashgen.attention(*qkv(seqlen_q=10))
    assert len(gpu.planned) == 6
    assert len(gpu.compiled) == 1


def test_reload_reads_the_databases_again_and_keeps_the_kernels(gpu: FakeGpu, ladder: Ladder) -> None:
    q, k, v = (tensor(4, h, 4096, 128) for h in (32, 8, 8))
    flashgen.attention(q, k, v, causal=True)
    ladder.user(measured(config=config(32)))
    flashgen.attention(q, k, v, causal=True)
    assert [each[1] for each in gpu.planned] == [default()]
    flashgen.reload()
    flashgen.attention(q, k, v, causal=True)
    assert [each[1] for each in gpu.planned] == [default(), config(32)]
    flashgen.reload()
    flashgen.attention(q, k, v, causal=True)
    assert [each[1] for each in gpu.planned] == [default(), config(32), config(32)]
    assert [each[1] for each in gpu.compiled] == [default(), config(32)]


def test_reload_reads_the_settings_again(gpu: FakeGpu, ladder: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    ladder.user(measured(baselines=faster("sdpa-flash")))
    used: list[str] = []
    monkeypatch.setattr(runs, "sdpa_run", lambda impl, **given: used.append(impl) or (lambda *call: call[0]))
    q, k, v = (tensor(4, h, 4096, 128) for h in (32, 8, 8))
    flashgen.attention(q, k, v, causal=True)
    assert used == ["sdpa-flash"]
    monkeypatch.setenv("FLASHGEN_POLICY", "generated")
    flashgen.reload()
    flashgen.attention(q, k, v, causal=True)
    assert used == ["sdpa-flash"]
    assert len(gpu.launched) == 1


def test_what_sdpa_computes_otherwise_stays_with_the_kernel(
    gpu: FakeGpu, ladder: Ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder.user(measured(config=config(8, "pointer"), baselines=faster("sdpa-cudnn")))
    used: list[dict[str, object]] = []
    monkeypatch.setattr(runs, "sdpa_run", lambda impl, **given: used.append(given) or (lambda *call: call[0]))
    q, k, v = (tensor(4, h, 4096, 128) for h in (32, 8, 8))
    flashgen.attention(q, k, v, causal=True, return_lse=True)
    flashgen.attention(q, k, v, causal=True, q_offset=0)
    flashgen.attention(q, k, v, causal=True, q_offset=torch.zeros(4, dtype=torch.int32).as_subclass(OnGpu))
    flashgen.attention(tensor(4, 32, 4096, 128, shift=1), k, v, causal=True)
    assert (len(gpu.launched), used) == (4, [])
    flashgen.attention(q, k, v, causal=True)
    assert (len(gpu.launched), used) == (4, [{"causal": True, "bshd": False, "gqa": True}])


def test_a_compile_while_serving_can_be_forbidden(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_NO_COMPILE", "1")
    settings.cache_clear()
    with pytest.raises(BuildError, match=r"FLASHGEN_NO_COMPILE forbids .*hopper_forward\(.* for fwd-bf16-d64 .*warmup"):
        flashgen.attention(*qkv())
    assert flashgen.warmup(["b1-h4-hk2-s64-d64"]) == 3, "with shared keys and without, and for few queries"
    flashgen.attention(*qkv())
    flashgen.attention(*qkv(seqlen_k=1000))
    with pytest.raises(BuildError, match="fwd-bf16-d64-causal"):
        flashgen.attention(*qkv(), causal=True)
    assert len(gpu.compiled) == 3


def test_warming_allows_compiles_on_its_own_thread_and_only_while_it_lasts(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_NO_COMPILE", "1")
    settings.cache_clear()
    seen: list[str] = []

    def other_thread() -> None:
        try:
            flashgen.attention(*qkv())
        except BuildError as error:
            seen.append(str(error))

    def interrupted(kernel: object, index: int) -> int:
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        raise LaunchError("the driver refused")

    monkeypatch.setattr("flashgen.launch.plan.load", interrupted)
    with pytest.raises(LaunchError, match="the driver refused"):
        flashgen.warmup(["b1-h4-hk2-s64-d128"])
    assert len(seen) == 1
    assert "FLASHGEN_NO_COMPILE" in seen[0]
    with pytest.raises(BuildError, match="FLASHGEN_NO_COMPILE"):
        flashgen.attention(*qkv())


def test_nothing_is_built_while_a_graph_is_captured(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    flashgen.attention(*qkv())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    flashgen.attention(*qkv())
    flashgen.attention(*qkv(seqlen_k=77))  # a kernel that is there serves new shapes
    with pytest.raises(
        LaunchError, match=r"building the kernel for fwd-bf16-d64-causal is not possible .*cuda:0.*warmup"
    ):
        flashgen.attention(*qkv(), causal=True)
    assert len(gpu.compiled) == 1


def test_the_notice_is_one_line_once_with_the_command_to_run(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    for length in (48, 49):
        flashgen.attention(*qkv(seqlen_q=length), causal=True)
    flashgen.attention(*(x.half() for x in qkv()))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("flashgen", "WARNING")
    line = record.getMessage()
    assert line.startswith("flashgen: no tuned record for NVIDIA H200 (sm90-132sm-141gb); the default config serves.")
    shape = "bf16-b1-h4-hk2-sq48-sk64-d64-causal"
    assert line.endswith(f"flashgen tune --shape {shape}  (about {log.TUNE_SECONDS_PER_WORKLOAD} s)")
    assert flashgen.Workload.parse(shape) == workload_of(gpu.prepared[0])
    flashgen.reload()
    flashgen.attention(*qkv())
    assert len(caplog.records) == 2


def test_rungs_and_compiles_are_logged_once_and_a_repeated_call_logs_nothing(
    gpu: FakeGpu, ladder: Ladder, caplog: pytest.LogCaptureFixture
) -> None:
    ladder.user(measured())
    with caplog.at_level("DEBUG", logger="flashgen"):
        tensors = qkv(batch=2, nheads=4, seqlen_q=64, dim=128)
        flashgen.attention(*tensors, causal=True)
        said = [(record.levelname, record.getMessage()) for record in caplog.records]
        flashgen.attention(*tensors, causal=True)
    assert said == [(record.levelname, record.getMessage()) for record in caplog.records]
    (level, rung), (other, compiled) = said
    assert (level, other) == ("DEBUG", "INFO")
    assert re.search(rf" is served by rung [35], .*: {re.escape(str(gpu.planned[0][1]))}$", rung), rung
    assert re.fullmatch(rf"compiled {re.escape(str(gpu.planned[0][1]))} for fwd-\S+ in \d+\.\d\d s", compiled), compiled


@pytest.mark.parametrize("kind", ["exact", "nearest", "another device", "predicted", "quiet"])
def test_there_is_no_notice_where_a_record_serves_or_nobody_wants_it(
    kind: str,
    gpu: FakeGpu,
    ladder: Ladder,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = CAUSAL.with_shape(batch=1, nheads=4, nheads_k=2, seqlen_q=80, seqlen_k=80)
    record = {
        "exact": measured(shape),
        "nearest": measured(),
        "another device": measured(device=H100),
        "predicted": predicted(),
    }.get(kind)
    if record is None:
        monkeypatch.setenv("FLASHGEN_QUIET", "1")
        settings.cache_clear()
    else:
        ladder.user(record)
    flashgen.attention(*qkv(seqlen_q=80, seqlen_k=80, dim=128), causal=True)
    assert gpu.planned[0][1] == (record.config if record else default(shape))
    assert (capsys.readouterr().err, caplog.records) == ("", [])


def workload_of(call: Call) -> flashgen.Workload:
    return CheckedCall.of(call).workload


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **changes: Any) -> Call:
    return Call(**{"q": q, "k": k, "v": v, "causal": False, **changes})


def test_the_workload_of_a_call() -> None:
    q, k, v = tensor(2, 6, 10, 96), tensor(2, 3, 20, 96), tensor(2, 3, 20, 64)
    expected = flashgen.Workload.parse("bf16-b2-h6-hk3-sq10-sk20-d96-dv64-causal")
    assert workload_of(call(q, k, v, causal=True)) == expected
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    assert workload_of(call(*swapped, bshd=True, causal=True)) == expected
    assert workload_of(call(q.half(), k.half(), v.half())).dtype == "fp16"
    assert workload_of(call(q.float(), k.float(), v.float())).dtype == "fp32"


B, H, S, D = 2, 6, 10, 64
WRONG: dict[str, tuple[Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]], str]] = {
    "dimensions": (
        lambda: (tensor(B, H, S, D), tensor(B, H, S, D)[0], tensor(B, H, S, D)),
        r"4 dimensions, got k with shape \(6, 10, 64\)",
    ),
    "dtype": (
        lambda: (tensor(B, H, S, D, dtype=torch.float64),) * 3,
        r"bfloat16, float16 or float32, got q with torch\.float64",
    ),
    "dtypes": (
        lambda: (tensor(B, H, S, D), tensor(B, H, S, D), tensor(B, H, S, D).half()),
        r"share dtype and device, got q torch\.bfloat16 on cpu, v torch\.float16 on cpu",
    ),
    "devices": (
        lambda: (tensor(B, H, S, D), torch.empty(B, H, S, D, device="meta", dtype=torch.bfloat16), tensor(B, H, S, D)),
        r"share dtype and device, got q torch\.bfloat16 on cpu, k torch\.bfloat16 on meta",
    ),
    "last stride": (
        lambda: (tensor(B, H, S, D), tensor(B, H, D, S).transpose(2, 3), tensor(B, H, S, D)),
        r"last dimension is contiguous, got k with strides \(3840, 640, 1, 10\)",
    ),
    "batch": (
        lambda: (tensor(B, H, S, D), tensor(1, H, S, D), tensor(1, H, S, D)),
        r"got \(2, 6, 10, 64\), \(1, 6, 10, 64\) and \(1, 6, 10, 64\)",
    ),
    "lengths": (
        lambda: (tensor(B, H, S, D), tensor(B, H, 11, D), tensor(B, H, 12, D)),
        r"got \(2, 6, 10, 64\), \(2, 6, 11, 64\) and \(2, 6, 12, 64\)",
    ),
    "heads of v": (
        lambda: (tensor(B, H, S, D), tensor(B, 3, S, D), tensor(B, 2, S, D)),
        r"k \(batch, nheads_k, seqlen_k, head_dim\) and v \(batch, nheads_k",
    ),
    "head_dim": (
        lambda: (tensor(B, H, S, D), tensor(B, H, S, 32), tensor(B, H, S, D)),
        r"got \(2, 6, 10, 64\), \(2, 6, 10, 32\) and",
    ),
    "groups": (
        lambda: (tensor(B, H, S, D), tensor(B, 4, S, D), tensor(B, 4, S, D)),
        "nheads must be a multiple of nheads_k, got 6 and 4",
    ),
    "no heads of k": (
        lambda: (tensor(B, H, S, D), tensor(B, 0, S, D), tensor(B, 0, S, D)),
        r"must be at least 1, got \(2, 6, 10, 64\), \(2, 0, 10, 64\) and \(2, 0, 10, 64\)",
    ),
    "no head_dim_v": (
        lambda: (tensor(B, H, S, D), tensor(B, H, S, D), tensor(B, H, S, 0)),
        r"must be at least 1, got \(2, 6, 10, 64\), \(2, 6, 10, 64\) and \(2, 6, 10, 0\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_breaks_a_rule_is_told_the_rule_and_the_value(name: str, gpu: FakeGpu) -> None:
    make, message = WRONG[name]
    with pytest.raises(WorkloadError, match=message):
        workload_of(call(*make()))
    if name != "devices":  # torch itself chooses where such a call goes
        with pytest.raises(WorkloadError, match=message):
            flashgen.attention(*make())
    assert serve.MEMO == {}


def test_strides_that_nothing_steps_along_break_no_rule() -> None:
    one = torch.empty(2, 2, 5, 1, dtype=torch.float16).as_strided((2, 2, 5, 1), (10, 5, 1, 7))
    assert workload_of(call(one, one, one)).head_dim == 1
    empty = torch.empty(2, 2, 64, 0, dtype=torch.float16).transpose(2, 3)
    q = torch.empty(2, 2, 3, 64, dtype=torch.float16)
    assert workload_of(call(q, empty, empty)).seqlen_k == 0


def test_alignment_is_that_of_pointers_and_strides_in_use() -> None:
    q, k, v = qkv()

    def aligned(*tensors: torch.Tensor, **changes: bool) -> bool:
        made = call(*tensors, **changes)
        return CheckedCall.of(made).spec.aligned16

    assert aligned(q, k, v)
    assert aligned(*(x.transpose(1, 2) for x in (q, k, v)), bshd=True)
    assert not aligned(q, k, tensor(1, 2, 64, 64, shift=1))
    assert not aligned(tensor(1, 4, 48, 64, shift=4), k, v)
    assert aligned(tensor(1, 4, 48, 64, shift=8), k, v)
    wide = tensor(1, 2, 64, 65)[..., :64]
    assert not aligned(q, wide, v)
    assert aligned(q, tensor(1, 2, 64, 72)[..., :64], v)
    assert aligned(q, k[:, :1].expand(1, 4, 64, 64), v[:, :1].expand(1, 4, 64, 64))
    assert not aligned(tensor(1, 4, 48, 20), tensor(1, 2, 64, 20), tensor(1, 2, 64, 20))
    offset = call(q, k, v, causal=True, offset_tensor=True)
    assert CheckedCall.of(offset).spec.key == "fwd-bf16-d64-causal-offset"


def test_unaligned_tensors_get_a_kernel_that_takes_them(gpu: FakeGpu, ladder: Ladder) -> None:
    ladder.user(measured())
    q, k, v = (tensor(4, h, 4096, 128) for h in (32, 8, 8))
    flashgen.attention(q, k, v, causal=True)
    flashgen.attention(q, tensor(4, 8, 4096, 128, shift=1), v, causal=True)
    assert [(spec.aligned16, chosen["loads"]) for spec, chosen, _, _ in gpu.planned] == [
        (True, "descriptor"),
        (False, "pointer"),
    ]


@pytest.mark.parametrize("stage", ["flashgen.codegen.build.compile_kernel", "flashgen.launch.plan.make_plan"])
def test_a_record_that_cannot_be_built_here_leaves_the_call_to_the_default(
    stage: str, gpu: FakeGpu, ladder: Ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record may come from another Triton; a kernel that was asked for by name may not be replaced."""
    ladder.user(measured())
    recorded, real = measured().config, {"build.compile_kernel": gpu.compile_kernel, "plan.make_plan": gpu.make_plan}

    def strict(*arguments: Any) -> Any:
        if recorded in arguments:
            raise BuildError("too much shared memory") if "build" in stage else LaunchError("too much shared memory")
        return real[stage.split(".", 2)[2]](*arguments)

    monkeypatch.setattr(stage, strict)
    q, k, v = (tensor(4, h, 4096, 128) for h in (32, 8, 8))
    with pytest.warns(UserWarning, match=r"b4-h32-hk8.*tuning\.sqlite3 cannot serve here.*too much shared memory"):
        flashgen.attention(q, k, v, causal=True)
    assert gpu.planned[-1][1] == default(CAUSAL) != recorded
    flashgen.attention(q, k, v, causal=True)  # remembered: no second warning, which would be an error
    with pytest.raises((BuildError, LaunchError), match="too much shared memory"):
        serve.prepare(Call(q=q, k=k, v=v, causal=True, config=recorded))


def test_what_no_config_can_build_is_no_fault_of_a_record(
    gpu: FakeGpu, ladder: Ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake in a user's function, say: the error alone, without advice to tune again."""
    ladder.user(measured())

    def broken(*arguments: Any) -> Any:
        raise BuildError("mask_mod returns booleans")

    monkeypatch.setattr("flashgen.codegen.build.compile_kernel", broken)
    with pytest.raises(BuildError, match="mask_mod returns booleans"):
        flashgen.attention(*(tensor(4, h, 4096, 128) for h in (32, 8, 8)), causal=True)


def test_an_unsupported_call_on_a_gpu_lists_every_family(gpu: FakeGpu) -> None:
    with pytest.raises(UnsupportedError, match=r"portable_forward: its head_dim is 16 to \d+, not 1024"):
        flashgen.attention(*qkv(dim=1024))
    assert gpu.compiled == []


def test_threads_that_meet_in_the_slow_path_build_a_kernel_once(gpu: FakeGpu) -> None:
    barrier = threading.Barrier(6)
    outs: list[torch.Tensor] = []

    def run() -> None:
        q, k, v = qkv()
        barrier.wait()
        outs.append(flashgen.attention(q, k, v))

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outs) == 6
    assert len(gpu.compiled) == 1
    assert len(serve.MEMO) == 1


def test_an_explicit_config_is_compiled_and_a_wrong_one_refused(gpu: FakeGpu) -> None:
    q, k, v = (tensor(1, h, 128, 128) for h in (4, 2, 2))
    serve.prepare(call(q, k, v, causal=True, config=config(32)))(q, k, v, None, None)
    assert gpu.compiled[0][1] == config(32)
    with pytest.raises(flashgen.ConfigError, match="descriptors need"):
        serve.prepare(call(tensor(1, 4, 128, 128, shift=1), k, v, causal=True, config=config(32)))


def test_the_geometry_of_a_plan_is_that_of_the_output_it_will_get(gpu: FakeGpu) -> None:
    """The output is allocated at each call; its strides were promised to the plan once."""
    odd = tensor(2, 4, 48, 72)[..., :64]
    for q in (tensor(2, 4, 48, 64), tensor(2, 4, 48, 64, swap=True), odd, tensor(2, 1, 48, 64).expand(2, 4, 48, 64)):
        for v in (tensor(2, 2, 64, 64), tensor(2, 2, 64, 32, swap=True)):
            out = flashgen.attention(q, tensor(2, 2, 64, 64), v)
            assert gpu.planned[-1][2] == Geometry.of(q, tensor(2, 2, 64, 64), v, out)


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize(("causal", "gqa"), [(False, True), (True, False)])
def test_sdpa_computes_the_same_in_the_strides_that_were_promised(causal: bool, gqa: bool, bshd: bool) -> None:
    """On a CPU the flash backend exists, too."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 32, 16, generator=generator) for h in (4, 2 if gqa else 4, 2 if gqa else 4))
    scores = q @ k.repeat_interleave(4 // k.shape[1], 1).mT * 0.3
    if causal:
        scores = scores.masked_fill(torch.ones(32, 32).triu(1).bool(), float("-inf"))
    expected = scores.softmax(-1) @ v.repeat_interleave(4 // v.shape[1], 1)
    run = runs.sdpa_run("sdpa-flash", causal=causal, bshd=bshd, gqa=gqa)
    for swap in (False, True):
        given = [x.transpose(1, 2).contiguous().transpose(1, 2) if swap else x for x in (q, k, v)]
        if bshd:
            given = [x.transpose(1, 2) for x in given]
        out = run(*given, 0.3, None)
        assert out.stride() == outputs.empty_output(given[0], given[2], bshd=bshd).stride()
        torch.testing.assert_close(out.transpose(1, 2) if bshd else out, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("swap", [False, True])
def test_an_sdpa_output_in_other_strides_is_copied(swap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 4, 32, 16, generator=torch.Generator().manual_seed(0))
    other = q.clone() if swap else q.transpose(1, 2).contiguous().transpose(1, 2)
    given = q.transpose(1, 2).contiguous().transpose(1, 2) if swap else q
    monkeypatch.setattr(runs, "scaled_dot_product_attention", lambda *arguments, **options: other)
    out = runs.sdpa_run("sdpa-flash", causal=False, bshd=False, gqa=False)(given, given, given, None, None)
    assert other.stride() != given.stride()
    assert out.stride() == given.stride()
    assert torch.equal(out, q)


def test_every_backend_has_a_name_in_the_ladder() -> None:
    assert set(BACKENDS) == set(SDPA_IMPLS)
