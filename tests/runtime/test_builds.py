"""Kernels that a call builds: where that is forbidden, once for all threads, and what serves if one cannot be built."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import flashgen
from flashgen.core.errors import BuildError, LaunchError, UnsupportedError
from flashgen.core.settings import settings
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.calls import Call
from tests.fakes.gpu import FakeGpu, qkv, tensor
from tests.runtime.ladders import CAUSAL, Ladder, config, default, measured


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
    serve.prepare(Call(q=q, k=k, v=v, causal=True, config=config(32)))(q, k, v, None, None)
    assert gpu.compiled[0][1] == config(32)
    with pytest.raises(flashgen.ConfigError, match="descriptors need"):
        serve.prepare(Call(q=tensor(1, 4, 128, 128, shift=1), k=k, v=v, causal=True, config=config(32)))
