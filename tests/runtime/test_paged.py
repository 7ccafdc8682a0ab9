"""`flashgen.attention_varlen` over pages on an imagined GPU: what kernels read, mixed batches, and every rule."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashgen
from flashgen.codegen.families import family, invalid
from flashgen.codegen.family import Sizes
from flashgen.codegen.portable_forward import shares
from flashgen.core.device import find_device
from flashgen.core.errors import FlashgenError, UnsupportedError, WorkloadError
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization
from flashgen.runtime.lookup.mixed import APART_KEYS, why_not_decoded
from flashgen.runtime.ops import kernel_cache
from flashgen.runtime.varlen import api, mixed
from tests.decoding import decode_config
from tests.fakes.driver import FakeDriver, Launched
from tests.packing import Case
from tests.paging import Paged, checked, paged

H200 = find_device("h200")
CHUNKS = Case(queries=(1, 1, 40, 7), keys=(600, 0, 60, 7), options={"causal": True})


@pytest.fixture(autouse=True)
def splits(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many CTAs share the keys of a tile: at first one, whatever the sizes."""

    def share(number: int) -> None:
        monkeypatch.setattr(shares, "_best", lambda *_: number)

    share(1)
    return share


def run(fake: FakeDriver, call: Paged, **changes: Any) -> tuple[list[Launched], Any]:
    """The launches of a call, and what it returns."""
    spec = checked(call).spec
    row = family("portable_forward")
    config = row.default(spec, H200).replace(split_keys=shares._best(spec, None, None, None) > 1)
    kernels = {kernel.entry: kernel.parameters for kernel in row.kernels(spec, config)}
    fake.named = {**kernels, **decode_kernels(call, spec, changes.get("num_decodes", 0))}
    before = len(fake.launches)
    found = flashgen.attention_varlen(call.q, call.k, call.v, **{**call.named, **changes})
    return fake.launches[before:], found


def decode_kernels(call: Paged, spec: Specialization, batch: int) -> dict[str, Any]:
    """The parameters of the kernels of a step of decoding, by their names."""
    if not batch or spec.dtype == "fp32":
        return {}
    step = replace(spec, direction="decode", varlen=False)
    room = call.k.shape[1] * call.named["block_table"].shape[1]
    sizes = Sizes(batch=batch, nheads=call.q.shape[1], nheads_k=call.k.shape[2], seqlen_q=1, seqlen_k=room)
    config = decode_config(step, sizes, H200)
    return {kernel.entry: kernel.parameters for kernel in family(config.family).kernels(step, config)}


@pytest.mark.parametrize("by_ends", [False, True])
def test_the_kernel_reads_the_call(driver: FakeDriver, by_ends: bool) -> None:
    call = paged(CHUNKS, 16, "halves", by_ends=by_ends)
    ((found,), _) = run(driver, call)
    values, table = found.values, call.named["block_table"]
    assert (values["Table"], values["stride_table"]) == (table.data_ptr(), table.stride(0))
    assert (values["K"], values["V"], values["Q"]) == (call.k.data_ptr(), call.v.data_ptr(), call.q.data_ptr())
    assert (values["num_pages"], values["table_keys"]) == (len(call.k), 16 * table.shape[1])
    assert (values["stride_kb"], values["stride_ks"], values["stride_kh"]) == call.k.stride()[:3]
    assert values["stride_kb"] == 2 * 16 * 2 * 32
    assert values["has_seqused_k"] == (not by_ends)
    named = ("CuSeqlensK", "cu_seqlens_k") if by_ends else ("SeqUsedK", "seqused_k")
    assert values[named[0]] == call.named[named[1]].data_ptr()
    assert (values["sequences"], values["total_q"]) == (4, 49)
    assert found.grid[0] == 4 * (min(49 // 128 + 4, 4) + 1)


def test_pages_that_hold_steps_are_loaded_by_tma(driver: FakeDriver) -> None:
    call = paged(CHUNKS, 128, "hnd")
    ((found,), _) = run(driver, call)
    assert (found.values["k_desc"], found.values["v_desc"]) == (call.k.data_ptr(), call.v.data_ptr())
    keys = driver.encoded[1]
    assert keys.shape == (32, 128, 2, len(call.k))
    assert keys.byte_strides == tuple(2 * step for step in (32, 128 * 32, 2 * 128 * 32))


def test_batches_of_other_sizes_compile_nothing(driver: FakeDriver) -> None:
    case = Case(queries=(3,), head_dim=16, nheads=1, nheads_k=1, options={"causal": True, "window": (300, 0)})
    for lengths in ((3,), (40, 2), (5, 0, 300), (1,) * 20):
        for layout in ("nhd", "halves"):
            run(driver, paged(replace(case, queries=lengths), 8, layout))
    assert len({(spec, config) for spec, config, _ in kernel_cache.KERNELS}) == 1
    assert len(driver.loaded) == 1


def test_without_pages_nothing_is_launched(driver: FakeDriver) -> None:
    call = paged(Case(queries=(3, 2), keys=(0, 0)), 16)
    for changes in ({"block_table": torch.empty(2, 0, dtype=torch.int32)}, {"k": call.k[:0], "v": call.v[:0]}):
        given = {"q": call.q, "k": call.k, "v": call.v, **call.named, **changes}
        out, lse = flashgen.attention_varlen(**given, return_lse=True)
        assert not out.any()
        assert (lse == -torch.inf).all()
    assert not driver.launches


# --- mixed batches ----------------------------------------------------------------------------------------------------


def test_steps_of_decoding_have_launches_of_their_own(driver: FakeDriver) -> None:
    call = paged(replace(CHUNKS, alibi="own", spare=5), 16)
    (prefill, step, *merge), (out, lse) = run(driver, call, num_decodes=2, return_lse=True)
    assert len(merge) <= 1
    named, table = call.named, call.named["block_table"]
    values = prefill.values
    assert (values["sequences"], values["total_q"]) == (2, 54)
    assert values["CuSeqlensQ"] == named["cu_seqlens_q"][2:].data_ptr()
    assert values["SeqUsedK"] == named["seqused_k"][2:].data_ptr()
    assert values["Table"] == table[2:].data_ptr()
    assert values["AlibiSlopes"] == named["alibi_slopes"][2:].data_ptr()
    assert (values["Q"], values["O"], values["LSE"]) == (call.q.data_ptr(), out.data_ptr(), lse.data_ptr())
    values = step.values
    assert (values["Q"], values["O"], values["Lens"]) == (
        call.q.data_ptr(),
        out.data_ptr(),
        named["seqused_k"].data_ptr(),
    )
    assert (values["Table"], values["stride_table"]) == (table.data_ptr(), table.stride(0))
    assert values["AlibiSlopes"] == named["alibi_slopes"].data_ptr()
    assert (values["stride_qb"], values["stride_ob"]) == (call.q.stride(0), out.stride(0))
    assert (out.shape, lse.shape) == ((54, 4, 32), (4, 54))


def test_a_reload_while_a_thread_asks_how_steps_are_launched_forgets_the_answer(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, threads = mixed._is_apart, list[threading.Thread]()

    def is_apart(*given: Any) -> bool:
        found = real(*given)
        threads.append(threading.Thread(target=flashgen.reload))
        threads[-1].start()
        threads[-1].join(0.2)  # what is not held back is done by then
        return found

    monkeypatch.setattr(mixed, "_is_apart", is_apart)
    run(driver, paged(CHUNKS, 16), num_decodes=2)
    threads[0].join()
    assert not mixed.APART


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "dispatched"])
@pytest.mark.parametrize("by_ends", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("num_decodes", [0, 2])
def test_what_a_call_allocates(
    driver: FakeDriver,
    num_decodes: int,
    with_lse: bool,
    by_ends: bool,
    direct: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The output and the LSE; beside two launches the LSE of the steps, and lengths where ends alone say them.

    By torch's dispatcher the memory that CTAs of decoding share is none that is kept, either.
    """
    call = paged(CHUNKS, 16, by_ends=by_ends)
    changes = {"num_decodes": num_decodes, "return_lse": with_lse}
    launches, _ = run(driver, call, **changes)
    assert (len(launches) > 1) == bool(num_decodes)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as seen, monkeypatch.context() as inner:
        inner.setattr(torch.autograd.profiler, "_is_profiler_enabled", not direct)  # under one calls are dispatched
        kept = flashgen.attention_varlen(call.q, call.k, call.v, **{**call.named, **changes})
    events = seen.profiler.kineto_results.events()
    counted = sum(event.name() == "[memory]" and event.nbytes() > 0 for event in events)
    temporaries = with_lse + by_ends + (not direct) if num_decodes else 0
    assert counted == 1 + with_lse + temporaries
    del kept


@pytest.mark.parametrize("with_lse", [False, True])
def test_ctas_that_share_keys_leave_their_outputs_in_memory_of_the_call(
    driver: FakeDriver, with_lse: bool, splits: Callable[[int], None]
) -> None:
    splits(3)
    call = paged(CHUNKS, 16)
    (main, merge), found = run(driver, call, return_lse=with_lse)
    out = found[0] if with_lse else found
    assert main.values["key_splits"] == merge.values["key_splits"] == 3
    assert main.grid[0] % 3 == 0
    assert "O" not in main.values
    assert main.values["OParts"] == merge.values["OParts"]
    rows, heads, columns = out.shape
    assert merge.values["LseParts"] == main.values["LseParts"] >= main.values["OParts"] + 3 * rows * heads * columns * 4
    assert (merge.values["O"], merge.values["total_q"]) == (out.data_ptr(), rows)
    assert merge.values["lse_rows"] == (rows if with_lse else 0)
    assert merge.grid[0] == heads * -(-rows // 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = flashgen.attention_varlen(call.q, call.k, call.v, return_lse=with_lse, **call.named)
    events = seen.profiler.kineto_results.events()
    assert sum(event.name() == "[memory]" and event.nbytes() > 0 for event in events) == 2 + with_lse
    del kept


def test_a_batch_of_steps_alone_is_one_launch_of_decoding(driver: FakeDriver) -> None:
    call = paged(replace(CHUNKS, queries=(1, 1), keys=(600, 9)), 16)
    launches, out = run(driver, call, num_decodes=2)
    assert "Lens" in launches[0].values
    assert all("CuSeqlensQ" not in one.values for one in launches)
    by_ends = paged(replace(CHUNKS, queries=(1, 1), keys=(600, 9)), 16, by_ends=True)
    assert "Lens" in run(driver, by_ends, num_decodes=2)[0][0].values
    assert out.shape == (2, 4, 32)


def test_one_launch_where_a_second_one_costs_more(driver: FakeDriver) -> None:
    few = paged(replace(CHUNKS, keys=(APART_KEYS - 1, 0, 60, 7)), 16)
    window = paged(replace(CHUNKS, options={"causal": True, "window": (100, 0)}), 16)
    used = paged(replace(CHUNKS, used_q=(1, 0, 40, 7)), 16)
    full = paged(replace(CHUNKS, dtype=torch.float32), 16)
    for call in (few, window, used, full):
        problem = checked(call)
        assert problem.features is not None
        assert not mixed._is_apart(call.q[None], call.k, call.v, True, 2, problem.features)
    assert run(driver, paged(CHUNKS, 16), num_decodes=2, deterministic=True)[0][0].values["sequences"] == 4
    ((one,), _) = run(driver, few, num_decodes=2)
    assert one.values["sequences"] == 4
    spec = checked(paged(CHUNKS, 16)).spec
    assert why_not_decoded(spec, H200) is None
    assert "512" in str(why_not_decoded(replace(spec, head_dim=512, head_dim_v=512), H200))


def test_under_torch_compile_the_call_is_one_op(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "is_dynamo_compiling", lambda: True)
    call = paged(replace(CHUNKS, sinks=True), 16)
    launches, found = run(driver, call, num_decodes=2, return_lse=True)
    assert len(launches) >= 2
    assert found[1].shape == (4, 49)
    (alone,), _ = run(driver, call)
    assert alone.values["Table"] == call.named["block_table"].data_ptr()
    count = len(driver.launches)
    with FakeTensorMode() as mode:
        given = {"q": call.q, "k": call.k, "v": call.v, **call.named}
        fake = {n: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for n, t in given.items()}
        for changes in ({}, {"num_decodes": 2}):
            out, lse = flashgen.attention_varlen(**fake, **changes, return_lse=True)
            assert (out.shape, lse.shape, lse.dtype) == ((49, 4, 32), (4, 49), torch.float32)
            with pytest.raises(WorkloadError, match="block_table is int32"):
                flashgen.attention_varlen(**{**fake, "block_table": fake["block_table"][:3]}, **changes)
    assert len(driver.launches) == count


# --- rules ------------------------------------------------------------------------------------------------------------


def broken(rule: str, call: Paged) -> dict[str, Any]:
    """What a call that breaks one rule has in place of the right values."""
    q, k, v, table = call.q, call.k, call.v, call.named["block_table"]
    return {
        "block_table must be": lambda: {"block_table": [[0]]},
        r"block_table is int32 .*here \(4, \.\.\.\)": lambda: {"block_table": table[:3]},
        "block_table is int32": lambda: {"block_table": table.long()},
        "block_table is contiguous along its rows": lambda: {"block_table": table.repeat(1, 2)[:, ::2]},
        r"\(pages, page_size, nheads_k, head_dim\), got k": lambda: {"k": k[0]},
        r"k \(pages, page_size, nheads_k, head_dim\) and v .*16, 2, 16": lambda: {"k": k[..., :16]},
        "got neither": lambda: {"seqused_k": None},
        "got both": lambda: {"cu_seqlens_k": call.named["cu_seqlens_q"]},
        "at most 536870912 keys, got a block_table with room for": lambda: {
            name: one.as_strided((1, 2**29, 2, 32), (0, 0, 32, 1)) for name, one in (("k", k), ("v", v))
        },
        "pages lie less than": lambda: {"k": k.as_strided((1, *k.shape[1:]), (2**31, *k.stride()[1:])), "v": v[:1]},
        "num_decodes must be at most 4": lambda: {"num_decodes": 5},
        "num_decodes must be at least 0": lambda: {"num_decodes": -1},
        "num_decodes must be a whole": lambda: {"num_decodes": 1.5},
        "no gradient through keys and values in pages": lambda: {"q": q.clone().requires_grad_()},
    }[rule]()


RULES = (
    *("block_table must be", r"block_table is int32 .*here \(4, \.\.\.\)", "block_table is int32"),
    *("block_table is contiguous along its rows", r"\(pages, page_size, nheads_k, head_dim\), got k"),
    *(r"k \(pages, page_size, nheads_k, head_dim\) and v .*16, 2, 16", "got neither", "got both"),
    *("at most 536870912 keys, got a block_table with room for", "pages lie less than"),
    *("num_decodes must be at most 4", "num_decodes must be at least 0", "num_decodes must be a whole"),
    "no gradient through keys and values in pages",
)


@pytest.mark.parametrize("rule", RULES)
def test_a_call_that_breaks_a_rule_is_refused(driver: FakeDriver, rule: str) -> None:
    call = paged(CHUNKS, 16)
    given = {"q": call.q, "k": call.k, "v": call.v, **call.named, **broken(rule, call)}
    with pytest.raises(FlashgenError, match=rule) as refused:
        flashgen.attention_varlen(**given)
    assert isinstance(refused.value, UnsupportedError if "gradient" in rule else WorkloadError)
    assert not driver.launches


@pytest.mark.parametrize("trains", [False, True])
def test_steps_need_pages(driver: FakeDriver, trains: bool) -> None:
    call = paged(CHUNKS, 16).packed
    with pytest.raises(WorkloadError, match="it needs a block_table, got 2"):
        flashgen.attention_varlen(call.q.requires_grad_(trains), call.k, call.v, **call.named, num_decodes=2)


def test_contents_are_checked_on_request(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CHECKS", "1")
    settings.cache_clear()
    call = paged(replace(CHUNKS, options={"causal": True, "window": (20, 0)}), 16)
    run(driver, call, num_decodes=2)

    def refused(rule: str, **changes: Any) -> None:
        with pytest.raises(WorkloadError, match=rule):
            run(driver, call, **changes)

    lengths = call.named["seqused_k"]
    refused(
        "keys of a sequence are 0 to 600, .* got 601 for sequence 0",
        seqused_k=lengths + torch.tensor([1, 0, 0, 0]).int(),
    )
    table = call.named["block_table"].clone()
    table[2, 1] = -1  # its queries see keys 1 to 59
    refused(r"page ids of keys that are visible are 0 to \d+; got -1 for sequence 2", block_table=table)
    table = call.named["block_table"].clone()
    table[0, :36], table[1] = 2**31 - 1, -7  # before the window, and of no keys
    run(driver, call, block_table=table)
    table[0, 36] = len(call.k)  # the window begins at key 579
    refused("for sequence 0", block_table=table)
    refused("the first num_decodes sequences, 3, have one query each; got 40 for sequence 2", num_decodes=3)
    settings.cache_clear()


@pytest.mark.parametrize("name", ["h200", "a100", "sm86", "sm120", "gfx942"])
def test_defaults_are_valid(name: str) -> None:
    device, row = find_device(name), family("portable_forward")
    for page in (1, 10, 16, 64, 128, 256):
        for text in ("", "-causal", "-causal-window", "-softcap", "-alibi-sink", "-causal-unaligned"):
            for head_dim in (16, 64, 128, 192, 256):
                spec = Specialization.parse(f"fwd-bf16-d{head_dim}-varlen-page{page}{text}")
                assert row.unsupported(spec, device) is None
                config = row.default(spec, device)
                assert invalid(config, spec, device) is None, (spec.key, config)
                assert (config.get("page_ids", "load") == "asm") is device.is_nvidia
    dense = Specialization.parse("fwd-bf16-d64-page16")
    assert "but those of packed sequences" in str(row.unsupported(dense, device))
