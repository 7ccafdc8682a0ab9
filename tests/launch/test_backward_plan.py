"""Sequences of launches: order, shared scratch memory, what later calls write, threads, contexts, errors, graphs."""

from __future__ import annotations

import gc
import math
import threading
import time
from typing import Any

import pytest
import torch

from flashgen.core.errors import LaunchError
from flashgen.launch import backward_plan
from flashgen.launch.backward_geometry import BackwardGeometry, BackwardTensors
from flashgen.launch.backward_plan import BackwardLaunch, EmptyBackwardPlan, TritonBackwardPlan, make_backward_plan
from flashgen.launch.parameters import Layout
from tests.launch.backward_rows import (
    DESCRIPTORS,
    ENTRIES,
    FIRST_FUNCTION,
    POINTERS,
    ROWS,
    ImaginedBackward,
    backward_tensors,
    calls_of,
    kernels,
    pointers,
    replaced,
)
from tests.launch.conftest import Streams
from tests.launch.fake_driver import FakeDriver, Launched
from tests.launch.rows import CONFIG

KINDS = {"descriptors": DESCRIPTORS, "pointers": POINTERS}


@pytest.fixture(params=KINDS)
def imagined(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ImaginedBackward:
    return ImaginedBackward(monkeypatch, kernels(*KINDS[request.param]))


def planned(imagined: ImaginedBackward, cuda: FakeDriver, given: BackwardTensors) -> BackwardLaunch:
    return imagined.through_the_driver(cuda, BackwardGeometry.of(given))


def read_pointers(call: list[Launched]) -> dict[str, set[int]]:
    """The addresses that the kernels of one call had, by id."""
    found: dict[str, set[int]] = {}
    for one in call:
        for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv"):
            for key in (name.upper(), f"{name}_desc"):
                if key in one.values:
                    found.setdefault(name, set()).add(one.values[key])
    return found


def expected_pointers(given: BackwardTensors) -> dict[str, set[int]]:
    return {name: {address} for name, address in pointers(given).items()}


def scratch_of(call: list[Launched]) -> int:
    """Where the scratch memory of a call lies; all of its kernels agree."""
    starts = {one.values[key] for one in call for key in ("NegDelta", "neg_delta_desc") if key in one.values}
    after = 4 * 2 * 6 * ROWS  # `dq_acc` follows `neg_delta`
    starts |= {one.values[key] - after for one in call for key in ("DqAcc", "dq_acc_desc") if key in one.values}
    (start,) = starts
    return start


def test_kernels_run_in_order_each_with_its_own_grid(
    imagined: ImaginedBackward, cuda: FakeDriver, streams: Streams
) -> None:
    given = backward_tensors()
    launch = planned(imagined, cuda, given)
    for streams.current in (0, 0xABC0):
        launch(given)
    for call, stream in zip(calls_of(cuda, 3), (0, 0xABC0), strict=True):
        assert [one.function for one in call] == [FIRST_FUNCTION, FIRST_FUNCTION + 1, FIRST_FUNCTION + 2]
        assert [one.grid for one in call] == [(5, 1, 1), (6, 1, 1), (7, 1, 1)]
        assert [one.block for one in call] == [(12 * 32, 1, 1)] * 3
        assert [one.shared_bytes for one in call] == [1000] * 3
        assert [one.stream for one in call] == [stream] * 3


def test_a_call_has_scratch_memory_of_its_own_and_returns_neg_delta(
    imagined: ImaginedBackward, cuda: FakeDriver
) -> None:
    given = backward_tensors()
    launch, triton = planned(imagined, cuda, given), imagined.through_triton(BackwardGeometry.of(given))
    results = [launch(given), launch(given)]
    starts = [scratch_of(call) for call in calls_of(cuda, 3)]
    assert starts == [one.data_ptr() for one in results]
    assert starts[0] != starts[1], "the first result is still in use"
    for result in (*results, triton(given)):
        assert (result.shape, result.dtype) == ((2, 6, 200), torch.float32)
        assert result.stride() == (6 * ROWS, ROWS, 1)
    shapes = {"NegDelta": (2, 6, ROWS), "DqAcc": (2 * 6 * ROWS + 1, 64)}
    for _, _, arguments in imagined.seen:
        for name, shape in shapes.items():
            assert name not in arguments or arguments[name].shape == shape


def test_a_view_that_nobody_asks_for_is_not_made(imagined: ImaginedBackward, cuda: FakeDriver) -> None:
    given = backward_tensors()
    launch = planned(imagined, cuda, given)
    memory = launch(given, with_neg_delta=False)
    assert scratch_of(cuda.launches) == memory.data_ptr()
    assert (memory.dtype, memory.dim()) == (torch.float32, 1)
    assert memory.numel() == imagined.binding(BackwardGeometry.of(given)).scratch.floats


def test_later_calls_write_what_changed_and_nothing_stale_stays(imagined: ImaginedBackward, cuda: FakeDriver) -> None:
    first, second = backward_tensors(), backward_tensors()
    launch = planned(imagined, cuda, first)
    turns = [first, first, second, replaced(first, k=second.k, dq=second.dq), first]
    results = [launch(one) for one in turns]
    calls = calls_of(cuda, 3)
    assert [read_pointers(call) for call in calls] == [expected_pointers(one) for one in turns]
    assert [scratch_of(call) for call in calls] == [one.data_ptr() for one in results]
    assert {call[0].values["LSE"] for call in calls[:2]} == {first.lse.data_ptr()}
    assert calls[2][0].values["LSE"] == second.lse.data_ptr()


def test_scales_change_from_call_to_call_in_every_kernel(cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    named = ("softmax_scale: fp32", "softmax_scale_log2: fp32", "NegDelta: *fp32")
    imagined, given = ImaginedBackward(monkeypatch, kernels(named, named)), backward_tensors()
    launch = planned(imagined, cuda, given)
    scales = (0.5, None, 0.25, 0.25, 0.0)
    for scale in scales:
        launch(given, scale)
    seen = [(one.values["softmax_scale"], one.values["softmax_scale_log2"]) for one in cuda.launches]
    used = [0.125 if scale is None else scale for scale in scales for _ in range(2)]
    assert seen == [pytest.approx((scale, scale * math.log2(math.e)), rel=1e-6) for scale in used]


def test_equal_descriptors_of_several_kernels_are_made_once(cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dO` is read by two kernels in boxes of the same size here; both follow its pointer."""
    tile = "tensordesc<bf16[1, 1, 64, 64]>"
    same = (f"do_desc: {tile}", "NegDelta: *fp32")
    other = (f"q_desc: {tile}", f"do_desc: {tile}")
    imagined = ImaginedBackward(monkeypatch, kernels(same, same, other))
    ones = [backward_tensors() for _ in range(3)]
    launch = planned(imagined, cuda, ones[0])
    for turn in (0, 1, 0, 2):
        launch(ones[turn])
        assert {one.values["do_desc"] for one in cuda.launches[-3:]} == {ones[turn].dout.data_ptr()}
    assert len(cuda.encoded) == 3, "one for two kernels, one in a box of 65 rows, and that of q"
    assert len(cuda.replaced) == 2 * 3, "for the second and the third set of tensors"


def test_a_plan_keeps_what_its_addresses_point_to(imagined: ImaginedBackward, cuda: FakeDriver) -> None:
    given = backward_tensors()
    launches = [planned(imagined, cuda, given) for _ in range(3)]
    gc.collect()
    kept = [launch(given) for launch in launches]
    assert len({str(read_pointers(call)) for call in calls_of(cuda, 3)}) == 1
    assert len(kept) == 3


def test_two_threads_never_mix_their_sequences(
    imagined: ImaginedBackward, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    ones = [backward_tensors() for _ in range(4)]
    original = cuda.cuLaunchKernelEx

    def slowly(*arguments: Any) -> int:
        time.sleep(0.001)  # lets another thread run in the middle of a sequence
        return original(*arguments)

    monkeypatch.setattr(cuda, "cuLaunchKernelEx", slowly)
    launch = planned(imagined, cuda, ones[0])
    wanted, done = {one.q.data_ptr(): expected_pointers(one) for one in ones}, threading.Barrier(4)

    def work(one: BackwardTensors) -> None:
        done.wait()
        for _ in range(5):
            launch(one)

    threads = [threading.Thread(target=work, args=(one,)) for one in ones]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls = calls_of(cuda, 3)
    assert len(calls) == 20
    for call in calls:
        assert [one.function for one in call] == [FIRST_FUNCTION, FIRST_FUNCTION + 1, FIRST_FUNCTION + 2]
        found = read_pointers(call)
        (q,) = found["q"]
        assert found == wanted[q]
        scratch_of(call)


def test_a_new_thread_gets_the_context_of_the_plan(imagined: ImaginedBackward, cuda: FakeDriver) -> None:
    given, other = backward_tensors(), backward_tensors()
    cuda.context = 0x7700
    launch = planned(imagined, cuda, given)
    launch(given)
    cuda.context, cuda.needs_context = 0, True
    launch(other)
    assert cuda.context == 0x7700
    assert len(cuda.launches) == 6, "none of the sequence ran twice"
    assert read_pointers(cuda.launches[3:]) == expected_pointers(other)


def test_a_plan_made_on_a_thread_without_a_context_takes_the_one_of_torch(
    imagined: ImaginedBackward, cuda: FakeDriver
) -> None:
    cuda.needs_context, cuda.context = True, 0
    given = backward_tensors()
    launch = planned(imagined, cuda, given)
    assert cuda.context == cuda.primary
    cuda.context = 0
    launch(given)
    assert cuda.context == cuda.primary
    assert len(cuda.launches) == 3


@pytest.mark.parametrize("number", [0, 1, 2])
def test_errors_name_the_kernel_and_carry_the_text_of_the_driver(
    number: int, imagined: ImaginedBackward, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, original = backward_tensors(), cuda.cuLaunchKernelEx
    cuda.context = 0x9900

    def one_fails(config: int, function: int, addresses: int, extra: None) -> int:
        return 700 if function == FIRST_FUNCTION + number else original(config, function, addresses, extra)

    monkeypatch.setattr(cuda, "cuLaunchKernelEx", one_fails)
    launch = planned(imagined, cuda, given)
    said = rf"launch {5 + number} blocks of 384 threads of {ENTRIES[number]}: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal"
    with pytest.raises(LaunchError, match=said):
        launch(given)
    assert len(cuda.launches) == number, "what comes after it is not launched"
    assert cuda.context == 0x9900, "a context of the caller is left alone"


def test_a_refused_descriptor_is_an_error_and_later_calls_are_right(
    cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    imagined = ImaginedBackward(monkeypatch, kernels(*DESCRIPTORS))
    good, bad = backward_tensors(), backward_tensors()
    launch = planned(imagined, cuda, good)
    same = torch.empty(imagined.binding(BackwardGeometry.of(good)).scratch.floats)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, size, dtype: same)  # as an allocator may well do
    cuda.refused = {good.dout.data_ptr(), bad.dv.data_ptr()}
    with pytest.raises(LaunchError, match=r"describe a bf16 tensor of shape \(2, 6, 200, 64\).*INVALID_VALUE"):
        launch(good)
    cuda.refused = {bad.dv.data_ptr()}
    launch(good)
    with pytest.raises(LaunchError, match=rf"describe a tensor at {bad.dv.data_ptr():#x}: CUDA_ERROR_INVALID_VALUE"):
        launch(bad)
    launch(good)
    assert [read_pointers(call) for call in calls_of(cuda, 3)] == [expected_pointers(good)] * 2


def test_another_current_device_is_changed_for_the_launch_and_back(
    imagined: ImaginedBackward, cuda: FakeDriver, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    given, devices = backward_tensors(), []
    original = cuda.cuLaunchKernelEx

    def noting(*arguments: Any) -> int:
        devices.append(streams.device)
        return original(*arguments)

    monkeypatch.setattr(cuda, "cuLaunchKernelEx", noting)
    launch = planned(imagined, cuda, given)
    streams.device = 1
    launch(given)
    assert (devices, streams.device) == ([0, 0, 0], 1)


class Loaded:
    """What the real maker of plans is given of Triton: a binary to load, and a parameter list that is known or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cuda: FakeDriver, unknown: str = "") -> None:
        self.imagined = ImaginedBackward(monkeypatch, kernels(*POINTERS))
        cuda.named = dict(zip(ENTRIES, self.imagined.given, strict=True))
        for part in self.imagined.compiled.parts:
            handle, entry = part.handle, part.kernel.entry
            handle.asm, handle.hash, handle.metadata.name = {"cubin": entry.encode()}, f"{id(self)} {entry}", entry
        monkeypatch.setattr(
            backward_plan,
            "known_layout",
            lambda part: None if part.kernel.entry == unknown else Layout.of(part.kernel.parameters, 2),
        )

    def plan(self, given: BackwardTensors) -> BackwardLaunch:
        geometry = BackwardGeometry.of(given)
        return make_backward_plan(self.imagined.compiled, self.imagined.spec, CONFIG, geometry, 0)


def test_kernels_are_loaded_once_and_launched_through_the_driver(
    cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, given = Loaded(monkeypatch, cuda), backward_tensors()
    for _ in range(2):
        launch = loaded.plan(given)
        assert not isinstance(launch, TritonBackwardPlan)
        launch(given)
    assert [name.decode() for _, name in cuda.loaded] == list(ENTRIES)
    assert [read_pointers(call) for call in calls_of(cuda, 3)] == [expected_pointers(given)] * 2


@pytest.mark.parametrize("entry", ENTRIES)
def test_one_unknown_parameter_list_sends_all_kernels_through_triton(
    entry: str, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, given = Loaded(monkeypatch, cuda, unknown=entry), backward_tensors()
    launch = loaded.plan(given)
    assert isinstance(launch, TritonBackwardPlan)
    launch(given)
    assert (cuda.loaded, cuda.launches) == ([], [])
    assert [(name, grid) for name, grid, _ in loaded.imagined.seen] == [
        (name, (5 + i, 1, 1)) for i, name in enumerate(ENTRIES)
    ]


def test_a_graph_under_capture_takes_loaded_kernels_only(cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    loaded, given = Loaded(monkeypatch, cuda), backward_tensors()
    with pytest.raises(LaunchError, match=r"^loading imagined_prepare is not possible while"):
        loaded.plan(given)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    loaded.plan(given)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    loaded.plan(given)(given)
    assert len(cuda.launches) == 3


@pytest.mark.parametrize("shape", [(2, 2, 2, 5, 0), (0, 2, 2, 5, 5), (1, 2, 2, 0, 5)])
def test_nothing_to_compute_launches_nothing(
    shape: tuple[int, int, int, int, int], cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    imagined = ImaginedBackward(monkeypatch, kernels(*POINTERS))
    given = backward_tensors(shape=shape, dlse=True)
    given = replaced(given, dbias=torch.full((1, 1, *shape[3:]), float("nan")))
    plan = make_backward_plan(imagined.compiled, imagined.spec, CONFIG, BackwardGeometry.of(given), 0)
    assert isinstance(plan, EmptyBackwardPlan)
    gradients = [given.dq, given.dk, given.dv, given.dbias]
    for one in gradients:
        one.fill_(float("nan"))  # type: ignore[union-attr]
    assert plan(given) is given.dlse
    assert all(torch.all(one == 0) for one in gradients)  # type: ignore[arg-type]
    zeros = plan(given._replace(dlse=None, dbias=None))
    assert zeros.shape == given.lse.shape
    assert torch.all(zeros == 0)
    assert (cuda.launches, imagined.seen) == ([], [])
