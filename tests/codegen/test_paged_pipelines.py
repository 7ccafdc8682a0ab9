"""What the compiler makes of kernels over pages: K and V keep the whole depth of the software pipeline."""

from __future__ import annotations

import re

import pytest

from flashgen.codegen.build import compile_kernel
from flashgen.codegen.families import family
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from tests.tiers import EXHAUSTIVE, first

KNOBS = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 3, "loads": "pointer"}


def pipeline(key: str, arch: str, **knobs: str) -> tuple[list[str], list[str]]:
    """Buffers of the loops, and copies that may be under way when a step waits for its own."""
    spec, device = Specialization.parse(key), find_device(arch)
    row = family("portable_forward")
    config = row.default(spec, device).replace(**KNOBS, **knobs)
    text = compile_kernel(spec, config, device).main.handle.asm["ttgir"]
    loops = text.split("scf.for")[2:]
    waits = [count for loop in loops for count in re.findall(r"async_wait[^\n]*?num = (\d+)", loop)]
    return re.findall(r"local_alloc : \(\) -> !ttg.memdesc<([0-9x]+)x", text), waits


@EXHAUSTIVE
@pytest.mark.parametrize(("arch", "page"), first(1, [("sm80", 16), ("sm90", 64)]))
def test_hidden_page_ids_leave_the_pipeline_its_depth(arch: str, page: int) -> None:
    dense = pipeline("fwd-bf16-d64-causal-varlen", arch)
    assert "2" in dense[1]
    assert pipeline(f"fwd-bf16-d64-causal-varlen-page{page}", arch, page_ids="asm") == dense


@EXHAUSTIVE
def test_page_ids_that_the_pipeline_sees_take_half_of_it() -> None:
    """The trap that they are hidden from: a Triton without it would make the knob useless."""
    buffers, waits = pipeline("fwd-bf16-d64-causal-varlen-page16", "sm80", page_ids="load")
    assert "2" not in waits
    assert buffers != pipeline("fwd-bf16-d64-causal-varlen", "sm80")[0]
