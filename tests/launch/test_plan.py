"""Which plan a kernel gets, what Triton's own launch is given, loading, and what a graph under capture refuses."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.codegen.build import CompiledKernel
from flashgen.codegen.families import family
from flashgen.core.errors import LaunchError
from flashgen.core.features.values import Features
from flashgen.launch import driver
from flashgen.launch.backward import BackwardTensors
from flashgen.launch.feature_arguments import LOG2E
from flashgen.launch.geometry import Geometry
from flashgen.launch.plan import EmptyBackwardPlan, EmptyPlan, check_capture, load, make_plan
from flashgen.launch.triton_plan import TritonPlan
from tests.fakes.driver import FakeDriver
from tests.launch.kernels import KERNELS, kernel, tensors
from tests.tiers import first


class Handle:
    """Triton's compiled kernel, as far as plans use it; keeps the grid and the arguments of each launch."""

    def __init__(self, real: Any, *, ptx: str | None = "", **metadata: object) -> None:
        self.asm = {**real.asm, **({"ptx": ptx} if ptx is not None else {})}
        if ptx is None:
            del self.asm["ptx"]
        self.metadata = SimpleNamespace(**{**real.metadata._asdict(), **metadata})
        self.hash = real.hash
        self.launches: list[tuple[tuple[int, int, int], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.launches.append((grid, arguments))


def with_handle(compiled: CompiledKernel, **changes: Any) -> CompiledKernel:
    part = dataclasses.replace(compiled.main, handle=Handle(compiled.handle, **changes))
    return dataclasses.replace(compiled, parts=(part,))


@pytest.mark.parametrize(
    "changes",
    [
        {"ptx": "// a parameter list that nobody knows"},
        {"ptx": None},
        {"num_ctas": 2},
        {"launch_pdl": True},
        {"global_scratch_size": 64},
        {"profile_scratch_size": 8},
    ],
    ids=str,
)
def test_triton_launches_what_the_known_layout_does_not_cover(changes: dict[str, Any], cuda: FakeDriver) -> None:
    spec, config, compiled = kernel("pointers")
    geometry = Geometry.of(*tensors(spec))
    if "ptx" not in changes:
        changes = {"ptx": compiled.handle.asm["ptx"], **changes}
    plan = make_plan(with_handle(compiled, **changes), spec, config, geometry, 0)
    assert isinstance(plan, TritonPlan)
    assert cuda.loaded == []
    assert not isinstance(make_plan(compiled, spec, config, geometry, 0), TritonPlan)


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("name", first(5, KERNELS))
def test_triton_is_given_the_arguments_of_the_signature(name: str, bshd: bool, cuda: FakeDriver) -> None:
    spec, config, compiled = kernel(name)
    four = tensors(spec, bshd=bshd)
    stand_in = with_handle(compiled)
    plan = make_plan(stand_in, spec, config, Geometry.of(*four), 0)
    lse = torch.empty(2, 6, 200)
    offset = torch.zeros(2, dtype=torch.int32) if spec.offset_tensor else 1000 if spec.causal else None
    plan(*four, lse, 0.3, offset)
    plan(*four, q_offset=offset if spec.offset_tensor else None)
    parameters = family(config.family).parameters(spec, config)
    (grid, full), (_, plain) = stand_in.handle.launches
    assert grid == (-(-200 // config.integer("block_m")) * 12, 1, 1)
    assert len(full) == len(plain) == len(parameters)
    given = dict(zip((parameter.name for parameter in parameters), full, strict=True))
    defaults = dict(zip((parameter.name for parameter in parameters), plain, strict=True))
    for letter, tensor in zip("qkvo", four, strict=True):
        if config["loads"] == "descriptor":
            descriptor = given[f"{letter}_desc"]
            assert descriptor.base is tensor
            assert descriptor.shape == list(tensor.shape)
            assert descriptor.strides == list(tensor.stride())
            rows = config.integer("block_m" if letter in "qo" else "block_n")
            assert descriptor.block_shape[:3] == [1, 1, rows]
        else:
            assert given[letter.upper()] is tensor
            assert [given[f"stride_{letter}{axis}"] for axis in "bhs"] == list(tensor.stride()[:3])
    assert given["LSE"] is lse
    assert given["softmax_scale_log2"] == pytest.approx(0.3 * LOG2E)
    assert (given["lse_rows"], given["seqlen_q"], given["seqlen_k"], given["nheads"]) == (200, 200, 333, 6)
    assert defaults["softmax_scale_log2"] == pytest.approx(spec.head_dim**-0.5 * LOG2E)
    assert (defaults["LSE"], defaults["lse_rows"]) == (None, 0)
    if spec.offset_tensor:
        assert given["QOffset"] is offset
    elif spec.causal:
        assert (given["q_offset"], defaults["q_offset"]) == (333, 133)


@pytest.mark.parametrize("shape", [(2, 2, 2, 5, 0), (0, 2, 2, 5, 5), (1, 2, 2, 0, 5)])
def test_nothing_to_compute_launches_nothing(shape: tuple[int, int, int, int, int], cuda: FakeDriver) -> None:
    spec, config, compiled = kernel("pointers")
    q, k, v, out = tensors(spec, shape)
    plan = make_plan(compiled, spec, config, Geometry.of(q, k, v, out), 0)
    assert isinstance(plan, EmptyPlan)
    out.fill_(float("nan"))
    lse = torch.full(out.shape[:3], float("nan"))
    plan(q, k, v, out, lse)
    plan(q, k, v, out)
    assert torch.all(out == 0)
    assert torch.all(lse == float("-inf"))
    assert cuda.launches == []


@pytest.mark.parametrize("used", [None, (1, 0, 2)])
def test_sinks_are_the_lse_of_rows_that_a_sequence_has_though_there_is_no_key(used: tuple[int, ...] | None) -> None:
    """Of sequences of 1, 2 and 2 queries with a row behind them, all or some of which are used."""
    ends = torch.tensor([0, 1, 3, 5], dtype=torch.int32)
    seqused = None if used is None else torch.tensor(used, dtype=torch.int32)
    features = Features(sinks=torch.tensor([0.5, 1.5]), cu_seqlens_q=ends, cu_seqlens_k=ends * 0, seqused_q=seqused)
    q, none = torch.zeros(1, 2, 6, 8), torch.zeros(1, 2, 0, 8)
    out, lse = torch.full_like(q, math.nan), torch.full((1, 2, 6), math.nan)
    EmptyPlan()(q, none, none, out, lse, features=features)
    rows = torch.tensor([True] * 5 + [False] if used is None else [True, False, False, True, True, False])
    assert not out.any()
    assert torch.equal(lse[0], torch.where(rows, features.sinks[:, None], -math.inf))
    of_lse = torch.ones_like(lse)
    given = BackwardTensors(*([None] * len(BackwardTensors._fields)))._replace(lse=lse, dlse=of_lse)
    assert torch.equal(EmptyBackwardPlan()(given, features=features)[0], rows.float().expand(2, 6))
    no_sequence = dataclasses.replace(features, cu_seqlens_q=ends[:1], seqused_q=None)
    EmptyPlan()(q, none, none, out, lse, features=no_sequence)
    assert (lse == -math.inf).all()


def test_a_kernel_is_loaded_once_a_device_and_asks_for_its_shared_memory(cuda: FakeDriver) -> None:
    _, _, small = kernel("pointers-sm80")
    _, _, large = kernel("descriptors")
    assert small.shared_bytes <= driver.STATIC_SHARED_LIMIT < large.shared_bytes
    assert load(small, 0) == load(small, 0) == 0x6000
    assert cuda.attributes == []
    load(large, 0)
    assert cuda.attributes == [(driver.MAX_DYNAMIC_SHARED_BYTES, large.shared_bytes)]
    load(large, 1)
    names = [name for _, name in cuda.loaded]
    assert names == [b"portable_forward"] * 3
    assert cuda.loaded[0][0] == small.handle.asm["cubin"]


def test_too_much_shared_memory_is_refused_with_the_amount(cuda: FakeDriver) -> None:
    with pytest.raises(LaunchError, match="give a block 300000 bytes of shared memory: CUDA_ERROR_INVALID_VALUE"):
        driver.load_function(b"cubin", "kernel", 300_000)


def test_a_binary_that_the_driver_refuses_is_tried_again_next_time(cuda: FakeDriver) -> None:
    _, _, compiled = kernel("pointers")
    cuda.code = 700
    with pytest.raises(LaunchError, match="load kernel portable_forward: CUDA_ERROR_ILLEGAL_ADDRESS"):
        load(compiled, 0)
    cuda.code = 0
    assert load(compiled, 0) == 0x6000


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "PyDLL", missing)
    driver.library.cache_clear()
    with pytest.raises(LaunchError, match=r"needs the CUDA driver, and libcuda\.so\.1 cannot be opened"):
        driver.library()


@pytest.mark.parametrize("capturing", [False, True])
def test_a_graph_under_capture_holds_no_load(
    capturing: bool, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    _, _, compiled = kernel("pointers")
    if not capturing:
        check_capture(0, "building")
        load(compiled, 0)
        return
    with pytest.raises(LaunchError, match=r"^building .*captured on cuda:3; call flashgen\.warmup"):
        check_capture(3, "building")
    with pytest.raises(LaunchError, match=r"^loading portable_forward is not possible while"):
        load(compiled, 0)
    assert cuda.loaded == []


def test_a_loaded_kernel_serves_new_shapes_under_capture(cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, config, compiled = kernel("pointers")
    load(compiled, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    four = tensors(spec)
    cuda.parameters = family(config.family).parameters(spec, config)
    make_plan(compiled, spec, config, Geometry.of(*four), 0)(*four)
    assert len(cuda.launches) == 1
