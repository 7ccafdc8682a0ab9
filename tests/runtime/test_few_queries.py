"""Calls of `attention` with few queries on an imagined GPU: the rule, what decode kernels read, what `explain` says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashgen
from flashgen.codegen.families import family
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.errors import BuildError, LaunchError
from flashgen.core.workload import Workload
from flashgen.launch import decode_passes
from flashgen.runtime.lookup.few_queries import decode_specialization, served_by_decoding
from flashgen.runtime.ops import kernel_cache, serve
from tests.decoding import decode_config
from tests.fakes.driver import FakeDriver, Launched

H200, AMD = find_device("h200"), find_device("gfx942")
PLAIN = Workload.parse("fwd-bf16-b2-h16-hk2-sq1-sk3000-d64-causal")


@pytest.fixture
def lengths(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.Tensor]:
    """What stands in the place of lengths on the imagined GPU."""
    found = torch.full((1024,), 2**31 - 1, dtype=torch.int32)
    monkeypatch.setitem(decode_passes._LENGTHS, 0, found)
    monkeypatch.setattr(serve, "_PLANS", {})
    serve.reload()
    yield found
    serve.reload()


def made(workload: Workload, *, bshd: bool = False) -> list[torch.Tensor]:
    w = workload
    heads = ((w.nheads, w.seqlen_q), (w.nheads_k, w.seqlen_k), (w.nheads_k, w.seqlen_k))
    shapes = [(w.batch, *(two[::-1] if bshd else two), w.head_dim) for two in heads]
    return [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]


def run(fake: FakeDriver, workload: Workload, tensors: list[torch.Tensor], **options: Any) -> list[Launched]:
    """The launches of a call."""
    spec = decode_specialization(workload.specialization)
    config = decode_config(spec, Sizes.of(workload), H200)
    fake.named = {kernel.entry: kernel.parameters for kernel in family(config.family).kernels(spec, config)}
    before = len(fake.launches)
    flashgen.attention(*tensors, **{"causal": workload.causal, **options})
    return fake.launches[before:]


@pytest.mark.parametrize("bshd", [False, True])
def test_the_decode_kernels_read_the_call(bshd: bool, driver: FakeDriver, lengths: torch.Tensor) -> None:
    tensors = made(PLAIN, bshd=bshd)
    first, second = run(driver, PLAIN, tensors, layout="bshd" if bshd else "bhsd", return_lse=True)
    names = dict(zip("QKV", tensors, strict=True)) | {"Lens": lengths}
    assert {name: first.values[name] for name in names} == {name: one.data_ptr() for name, one in names.items()}
    order = (0, 1, 2) if bshd else (0, 2, 1)
    for name, axes, tensor in (("q", "bsh", tensors[0]), ("k", "psh", tensors[1]), ("v", "psh", tensors[2])):
        strides = [first.values[f"stride_{name}{axis}"] for axis in axes]
        assert strides == [tensor.stride(axis) for axis in order]
    sizes = ("seqlen_q", "seqlen_k", "nheads_k", "group_size", "window_right", "lse_rows", "has_leftpad")
    assert [first.values[name] for name in sizes] == [1, 3000, 2, 8, 0, 1, 0]
    assert first.values["LSE"] == second.values["LSE"] != 0


def test_what_calls_of_one_key_may_change_is_packed_for_each(driver: FakeDriver, lengths: torch.Tensor) -> None:
    capped = replace(PLAIN, softcap=True, window_left=2000)
    tensors, loaded = made(capped), len(driver.loaded)
    rates = set()
    for scale, softcap in ((None, 10.0), (0.5, 10.0), (None, 20.0)):
        first, *_ = run(driver, capped, tensors, softmax_scale=scale, softcap=softcap, window=(2000, None))
        rates.add((first.values["softcap_rate"], first.values["softcap_scale_log2"]))
        assert first.values["window_left"] == 2000
    assert len(rates) == 3
    assert len(serve.MEMO) == 1
    assert len(driver.loaded) == loaded + 2


def test_new_lengths_are_served_without_the_slow_path(
    driver: FakeDriver,
    lengths: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seqlen_k in (3000, 3001):
        run(driver, w := PLAIN.with_shape(seqlen_k=seqlen_k), made(w))
    monkeypatch.setattr(serve, "prepare", None)
    longer = PLAIN.with_shape(seqlen_k=3002)
    first, *_ = run(driver, longer, made(longer))
    assert first.values["seqlen_k"] == 3002


def test_where_nothing_may_be_compiled_a_forward_family_serves(
    driver: FakeDriver,
    lengths: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Config] = []

    def refuse(spec: object, config: Config, *rest: object) -> None:
        asked.append(config)
        raise BuildError("none")

    monkeypatch.setattr(kernel_cache, "compiled", refuse)
    with pytest.raises(BuildError):
        run(driver, PLAIN, made(PLAIN))
    assert [config.family for config in asked][:2] == ["hopper_decode", "hopper_forward"]


def test_lengths_are_made_once_and_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose memory torch.compile does not count among that of a graph."""
    makers = []

    def full(shape: tuple[int, ...], value: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        makers.append((threading.get_ident(), device))
        return torch.zeros(shape, dtype=dtype).fill_(value)

    monkeypatch.setattr(torch, "full", full)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(decode_passes, "_LENGTHS", {})
    found = decode_passes.endless(3)
    assert decode_passes.endless(3) is found
    assert (found.shape, int(found[-1])) == ((1024,), 2**31 - 1)
    ((maker, device),) = makers
    assert (maker != threading.get_ident(), device) == (True, "cuda:3")


def test_lengths_are_not_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(LaunchError, match="filling lengths"):
        decode_passes.endless(5)


REASONS = {
    "b2-h16-hk2-sq17-sk3000-d64": "no 1 to 16 queries",
    "b1025-h2-hk1-sq1-sk3000-d64": "up to 1024 sequences",
    "b2-h24-hk2-sq11-sk90000-d64": "132 query rows of a key head are more than 128",
    "b2-h16-hk2-sq1-sk500-d64": "as fast with 4 CTAs of 500 keys and 8 query rows each, on 132 SMs",
    "b2-h16-hk2-sq1-sk3000-d64-wl20": "4 CTAs of 21 keys",
    "b40-h16-hk2-sq1-sk90000-d64": "80 CTAs of 90000 keys and 8 query rows each, on 132 SMs",
    "b4-h32-hk8-sq16-sk4096-d128": "32 CTAs of 4096 keys and 64 query rows",
    "fp32-b2-h16-hk2-sq1-sk3000-d64": "caches are in bf16 or fp16",
    "b2-h16-hk2-sq1-sk3000-d512": "its head_dim is 16 to 256",
    "b2-h16-hk2-sq1-sk3000-d64-bias": "bias",
    "b2-h16-hk2-sq1-sk3000-d64-keymask": "mask",
}


@pytest.mark.parametrize("shape", REASONS)
def test_what_is_left_to_forward_families_says_why(shape: str) -> None:
    workload = Workload.parse(shape)
    seen = min(workload.seqlen_k, (workload.window_left or 2**30) + workload.seqlen_q)
    reason = served_by_decoding(workload.specialization, Sizes.of(workload), seen, H200, serve.records())
    assert isinstance(reason, str)
    assert REASONS[shape] in reason


BY_DECODING = ("b1-h32-hk8-sq1-sk1024-d128", "b4-h32-hk8-sq4-sk1024-d128", "b1-h64-hk8-sq16-sk8192-d64-wl5000")


@pytest.mark.parametrize("shape", BY_DECODING)
def test_what_was_faster_by_decoding_is_served_by_it(shape: str) -> None:
    workload = Workload.parse(shape)
    seen = min(workload.seqlen_k, (workload.window_left or 2**30) + workload.seqlen_q)
    found = served_by_decoding(workload.specialization, Sizes.of(workload), seen, H200, serve.records())
    assert not isinstance(found, str)


def test_offsets_and_other_makers_are_left_to_forward_families() -> None:
    shifted = replace(PLAIN.specialization, offset_tensor=True)
    for spec, device, why in ((shifted, H200, "at the last keys"), (PLAIN.specialization, AMD, "NVIDIA")):
        assert why in str(served_by_decoding(spec, Sizes.of(PLAIN), 3000, device, serve.records()))


def test_it_is_explained(driver: FakeDriver, lengths: torch.Tensor) -> None:
    tensors = made(PLAIN)
    found = flashgen.explain(*tensors, causal=True)
    assert (found.served.config.family, found.forward.config.family) == ("hopper_decode", "hopper_forward")
    assert "by decoding: all SMs share the keys" in str(found)
    assert found.to_dict()["family"] == "hopper_decode"
    shifted = flashgen.explain(*tensors, causal=True, q_offset=3)
    assert shifted.served == shifted.forward
    assert "by a forward family: its queries do not stand" in str(shifted)
    assert flashgen.explain(*tensors, causal=True, direction="backward").few_queries == ""


def test_a_warm_up_has_what_serves_few_queries(
    driver: FakeDriver,
    lengths: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warmed: set[Any] = set()
    monkeypatch.setattr(kernel_cache, "warm", lambda pairs, *_: warmed.update(pairs) or len(pairs))
    spec = decode_specialization(PLAIN.specialization)
    for seqlens in (None, [600, 5000]):
        warmed.clear()
        flashgen.warmup([PLAIN], seqlens=seqlens)
        expected = {decode_config(spec, Sizes.of(PLAIN.with_shape(seqlen_k=n)), H200) for n in (600, 3000, 5000)}
        assert expected <= {config for each, config in warmed if each == spec}
    warmed.clear()
    flashgen.warmup([PLAIN.with_shape(seqlen_q=100)])
    assert spec not in {each for each, _ in warmed}
