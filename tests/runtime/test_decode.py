"""`flashgen.attention_decode` on an imagined GPU: what both kernels read, the memo, large batches, and every rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashgen
from flashgen.codegen.families import family, invalid
from flashgen.codegen.family import Sizes
from flashgen.core.device import Device, find_device
from flashgen.core.errors import FlashgenError, LaunchError, UnsupportedError, WorkloadError
from flashgen.core.features.values import Features
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization
from flashgen.launch import decode_plan
from flashgen.launch.decode_plan import POINTERS
from flashgen.runtime.decode import api, plans, runs
from flashgen.runtime.decode.call import CheckedDecode
from flashgen.runtime.decode.contents import check_contents
from tests.decoding import Case, arguments, decode_config, make
from tests.fakes.driver import INVALID_VALUE, FakeDriver
from tests.fakes.gpu_zero import H200
from tests.runtime.decode_calls import GOOD, RULES, broken, kernels_of, run


def test_both_kernels_read_the_call(driver: FakeDriver) -> None:
    call = make(Case(lens=(300, 0, 64), page=64, sinks=True, options={"causal": True}, seqlen_q=3))
    first, second = run(driver, replace(call, return_lse=True))
    tensors = {"Q": call.q, "K": call.k_cache, "V": call.v_cache, "Lens": call.seqlens, "Table": call.block_table}
    for name, tensor in {**tensors, "Sinks": call.features.sinks}.items():
        assert tensor is not None
        assert first.values[name] == tensor.data_ptr()
    for name in ("O", "LSE", "PartO", "PartLse", "Lens", "Sinks", "group_size", "tile_rows", "m_blocks", "lse_rows"):
        assert first.values[name] == second.values[name]
    assert (first.values["batch"], first.values["seqlen_q"], first.values["seqlen_k"]) == (3, 3, 6 * 64)
    assert (first.values["window_right"], first.values["lse_rows"], first.values["has_leftpad"]) == (0, 3, 0)
    assert first.values["stride_table"] == 6
    assert [first.values[f"stride_k{axis}"] for axis in "psh"] == list(call.k_cache.stride()[:3])
    heads = call.k_cache.shape[2]
    assert first.grid == (first.values["beside"], first.values["groups"], 1) == (heads, 2 * H200.num_sms // heads, 1)
    assert second.grid == (6, heads, first.grid[1])
    assert second.values["beside"] == heads
    assert {one.stream for one in (first, second)} == {7}
    assert (first.attributes, second.attributes) == ([], [(6, 1)])


def test_a_second_call_finds_its_launch_and_other_pointers_are_written(driver: FakeDriver) -> None:
    case = Case(lens=(300, 0, 64), page=16)
    one, other = make(case), make(case, seed=3)  # both live at once: else their tensors may have the same addresses
    (first, _), (again, _) = run(driver, one), run(driver, other)
    assert len(runs.MEMO) == 1
    assert first.values["PartO"] == again.values["PartO"]  # memory that the stream's calls share
    assert first.values["Q"] == one.q.data_ptr()
    assert again.values["Q"] == other.q.data_ptr() != first.values["Q"]
    run(driver, make(replace(case, lens=(300, 2))))
    assert len(runs.MEMO) == 2
    assert len(plans.PLANS) == 1
    assert len(driver.loaded) == 2


def test_a_graph_that_is_captured_has_memory_of_its_own(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make(Case(lens=(300, 0, 64), page=16))
    ((first, _), shared) = run(driver, call), dict(decode_plan._SHARED)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    (captured, _) = run(driver, call)
    assert first.values["PartO"] in {start for _, start in shared.values()}
    assert captured.values["PartO"] not in {start for _, start in shared.values()}
    assert shared.keys() == decode_plan._SHARED.keys() == {(0, 7)}


def test_the_merge_is_launched_where_keys_may_be_split_alone(driver: FakeDriver) -> None:
    assert len(run(driver, make(Case(lens=(64, 3))))) == 1
    assert len(run(driver, make(Case(lens=(65, 3))))) == 2
    assert len(run(driver, make(Case(lens=(256, 3), options={"fixed_split_size": 256})))) == 1
    first, second = run(driver, make(Case(lens=(257, 3), options={"fixed_split_size": 256})))
    assert first.values["split_tiles"] == 4
    assert second.grid == (2, 2, 2)  # rows, key heads, sequences


def test_a_launch_that_the_driver_refuses_changes_nothing_for_the_next(driver: FakeDriver) -> None:
    call = make(Case(lens=(300, 0, 64), page=16))
    before = run(driver, call)
    driver.code = INVALID_VALUE
    with pytest.raises(LaunchError, match="invalid argument"):
        run(driver, call)
    driver.code = 0
    after = run(driver, call)
    for one, other in zip(before, after, strict=True):
        assert one.values | {"O": 0} == other.values | {"O": 0}


def test_large_batches_are_several_launches(driver: FakeDriver) -> None:
    call = make(Case(lens=(20,) * 1025, room=300, head_dim=16, nheads=1, nheads_k=1))
    first, _, second, _ = run(driver, call)
    assert (first.values["batch"], second.values["batch"]) == (1024, 1)
    for name, tensor in {"Q": call.q, "K": call.k_cache, "V": call.v_cache, "Lens": call.seqlens}.items():
        assert second.values[name] == tensor[1024].data_ptr()


def test_without_keys_or_sequences_nothing_is_launched(driver: FakeDriver) -> None:
    call = make(Case(lens=(3, 4), sinks=True))
    empty = replace(call, k_cache=call.k_cache[:, :0], v_cache=call.v_cache[:, :0], return_lse=True)
    assert run(driver, empty) == []
    out, lse = runs.run(empty)
    assert not out.any()
    assert lse is not None
    assert call.features.sinks is not None
    assert torch.equal(lse[1, :, 0], call.features.sinks)
    none = replace(call, **{name: getattr(call, name)[:0] for name in ("q", "k_cache", "v_cache", "seqlens")})
    assert run(driver, none) == []


def test_under_torch_compile_the_call_is_one_op(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Dynamo sees it, without the seconds that Dynamo takes: a real call through the op, and shapes without data."""
    monkeypatch.setattr(api, "is_dynamo_compiling", lambda: True)
    call = make(Case(lens=(300, 2), page=16, sinks=True, options={"window": (100, 0)}))
    tensors, named = arguments(replace(call, return_lse=True))
    driver.named = kernels_of(call)
    out, lse = flashgen.attention_decode(*tensors, **named)
    assert (out.shape, lse.shape) == ((2, 1, 4, 32), (2, 4, 1))
    first, _ = driver.launches
    assert not decode_plan._SHARED
    assert call.features.sinks is not None
    assert (first.values["window_left"], first.values["Sinks"]) == (100, call.features.sinks.data_ptr())
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in tensors]
        options = {n: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for n, t in named.items()}
        out, lse = flashgen.attention_decode(*fakes, **options)
        assert (out.shape, lse.shape, lse.dtype) == ((2, 1, 4, 32), (2, 4, 1), torch.float32)
        assert flashgen.attention_decode(*fakes, **{**options, "return_lse": False}).shape == out.shape
    assert len(driver.launches) == 2


def test_pointers_that_a_call_writes_are_those_of_the_kernels() -> None:
    spec = Specialization(
        direction="decode",
        dtype="bf16",
        head_dim=64,
        head_dim_v=64,
        alibi=True,
        sink=True,
        page_size=1,
        offset_tensor=True,
    )
    config = decode_config(spec, Sizes(batch=1, nheads=1, nheads_k=1, seqlen_q=1, seqlen_k=1), H200)
    kernels = family(config.family).kernels(spec, config)
    named = {p.name for kernel in kernels for p in kernel.parameters if p.type.startswith("*")}
    assert named - {"PartO", "PartLse"} == set(POINTERS) - {"BatchIdx"}


@pytest.mark.parametrize("rule", RULES)
def test_a_call_that_breaks_a_rule_is_refused(rule: str) -> None:
    with pytest.raises(FlashgenError, match=rule) as refused:
        runs.run(broken(rule))
    assert isinstance(refused.value, UnsupportedError if "backward" in rule else WorkloadError)


def test_a_window_may_be_a_list_as_in_other_calls(driver: FakeDriver) -> None:
    call = replace(make(GOOD), causal=True, features=Features(window=(3, None)))
    given = (call.q, call.k_cache, call.v_cache, call.seqlens)
    expected = [one.values["window_left"] for one in run(driver, call) if "window_left" in one.values]
    before, window = len(driver.launches), [3, None]
    for _ in range(2):
        flashgen.attention_decode(*given, block_table=call.block_table, causal=True, window=window)  # type: ignore[arg-type]
    found = [one.values["window_left"] for one in driver.launches[before:] if "window_left" in one.values]
    assert expected
    assert found == 2 * expected


def test_numbers_of_heads_with_gaps_are_packed(driver: FakeDriver) -> None:
    """As by torch's dispatcher: kernels know no stride of them."""
    call = make(Case(lens=(40, 7), page=16))
    slopes = torch.rand(call.q.shape[2], 2)[:, 0]
    given = (call.q, call.k_cache, call.v_cache, call.seqlens)
    run(driver, replace(call, features=Features(alibi_slopes=slopes.contiguous())))  # its kernels are known
    before = len(driver.launches)
    for _ in range(3):
        flashgen.attention_decode(*given, block_table=call.block_table, alibi_slopes=slopes)
    read = [one.values["AlibiSlopes"] for one in driver.launches[before:] if "AlibiSlopes" in one.values]
    assert read
    assert slopes.data_ptr() not in read


def test_the_output_of_queries_that_overlap_is_dense(driver: FakeDriver) -> None:
    """Rows are written by strides that `empty_like` does not have for such queries."""
    call = make(Case(lens=(40, 7), seqlen_q=2))
    rows = torch.randn(999).to(call.q.dtype)
    q = rows.as_strided(call.q.shape, (16, 8, 1, 1))
    driver.named = kernels_of(call)
    out = flashgen.attention_decode(q, call.k_cache, call.v_cache, call.seqlens)
    assert isinstance(out, torch.Tensor)
    assert out.is_contiguous()


def test_tensors_of_a_cpu_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="all of them run on GPUs"):
        runs.run(make(GOOD))


def test_contents_are_checked_on_request() -> None:
    call = make(GOOD)
    check_contents(call)
    with pytest.raises(WorkloadError, match=r"seqlens are 0 to 64, .* got 65 for sequence 1"):
        check_contents(replace(call, seqlens=torch.tensor([1, 65], dtype=torch.int32)))
    assert call.block_table is not None
    table = call.block_table.clone()
    table[0, 2] = 99
    with pytest.raises(WorkloadError, match=r"page ids .* got 99 for sequence 0"):
        check_contents(replace(call, block_table=table))
    check_contents(replace(call, block_table=table, seqlens=torch.tensor([32, 0], dtype=torch.int32)))
    table = call.block_table.clone()
    table[0, 0] = -1
    check_contents(replace(call, block_table=table, features=Features(window=(3, 0))))
    check_contents(replace(call, features=Features(window=(2**70, 0))))  # which hides nothing
    plain = make(Case(lens=(40, 7), leftpad=(0, 7)))
    check_contents(plain)
    with pytest.raises(WorkloadError, match="leftpad"):
        check_contents(replace(plain, leftpad=torch.tensor([0, 8], dtype=torch.int32)))
    with pytest.raises(WorkloadError, match="batch_idx"):
        check_contents(replace(plain, batch_idx=torch.tensor([0, 2], dtype=torch.int32)))


def test_the_setting_that_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.cache_clear()
    assert not settings().checks
    monkeypatch.setenv("FLASHGEN_CHECKS", "1")
    settings.cache_clear()
    assert settings().checks
    settings.cache_clear()


@pytest.mark.parametrize("name", ["h200", "a100", "sm86", "sm120", "gfx942"])
def test_defaults_are_valid(name: str) -> None:
    device: Device = find_device(name)
    for head_dim in (16, 64, 96, 128, 192, 256):
        for page in (None, 16, 64):
            spec = Specialization(
                direction="decode", dtype="bf16", head_dim=head_dim, head_dim_v=head_dim, page_size=page
            )
            for rows in (1, 16):
                for batch in (1, 300, 1024):
                    sizes = Sizes(batch=batch, nheads=8 * rows, nheads_k=8, seqlen_q=4, seqlen_k=4096)
                    config = decode_config(spec, sizes, device)
                    assert invalid(config, spec, device) is None, (spec.key, config)


def test_with_fixed_splits_neither_batch_nor_pages_choose_tiles() -> None:
    def tiles(batch: int, page: int | None, seqlen_k: int) -> tuple[object, ...]:
        spec = Specialization(direction="decode", dtype="bf16", head_dim=128, head_dim_v=128, page_size=page)
        sizes = Sizes(batch=batch, nheads=32, nheads_k=8, seqlen_q=1, seqlen_k=seqlen_k)
        return tuple(decode_config(spec, sizes, H200).replace(batch_pad=16).knobs)

    calls = [(batch, page) for batch in (1, 16, 64, 1024) for page in (None, 16, 64)]
    assert len({tiles(*call, 0) for call in calls}) == 1
    assert len({tiles(*call, 8192) for call in calls}) > 1
    call = make(Case(lens=(300, 2), options={"fixed_split_size": 256}))
    out = torch.empty_like(call.q)
    assert CheckedDecode.of(call, out).shape.sizes.seqlen_k == 0
    assert CheckedDecode.of(replace(call, fixed_split_size=None), out).shape.sizes.seqlen_k == 300
    windowed = replace(call, fixed_split_size=None, features=Features(window=(99, 0)))
    assert CheckedDecode.of(windowed, out).shape.sizes.seqlen_k == 100
