"""Helper kernels as the driver gets them: every parameter in its place, from this process or an earlier one."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.codegen.append_kv import AppendSpec, append_kernel
from flashgen.codegen.build import CompiledKernel, compile_helper
from flashgen.codegen.helper import HelperKernel
from flashgen.codegen.merge_states import MergeSpec, merge_kernel
from flashgen.core.device import find_device
from flashgen.core.errors import BuildError, LaunchError
from flashgen.core.settings import settings
from flashgen.launch import binaries, bundles
from flashgen.launch.helper_launch import helper_launcher
from flashgen.runtime.ops import append, helpers, merging, serve
from flashgen.runtime.ops.append_rules import AppendArguments
from tests.fakes.driver import FakeDriver
from tests.launch.conftest import Streams

H200 = find_device("h200")
BATCH, NEW, HEADS, DIM, BLOCKS, PAGE, PAGES = 2, 3, 2, 64, 10, 16, 4
SPEC = AppendSpec(
    dtype="bf16", head_dim=DIM, head_dim_v=DIM, place="pages", rotary="halves", rotary_dim=32, table_dtype="fp32"
)
HELPER = append_kernel(SPEC)


@functools.cache
def compiled(helper: HelperKernel = HELPER) -> CompiledKernel:
    return compile_helper(helper, H200)


def arguments(**changes: Any) -> AppendArguments:
    """A call with pages in two halves of one tensor, for which `SPEC` is compiled."""
    cache = torch.zeros(BLOCKS, 2, PAGE, HEADS, DIM, dtype=torch.bfloat16)
    k, v = torch.zeros(2, BATCH, NEW, HEADS, DIM, dtype=torch.bfloat16)
    cos, sin = torch.zeros(2, PAGES * PAGE, 16)
    found = AppendArguments(k, v, cache[:, 0], cache[:, 1], torch.zeros(BATCH, dtype=torch.int32))
    table = torch.zeros(BATCH, PAGES + 4, dtype=torch.int32)[:, :PAGES]
    return found._replace(block_table=table, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False, **changes)


@pytest.fixture
def on_gpu(cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Tensors of the CPU taken for those of an H200, on which nothing is loaded yet."""
    cuda.parameters = HELPER.parameters
    monkeypatch.setattr(serve, "gpu_index", lambda tensor: 0)
    monkeypatch.setattr(serve, "device_at", lambda index: H200)
    monkeypatch.setattr(helpers, "_LAUNCHERS", {})
    monkeypatch.setattr(append, "_MEMO", {})
    monkeypatch.setattr(append, "_remembered", append._MEMO.get)
    return cuda


def test_every_parameter_is_where_the_kernel_expects_it(on_gpu: FakeDriver, streams: Streams) -> None:
    streams.current = 0x77
    given = arguments(q=torch.zeros(BATCH, 5, 4, DIM, dtype=torch.bfloat16))
    q_out = append.append(given)
    assert q_out is not None
    (done,) = on_gpu.launches
    found, tensors = done.values, (given.k, given.v, given.k_cache, given.v_cache, given.q, q_out, given.rotary_cos)
    names = ("K", "V", "KCache", "VCache", "Q", "QOut", "Cos")
    assert [found[name] for name in names] == [tensor.data_ptr() for tensor in tensors if tensor is not None]
    assert (found["RotarySeqlens"], found["num_seqlens"], found["num_rotary_seqlens"]) == (0, BATCH, 0)
    expected = {
        "kv_rows": BATCH * NEW * HEADS,
        "seqlen_new": NEW,
        "nheads_k": HEADS,
        "page_size": PAGE,
        "num_pages": PAGES,
        "num_blocks": BLOCKS,
        "q_rows": BATCH * 5 * 4,
        "seqlen_q": 5,
        "nheads": 4,
        "table_rows": PAGES * PAGE,
        "q_moves": 1,
        "stride_kb": NEW * HEADS * DIM,
        "stride_kcb": 2 * PAGE * HEADS * DIM,
        "stride_vcs": HEADS * DIM,
        "stride_vch": DIM,
        "stride_qob": 5 * 4 * DIM,
        "stride_cos": 16,
        "stride_table": PAGES + 4,
    }
    assert {name: found[name] for name in expected} == expected
    programs = -(-expected["kv_rows"] // HELPER.rows) - (-expected["q_rows"] // HELPER.rows)
    assert (done.grid, done.block, done.stream) == ((programs, 1, 1), (32 * HELPER.num_warps, 1, 1), 0x77)


def test_later_calls_change_pointers_numbers_and_streams(on_gpu: FakeDriver, streams: Streams) -> None:
    one = arguments()
    append.append(one)
    streams.current = 5
    other = arguments(seqlens=None, seqlen=7)
    append.append(other)
    append.append(other._replace(seqlen=9))
    first, second, third = on_gpu.launches
    assert (first.values["K"], first.stream) == (one.k.data_ptr(), 0)
    assert (second.values["K"], second.stream) == (other.k.data_ptr(), 5)
    assert [each.values["num_seqlens"] for each in (first, second)] == [BATCH, 0]
    assert [each.values["seqlen"] for each in (second, third)] == [7, 9]
    assert len(on_gpu.loaded) == 1


def test_caches_that_overlap_are_refused_at_every_call(on_gpu: FakeDriver) -> None:
    given = arguments()
    for _ in range(2):
        with pytest.raises(
            ValueError, match="k_cache shares no memory with k, v, q or the other cache, got one with v_c"
        ):
            append.append(given._replace(v_cache=given.k_cache))
        with pytest.raises(ValueError, match=r"v_cache shares no memory with k, v, q .*, got one with k"):
            append.append(given._replace(k=given.v_cache[:BATCH, :NEW]))
        append.append(given)
    assert len(on_gpu.launches) == 2


def test_rows_of_states_are_merged_in_the_order_of_memory(on_gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "_MEMO", {})
    monkeypatch.setattr(merging, "_remembered", merging._MEMO.get)
    spec = MergeSpec(dtype="bf16", out_dtype="bf16", head_dim=DIM)
    on_gpu.parameters = merge_kernel(spec).parameters
    outs, lses = torch.zeros(3, BATCH, 5, 4, DIM, dtype=torch.bfloat16), torch.zeros(3, BATCH, 4, 5)
    for given, layout in ((outs, "bshd"), (outs.transpose(2, 3), "bhsd")):
        out, lse = merging.merge(given, lses, layout)
        assert (out.stride(), lse.stride()) == (given[0].stride(), (20, 5, 1))
    for done in on_gpu.launches:
        found = done.values
        assert [found[name] for name in ("num_rows", "inner_size", "middle_size", "num_states")] == [
            BATCH * 20,
            4,
            5,
            3,
        ]
        for name, strides in {
            "state": (20 * DIM, 4 * DIM, DIM),
            "lses": (20, 1, 5),
            "o": (20 * DIM, 4 * DIM, DIM),
        }.items():
            assert tuple(found[f"stride_{name}_{axis}"] for axis in ("outer", "middle", "inner")) == strides
        assert (found["stride_state_next"], found["stride_lses_next"]) == (BATCH * 20 * DIM, BATCH * 20)
    assert len(on_gpu.launches) == 2


def test_a_cache_is_known_to_have_changed(on_gpu: FakeDriver) -> None:
    given = arguments()
    before = given.k_cache._version
    append.append(given)
    assert given.k_cache._version > before


def test_a_kernel_of_an_earlier_process_or_a_bundle_is_launched(
    on_gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    binaries.write_helper(compiled(), HELPER)
    found = binaries.read_helper(HELPER, H200)
    assert found is not None
    assert found.source == compiled().source
    assert found.handle.asm["cubin"] == compiled().handle.asm["cubin"]
    monkeypatch.setenv("FLASHGEN_NO_COMPILE", "1")
    settings.cache_clear()
    append.append(arguments())
    assert len(on_gpu.launches) == 1
    monkeypatch.delenv("TRITON_DISABLE_LINE_INFO")  # no bundle holds what a machine's own settings made
    entry = bundles.entry_of_helper(HELPER, H200)
    assert entry is not None
    assert binaries.stated_key(entry.content) == entry.key


def test_compiling_may_be_forbidden_and_is_impossible_in_a_capture(
    on_gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(LaunchError, match=r"building append_kv for bf16-d64-pages-halves32-fp32 is not possible while"):
        append.append(arguments())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("FLASHGEN_NO_COMPILE", "1")
    settings.cache_clear()
    with pytest.raises(
        BuildError, match=r"forbids compiling outside warmup, and append_kv for bf16-d64-pages-halves32"
    ):
        append.append(arguments())
    helpers.warm(HELPER, 0)
    append.append(arguments())


def test_an_unknown_layout_is_launched_by_triton(cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Handle:
        metadata = replace
        asm: dict[str, str] = {}  # noqa: RUF012

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *given: calls.append((grid, *given))

    part = replace(compiled().main, handle=Handle())
    launch = helper_launcher(replace(compiled(), parts=(part,)), 0)(6, [1, 2])
    tensor = torch.zeros(1)
    launch((tensor, None), (3,))
    assert calls == [((6, 1, 1), tensor, None, 3, 1, 2)]


def test_a_refused_launch_says_what_the_driver_says(on_gpu: FakeDriver) -> None:
    append.append(arguments())
    on_gpu.code = 700
    with pytest.raises(LaunchError, match=r"could not launch \d+ blocks of append_kv: CUDA_ERROR_ILLEGAL_ADDRESS"):
        append.append(arguments())
