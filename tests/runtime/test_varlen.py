"""`flashgen.attention_varlen` on an imagined GPU: what the kernel reads, the memo, no new compiles, and every rule."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import flashgen
from flashgen.codegen.families import FAMILIES, family, invalid, unsupported
from flashgen.core.device import find_device
from flashgen.core.errors import FlashgenError, UnsupportedError, WorkloadError
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization
from flashgen.launch import counters
from flashgen.launch.geometry import CLIPPED_ROWS
from flashgen.runtime.lookup import records
from flashgen.runtime.ops import kernel_cache, serve
from flashgen.runtime.varlen import api
from tests.fakes.driver import FakeDriver, Launched
from tests.fakes.gpu_zero import H200
from tests.packing import Case, Packed, checked, make

GOOD = Case(queries=(40, 0, 7), keys=(30, 5, 60), nheads=3, nheads_k=1)


def run(fake: FakeDriver, packed: Packed, **changes: Any) -> Launched:
    """The launch of a call."""
    problem = checked(packed)
    row = family("portable_forward")
    (kernel,) = row.kernels(problem.spec, row.default(problem.spec, H200))
    fake.named = {kernel.entry: kernel.parameters}
    flashgen.attention_varlen(packed.q, packed.k, packed.v, **{**packed.named, **changes})
    return fake.launches[-1]


def test_the_kernel_reads_the_call(bare_driver: FakeDriver) -> None:
    packed = make(replace(GOOD, used_k=(30, 2, 60), sinks=True, options={"causal": True, "window": (9, 0)}))
    found = run(bare_driver, packed)
    named, values = packed.named, found.values
    pointers = {"CuSeqlensQ": "cu_seqlens_q", "CuSeqlensK": "cu_seqlens_k", "SeqUsedK": "seqused_k", "Sinks": "sinks"}
    assert {name: values[name] for name in pointers} == {name: named[key].data_ptr() for name, key in pointers.items()}
    assert (values["q_desc"], values["k_desc"], values["v_desc"]) == tuple(
        one.data_ptr() for one in (packed.q, packed.k, packed.v)
    )
    assert (values["has_seqused_q"], values["has_seqused_k"], values["lse_rows"]) == (0, 1, 0)
    assert (values["sequences"], values["total_q"], values["total_k"]) == (3, 47, 95)
    assert (values["window_left"], values["stride_os"], values["stride_oh"]) == (9, 96, 32)
    assert found.grid[0] == 3 * (min(47 // 128 + 3, 3 * 1) + 1)  # heads, blocks of the sequences, one of all the rest
    assert run(bare_driver, packed, return_lse=True).values["lse_rows"] == 47


def test_a_hopper_kernel_gets_tensors_that_tma_clips_behind_any_row(
    bare_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = family("hopper_forward")
    monkeypatch.setattr(records, "default_config", row.default)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(counters, "_FREE", {0: iter([torch.zeros(1, dtype=torch.int32)])})
    packed = make(replace(GOOD, head_dim=64, options={"causal": True}))
    spec = checked(packed).spec
    (kernel,) = row.kernels(spec, row.default(spec, H200))
    bare_driver.named = {kernel.entry: kernel.parameters}
    flashgen.attention_varlen(packed.q, packed.k, packed.v, **packed.named)
    found = bare_driver.launches[-1]
    assert (found.values["sequences"], found.values["total_q"], found.values["total_k"]) == (3, 47, 95)
    assert found.grid[0] == 3 * (3 * 1 + 1)  # heads, blocks of the sequences and of all the rest
    for name, heads in (("q", 3), ("k", 1), ("v", 1), ("o", 3)):
        encoded, step = found.values[f"{name}_desc.encoded"], heads * 64
        assert encoded.shape == (64, CLIPPED_ROWS, heads, 0x7FFF0000, 0x7FFF0000)
        assert encoded.byte_strides == (2 * step, 128 if heads > 1 else 32, 2 * step, 2 * (2**34 - step))
        assert encoded.box[2:] == (1, 1, 1)


def differentiated(fake: FakeDriver, packed: Packed, **changes: Any) -> list[Launched]:
    """The launches of a backward pass."""
    spec = replace(checked(packed).spec, direction="backward", sink=False, deterministic="deterministic" in changes)
    row = family("portable_backward_split")
    run(fake, packed, return_lse=True)
    fake.named |= {kernel.entry: kernel.parameters for kernel in row.kernels(spec, row.default(spec, H200))}
    return gradients_of(fake, packed, **changes)


def gradients_of(fake: FakeDriver, packed: Packed, **changes: Any) -> list[Launched]:
    given = {name: getattr(packed, name).detach().requires_grad_() for name in "qkv"}
    out = flashgen.attention_varlen(**given, **{**packed.named, **changes})
    before = len(fake.launches)
    found = torch.autograd.grad(out, tuple(given.values()), torch.ones_like(out))
    assert [one.shape for one in found] == [one.shape for one in given.values()]
    return fake.launches[before:]


def test_its_gradients_are_computed_by_kernels_that_read_the_call(bare_driver: FakeDriver) -> None:
    packed = make(replace(GOOD, used_k=(30, 2, 60), sinks=True, options={"causal": True}))
    for changes, count in (({}, 3), ({"deterministic": True}, 3)):
        launches = differentiated(bare_driver, packed, **changes)
        assert len(launches) == count
        main = launches[1].values
        assert main["CuSeqlensK"] == packed.named["cu_seqlens_k"].data_ptr()
        assert (main["sequences"], main["total_q"], main["total_k"], main["has_seqused_k"]) == (3, 47, 95, 1)
        assert launches[1].grid[0] == 1 * (
            min(95 // 64 + 3, 3 * 1) + 1
        )  # key heads, blocks of sequences, one of the rest
        assert launches[0].values["seqlen_q"] == 47
    assert launches[2].grid[0] == 3 * (min(47 // 128 + 3, 3 * 1) + 1)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_gradient_that_a_collective_returns_is_waited_for(sinks: bool, bare_driver: FakeDriver) -> None:
    packed = make(replace(GOOD, sinks=sinks, options={"causal": True}))
    differentiated(bare_driver, packed)  # so that the kernels of both passes are there
    given = [tensor.detach().requires_grad_() for tensor in (packed.q, packed.k, packed.v)]
    out = flashgen.attention_varlen(*given, **packed.named)
    torch.autograd.grad(out, given, AsyncCollectiveTensor(torch.ones_like(out)))
    launches = bare_driver.launches[-3:]
    read = [value for one in launches for name, value in one.values.items() if name in ("DO", "do_desc")]
    assert read
    assert all(read)


def test_autograd_sees_one_node_and_what_is_written_over(bare_driver: FakeDriver) -> None:
    """No views around it, which would cost as much as a launch; saved tensors are watched, though they are views."""
    packed = make(replace(GOOD, options={"causal": True}))
    differentiated(bare_driver, packed)  # so that the kernels of both passes are there
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in (packed.q, packed.k, packed.v))
    out, lse = flashgen.attention_varlen(q, k, v, **packed.named, return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, (q.shape[1], q.shape[0]))
    assert out.grad_fn is lse.grad_fn is not None
    owners = [node for node, _ in out.grad_fn.next_functions if node is not None]
    assert [node.variable for node in owners] == [q, k, v]  # type: ignore[attr-defined]
    for number in range(2):
        out = flashgen.attention_varlen(q, k, v, **packed.named)
        with torch.no_grad():
            (out, q)[number].mul_(2)
        with pytest.raises(RuntimeError, match="inplace"):
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def test_nothing_is_left_of_a_call_that_was_not_differentiated(bare_driver: FakeDriver) -> None:
    """The output is a view, and its memory is kept for a backward pass: no circle may hold both."""
    packed = make(replace(GOOD, options={"causal": True}))
    differentiated(bare_driver, packed)
    q = packed.q.detach().requires_grad_()
    out = flashgen.attention_varlen(q, packed.k, packed.v, **packed.named)
    kept = [weakref.ref(tensor) for tensor in (out, out._base) if tensor is not None]
    storages = [weakref.ref(out.untyped_storage())]
    gc.disable()
    try:
        del out
        assert [ref() for ref in (*kept, *storages)] == [None] * len((*kept, *storages))
    finally:
        gc.enable()


def test_hopper_gradients_lie_in_whole_blocks_of_each_sequence(
    bare_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = family("hopper_backward_fused")
    rows = {"forward": family("portable_forward"), "backward": row}
    monkeypatch.setattr(records, "default_config", lambda spec, *given: rows[spec.direction].default(spec, *given))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(counters, "_FREE", {0: iter([torch.zeros(1, dtype=torch.int32)])})
    packed = make(replace(GOOD, head_dim=64, nheads_k=GOOD.nheads, used_k=(30, 2, 60), options={"causal": True}))
    run(bare_driver, packed, return_lse=True)
    spec = replace(checked(packed).spec, direction="backward", sink=False)
    bare_driver.named |= {kernel.entry: kernel.parameters for kernel in row.kernels(spec, row.default(spec, H200))}
    prepare, main, finish = gradients_of(bare_driver, packed)
    blocks = 47 // 128 + 3 + 1
    assert (prepare.grid[0], finish.grid[0]) == (3 * blocks * 128 // 64, 3 * blocks * 2)
    assert (main.values["sequences"], main.values["total_q"], main.values["total_k"]) == (3, 47, 95)
    assert main.values["has_seqused_k"] == prepare.values["has_seqused_q"] + 1 == 1
    for name in ("lse_start", "dp_start"):
        assert main.values[f"{name}_desc.encoded"].shape == (blocks * 128, 3, 1)
    for name, heads in (("q", 3), ("do", 3), ("k", 3), ("dk", 3), ("dv", 3)):
        assert main.values[f"{name}_desc.encoded"].shape == (64, CLIPPED_ROWS, heads, 0x7FFF0000, 0x7FFF0000)


def test_batches_of_other_sizes_compile_nothing(bare_driver: FakeDriver) -> None:
    draw = random.Random(0)
    options = {"causal": True, "window": (300, 0)}
    for _ in range(200):
        lengths = tuple(draw.randint(0, 500) for _ in range(draw.randint(1, 30)))
        packed = make(Case(queries=(*lengths, 1), head_dim=16, nheads=1, nheads_k=1, options=options))
        run(bare_driver, packed)
    assert len({(spec, config) for spec, config, _ in kernel_cache.KERNELS}) == 1
    assert len(bare_driver.loaded) == 1


def numbers(launches: list[Launched]) -> list[dict[str, Any]]:
    """What kernels read but for addresses."""
    pointers = [name for one in launches for name in one.values if name[0].isupper() or name.endswith("_desc")]
    return [
        {"grid": one.grid, **{n: v for n, v in one.values.items() if n not in pointers and ".encoded" not in n}}
        for one in launches
    ]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (40, 7), "softcap": 30.0}])
def test_what_is_open_to_sizes_is_launched_as_on_the_slow_path(
    bare_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, trains: bool, options: dict[str, Any]
) -> None:
    draw, prepared, prepare = random.Random(1), [], serve.prepare
    monkeypatch.setattr(serve, "prepare", lambda call: (prepared.append(call), prepare(call))[1])

    def launched(packed: Packed) -> list[Launched]:
        before = len(bare_driver.launches)
        if trains:
            return differentiated(bare_driver, packed)
        run(bare_driver, packed)
        return bare_driver.launches[before:]

    for number in range(12):
        lengths = tuple(draw.randint(0, 90) for _ in range(draw.randint(1, 9)))
        used = tuple(draw.randint(0, length) for length in lengths) if number % 3 == 2 else ()
        packed = make(Case(queries=(*lengths, 1), used_k=(*used, 1) if used else (), options=options))
        before = len(prepared)
        found = numbers(launched(packed))
        was_open = len(prepared) == before
        assert was_open or number < 8
        for memo in (serve.MEMO, serve._OPEN, serve._SEEN) if number > 7 else ():
            saved, _ = memo.copy(), memo.clear()  # type: ignore[attr-defined]
            assert numbers(launched(packed)) == found
            memo.update(saved)  # type: ignore[attr-defined]


def test_a_call_with_something_odd_about_it_is_not_open(bare_driver: FakeDriver) -> None:
    for rows in (5, 6, 7):
        run(bare_driver, make(Case(queries=(rows, 9))))
    assert serve._OPEN
    packed = make(Case(queries=(20, 9)))
    wrong = packed.named["cu_seqlens_q"]
    for changes, rule in (
        ({"cu_seqlens_q": wrong.long()}, "cu_seqlens_q is int32"),
        ({"cu_seqlens_q": wrong[None]}, "cu_seqlens_q is int32"),
        ({"cu_seqlens_k": wrong[:2]}, "cu_seqlens_k is int32"),
    ):
        with pytest.raises(WorkloadError, match=rule):
            run(bare_driver, packed, **changes)
    with pytest.raises(WorkloadError, match="share dtype"):
        flashgen.attention_varlen(packed.q, packed.k.bfloat16(), packed.v, **packed.named)
    odd = make(Case(queries=(20, 11), layout="odd"))
    assert run(bare_driver, odd).values["total_q"] == 31


def test_without_rows_or_keys_nothing_is_launched(bare_driver: FakeDriver) -> None:
    none = torch.zeros(3, dtype=torch.int32)
    q, k = torch.ones(5, 2, 16, dtype=torch.bfloat16), torch.ones(0, 2, 16, dtype=torch.bfloat16)
    ends = torch.tensor([0, 3, 5], dtype=torch.int32)
    out, lse = flashgen.attention_varlen(q, k, k, ends, none, max_seqlen_q=3, max_seqlen_k=0, return_lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert flashgen.attention_varlen(k, q, q, none, ends, max_seqlen_q=0, max_seqlen_k=3).shape == (0, 2, 16)
    assert not bare_driver.launches


def test_under_torch_compile_the_call_is_one_op(bare_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Dynamo sees it, without the seconds that Dynamo takes: a real call through the op, and shapes without data."""
    monkeypatch.setattr(api, "is_dynamo_compiling", lambda: True)
    packed = make(replace(GOOD, sinks=True, options={"causal": True}))
    assert run(bare_driver, packed, return_lse=True).values["Sinks"] == packed.named["sinks"].data_ptr()
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(one) for one in (packed.q, packed.k, packed.v))
        named = {n: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for n, t in packed.named.items()}
        out, lse = flashgen.attention_varlen(q, k, v, **named, return_lse=True)
        assert (out.shape, lse.shape, lse.dtype) == ((47, 3, 32), (3, 47), torch.float32)
        with pytest.raises(WorkloadError, match="cu_seqlens_k is int32"):
            flashgen.attention_varlen(q, k, v, **{**named, "cu_seqlens_k": named["cu_seqlens_k"][:2]})
    assert len(bare_driver.launches) == 1


def broken(name: str) -> dict[str, Any]:
    """What a call that breaks one rule has in place of the right values."""
    packed = make(GOOD)
    q, k, v, ends = packed.q, packed.k, packed.v, packed.named["cu_seqlens_q"]
    return {
        r"\(rows, heads, head_dim\), got q": lambda: {"q": q[0]},
        r"q is \(total_q, nheads, head_dim\), .* got \(47, 3, 32\), \(95, 1, 16\)": lambda: {"k": k[..., :16]},
        "q is .total_q": lambda: {"v": v[:-1]},
        "nheads must be a multiple": lambda: {"q": q[:, :1], "k": k.repeat(1, 2, 1), "v": v.repeat(1, 2, 1)},
        "share dtype": lambda: {"k": k.bfloat16()},
        "dtype is bfloat16, float16 or float32": lambda: {"q": q.double(), "k": k.double(), "v": v.double()},
        "last dimension is contiguous": lambda: {"q": q.repeat(1, 1, 2)[..., ::2]},
        "cu_seqlens_q is int32": lambda: {"cu_seqlens_q": ends.long()},
        "cu_seqlens_q is int32 .*contiguous": lambda: {"cu_seqlens_q": ends.repeat(2)[::2]},
        "cu_seqlens_q must be": lambda: {"cu_seqlens_q": [0, 40, 40, 47]},
        r"cu_seqlens_k is int32 .*here \(4,\)": lambda: {"cu_seqlens_k": ends[:3]},
        "has max_seqlen_k": lambda: {"max_seqlen_k": None},
        r"seqused_k is int32 \(batch,\)": lambda: {"seqused_k": ends},
        "max_seqlen_q must be": lambda: {"max_seqlen_q": -1},
        "max_seqlen_k must be": lambda: {"max_seqlen_k": 1.5},
        "softmax_scale is finite": lambda: {"softmax_scale": 0.0},
        "softcap is finite": lambda: {"softcap": -1.0},
        "an edge of a window": lambda: {"window": (-1, 0)},
        "alibi_slopes are .* for batch 3": lambda: {"alibi_slopes": torch.zeros(2, 3)},
        "functions of the caller": lambda: {"mask_mod": loaded, "aux": (torch.zeros(1, requires_grad=True),)},
    }[name]()


def loaded(b, h, q_idx, k_idx, aux):  # type: ignore[no-untyped-def]
    return q_idx // 7 == k_idx // 7


RULES = (
    *(r"\(rows, heads, head_dim\), got q", r"q is \(total_q, nheads, head_dim\), .* got \(47, 3, 32\), \(95, 1, 16\)"),
    *("q is .total_q", "nheads must be a multiple", "share dtype", "dtype is bfloat16, float16 or float32"),
    *("last dimension is contiguous", "cu_seqlens_q is int32", "cu_seqlens_q is int32 .*contiguous"),
    *("cu_seqlens_q must be", r"cu_seqlens_k is int32 .*here \(4,\)", "has max_seqlen_k"),
    *(r"seqused_k is int32 \(batch,\)", "max_seqlen_q must be", "max_seqlen_k must be", "softmax_scale is finite"),
    *("softcap is finite", "an edge of a window", "alibi_slopes are .* for batch 3"),
    "functions of the caller",
)


@pytest.mark.parametrize("rule", RULES)
def test_a_call_that_breaks_a_rule_is_refused(rule: str) -> None:
    packed = make(GOOD)
    given = {"q": packed.q, "k": packed.k, "v": packed.v, **packed.named, **broken(rule)}
    with pytest.raises(FlashgenError, match=rule) as refused:
        flashgen.attention_varlen(**given)
    assert isinstance(refused.value, UnsupportedError if "functions" in rule else WorkloadError)


def test_contents_are_checked_on_request(bare_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CHECKS", "1")
    settings.cache_clear()
    packed = make(replace(GOOD, used_q=(40, 0, 7)))

    def refused(rule: str, **changes: Any) -> None:
        with pytest.raises(WorkloadError, match=rule):
            run(
                bare_driver, packed, **{name: torch.tensor(value, dtype=torch.int32) for name, value in changes.items()}
            )

    run(bare_driver, packed)
    refused("begins with 0 .* got 1 and 47", cu_seqlens_q=[1, 40, 40, 47])
    refused("ends at most at the 47 rows of q, got 0 and 48", cu_seqlens_q=[0, 40, 40, 48])
    refused("cu_seqlens_k never falls.* got -10 for sequence 1", cu_seqlens_k=[0, 30, 20, 80])
    refused("no sequence is longer than max_seqlen_q, 40; got 41 for sequence 0", cu_seqlens_q=[0, 41, 41, 47])
    refused("seqused_q is 0 to the length .* got 1 for sequence 1", seqused_q=[40, 1, 7])
    settings.cache_clear()


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("name", ["h200", "a100", "sm86", "sm120", "gfx942"])
def test_defaults_are_valid(name: str, direction: str) -> None:
    device = find_device(name)
    for text in ("", "-causal", "-causal-window", "-softcap", "-alibi-sink", "-causal-unaligned"):
        for head_dim in (16, 64, 96, 128, 192, 256, 512):
            for dtype in ("bf16", "fp32"):
                spec = Specialization.parse(f"{direction}-{dtype}-d{head_dim}-varlen{text}")
                rows = [row for row in FAMILIES if unsupported(row, spec, device) is None]
                assert rows or head_dim == 512, spec.key
                for row in rows:
                    assert invalid(row.default(spec, device), spec, device) is None, spec.key
