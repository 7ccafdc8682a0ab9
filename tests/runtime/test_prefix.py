"""`attention_decode(prefix=...)` on an imagined GPU: what the pass over shared keys reads, its memo, every rule."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import flashgen
from flashgen.core.errors import FlashgenError, UnsupportedError, WorkloadError
from flashgen.core.settings import settings
from flashgen.runtime.decode import api, shared_keys
from flashgen.runtime.decode.call import DecodeCall
from flashgen.runtime.decode.prefix import Prefix, check_prefix, run_with_prefix
from flashgen.runtime.decode.shared_keys import SharedKeys, check_shared
from flashgen.runtime.ops import merging
from tests.decoding import Case, arguments, make
from tests.fakes.driver import FakeDriver, Launched
from tests.prefixes import make_prefix
from tests.runtime.decode_calls import kernels_of, run


@pytest.fixture
def merges(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tensors of each merge, which is not computed."""
    found: list[list[int]] = []

    def launched(tensors: list[torch.Tensor], numbers: object) -> None:
        found.append([tensor.data_ptr() for tensor in tensors])

    monkeypatch.setattr(merging, "launcher", lambda *_: lambda *_: launched)
    merging._MEMO.clear()
    shared_keys._MEMO.clear()
    return found


def shared_launches(fake: FakeDriver, call: DecodeCall, prefix: Prefix) -> list[Launched]:
    """The launches of a call over its shared keys, once the ones over its own keys have been seen."""
    own = len(run(fake, replace(call, return_lse=True)))
    fake.named = kernels_of(call, is_shared=True)
    before = len(fake.launches)
    tensors, named = arguments(call)
    flashgen.attention_decode(*tensors, **named, prefix=prefix)
    return fake.launches[before + own :]


def test_the_kernels_read_groups(driver: FakeDriver, merges: list[list[int]]) -> None:
    call = make(Case(lens=(300, 0, 64, 7), page=16, seqlen_q=2, sinks=True, options={"window": (500, 0)}))
    prefix = make_prefix(Case(lens=(300, 0, 64, 7), seqlen_q=2), (400, 90), page=64)
    first, second = shared_launches(driver, call, prefix)
    assert prefix.k is not None
    assert prefix.block_table is not None
    tensors = {"Q": call.q, "K": prefix.k, "Lens": prefix.seqlens, "Table": prefix.block_table, "OwnLens": call.seqlens}
    assert {name: first.values[name] for name in tensors} == {name: one.data_ptr() for name, one in tensors.items()}
    assert (first.values["batch"], first.values["members"], first.values["seqlen_q"]) == (2, 2, 2)
    assert (first.values["seqlen_k"], first.values["own_seqlen_k"]) == (8 * 64, 20 * 16)
    assert (first.values["has_leftpad"], first.values["window_left"], first.values["lse_rows"]) == (1, 500, 2)
    assert first.values["tile_rows"] == second.values["tile_rows"] == 8
    assert "Sinks" not in first.values
    ((shared_out, own_out, shared_lse, own_lse, *_),) = merges
    assert (first.values["O"], first.values["LSE"]) == (shared_out, shared_lse)
    assert shared_out != own_out
    assert shared_lse != own_lse


def test_a_second_call_prepares_nothing(driver: FakeDriver, merges: list[list[int]]) -> None:
    case = Case(lens=(300, 0, 64, 7))
    call, other = make(case), make(case, seed=3)
    (first, *_) = shared_launches(driver, call, make_prefix(case, (400, 90)))
    (again, *_) = shared_launches(driver, other, make_prefix(case, (3, 400)))
    assert len(shared_keys._MEMO) == 1
    assert again.values["Q"] == other.q.data_ptr() != first.values["Q"]
    shared_launches(driver, other, make_prefix(case, (3, 400), (0, 1)))
    assert len(shared_keys._MEMO) == 2


def test_a_reload_forgets_passes_over_shared_keys(driver: FakeDriver, merges: list[list[int]]) -> None:
    """So a record of today serves them, and calls that are recorded are counted."""
    case = Case(lens=(300, 0, 64, 7))
    shared_launches(driver, make(case), make_prefix(case, (400, 90)))
    assert shared_keys._MEMO
    flashgen.reload()
    assert not shared_keys._MEMO


def test_a_reload_while_a_thread_plans_a_pass_forgets_it(
    driver: FakeDriver, merges: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, threads = shared_keys.remember, list[threading.Thread]()

    def remember(*given: Any) -> None:
        threads.append(threading.Thread(target=flashgen.reload))
        threads[-1].start()
        threads[-1].join(0.2)  # what is not held back is done by then
        real(*given)

    monkeypatch.setattr(shared_keys, "remember", remember)
    case = Case(lens=(300, 0, 64, 7))
    shared_launches(driver, make(case), make_prefix(case, (400, 90)))
    threads[0].join()
    assert not shared_keys._MEMO


def test_groups_of_several_sizes_are_several_launches(driver: FakeDriver, merges: list[list[int]]) -> None:
    case = Case(lens=(30, 0, 64, 7, 1))
    call, prefix = make(case), make_prefix(case, (40, 20, 5), (0, 1, 2))
    launches = [
        one for one in shared_launches(driver, call, prefix) if "members" in one.values and "batch" in one.values
    ]
    assert prefix.k is not None
    assert [(one.values["batch"], one.values["members"]) for one in launches] == [(2, 1), (1, 3)]
    assert launches[1].values["Q"] == call.q[2].data_ptr()
    assert launches[1].values["K"] == prefix.k[2].data_ptr()
    assert launches[1].values["OwnLens"] == call.seqlens[2].data_ptr()
    shared = prefix.shared_keys(call.k_cache, call.v_cache)
    many = replace(shared, seqlens=torch.zeros(2050, dtype=torch.int32), starts=())
    assert [(run.groups, run.start) for run in many.runs(4100)] == [(1024, 0), (1024, 2048), (2, 4096)]


def test_a_prefix_without_room_is_no_launch(driver: FakeDriver, merges: list[list[int]]) -> None:
    call = make(Case(lens=(30, 2)))
    none = torch.zeros(1, 0, 2, 32, dtype=torch.float16)
    prefix = Prefix(seqlens=torch.zeros(1, dtype=torch.int32), k=none, v=none)
    assert shared_launches(driver, call, prefix) == []
    assert len(merges) == 1


def test_pages_of_the_calls_own_cache(driver: FakeDriver, merges: list[list[int]]) -> None:
    call = make(Case(lens=(30, 2), page=16))
    table = torch.zeros(1, 4, dtype=torch.int32)
    first, *_ = shared_launches(driver, call, Prefix(seqlens=torch.full((1,), 50).int(), block_table=table))
    assert (first.values["K"], first.values["Table"]) == (call.k_cache.data_ptr(), table.data_ptr())
    assert first.values["has_leftpad"] == 0


def test_with_fixed_splits_tiles_are_of_one_height(driver: FakeDriver, merges: list[list[int]]) -> None:
    heights = set()
    for batch in (2, 40):
        case = Case(lens=(20,) * batch, options={"fixed_split_size": 128})
        first, *_ = shared_launches(driver, make(case), make_prefix(case, (300,)))
        heights.add(first.values["m_blocks"] * 64 >= 2 * batch)
        assert first.values["tile_rows"] == min(64, 2 * batch)
    assert heights == {True}


def test_under_torch_compile_the_call_is_one_op(
    driver: FakeDriver,
    merges: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(lens=(300, 2), page=16)
    call, prefix = make(case), make_prefix(case, (40,), page=16)
    launches = len(shared_launches(driver, call, prefix))
    monkeypatch.setattr(api, "is_dynamo_compiling", lambda: True)
    tensors, named = arguments(call)
    before = len(driver.launches)
    assert flashgen.attention_decode(*tensors, **named, prefix=prefix).shape == call.q.shape
    assert len(driver.launches) - before == launches + 2
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert flashgen.attention_decode(*tensors, **named, prefix=prefix).shape == call.q.shape


GOOD = Case(lens=(40, 7, 3, 1))


def broken(rule: str) -> tuple[DecodeCall, Prefix]:
    """A call and a prefix of which one breaks a rule."""
    call, prefix = make(GOOD), make_prefix(GOOD, (30, 5))
    pages = make_prefix(GOOD, (30, 5), page=16)
    assert prefix.k is not None
    changes = {
        "both k and v, or neither": {"v": None},
        "has a block_table, of pages": {"k": None, "v": None},
        "groups are of equal size, got 3 prefixes": {"seqlens": torch.zeros(3, dtype=torch.int32)},
        "ascending from 0 and below 4, got 2": {"group_starts": (0, 4)},
        "got 2 prefixes and group_starts .1, 2.": {"group_starts": (1, 2)},
        "of a prefix: seqlens is int32": {"seqlens": torch.zeros(2)},
        "of a prefix: k_cache has the head_dim": {"k": prefix.k[..., :16]},
        "v of a prefix has the heads and the head_dim of v_cache": {"v": prefix.k[..., :16]},
        "k of a prefix has the heads and the head_dim of k_cache": {"k": prefix.k[:, :, :1], "v": prefix.k[:, :, :1]},
        "of a prefix: the last dimension of k_cache": {"k": prefix.k.transpose(1, 3)},
        "of a prefix: without block_table": {"k": prefix.k[:1], "v": prefix.k[:1]},
    }
    if rule == "a call with a prefix has no leftpad":
        return replace(call, leftpad=torch.zeros(4, dtype=torch.int32)), prefix
    if rule == "of a prefix: block_table is int32":
        assert pages.block_table is not None
        return call, replace(pages, block_table=pages.block_table.long())
    return call, replace(prefix, **changes[rule])


RULES = (
    *("both k and v, or neither", "has a block_table, of pages", "groups are of equal size, got 3 prefixes"),
    *("ascending from 0 and below 4, got 2", "got 2 prefixes and group_starts .1, 2.", "of a prefix: seqlens is int32"),
    *("of a prefix: k_cache has the head_dim", "of a prefix: the last dimension of k_cache"),
    *(f"{name} of a prefix has the heads and the head_dim of {name}_cache" for name in "kv"),
    *("of a prefix: without block_table", "of a prefix: block_table is int32", "a call with a prefix has no leftpad"),
)


@pytest.mark.usefixtures("merges")
@pytest.mark.parametrize("rule", RULES)
def test_a_prefix_that_breaks_a_rule_is_refused(rule: str, driver: FakeDriver) -> None:
    call, prefix = broken(rule)
    driver.named = kernels_of(call)
    with pytest.raises(WorkloadError, match=rule):
        run_with_prefix(call, prefix)
    if not any(word in rule for word in ("equal size", "group_starts", "ascending", "last dimension")):
        with pytest.raises(WorkloadError, match=rule):  # what tensors without memory show, too
            check_prefix(call, prefix)


def test_wrong_types_are_refused() -> None:
    lens = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(WorkloadError, match="seqlens of a prefix must be a tensor"):
        Prefix(seqlens=3)  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match="a start of a group"):
        Prefix(seqlens=lens, group_starts=(-1,))
    tensors, named = arguments(make(GOOD))
    with pytest.raises(WorkloadError, match="prefix must be a Prefix"):
        flashgen.attention_decode(*tensors, **named, prefix=(lens, 3))  # type: ignore[arg-type]


@pytest.mark.usefixtures("merges")
def test_a_gradient_of_shared_keys_is_refused(driver: FakeDriver) -> None:
    call, prefix = make(GOOD), make_prefix(GOOD, (30, 5))
    shared_launches(driver, call, prefix)
    assert prefix.k is not None
    with pytest.raises(UnsupportedError, match="no backward pass"):
        run_with_prefix(call, replace(prefix, k=prefix.k.clone().requires_grad_()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where forward-mode derivatives begin
@pytest.mark.usefixtures("merges")
@pytest.mark.parametrize("name", ["k", "v"])
def test_derivatives_of_shared_keys_that_a_transform_hides_are_refused(name: str, driver: FakeDriver) -> None:
    """Without a word, every gradient would be 0, and every tangent missing."""
    call, prefix = make(GOOD), make_prefix(GOOD, (30, 5))
    driver.named = kernels_of(call)
    tensors, named = arguments(call)
    shared: torch.Tensor = getattr(prefix, name)

    def decode(x: torch.Tensor) -> torch.Tensor:
        out = flashgen.attention_decode(*tensors, **named, prefix=replace(prefix, **{name: x}))
        assert isinstance(out, torch.Tensor)
        return out.float().sum()

    with pytest.raises(UnsupportedError, match="no backward pass"):
        torch.func.grad(decode)(shared)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="no forward-mode derivative"):
        decode(forward_ad.make_dual(shared, shared))
    with torch.profiler.profile(), pytest.raises(UnsupportedError, match="no backward pass"):
        decode(shared.clone().requires_grad_())


@pytest.mark.usefixtures("merges")
def test_contents_are_checked_on_request(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    call, prefix = make(GOOD), make_prefix(GOOD, (30, 5), page=16)
    shared = prefix.shared_keys(call.k_cache, call.v_cache)
    check_shared(call, shared)
    with pytest.raises(WorkloadError, match=r"seqlens are 0 to 48, .* got 49 for sequence 1"):
        check_shared(call, replace(shared, seqlens=torch.tensor([1, 49], dtype=torch.int32)))
    assert shared.block_table is not None
    freed = shared.block_table.clone()
    freed[0, 0] = -1
    wrong: SharedKeys = replace(shared, block_table=freed)
    with pytest.raises(WorkloadError, match="page ids"):
        check_shared(call, wrong)
    windowed = replace(call, features=replace(call.features, window=(10, 0)), seqlens=call.seqlens + 5)
    check_shared(windowed, wrong)  # which no query sees any more
    monkeypatch.setenv("FLASHGEN_CHECKS", "1")
    settings.cache_clear()
    driver.named = kernels_of(call)
    with pytest.raises(FlashgenError, match="page ids"):
        run_with_prefix(call, replace(prefix, block_table=freed))
    settings.cache_clear()
