"""The parameter list of real kernels: what the launch prepares is what their PTX declares."""

from __future__ import annotations

import pytest

from flashgen.codegen.families import family
from flashgen.codegen.family import Parameter
from flashgen.launch.parameters import ptx_sizes, slot_sizes, trailing_pointers
from tests.launch.kernels import KERNELS, kernel
from tests.tiers import first


@pytest.mark.parametrize("name", first(5, KERNELS))
def test_the_layout_is_that_of_the_compiled_kernel(name: str) -> None:
    spec, config, compiled = kernel(name)
    parameters = family(config.family).parameters(spec, config)
    sizes = ptx_sizes(compiled.handle.asm["ptx"])
    assert trailing_pointers(sizes, parameters) == 2
    assert sizes[:-2] == tuple(size for parameter in parameters for size in slot_sizes(parameter))
    assert (128 in sizes) is (config["loads"] == "descriptor")


@pytest.mark.parametrize("name", ["descriptors", "pointers-sm80"])
def test_any_other_list_is_not_taken_for_the_known_one(name: str) -> None:
    spec, config, compiled = kernel(name)
    ptx, parameters = compiled.handle.asm["ptx"], family(config.family).parameters(spec, config)
    sizes = ptx_sizes(ptx)
    assert trailing_pointers(sizes, parameters[1:]) is None
    assert trailing_pointers(sizes, (*parameters, Parameter(name="more", type="i32"))) is None
    assert trailing_pointers(sizes, tuple(reversed(parameters))) is None
    lines = ptx.splitlines()
    first = next(number for number, line in enumerate(lines) if ".param" in line)
    without = "\n".join(lines[:first] + lines[first + 1 :])
    assert trailing_pointers(ptx_sizes(without), parameters) is None


def test_sizes_of_each_kind_of_parameter() -> None:
    sizes = {"*bf16": (8,), "*fp32": (8,), "i32": (4,), "i64": (8,), "fp32": (4,)}
    for kind, expected in sizes.items():
        assert slot_sizes(Parameter(name="x", type=kind)) == expected
    assert slot_sizes(Parameter(name="x", type="tensordesc<bf16[1, 1, 128, 64]>")) == (128, *[4] * 4, *[8] * 4)
    assert slot_sizes(Parameter(name="x", type="tensordesc<fp16[64, 64]>")) == (128, 4, 4, 8, 8)
