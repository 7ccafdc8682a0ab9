"""From tensors to a launch: the memo and its key, what a launch is given, and what a reload reads again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen
from flashgen.core.errors import BuildError
from flashgen.launch.geometry import Geometry
from flashgen.runtime.ops import kernel_cache, runs, serve
from tests.fakes.gpu import MARK, FakeGpu, OnGpu, qkv, tensor
from tests.runtime.ladders import Ladder, config, default, faster, measured


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


def test_reload_while_a_thread_compiles_forgets_what_that_compiles(
    gpu: FakeGpu, ladder: Ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the compile, and the record of then is not remembered behind it."""
    q, k, v = (tensor(4, h, 4096, 128) for h in (32, 8, 8))
    compiling, real = threading.Event(), kernel_cache.built

    def built(*asked: Any) -> Any:
        compiling.set()
        time.sleep(0.2)  # in which the other thread begins to wait
        return real(*asked)

    monkeypatch.setattr(kernel_cache, "built", built)
    thread = threading.Thread(target=flashgen.attention, args=(q, k, v), kwargs={"causal": True})
    thread.start()
    compiling.wait()
    ladder.user(measured(config=config(32)))
    flashgen.reload()
    thread.join()
    flashgen.attention(q, k, v, causal=True)
    assert [each[1] for each in gpu.planned] == [default(), config(32)]


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


def test_few_unaligned_queries_get_a_kernel_that_takes_them(gpu: FakeGpu, ladder: Ladder) -> None:
    ladder.user(measured())
    q, k, v = (tensor(4, h, 255, 128) for h in (32, 8, 8))
    flashgen.attention(q, k, v, causal=True)
    flashgen.attention(q, tensor(4, 8, 255, 128, shift=1), v, causal=True)
    assert [(spec.aligned16, chosen["loads"]) for spec, chosen, _, _ in gpu.planned] == [
        (True, "descriptor"),
        (False, "pointer"),
    ]


def test_the_geometry_of_a_plan_is_that_of_the_output_it_will_get(gpu: FakeGpu) -> None:
    """The output is allocated at each call; its strides were promised to the plan once."""
    odd = tensor(2, 4, 48, 72)[..., :64]
    for q in (tensor(2, 4, 48, 64), tensor(2, 4, 48, 64, swap=True), odd, tensor(2, 1, 48, 64).expand(2, 4, 48, 64)):
        for v in (tensor(2, 2, 64, 64), tensor(2, 2, 64, 32, swap=True)):
            out = flashgen.attention(q, tensor(2, 2, 64, 64), v)
            assert gpu.planned[-1][2] == Geometry.of(q, tensor(2, 2, 64, 64), v, out)
