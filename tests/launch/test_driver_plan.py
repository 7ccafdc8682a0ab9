"""What the driver reads at a launch: every parameter in its place, on the first call and after anything changed."""

from __future__ import annotations

import math

import pytest
import torch

from flashgen.codegen.families import family
from flashgen.core.workload import Specialization
from flashgen.launch import tensor_maps
from flashgen.launch.geometry import Geometry
from flashgen.launch.plan import Launch, make_plan
from flashgen.launch.triton_plan import TritonPlan
from tests.fakes.driver import FakeDriver
from tests.launch.conftest import Streams
from tests.launch.kernels import KERNELS, kernel, tensors
from tests.tiers import first

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
LOG2E = math.log2(math.e)


def planned(name: str, cuda: FakeDriver, four: Four) -> tuple[Specialization, Launch]:
    """The plan of a compiled kernel for these tensors, over a driver that knows the kernel's parameters."""
    spec, config, compiled = kernel(name)
    cuda.parameters = family(config.family).parameters(spec, config)
    launch = make_plan(compiled, spec, config, Geometry.of(*four), 0)
    assert not isinstance(launch, TritonPlan)
    return spec, launch


def pointers(values: dict[str, int], *, descriptors: bool) -> list[int]:
    return [values[f"{letter}_desc" if descriptors else letter.upper()] for letter in "qkvo"]


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("name", first(4, KERNELS))
def test_every_parameter_is_where_the_kernel_expects_it(name: str, bshd: bool, cuda: FakeDriver) -> None:
    spec, config, compiled = kernel(name)
    four = tensors(spec, bshd=bshd)
    _, launch = planned(name, cuda, four)
    lse = torch.empty(2, 6, 200)
    offset = torch.zeros(2, dtype=torch.int32) if spec.offset_tensor else 7 if spec.causal else None
    launch(*four, lse, 0.3, offset)
    (done,) = cuda.launches
    values, descriptors = done.values, config["loads"] == "descriptor"
    assert pointers(values, descriptors=descriptors) == [tensor.data_ptr() for tensor in four]
    assert values["LSE"] == lse.data_ptr()
    assert values["softmax_scale_log2"] == pytest.approx(0.3 * LOG2E, rel=1e-6)
    if spec.causal:
        name_of = "QOffset" if spec.offset_tensor else "q_offset"
        assert values[name_of] == (offset.data_ptr() if isinstance(offset, torch.Tensor) else 7)
    expected = {"nheads": 6, "group_size": 2, "seqlen_q": 200, "seqlen_k": 333, "lse_rows": 200}
    assert {key: values[key] for key in expected} == expected
    blocks = -(-200 // config.integer("block_m"))
    assert done.grid == (blocks * 2 * 6, 1, 1)
    assert done.block == (32 * config.integer("num_warps"), 1, 1)
    assert done.shared_bytes == compiled.shared_bytes
    assert done.function == 0x6000
    for letter, tensor in zip("qkvo", four, strict=True):
        if not descriptors:
            assert tuple(values[f"stride_{letter}{axis}"] for axis in "bhs") == tensor.stride()[:3]


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("name", [name for name in KERNELS if "descriptors" in name])
def test_descriptors_describe_the_tensors(name: str, bshd: bool, cuda: FakeDriver) -> None:
    """Shape and strides of four dimensions, so that TMA clips at the end of each sequence."""
    spec, config, _ = kernel(name)
    four = tensors(spec, bshd=bshd)
    _, launch = planned(name, cuda, four)
    launch(*four, q_offset=torch.zeros(2, dtype=torch.int32) if spec.offset_tensor else None)
    values = cuda.launches[0].values
    rows = {"q": "block_m", "k": "block_n", "v": "block_n", "o": "block_m"}
    for letter, tensor in zip("qkvo", four, strict=True):
        assert values[f"{letter}_desc.shape"] == tuple(tensor.shape)
        assert values[f"{letter}_desc.strides"] == tensor.stride()
        encoded = values[f"{letter}_desc.encoded"]
        assert encoded.shape == tuple(reversed(tensor.shape))
        assert encoded.byte_strides == tuple(2 * stride for stride in reversed(tensor.stride()[:3]))
        assert encoded.dtype == {"fp16": 6, "bf16": 9}[spec.dtype]
        # one copy takes at most the 128 bytes over which shared memory is swizzled, and all rows of the block
        assert encoded.box == (64, config.integer(rows[letter]), 1, 1)
        assert encoded.swizzle == 3


@pytest.mark.parametrize("name", ["descriptors", "pointers"])
def test_later_calls_write_what_changed_and_nothing_stale_stays(name: str, cuda: FakeDriver, streams: Streams) -> None:
    spec, config, _ = kernel(name)
    first, second = tensors(spec), tensors(spec)
    _, launch = planned(name, cuda, first)
    lse = torch.empty(2, 6, 200)
    launch(*first, lse, 0.5, -3)
    launch(*first)
    streams.current = 0xABC0
    launch(*second, None, 0.25, 10**9)
    mixed = (second[0], first[1], second[2], first[3])
    launch(*mixed, torch.empty(2, 6, 200))
    descriptors = config["loads"] == "descriptor"
    seen = [done.values for done in cuda.launches]
    expected = [first, first, second, mixed]
    assert [pointers(values, descriptors=descriptors) for values in seen] == [
        [tensor.data_ptr() for tensor in four] for four in expected
    ]
    scales = [values["softmax_scale_log2"] / LOG2E for values in seen]
    assert scales == pytest.approx([0.5, 0.125, 0.25, 0.125], rel=1e-6)
    assert [values["q_offset"] for values in seen] == [-3, 133, 333, 133]  # beyond seqlen_k nothing changes
    assert [values["lse_rows"] for values in seen] == [200, 0, 0, 200]
    assert [done.stream for done in cuda.launches] == [0, 0, 0xABC0, 0xABC0]
    if descriptors:
        assert len(cuda.encoded) == 4, "a descriptor is encoded once"
        assert len(cuda.replaced) == 4, "a copy gets its address where a pointer is new, and only there"


@pytest.mark.parametrize("name", ["descriptors", "pointers"])
def test_tensors_may_change_their_roles(name: str, cuda: FakeDriver) -> None:
    """Each pointer is compared with the last one in its own place."""
    spec, config, _ = kernel(name)
    four = tensors(spec, (2, 3, 3, 200, 200))
    _, launch = planned(name, cuda, four)
    turns = [four[turn:] + four[:turn] for turn in (0, 1, 2, 3, 0)]
    for turn in turns:
        launch(*turn)
    descriptors = config["loads"] == "descriptor"
    assert [pointers(done.values, descriptors=descriptors) for done in cuda.launches] == [
        [tensor.data_ptr() for tensor in turn] for turn in turns
    ]


def test_more_pointers_than_are_kept_are_described_again(cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest descriptor of a tensor is the one that goes, its own last one included."""
    monkeypatch.setattr(tensor_maps, "TENSOR_MAPS_KEPT", 3)
    spec, _, _ = kernel("descriptors")
    many = [tensors(spec) for _ in range(5)]
    _, launch = planned("descriptors", cuda, many[0])
    turns = [0, 1, 2, 0, 3, 3, 0, 4, 1, 0]
    for turn in turns:
        launch(*many[turn])
    assert [pointers(done.values, descriptors=True) for done in cuda.launches] == [
        [tensor.data_ptr() for tensor in many[turn]] for turn in turns
    ]
    assert len(cuda.encoded) == 4
    # new at 1, 2, 3 (drops 0), 0 (drops 1), 4 (drops 2), 1 (drops 3); the 0 before the last turn is still there
    assert len(cuda.replaced) == 4 * 6


def test_an_lse_of_its_own_is_written_at_every_call(cuda: FakeDriver) -> None:
    spec, _, _ = kernel("pointers")
    four = tensors(spec)
    _, launch = planned("pointers", cuda, four)
    ones = [torch.empty(2, 6, 200) for _ in range(3)]
    for lse in ones:
        launch(*four, lse)
    assert [done.values["LSE"] for done in cuda.launches] == [lse.data_ptr() for lse in ones]


def test_dimensions_of_size_one_get_strides_that_a_descriptor_takes(cuda: FakeDriver) -> None:
    spec, _, _ = kernel("descriptors")
    q, k, v, out = tensors(spec, (1, 1, 1, 40, 50))
    q = q.as_strided(q.shape, (3, 5, 64, 1))
    _, launch = planned("descriptors", cuda, (q, k, v, out))
    launch(q, k, v, out)
    assert cuda.launches[0].values["q_desc.encoded"].byte_strides == (128, 32, 32)


@pytest.mark.parametrize("name", ["descriptors", "pointers"])
def test_a_plan_made_on_a_thread_without_a_context_takes_the_one_of_torch(name: str, cuda: FakeDriver) -> None:
    """A thread whose first use of the GPU is this call; twice, because the second finds the kernel loaded."""
    cuda.needs_context = True
    for _ in range(2):
        cuda.context = 0
        spec, _, _ = kernel(name)
        four = tensors(spec)
        _, launch = planned(name, cuda, four)
        assert cuda.context == cuda.primary
        cuda.context = 0
        launch(*four)
        assert cuda.context == cuda.primary
    assert len(cuda.loaded) == 1
    assert len(cuda.launches) == 2
