"""Backward launches on a GPU: through the driver as through Triton, in graphs, on threads, beyond 2**31 elements."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from flashgen.codegen.build import CompiledKernel, compile_kernel
from flashgen.codegen.common_types import TORCH_DTYPES
from flashgen.codegen.families import FAMILIES, family, invalid, unsupported
from flashgen.codegen.family import KernelFamily
from flashgen.core.config import Config, KnobValue
from flashgen.core.errors import LaunchError
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.launch.backward import BackwardTensors, backward_geometry
from flashgen.launch.binding import Binding
from flashgen.launch.gpu import current_device
from flashgen.launch.plan import BackwardLaunch, make_backward_plan
from flashgen.launch.triton_plan import TritonBackward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

KEYS = ("bwd-bf16-d64-causal", "bwd-bf16-d128")
BACKWARD = tuple(row.id for row in FAMILIES if row.direction == "backward")
DETERMINISTIC = tuple(name for name in BACKWARD if family(name).is_deterministic)
SHAPE = (2, 6, 3, 200, 333)
GRADIENTS = ("dq", "dk", "dv")


def compiled_for(key: str, family_id: str) -> tuple[Specialization, Config, CompiledKernel]:
    spec, device = Specialization.parse(key), current_device()
    reason = unsupported(family(family_id), spec, device)
    if reason is not None:
        pytest.skip(reason)
    config = family(family_id).default(spec, device)
    return spec, config, compile_kernel(spec, config, device)


def random_tensors(
    shape: tuple[int, int, int, int, int], head_dim: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16
) -> BackwardTensors:
    """Inputs without a forward pass: an LSE near that of random scores is as good for comparing launches."""
    batch, nheads, nheads_k, seqlen_q, seqlen_k = shape
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def one(heads: int, rows: int) -> torch.Tensor:
        size = (batch, heads, rows, head_dim)
        return torch.randn(size, generator=generator, device="cuda", dtype=dtype)

    def empty(heads: int, rows: int) -> torch.Tensor:
        return torch.full((batch, heads, rows, head_dim), float("nan"), device="cuda", dtype=dtype)

    lse = torch.rand((batch, nheads, seqlen_q), generator=generator, device="cuda") + 5
    return BackwardTensors(
        q=one(nheads, seqlen_q),
        k=one(nheads_k, seqlen_k),
        v=one(nheads_k, seqlen_k),
        out=one(nheads, seqlen_q),
        lse=lse,
        dout=one(nheads, seqlen_q),
        dq=empty(nheads, seqlen_q),
        dk=empty(nheads_k, seqlen_k),
        dv=empty(nheads_k, seqlen_k),
        dlse=torch.randn(lse.shape, generator=generator, device="cuda"),
    )


def gradients(given: BackwardTensors) -> list[torch.Tensor]:
    found = [getattr(given, name).clone() for name in GRADIENTS]
    for name in GRADIENTS:
        getattr(given, name).fill_(float("nan"))
    return found


def expected_gradients(
    given: BackwardTensors, *, causal: bool, window: tuple[int, int] | None = None
) -> list[torch.Tensor]:
    """The definition, in float64, for any `out` and `lse`."""
    group, scale = given.q.shape[1] // given.k.shape[1], given.q.shape[3] ** -0.5
    q, out, dout = (tensor.double() for tensor in (given.q, given.out, given.dout))
    k, v = (tensor.double().repeat_interleave(group, 1) for tensor in (given.k, given.v))
    p = (scale * q @ k.mT - given.lse.double()[..., None]).exp()
    if causal:
        p = p.tril(k.shape[2] - q.shape[2])
    if window is not None:
        p = p.tril(k.shape[2] - q.shape[2] + window[1]).triu(k.shape[2] - q.shape[2] - window[0])
    ds = p * (dout @ v.mT + (given.dlse - (dout * out).sum(-1))[..., None])  # type: ignore[operator]
    dk, dv = (tensor.unflatten(1, (-1, group)).sum(2) for tensor in (scale * ds.mT @ q, p.mT @ dout))
    return [scale * ds @ k, dk, dv]


def plans(key: str, family_id: str, given: BackwardTensors) -> tuple[BackwardLaunch, BackwardLaunch]:
    """The same kernels through the driver and through Triton."""
    spec, config, compiled = compiled_for(key, family_id)
    geometry = backward_geometry(given)
    launch = make_backward_plan(compiled, spec, config, geometry, 0)
    assert not isinstance(launch, TritonBackward)
    return launch, TritonBackward(Binding.of(compiled, spec, config, geometry), 0)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("family_id", BACKWARD)
def test_both_ways_to_launch_give_the_gradients(family_id: str, key: str) -> None:
    spec = Specialization.parse(key)
    given = random_tensors(SHAPE, spec.head_dim)
    expected = expected_gradients(given, causal=spec.causal)
    found, deltas = [], []
    for launch in plans(key, family_id, given):
        deltas.append(launch(given).clone())
        found.append(gradients(given))
        for name, mine, wanted in zip(GRADIENTS, found[-1], expected, strict=True):
            error = (mine - wanted).norm() / wanted.norm()
            assert error < 1e-2, f"{name} differs by {error:.2g} of its norm"
    delta = given.dlse - (given.dout.double() * given.out.double()).sum(-1)  # type: ignore[operator]
    torch.testing.assert_close(deltas[0].double(), delta, rtol=1e-4, atol=1e-3)
    assert torch.equal(*deltas)
    same = GRADIENTS if family_id in DETERMINISTIC else ("dk", "dv")
    for name, through_driver, through_triton in zip(GRADIENTS, *found, strict=True):
        assert name not in same or torch.equal(through_driver, through_triton), name


@pytest.mark.parametrize("key", ["bwd-bf16-d64", "bwd-bf16-d64-causal", "bwd-bf16-d128-causal"])
@pytest.mark.parametrize(
    "changes",
    [
        {"stagger_warpgroups": False},
        {"stagger_warpgroups": False, "q_stages": 3, "persistent": False},
        {"dq_conversion": "tiles"},
        {"q_stages": 3, "persistent": False},
        {"qk_prefetch": True, "accumulator_init": "interleaved"},
        {"qk_prefetch": True, "accumulator_init": "interleaved", "block_m": 64, "stagger_warpgroups": False},
        {"qk_prefetch": True, "accumulator_init": "interleaved", "stagger_warpgroups": False},
    ],
    ids=str,
)
def test_every_order_of_a_step_gives_the_gradients(key: str, changes: dict[str, KnobValue]) -> None:
    spec, device = Specialization.parse(key), current_device()
    row = family("hopper_backward_fused")
    if unsupported(row, spec, device) is not None:
        pytest.skip("needs a Hopper GPU")
    config = row.default(spec, device).replace(**changes)
    if (reason := invalid(config, spec, device)) is not None:
        pytest.skip(reason)
    compiled = compile_kernel(spec, config, device)
    # many steps a tile, one step a tile, many tiles a program
    for shape in (SHAPE, (1, 3, 3, 60, 130), (5, 16, 8, 700, 900)):
        given = random_tensors(shape, spec.head_dim)
        expected = expected_gradients(given, causal=spec.causal)
        launch = make_backward_plan(compiled, spec, config, backward_geometry(given), 0)
        for _ in range(3):
            launch(given)
            for name, mine, wanted in zip(GRADIENTS, gradients(given), expected, strict=True):
                error = (mine - wanted).norm() / wanted.norm()
                assert error < 1e-2, f"{name} of {shape} differs by {error:.2g} of its norm"


@pytest.mark.parametrize("family_id", ["hopper_backward_fused", "hopper_backward_split"])
@pytest.mark.parametrize("key", ["bwd-bf16-d64", "bwd-fp16-d96-causal", "bwd-bf16-d128-window", "bwd-bf16-d256-causal"])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_tiles_of_some_heads_of_a_group_give_the_gradients(heads: int, key: str, family_id: str) -> None:
    spec, device = Specialization.parse(key), current_device()
    row = family(family_id)
    if unsupported(row, spec, device) is not None:
        pytest.skip("needs a Hopper GPU, and heads that the family has")
    _gives_the_gradients(row, spec, row.default(spec, device).replace(heads_per_tile=heads))


@pytest.mark.parametrize("heads", [0, 1, 2])
@pytest.mark.parametrize("shares", [2, 4])
@pytest.mark.parametrize("family_id", ["hopper_backward_fused", "hopper_backward_split"])
@pytest.mark.parametrize("key", ["bwd-bf16-d64", "bwd-fp16-d96-causal", "bwd-bf16-d128-causal", "bwd-bf16-d256-causal"])
def test_tiles_that_share_queries_give_the_gradients(key: str, family_id: str, shares: int, heads: int) -> None:
    spec, device = Specialization.parse(key), current_device()
    row = family(family_id)
    if unsupported(row, spec, device) is not None:
        pytest.skip("needs a Hopper GPU, and heads that the family has")
    _gives_the_gradients(row, spec, row.default(spec, device).replace(query_shares=shares, heads_per_tile=heads))


@pytest.mark.parametrize("split_d", [True, False])
@pytest.mark.parametrize("key", ["bwd-bf16-d192-causal", "bwd-fp16-d160", "bwd-bf16-d136-window", "bwd-fp16-d192"])
def test_products_of_a_head_in_two_parts_or_whole_give_the_gradients(key: str, split_d: bool) -> None:
    spec, device = Specialization.parse(key), current_device()
    row = family("hopper_backward_split")
    if unsupported(row, spec, device) is not None:
        pytest.skip("needs a Hopper GPU")
    _gives_the_gradients(row, spec, row.default(spec, device).replace(split_d=split_d))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_m": 64},
        {"block_m": 64, "persistent": False},
        {"stagger_warpgroups": False, "q_stages": 3},
        {"query_shares": 4},
        {"heads_per_tile": 2, "query_shares": 2},
        {"qk_prefetch": True, "accumulator_init": "interleaved"},
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["bwd-bf16-d64", "bwd-bf16-d40-causal", "bwd-fp16-d96", "bwd-bf16-d128-causal"])
def test_tiles_that_have_all_keys_give_the_gradients(key: str, changes: dict[str, KnobValue]) -> None:
    spec, device = Specialization.parse(key), current_device()
    row = family("hopper_backward_fused")
    if unsupported(row, spec, device) is not None:
        pytest.skip("needs a Hopper GPU")
    config = row.default(spec, device).replace(dq_conversion="none", **changes)
    if (reason := invalid(config, spec, device)) is not None:
        pytest.skip(reason)
    # groups of 7, of 1 and of 3 heads, one key, far more tiles than SMs
    shapes = [(2, 14, 2, 77, 77), (1, 3, 3, 60, 128), (40, 24, 8, 100, 120)]
    shapes += [] if spec.causal else [(1, 2, 2, 5000, 77), (3, 6, 2, 1, 1)]
    _gives_the_gradients(row, spec, config, shapes)
    given = random_tensors((1, 2, 2, 129, 129), spec.head_dim, dtype=getattr(torch, TORCH_DTYPES[spec.dtype]))
    with pytest.raises(LaunchError, match="all keys, at most 128, got seqlen_k 129"):
        make_backward_plan(compile_kernel(spec, config, device), spec, config, backward_geometry(given), 0)


# groups of 7, of 1 and of 3 heads, keys at no multiple of a tile, far more tiles than SMs
SHAPES = ((2, 14, 2, 200, 333), (1, 3, 3, 60, 130), (9, 24, 8, 500, 700))


def _gives_the_gradients(
    row: KernelFamily, spec: Specialization, config: Config, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> None:
    device = current_device()
    assert invalid(config, spec, device) is None
    compiled = compile_kernel(spec, config, device)
    window = (90, 20) if spec.window else None
    for shape in shapes:
        given = random_tensors(shape, spec.head_dim, dtype=getattr(torch, TORCH_DTYPES[spec.dtype]))
        expected = expected_gradients(given, causal=spec.causal, window=window)
        features = None if window is None else Features(window=window)
        geometry = backward_geometry(given, features)
        launch = make_backward_plan(compiled, spec, config, geometry, 0)
        before: list[torch.Tensor] | None = None
        for _ in range(3):
            launch(given, features=features)
            found = gradients(given)
            for name, mine, wanted in zip(GRADIENTS, found, expected, strict=True):
                error = (mine - wanted).norm() / wanted.norm()
                assert error < 1e-2, f"{name} of {shape} differs by {error:.2g} of its norm"
            # sums of parts have one order: only those of dq in memory have none
            same = 0 if row.is_deterministic or config.get("dq_conversion", "") == "none" else 1
            assert before is None or all(map(torch.equal, found[same:], before[same:]))
            before = found


@pytest.mark.parametrize("family_id", DETERMINISTIC)
def test_a_graph_replays_a_backward_on_what_the_tensors_hold_then(family_id: str) -> None:
    given, other = (random_tensors(SHAPE, 64, seed) for seed in (1, 2))
    launch, _ = plans(KEYS[0], family_id, given)
    wanted = [launch(other).clone(), *gradients(other)]
    launch(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        delta = launch(given)
    for name in ("q", "k", "v", "out", "lse", "dout", "dlse"):
        getattr(given, name).copy_(getattr(other, name))
    for _ in range(2):
        gradients(given)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip([delta, *gradients(given)], wanted, strict=True))


@pytest.mark.parametrize("family_id", DETERMINISTIC)
def test_threads_on_streams_of_their_own_share_a_plan(family_id: str) -> None:
    many = [random_tensors(SHAPE, 64, seed) for seed in range(4)]
    launch, _ = plans(KEYS[0], family_id, many[0])
    wanted = []
    for given in many:
        delta = launch(given).clone()
        wanted.append([delta, *gradients(given)])
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    delta = launch(many[number]).clone()
                    found = [delta, *gradients(many[number])]
                    if not all(torch.equal(a, b) for a, b in zip(found, wanted[number], strict=True)):
                        wrong.append(number)

        return run

    threads = [threading.Thread(target=work(number)) for number in range(len(many))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("family_id", DETERMINISTIC)
def test_tensors_of_more_than_two_to_the_31_elements(family_id: str) -> None:
    """The last batch entry lies beyond 2**31 elements; alone it gives the same bits."""
    shape = (4200, 64, 1, 128, 128)
    if torch.cuda.mem_get_info()[0] < 45 << 30:
        pytest.skip("needs 45 GiB of free memory")
    given = random_tensors(shape, 64)
    assert given.q.numel() > 2**31
    launch, _ = plans(KEYS[0], family_id, given)
    delta = launch(given)
    fields = ("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv", "dlse")
    last = BackwardTensors(**{name: getattr(given, name)[-1:].clone() for name in fields})
    alone, _ = plans(KEYS[0], family_id, last)
    assert torch.equal(alone(last), delta[-1:])
    for name in GRADIENTS:
        assert torch.equal(getattr(given, name)[-1:], getattr(last, name)), name
        assert not torch.isnan(getattr(given, name)[0]).any(), name
