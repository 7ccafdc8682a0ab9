"""Compiling without a GPU: every family for every supported architecture, and defaults that do not spill."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from flashgen.codegen import build
from flashgen.codegen.build import CompiledPart, compile_kernel
from flashgen.codegen.families import default_config, family
from flashgen.codegen.generated import load_module
from flashgen.codegen.portable_forward.family import PORTABLE_FORWARD
from flashgen.codegen.render import KernelSource, render
from flashgen.core.config import Config
from flashgen.core.device import Device, find_device
from flashgen.core.errors import BuildError
from flashgen.core.workload import Specialization
from flashgen.launch.parameters import ptx_sizes, trailing_pointers
from scripts import crosscompile_jobs
from scripts.machine_loops import disassembled
from tests.codegen.devices import ONE_OF_EACH_KIND
from tests.codegen.goldens import kernel
from tests.tiers import EXHAUSTIVE, first, only

# each head dimension with and without a mask; bf16 and fp16, which differ in conversions alone, in turn
PLAIN = (
    *("fwd-fp16-d64", "fwd-bf16-d64-causal", "fwd-fp32-d64-causal"),
    *("fwd-bf16-d128", "fwd-fp16-d128-causal", "fwd-fp32-d128-causal"),
    *("fwd-fp16-d256", "fwd-bf16-d256-causal", "fwd-fp32-d256-causal"),
)
TWINS = ("sm86", "sm89")
"""Architectures with the same defaults, which Triton compiles in the same way: each kernel is compiled for one of them.

`scripts/crosscompile_jobs.py` has some for both.
"""
OLDEST = {
    (job.spec.head_dim, job.spec.causal, job.spec.dtype == "fp32", job.device.arch)
    for job in crosscompile_jobs.jobs([PORTABLE_FORWARD], list(crosscompile_jobs.TARGETS))
    if not job.may_spill and not job.device.has_wgmma
}
"""What `make crosscompile-all` compiles with the oldest Triton, and fails if it spills: head_dim, mask and target."""


def defaults_to_compile() -> Iterator[tuple[str, Device]]:
    """Every key for each kind of device, for one of the twins in turn, unless the oldest Triton compiles it.

    Of the three keys in fp32 each kind has one in turn: IEEE products are the same instructions everywhere.
    """
    for number, key in enumerate(PLAIN):
        spec, left_out = Specialization.parse(key), TWINS[number % len(TWINS)]
        for place, device in enumerate(device for device in ONE_OF_EACH_KIND if device.arch != left_out):
            known = (spec.head_dim, spec.causal, spec.dtype == "fp32", device.arch) in OLDEST
            has_turn = spec.dtype != "fp32" or (number // 3 + place) % 3 == 0
            if has_turn and not known:
                yield key, device


def test_every_default_is_compiled_by_some_triton() -> None:
    """Shape and target in pairs; every shape and every target is here, too. In fp32 all shapes, and all targets."""
    here = set(defaults_to_compile())
    assert {key for key, _ in here} == set(PLAIN)
    assert {device for _, device in here} == set(ONE_OF_EACH_KIND)
    found = {
        (spec.head_dim, spec.causal, spec.dtype == "fp32", device.arch)
        for key, device in here
        for spec in [Specialization.parse(key)]
    }
    in_fp32 = {arch for *_, is_fp32, arch in found | OLDEST if is_fp32}
    assert in_fp32 | set(TWINS) == {device.arch for device in ONE_OF_EACH_KIND}
    assert in_fp32 & set(TWINS)
    for spec in map(Specialization.parse, PLAIN):
        if spec.dtype == "fp32":
            continue
        compiled = {arch for *shape, arch in found | OLDEST if shape == [spec.head_dim, spec.causal, False]}
        assert len({device.arch for device in ONE_OF_EACH_KIND} - compiled - set(TWINS)) == 0
        assert compiled & set(TWINS)


@pytest.mark.parametrize("key", PLAIN)
def test_twins_have_the_same_defaults(key: str) -> None:
    spec = Specialization.parse(key)
    assert len({PORTABLE_FORWARD.default(spec, each) for each in ONE_OF_EACH_KIND if each.arch in TWINS}) == 1


BY_DEFAULT = (
    ("fwd-fp16-d64", find_device("h200")),
    ("fwd-bf16-d64-causal", find_device("rtx 5090")),
    ("fwd-fp32-d128-causal", find_device("mi300x")),
)
"""Each kind of products that compiles in a second; `make crosscompile-all` has all targets."""


@pytest.mark.parametrize(
    ("key", "device"),
    only(defaults_to_compile(), *BY_DEFAULT),
    ids=lambda value: value.slug if isinstance(value, Device) else value,
)
def test_defaults_compile_without_spills_and_fit(key: str, device: Device) -> None:
    spec = Specialization.parse(key)
    compiled = compile_kernel(spec, PORTABLE_FORWARD.default(spec, device), device)
    if spec.dtype == "fp32" and device.has_wgmma and spec.head_dim <= 128:
        # in five searches tiles that spill nothing took 1.27 to 1.47 times as long (test_portable_defaults.py)
        assert compiled.spills <= 96
    elif not (spec.dtype == "fp32" and device.arch == "gfx1200" and spec.head_dim >= 128):
        assert compiled.spills == 0
    elif spec.head_dim == 128:  # wider heads of IEEE products fit its registers with no tile
        assert compiled.spills <= 20
    assert compiled.shared_bytes <= device.smem_per_block
    assert compiled.occupancy(device) >= 1
    assert compiled.registers > 0


@pytest.mark.parametrize("name", first(1, ["h200", "rtx 4090", "b200"]))
def test_the_matrix_unit_and_wide_loads_are_used(name: str) -> None:
    device, spec = find_device(name), Specialization.parse("fwd-bf16-d128")
    code = disassembled(compile_kernel(spec, PORTABLE_FORWARD.default(spec, device), device).handle.asm["cubin"])
    expected = {
        "h200": ("HGMMA", "UTMALDG"),
        "rtx 4090": ("HMMA", "LDGSTS.E.BYPASS.128"),
        "b200": ("UTCHMMA", "UTMALDG"),
    }
    for instruction in expected[name]:
        assert instruction in code


@EXHAUSTIVE
@pytest.mark.parametrize(("key", "wide"), first(1, [("fwd-fp16-d64", True), ("fwd-fp16-d64-unaligned", False)]))
def test_alignment_decides_the_width_of_loads(key: str, wide: bool) -> None:
    device, spec = find_device("a100"), Specialization.parse(key)
    code = disassembled(compile_kernel(spec, default_config(spec, device), device).handle.asm["cubin"])
    assert ("LDGSTS.E.BYPASS.128" in code) is wide


def test_occupancy_is_limited_by_each_resource() -> None:
    device = find_device("h200")

    spec = Specialization.parse("fwd-fp16-d64")
    only = PORTABLE_FORWARD.kernels(spec, PORTABLE_FORWARD.default(spec, device))[0]

    def kernel(registers: int, shared: int, warps: int) -> CompiledPart:
        return CompiledPart(
            kernel=only,
            registers=registers,
            spills=0,
            shared_bytes=shared,
            num_warps=warps,
            compile_ms=0.0,
            handle=None,
        )

    assert kernel(168, 1024, 4).occupancy(device) == 3
    assert kernel(32, 1024, 8).occupancy(device) == 8
    assert kernel(32, 100 * 1024, 4).occupancy(device) == 2
    assert kernel(32, 300 * 1024, 4).occupancy(device) == 0


def test_a_compile_error_is_a_build_error_with_triton_s_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, device = Specialization.parse("fwd-bf16-d64"), find_device("h200")
    config = PORTABLE_FORWARD.default(spec, device)

    def broken(spec: Specialization, config: Config) -> KernelSource:
        source = render(spec, config)
        return KernelSource(entry=source.entry, text=source.text.replace("tl.exp2(m_i", "tl.no_such_function(m_i"))

    monkeypatch.setattr(build, "render", broken)
    with pytest.raises(BuildError, match=r"cannot compile portable_forward.*fwd-bf16-d64"):
        compile_kernel(spec, config, device)


def test_a_module_is_written_once_and_imported() -> None:
    spec, config = kernel("forward_d64_h200")
    source = render(spec, config)
    module = load_module(source)
    assert load_module(source) is module
    assert source.module in str(module.__file__)
    assert hasattr(module, source.entry)
    assert hasattr(module, f"{source.entry}_call")


@pytest.mark.parametrize("text", ["", ".visible .entry f(\n.param .v2 x\n)", "no entry at all"])
def test_an_unknown_parameter_list_is_not_guessed(text: str) -> None:
    assert ptx_sizes(text) == ()
    spec, config = kernel("forward_d64_h200")
    assert trailing_pointers(ptx_sizes(text), family(config.family).parameters(spec, config)) is None


class Hash:
    """Triton's hash of itself, as it counts and caches."""

    def __init__(self, error: Exception | None = None) -> None:
        self.threads: list[str] = []
        self._error = error

    def __call__(self) -> str:
        time.sleep(0.05)
        self.threads.append(threading.current_thread().name)
        if self._error is not None:
            raise self._error
        return "hash"

    def cache_info(self) -> SimpleNamespace:
        return SimpleNamespace(currsize=len(self.threads))


@pytest.mark.parametrize("error", [None, OSError("no such file")])
def test_triton_hashes_itself_once_and_beside_what_renders(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    hashed, interval = Hash(error), sys.getswitchinterval()
    monkeypatch.setattr("triton.runtime.cache.triton_key", hashed)
    with build._hashed_ahead():
        assert not hashed.threads
        assert sys.getswitchinterval() < interval
    assert len(hashed.threads) == 1
    assert hashed.threads != [threading.current_thread().name]
    with build._hashed_ahead():
        assert sys.getswitchinterval() == interval
    assert len(hashed.threads) == 1


def test_what_fails_to_render_waits_for_the_hash_and_leaves_the_interpreter_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed, interval = Hash(), sys.getswitchinterval()
    monkeypatch.setattr("triton.runtime.cache.triton_key", hashed)
    with pytest.raises(ZeroDivisionError), build._hashed_ahead():
        raise ZeroDivisionError
    assert (len(hashed.threads), sys.getswitchinterval()) == (1, interval)


def test_a_triton_without_that_hash_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("triton.runtime.cache.triton_key")
    with build._hashed_ahead():
        pass
