"""Every kind of plan: order of kernels, shared memory, what later calls write, threads, contexts, errors, graphs."""

from __future__ import annotations

import gc
import math
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flashgen.core.config import Config
from flashgen.core.errors import LaunchError
from flashgen.launch import plan
from flashgen.launch.backward import FIELDS, backward_geometry
from flashgen.launch.geometry import Geometry
from flashgen.launch.parameters import Layout
from flashgen.launch.plan import EmptyBackwardPlan, make_backward_plan, make_plan
from flashgen.launch.triton_plan import TritonPlan
from tests.fakes.driver import INVALID_CONTEXT, FakeDriver, Launched, as_number
from tests.fakes.imagined import (
    BACKWARD_DESCRIPTORS,
    BACKWARD_POINTERS,
    DESCRIPTORS,
    ENTRIES,
    FIRST_FUNCTION,
    FIRST_PROGRAMS,
    LSE,
    PLAIN,
    POINTERS,
    ROWS,
    SHAPE,
    SPLIT,
    Imagined,
    backward_tensors,
    calls_of,
    pointers,
)
from tests.launch.conftest import Streams
from tests.launch.kernels import tensors

KEY = "bwd-bf16-d64"
SPLIT_KERNELS = (
    (*DESCRIPTORS[:3], "PartialOut: *fp32", "PartialLse: *fp32", "softmax_scale_log2: fp32"),
    ("O: *bf16", *LSE, "partial_out_desc: tensordesc<fp32[64, 64]>", "PartialLse: *fp32"),
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of plan, and how its direction is called."""

    kernels: tuple[tuple[str, ...], ...]
    key: str = "fwd-bf16-d64"
    config: Config = PLAIN

    @property
    def count(self) -> int:
        return len(self.kernels)

    def imagined(self) -> Imagined:
        return Imagined(*self.kernels, key=self.key, config=self.config)

    def tensors(self) -> Any:
        return backward_tensors() if self.key == KEY else tensors(self.imagined().spec, SHAPE)

    def geometry(self, given: Any) -> Geometry:
        return backward_geometry(given) if self.key == KEY else Geometry.of(*given)

    def call(self, launch: Any, given: Any) -> torch.Tensor | None:
        found: torch.Tensor | None = launch(given) if self.key == KEY else launch(*given)
        return found

    def plan(self, cuda: FakeDriver, given: Any) -> Any:
        """A plan through the driver."""
        return self.imagined().through_the_driver(cuda, self.geometry(given))

    def made(self, imagined: Imagined, given: Any) -> Any:
        """What the real maker of plans makes of the kernels."""
        make = make_backward_plan if self.key == KEY else make_plan
        return make(imagined.compiled, imagined.spec, imagined.config, self.geometry(given), 0)

    def mixed(self, first: Any, second: Any) -> Any:
        """Some tensors of either."""
        if self.key == KEY:
            return first._replace(k=second.k, dq=second.dq)
        return (first[0], second[1], first[2], second[3])

    def addresses(self, given: Any) -> dict[str, set[int]]:
        named = pointers(given) if self.key == KEY else {n: x.data_ptr() for n, x in zip("qkvo", given, strict=True)}
        return {name: {address} for name, address in named.items()}


KINDS = {
    "forward, descriptors": Kind(kernels=((*DESCRIPTORS, *LSE),)),
    "forward, pointers": Kind(kernels=((*POINTERS, *LSE),)),
    "split forward": Kind(kernels=SPLIT_KERNELS, config=SPLIT),
    "backward, descriptors": Kind(kernels=BACKWARD_DESCRIPTORS, key=KEY),
    "backward, pointers": Kind(kernels=BACKWARD_POINTERS, key=KEY),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
each_backward = pytest.mark.parametrize(
    "kind", [pytest.param(kind, id=name) for name, kind in KINDS.items() if kind.key == KEY]
)


def read_pointers(call: list[Launched]) -> dict[str, set[int]]:
    """The addresses of tensors that the kernels of one call had, by id."""
    found: dict[str, set[int]] = {}
    for one in call:
        for name in FIELDS:
            for key in (name.upper(), f"{name}_desc"):
                if key in one.values:
                    found.setdefault(name, set()).add(one.values[key])
    return found


def scratch_of(call: list[Launched]) -> int:
    """Where the scratch memory of a call lies; all of its kernels agree."""
    starts = set[int]()
    # the next piece lies behind the one before, at a multiple of 256 bytes
    for first, second, after in (("neg_delta", "dq_acc", 4 * 2 * 6 * ROWS), ("partial_lse", "partial_out", 28_928)):
        for name, offset in ((first, 0), (second, after)):
            keys = ("".join(word.capitalize() for word in name.split("_")), f"{name}_desc")
            starts |= {one.values[key] - offset for one in call for key in keys if key in one.values}
    (start,) = starts
    return start


@each_kind
def test_kernels_run_in_order_each_with_its_own_grid(kind: Kind, cuda: FakeDriver, streams: Streams) -> None:
    given, numbers = kind.tensors(), range(kind.count)
    launch = kind.plan(cuda, given)
    for streams.current in (0, 0xABC0):
        kind.call(launch, given)
    for call, stream in zip(calls_of(cuda, kind.count), (0, 0xABC0), strict=True):
        assert [one.function for one in call] == [FIRST_FUNCTION + number for number in numbers]
        assert [one.grid for one in call] == [(FIRST_PROGRAMS + number, 1, 1) for number in numbers]
        assert [one.block for one in call] == [(12 * 32, 1, 1)] * kind.count
        assert [one.shared_bytes for one in call] == [1000] * kind.count
        assert [one.stream for one in call] == [stream] * kind.count


@each_backward
def test_a_call_has_scratch_memory_of_its_own_and_returns_neg_delta(kind: Kind, cuda: FakeDriver) -> None:
    given, imagined = backward_tensors(), kind.imagined()
    launch, triton = kind.plan(cuda, given), imagined.through_triton(backward_geometry(given))
    results = [launch(given), launch(given)]
    starts = [scratch_of(call) for call in calls_of(cuda, 3)]
    assert starts == [one.data_ptr() for one in results]
    assert starts[0] != starts[1], "the first result is still in use"
    for result in (*results, triton(given)):
        assert (result.shape, result.dtype) == ((2, 6, 200), torch.float32)
        assert result.stride() == (6 * ROWS, ROWS, 1)
    shapes = {"NegDelta": (2, 6, ROWS), "DqAcc": (2 * 6 * ROWS + 1, 64)}
    for one in imagined.seen:
        for name, shape in shapes.items():
            assert name not in one.arguments or one.arguments[name].shape == shape


def test_kernels_of_a_forward_pass_may_share_memory_too(cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS["split forward"]
    given, imagined = kind.tensors(), kind.imagined()
    memory = [torch.empty(1 << 19) for _ in "ab"]
    turns = iter([*memory, memory[0]])
    launch, triton = kind.plan(cuda, given), imagined.through_triton(kind.geometry(given))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", lambda self, size, dtype: next(turns))
        for _ in range(3):
            assert kind.call(launch, given) is None
    starts = [scratch_of(call) for call in calls_of(cuda, 2)]
    assert starts == [memory[turn].data_ptr() for turn in (0, 1, 0)]
    described = cuda.launches[-1].values
    assert described["partial_out_desc.shape"] == (3 * 2 * 6 * 200, 64)
    triton(*given)
    first, second = (one.arguments for one in imagined.seen)
    assert first["PartialLse"].data_ptr() == second["PartialLse"].data_ptr()
    assert first["PartialOut"].data_ptr() == second["partial_out_desc"].base.data_ptr()


@each_backward
def test_a_view_that_nobody_asks_for_is_not_made(kind: Kind, cuda: FakeDriver) -> None:
    given = backward_tensors()
    launch = kind.plan(cuda, given)
    memory = launch(given, with_neg_delta=False)
    assert scratch_of(cuda.launches) == memory.data_ptr()
    assert (memory.dtype, memory.dim()) == (torch.float32, 1)
    assert memory.numel() == kind.imagined().binding(backward_geometry(given)).scratch.floats


@each_kind
def test_later_calls_write_what_changed_and_nothing_stale_stays(kind: Kind, cuda: FakeDriver) -> None:
    first, second = kind.tensors(), kind.tensors()
    launch = kind.plan(cuda, first)
    turns = [first, first, second, kind.mixed(first, second), first]
    results = [kind.call(launch, one) for one in turns]
    calls = calls_of(cuda, kind.count)
    assert [read_pointers(call) for call in calls] == [kind.addresses(one) for one in turns]
    if kind.key == KEY:
        assert [scratch_of(call) for call in calls] == [one.data_ptr() for one in results]  # type: ignore[union-attr]
        assert {call[0].values["LSE"] for call in calls[:2]} == {first.lse.data_ptr()}
        assert calls[2][0].values["LSE"] == second.lse.data_ptr()


@pytest.mark.parametrize("kind", [KINDS["forward, pointers"], KINDS["backward, pointers"]], ids=["forward", "backward"])
def test_scales_change_from_call_to_call_in_every_kernel(kind: Kind, cuda: FakeDriver) -> None:
    named = ("softmax_scale: fp32", "softmax_scale_log2: fp32")
    given = kind.tensors()
    launch = Imagined(named, named, key=kind.key).through_the_driver(cuda, kind.geometry(given))
    scales = (0.5, None, 0.25, 0.25, 0.0)
    for scale in scales:
        launch(*((given,) if kind.key == KEY else given), softmax_scale=scale)
    seen = [(one.values["softmax_scale"], one.values["softmax_scale_log2"]) for one in cuda.launches]
    used = [0.125 if scale is None else scale for scale in scales for _ in range(2)]
    assert seen == [pytest.approx((scale, scale * math.log2(math.e)), rel=1e-6) for scale in used]


def test_equal_descriptors_of_several_kernels_are_made_once(cuda: FakeDriver) -> None:
    """`dO` is read by two kernels in boxes of the same size here; both follow its pointer."""
    tile = "tensordesc<bf16[1, 1, 64, 64]>"
    same = (f"do_desc: {tile}", "NegDelta: *fp32")
    other = (f"q_desc: {tile}", f"do_desc: {tile}")
    imagined = Imagined(same, same, other, key=KEY)
    ones = [backward_tensors() for _ in range(3)]
    launch = imagined.through_the_driver(cuda, backward_geometry(ones[0]))
    for turn in (0, 1, 0, 2):
        launch(ones[turn])
        assert {one.values["do_desc"] for one in cuda.launches[-3:]} == {ones[turn].dout.data_ptr()}
    assert len(cuda.encoded) == 3, "one for two kernels, one in a box of 65 rows, and that of q"
    assert len(cuda.replaced) == 2 * 3, "for the second and the third set of tensors"


@each_kind
def test_a_plan_keeps_what_its_addresses_point_to(kind: Kind, cuda: FakeDriver) -> None:
    """Only the function is kept by the memo; the parameters must live as long as it does."""
    given = kind.tensors()
    launches = [kind.plan(cuda, given) for _ in range(3)]
    gc.collect()
    kept = [kind.call(launch, given) for launch in launches]
    assert [read_pointers(call) for call in calls_of(cuda, kind.count)] == [kind.addresses(given)] * 3
    assert len(kept) == 3


@each_kind
def test_two_threads_never_mix_their_sequences(kind: Kind, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    ones = [kind.tensors() for _ in range(4)]
    original = cuda.cuLaunchKernelEx

    def slowly(*arguments: Any) -> int:
        time.sleep(0.001)  # lets another thread run in the middle of a sequence
        return original(*arguments)

    monkeypatch.setattr(cuda, "cuLaunchKernelEx", slowly)
    launch = kind.plan(cuda, ones[0])
    wanted, done = [kind.addresses(one) for one in ones], threading.Barrier(4)

    def work(one: Any) -> None:
        done.wait()
        for _ in range(5):
            kind.call(launch, one)

    threads = [threading.Thread(target=work, args=(one,)) for one in ones]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls = calls_of(cuda, kind.count)
    assert len(calls) == 20
    for call in calls:
        assert [one.function for one in call] == [FIRST_FUNCTION + number for number in range(kind.count)]
        assert read_pointers(call) in wanted
        if kind.count > 1:
            scratch_of(call)


@each_kind
def test_a_new_thread_gets_the_context_of_the_plan(kind: Kind, cuda: FakeDriver) -> None:
    given, other = kind.tensors(), kind.tensors()
    cuda.context = 0x7700
    launch = kind.plan(cuda, given)
    kind.call(launch, given)
    cuda.context, cuda.needs_context = 0, True
    kind.call(launch, other)
    assert cuda.context == 0x7700
    assert len(cuda.launches) == 2 * kind.count, "none of the sequence ran twice"
    assert read_pointers(cuda.launches[kind.count :]) == kind.addresses(other)


@each_kind
def test_a_plan_made_on_a_thread_without_a_context_takes_the_one_of_torch(kind: Kind, cuda: FakeDriver) -> None:
    cuda.needs_context, cuda.context = True, 0
    given = kind.tensors()
    launch = kind.plan(cuda, given)
    assert cuda.context == cuda.primary
    cuda.context = 0
    kind.call(launch, given)
    assert cuda.context == cuda.primary
    assert len(cuda.launches) == kind.count


@each_kind
def test_a_context_of_the_caller_is_left_alone(kind: Kind, cuda: FakeDriver) -> None:
    cuda.context = 0x9900
    given = kind.tensors()
    launch = kind.plan(cuda, given)
    kind.call(launch, given)
    assert cuda.context == 0x9900
    cuda.code = INVALID_CONTEXT
    with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_CONTEXT"):
        kind.call(launch, given)
    assert cuda.context == 0x9900


@each_kind
def test_errors_name_the_kernel_and_carry_the_text_of_the_driver(
    kind: Kind, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, original = kind.tensors(), cuda.cuLaunchKernelEx
    for number in range(kind.count):
        for code, text in ((700, "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal"), (12345, r".*\? \(12345\)")):

            def one_fails(config: Any, function: Any, *rest: Any, fails: int = number, code: int = code) -> int:
                return code if as_number(function) == FIRST_FUNCTION + fails else original(config, function, *rest)

            monkeypatch.setattr(cuda, "cuLaunchKernelEx", one_fails)
            cuda.launches.clear()
            launch = kind.plan(cuda, given)
            said = rf"launch {FIRST_PROGRAMS + number} blocks of 384 threads of {ENTRIES[number]}: {text}"
            with pytest.raises(LaunchError, match=said):
                kind.call(launch, given)
            assert len(cuda.launches) == number, "what comes after it is not launched"


@pytest.mark.parametrize("name", ["forward, descriptors", "split forward", "backward, descriptors"])
def test_a_refused_descriptor_is_an_error_and_later_calls_are_right(
    name: str, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    good, bad = kind.tensors(), kind.tensors()
    launch = kind.plan(cuda, good)
    same = torch.empty(1 << 20)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, size, dtype: same)  # as an allocator may well do
    field = {"dout": 5, "dv": 8} if kind.key == KEY else {"k": 1, "v": 2}
    at, other = field.values()
    cuda.refused = {good[at].data_ptr(), bad[other].data_ptr()}
    with pytest.raises(LaunchError, match=r"describe a bf16 tensor of shape \(2, \d, \d+, 64\).*INVALID_VALUE"):
        kind.call(launch, good)
    cuda.refused = {bad[other].data_ptr()}
    kind.call(launch, good)
    address = bad[other].data_ptr()
    with pytest.raises(LaunchError, match=rf"describe a tensor at {address:#x}: CUDA_ERROR_INVALID_VALUE"):
        kind.call(launch, bad)
    kind.call(launch, good)
    assert [read_pointers(call) for call in calls_of(cuda, kind.count)] == [kind.addresses(good)] * 2


@each_kind
def test_another_current_device_is_changed_for_the_launch_and_back(
    kind: Kind, cuda: FakeDriver, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    given, devices = kind.tensors(), []
    original = cuda.cuLaunchKernelEx

    def noting(*arguments: Any) -> int:
        devices.append(streams.device)
        return original(*arguments)

    monkeypatch.setattr(cuda, "cuLaunchKernelEx", noting)
    launch = kind.plan(cuda, given)
    streams.device = 1
    kind.call(launch, given)
    assert (devices, streams.device) == ([0] * kind.count, 1)


class Loaded:
    """What the real maker of plans is given of Triton: a binary to load, and a parameter list that is known or not."""

    def __init__(self, kind: Kind, monkeypatch: pytest.MonkeyPatch, cuda: FakeDriver, unknown: str = "") -> None:
        self.kind, self.imagined = kind, kind.imagined()
        cuda.named = dict(zip(ENTRIES, self.imagined.given, strict=False))
        for part in self.imagined.compiled.parts:
            handle, entry = part.handle, part.kernel.entry
            handle.asm, handle.hash, handle.metadata.name = {"cubin": entry.encode()}, f"{id(self)} {entry}", entry
        monkeypatch.setattr(
            plan,
            "known_layout",
            lambda part: (
                None if part.kernel.entry == unknown else Layout(parameters=part.kernel.parameters, trailing=2)
            ),
        )

    def plan(self, given: Any) -> Any:
        return self.kind.made(self.imagined, given)


@each_kind
def test_kernels_are_loaded_once_and_launched_through_the_driver(
    kind: Kind, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, given = Loaded(kind, monkeypatch, cuda), kind.tensors()
    for _ in range(2):
        launch = loaded.plan(given)
        assert not isinstance(launch, TritonPlan)
        kind.call(launch, given)
    assert [name.decode() for _, name in cuda.loaded] == list(ENTRIES[: kind.count])
    assert [read_pointers(call) for call in calls_of(cuda, kind.count)] == [kind.addresses(given)] * 2


@each_kind
def test_one_unknown_parameter_list_sends_all_kernels_through_triton(
    kind: Kind, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = kind.tensors()
    for entry in ENTRIES[: kind.count]:
        loaded = Loaded(kind, monkeypatch, cuda, unknown=entry)
        launch = loaded.plan(given)
        assert isinstance(launch, TritonPlan)
        kind.call(launch, given)
        assert (cuda.loaded, cuda.launches) == ([], [])
        assert [(one.entry, one.grid) for one in loaded.imagined.seen] == [
            (ENTRIES[number], (FIRST_PROGRAMS + number, 1, 1)) for number in range(kind.count)
        ]


@each_kind
def test_a_graph_under_capture_takes_loaded_kernels_only(
    kind: Kind, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    loaded, given = Loaded(kind, monkeypatch, cuda), kind.tensors()
    with pytest.raises(LaunchError, match=r"^loading imagined_prepare is not possible while"):
        loaded.plan(given)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    loaded.plan(given)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kind.call(loaded.plan(given), given)
    assert len(cuda.launches) == kind.count


@pytest.mark.parametrize("shape", [(2, 2, 2, 5, 0), (0, 2, 2, 5, 5), (1, 2, 2, 0, 5)])
def test_a_backward_pass_with_nothing_to_compute_launches_nothing(
    shape: tuple[int, int, int, int, int], cuda: FakeDriver
) -> None:
    imagined = Imagined(*BACKWARD_POINTERS, key=KEY)
    given = backward_tensors(shape=shape, dlse=True)
    given = given._replace(dbias=torch.full((1, 1, *shape[3:]), float("nan")))
    empty = make_backward_plan(imagined.compiled, imagined.spec, PLAIN, backward_geometry(given), 0)
    assert isinstance(empty, EmptyBackwardPlan)
    gradients = [given.dq, given.dk, given.dv, given.dbias]
    for one in gradients:
        one.fill_(float("nan"))  # type: ignore[union-attr]
    assert empty(given) is given.dlse
    assert all(torch.all(one == 0) for one in gradients)  # type: ignore[arg-type]
    zeros = empty(given._replace(dlse=None, dbias=None))
    assert zeros.shape == given.lse.shape
    assert torch.all(zeros == 0)
    assert (cuda.launches, imagined.seen) == ([], [])
