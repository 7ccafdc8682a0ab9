"""What `scripts/same_machine_code.py` takes for the same kernel: by its syntax, and by its machine code."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.codegen.families import FAMILIES
from flashgen.codegen.family import KernelFamily
from flashgen.codegen.render import render
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from flashgen.db.exchange import export_records
from flashgen.db.store import Store
from scripts import same_machine_code
from tests.db.samples import MEASURED, ORIGIN, REPLACED
from tests.tiers import every

TEXT = '''"""A kernel."""
import triton
import triton.language as tl

BLOCK = tl.constexpr(16)


@triton.jit
def _double(x):
    # twice as much
    return x + x


@triton.jit(do_not_specialize=["n"])
def kernel(X, n):
    """Doubles."""
    row = tl.arange(0, BLOCK)
    tl.store(X + row, _double(tl.load(X + row, mask=row < n)))
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("A kernel.", "Another legend."),
        ("# twice as much", "# x + x"),
        ("row", "column"),
        ("_double", "_twice"),
        ("BLOCK", "BLOCK_M"),
    ],
)
def test_comments_docstrings_and_names_of_its_own_do_not_count(old: str, new: str) -> None:
    assert same_machine_code._tree(TEXT.replace(old, new)) == same_machine_code._tree(TEXT)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x + x", "x * x"),
        ("constexpr(16)", "constexpr(32)"),
        ("row < n", "row <= n"),
        ("tl.load", "tl.store"),
        ("kernel", "another"),
        ("(X, n)", "(Y, n)"),
        ('["n"]', "[]"),
        ("mask=", "other="),
    ],
)
def test_everything_else_counts(old: str, new: str) -> None:
    assert same_machine_code._tree(TEXT.replace(old, new)) != same_machine_code._tree(TEXT)


@pytest.mark.parametrize("family", every(3, FAMILIES), ids=lambda family: family.id)
def test_another_order_of_tiles_is_another_tree(family: KernelFamily) -> None:
    spec = Specialization.parse(f"{'fwd' if family.direction == 'forward' else 'bwd'}-bf16-d128-causal")
    config = family.default(spec, find_device("h200"))
    values = next(knob.values for knob in family.knobs if knob.name == "heads_per_group")
    assert len({same_machine_code._tree(render(spec, config.replace(heads_per_group=n)).text) for n in values}) > 1


def cubin(sections: dict[str, bytes]) -> bytes:
    """An ELF file with these sections and nothing else that the script reads."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*sections, ".shstrtab"))
    body, headers = b"", [b"\0" * 64]
    for name, content in {**sections, ".shstrtab": names}.items():
        at = names.index(name.encode() + b"\0")
        headers.append(struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, 64 + len(body), len(content), 0, 0, 1, 0))
        body += content
    start = b"\x7fELF".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(body))
    start = start.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(headers), len(headers) - 1)
    return start + body + b"".join(headers)


def test_instructions_and_constants_count_and_lines_of_the_source_do_not() -> None:
    sections = {".text.k": b"code", ".nv.constant0.k": b"1", ".debug_line": b"7", ".nv_debug_ptx_txt": b"names"}
    first = dict(same_machine_code._sections(cubin(sections)))
    assert set(first) == {".text.k", ".nv.constant0.k"}
    assert dict(same_machine_code._sections(cubin({**sections, ".debug_line": b"8"}))) == first
    assert dict(same_machine_code._sections(cubin({**sections, ".text.k": b"edoc"}))) != first
    assert dict(same_machine_code._sections(cubin({**sections, ".nv.constant0.k": b"2"}))) != first


def test_a_verdict_names_what_differs() -> None:
    assert same_machine_code._verdict({"a": "1"}, {"a": "1"}) == "same"
    assert same_machine_code._verdict({"a": "1", "b": "2"}, {"a": "1"}) == "different: b"


def test_digests_that_are_carried_over_leave_the_history_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "nvidia_h200.sqlite3"
    export_records([MEASURED], path, origins={MEASURED.identity: ORIGIN}, replaced=[REPLACED])
    row = {"workload": MEASURED.workload.key, "device": MEASURED.device.identity, "text": "fedcba9876543210"}
    same_machine_code.carry_over(path, [row])
    with Store.open(path, shipped=True) as store:
        past = store.past(MEASURED.workload)
    assert past.records == ((replace(MEASURED, source_digest="fedcba9876543210"), ORIGIN),)
    assert past.replaced == (REPLACED,)
