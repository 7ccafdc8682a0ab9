"""Calls of other sizes than an earlier one, which the slow path does not see and would have served the same way."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch

import flashgen
from flashgen.codegen.family import Sizes
from flashgen.core.device import find_device
from flashgen.core.errors import WorkloadError
from flashgen.core.workload import Specialization, Workload
from flashgen.db.layers import Layers
from flashgen.runtime.lookup.by_sizes import SizesLookup
from flashgen.runtime.lookup.few_queries import served_by_decoding
from flashgen.runtime.lookup.handover import sdpa_backend
from flashgen.runtime.lookup.ladder import resolve
from flashgen.runtime.lookup.records import Records
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.calls import MAX_ROW_STRIDE
from flashgen.runtime.ops.open_calls import like, sizes_of, view
from tests.db.samples import H200
from tests.fakes.gpu import EmulatedGpu, FakeGpu, qkv, tensor
from tests.runtime.ladders import Ladder, config, measured
from tests.tiers import first, only

FACTORS = (0.3, 0.5, 0.99, 1, 1.01, 1.3, 2)


def neighbours(workload: Workload, count: int) -> Iterator[Workload]:
    """Its own sizes, and others drawn around them."""
    draw = random.Random(workload.key)
    yield workload
    for _ in range(count):
        rows, keys = (max(int(n * draw.choice(FACTORS)), 1) for n in (workload.seqlen_q, workload.seqlen_k))
        group = draw.choice((1, 2, 4, 8, workload.nheads // workload.nheads_k))
        heads = draw.choice((1, 2, 8, workload.nheads_k))
        sizes = {"batch": draw.choice((1, 2, workload.batch)), "nheads": heads * group, "nheads_k": heads}
        yield workload.with_shape(**sizes, seqlen_q=draw.choice((rows, keys, 1)), seqlen_k=keys)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return Records(Layers.open([tmp_path_factory.mktemp("empty") / "none.sqlite3"]))


@pytest.mark.parametrize("target", only(["h200", "h100", "a100"], "h200"))
@pytest.mark.parametrize("count", first(1, [2, 12]))
def test_the_neighbours_of_every_shipped_record_are_served_as_the_ladder_serves_them(
    target: str, count: int, shipped: Records
) -> None:
    device, asked, answered = find_device(target), 0, 0
    for spec, workloads in classes(shipped).items():
        choices = shipped.choices(spec, device)
        lookup = SizesLookup(choices, workloads[0], spec, device, shipped)
        for workload in (near for one in workloads for near in neighbours(one, count)):
            for asks_lse, generated_only in ((True, True), (False, True), (False, False)):
                with_lse = asks_lse and spec.direction == "forward"
                served = resolve(workload, spec, device, shipped, with_lse=with_lse)
                backend = None if generated_only else sdpa_backend(workload, spec, served)
                found = lookup.config(Sizes.of(workload), generated_only=generated_only, with_lse=with_lse)
                decoding = served_by_decoding(spec, Sizes.of(workload), workload.seqlen_k, device, shipped)
                if not isinstance(decoding, str):
                    assert found == decoding.config
                    continue
                asked, answered = asked + 1, answered + (found is not None)
                if found is None:
                    assert backend is not None or served.is_exact
                else:
                    assert (found, backend) == (served.config, None)
                    assert not served.is_exact
    assert answered > asked / 2, "most of them need not ask the ladder"


def classes(records: Records) -> dict[Specialization, list[Workload]]:
    """Every shipped workload without a window, by its specialization; those with profiles have ladders of their own."""
    found: dict[Specialization, list[Workload]] = {}
    for record, _ in records._layers.records(arch=H200.arch):
        workload = record.workload
        if not (workload.specialization.window or workload.has_profiles):
            found.setdefault(workload.specialization, []).append(workload)
    return found


def attend(gpu: FakeGpu, rows: int, keys: int, **options: object) -> object:
    """A call of sizes that differ in everything but the head dimension."""
    q, k, v = qkv(batch=1 + rows % 2, nheads=4, nheads_k=2 if rows % 2 else 4, seqlen_q=rows, seqlen_k=keys)
    return flashgen.attention(q, k, v, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"return_lse": True}, {"causal": True, "q_offset": 3}])
def test_a_new_length_is_planned_as_the_slow_path_would(options: dict[str, object], gpu: FakeGpu) -> None:
    lengths = [(512, 512), (513, 600), (1030, 4096), (2050, 3), (4096, 4096)]
    for rows, keys in lengths:
        attend(gpu, rows, keys, **options)
    prepared = 1 + len({config for _, config, *_ in gpu.planned})  # a tile that other sizes get is another kernel
    assert len(gpu.prepared) == prepared
    assert len(gpu.launched) == len(lengths)
    open_plans = gpu.planned.copy()
    for number, (rows, keys) in enumerate(lengths):
        flashgen.reload()
        attend(gpu, rows, keys, **options)
        assert gpu.planned[-1] == open_plans[number]
    assert len(gpu.prepared) == prepared + len(lengths)


def test_what_is_unusual_takes_the_slow_path(gpu: FakeGpu) -> None:
    for rows in (78, 79, 80):
        attend(gpu, rows, 64)
    assert len(gpu.prepared) == 2
    q, k, v = qkv(seqlen_q=50)
    wide = tensor(1, 4, 50, 68)[..., :64]  # rows that are no multiples of 16 bytes apart
    for given in ((tensor(1, 4, 50, 64, shift=1), k, v), (wide, k, v), (q[:, :, :0], k, v)):
        before = len(gpu.prepared)
        flashgen.attention(*given)
        assert len(gpu.prepared) == before + 1
    assert [spec.aligned16 for spec, *_ in gpu.planned[3:]] == [False, False, True]


@pytest.mark.parametrize("which", ["q", "k", "v", "kv", "qkv"])
@pytest.mark.parametrize(("axis", "stride"), [(0, 4), (1, 12), (2, 100), (2, MAX_ROW_STRIDE), (3, 2), (3, 0)])
def test_strides_that_are_unusual_in_any_of_the_tensors_take_the_slow_path(which: str, axis: int, stride: int) -> None:
    """Also where several tensors have one view, which is looked at once."""
    usual = ((2, 4, 48, 64), (4 * 48 * 64, 48 * 64, 64, 1))
    strides = list(usual[1])
    strides[axis] = stride
    odd = (usual[0], tuple(strides))
    views = {name: odd if name in which else usual for name in "qkv"}
    assert sizes_of(usual, usual, usual, 8) == Sizes(2, 4, 4, 48, 48)
    assert sizes_of(views["q"], views["k"], views["v"], 8) is None
    assert sizes_of(*(tuple(one) for one in views.values()), 8) is None


def test_shapes_that_do_not_fit_are_the_same_error_at_any_call(gpu: FakeGpu) -> None:
    q, k, v = qkv()
    wrong = [
        (q, k[:, :, :-1], v),
        (q, tensor(2, 2, 64, 64), tensor(2, 2, 64, 64)),
        (tensor(1, 3, 48, 64), k, v),
        (q, k.transpose(2, 3), v),
        (q.transpose(2, 3), k, v),
        (q[0], k, v),
        (q[0], k[0], v[0]),
        (q[0, 0, 0, 0], k, v),
        (q[:1, :, :1].expand(2**31, -1, -1, -1), *(one[:1].expand(2**31, -1, -1, -1) for one in (k, v))),
    ]

    def messages() -> list[str]:
        found = []
        for given in wrong:
            with pytest.raises(WorkloadError) as caught:
                flashgen.attention(*given)
            found.append(str(caught.value))
        return found

    expected = messages()
    for rows in (48, 64, 80):
        attend(gpu, rows, 64)
    before = len(gpu.prepared)
    assert messages() == expected
    assert len(gpu.prepared) == before + len(wrong), "the slow path says what is wrong"


def test_records_read_again_serve_new_lengths(ladder: Ladder, gpu: FakeGpu) -> None:
    def served() -> object:
        attend(gpu, 300, 300, causal=True)
        return gpu.planned[-1][1]

    near = Workload(batch=1, nheads=4, seqlen_q=512, head_dim=64, causal=True)
    for rows in (48, 64):
        attend(gpu, rows, 64, causal=True)
    default = served()  # of few tiles, whose keys CTAs share
    tuned = config().replace(block_n=32)
    ladder.user(measured(near, config=tuned))
    attend(gpu, 302, 302, causal=True)
    assert gpu.planned[-1][1] == default, "a process reads its databases once"
    flashgen.reload()
    for rows in (48, 64):
        attend(gpu, rows, 64, causal=True)
    assert served() == tuned.replace(split_keys=True)


def test_a_reload_that_comes_before_a_new_length_reaches_it(
    ladder: Ladder, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another thread, for whose lock this one waits."""
    real = serve.LOCK

    class Behind:
        """The lock, which a reload has got first."""

        def __enter__(self) -> None:
            monkeypatch.setattr(serve, "LOCK", real)
            flashgen.reload()
            real.acquire()

        def __exit__(self, *unused: object) -> None:
            real.release()

    for rows in (48, 64, 300):
        attend(gpu, rows, rows, causal=True)
    tuned = config().replace(block_n=32)
    near = Workload(batch=1, nheads=4, seqlen_q=512, head_dim=64, causal=True)
    ladder.user(measured(near, config=tuned))
    monkeypatch.setattr(serve, "LOCK", Behind())
    attend(gpu, 302, 302, causal=True)
    assert gpu.planned[-1][1] == tuned.replace(split_keys=True)


def test_the_strides_of_what_is_like_a_tensor_are_those_that_torch_gives_it() -> None:
    draw = random.Random(0)
    for _ in range(300):
        shape = [draw.choice((1, 2, 3, 8)) for _ in range(4)]
        room = [size + draw.choice((0, 0, 1)) for size in shape]
        order = draw.choice(list(itertools.permutations(range(4))))
        cut = torch.empty(room)[tuple(slice(size) for size in shape)].permute(order)
        for one in (cut, cut.contiguous(), cut[:1].expand(2, -1, -1, -1)):
            for bshd in (False, True):
                assert like(one, bshd) == view(torch.empty_like(one), bshd)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_results_and_gradients_of_new_lengths_are_right(layout: str, emulated: EmulatedGpu) -> None:
    """Of slices of longer tensors, contiguous ones and transposed ones, in the order of growing strides."""
    long = [torch.randn(2, 96, 4, 64, requires_grad=False) for _ in range(4)]
    for rows in (64, 33, 64, 40, 96):
        cut = [one[:, :rows] for one in long]
        cut = [one.contiguous() if rows == 40 else one for one in cut]
        q, k, v, dout = cut if layout == "bshd" else [one.transpose(1, 2) for one in cut]
        leaves = [one.detach().requires_grad_() for one in (q, k, v)]
        out = flashgen.attention(*leaves, layout=layout, causal=True)
        found = torch.autograd.grad(out, leaves, dout)
        own = [one.detach().requires_grad_() for one in (q, k, v)]
        flipped = own if layout == "bhsd" else [one.transpose(1, 2) for one in own]
        expected = torch.nn.functional.scaled_dot_product_attention(*flipped, is_causal=True)
        expected = expected if layout == "bhsd" else expected.transpose(1, 2)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
        for one, other in zip(found, torch.autograd.grad(expected, own, dout), strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert len(emulated.prepared) == 4, "two forward and two backward passes"
