"""Files that anybody may have written: what they are, how large and how many is known before the work."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from flashgen.core.errors import WorkloadError
from flashgen.tuning.workload_files import MAX_BYTES, MAX_WORKLOADS, load_file

ONE = "{batch: 1, nheads: 1, seqlen_q: 1, head_dim: 8}"
BOMB = "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}]" for i in range(1, 60))])
MERGES = "\n".join(["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 60))])
LIST = f"[{', '.join(map(str, range(1, 150)))}]"


def refused(path: object, rule: str) -> None:
    start = time.process_time()
    with pytest.raises(WorkloadError, match=rule) as caught:
        load_file(path)
    assert len(str(caught.value)) < 1500
    assert str(caught.value).replace("\n", "").isprintable()
    assert time.process_time() - start < 8


@pytest.mark.parametrize(
    "path",
    ["/dev/zero", "/dev/null", "/dev/tty", ".", "/proc/self/mem", "a\0b", "", "x" * 300],
    ids=lambda path: repr(path)[:16],
)
def test_what_is_no_ordinary_file_is_refused(path: str) -> None:
    refused(path, "a workload file must be readable text")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "a pipe")


@pytest.mark.parametrize("path", [None, 5, 1.5, b"x", ["x"], True])
def test_what_is_no_path_is_refused(path: object) -> None:
    refused(path, "a workload file is named by a path")


@pytest.mark.parametrize(
    "scalar",
    [
        *("2026-99-99", "1" * 5000, "!!int ''", "!!timestamp x", "!!float x", "!!bool x", "!!float _"),
        *("2001-12-14t21:59:43.10-99:00", "!!python/object:os.system x", "&a [*a]", "? [a]\n: b"),
    ],
    ids=lambda scalar: scalar[:24],
)
def test_scalars_that_are_none_are_refused(tmp_path: Path, scalar: str) -> None:
    path = tmp_path / "w.yaml"
    for text in (f"a: {scalar}\n", f"{scalar}: {{workloads: [{ONE}]}}\n", f"a: {{workloads: [{scalar}]}}\n"):
        path.write_text(text)
        refused(path, "w.yaml")


@pytest.mark.parametrize("value", ["2026-11-22", "0x" + "f" * 5000, "-1", "0", "1e400", ".nan", "!!binary eA==", "~x"])
def test_values_that_are_no_sizes_are_refused(tmp_path: Path, value: str) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(f"a: {{common: {{head_dim: {value}}}, workloads: [{{batch: 1, nheads: 1, seqlen_q: 1}}]}}")
    refused(path, "head_dim must be")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("#" * (MAX_BYTES + 1), f"at most {MAX_BYTES} bytes"),
        (BOMB, "must be a mapping"),
        (f"{BOMB}\nb: {{workloads: *a59}}", "must be a mapping"),
        (MERGES, "at most 20000 names"),
        (
            f"a: {{common: {{seqlen_k: {LIST}, batch: {LIST}}}, workloads: [{ONE.replace('batch: 1, ', '')}]}}",
            "1 to 10000",
        ),
        (f"a: {{workloads: [{', '.join([ONE.replace('batch: 1', f'batch: {LIST}')] * 100)}]}}", f"got {149 * 100}"),
        ("a: " + "{a: " * 2000, "YAML or JSON"),
        ("a: {workloads: [b1-h1-s4-d8]}\0", "YAML or JSON"),
    ],
    ids=["size", "aliases", "aliases as entries", "merges", "combinations", "workloads", "depth", "control"],
)
def test_limits_are_checked_before_the_work(tmp_path: Path, text: str, rule: str) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(text)
    refused(path, rule)


@pytest.mark.parametrize(
    ("text", "name", "lines"),
    [
        (f"a: {{workloads: [{ONE}]}}\nb: {{workloads: [{ONE}]}}\n'a': {{workloads: []}}", "'a'", (1, 3)),
        (f"1: {{workloads: [{ONE}]}}\n0x1: {{workloads: [{ONE}]}}", "1", (1, 2)),
        (f"a:\n  workloads: [{ONE}]\n  workloads: [{ONE}]", "'workloads'", (2, 3)),
        ("a: {workloads: [{batch: 1,\nnheads: 1,\nseqlen_q: 1, seqlen_q: 2, head_dim: 8}]}", "'seqlen_q'", (3, 3)),
        (f'{{"a": {{"workloads": ["b1-h1-s4-d8"]}},\n "a": {{"workloads": [{ONE}]}}}}', "'a'", (1, 2)),
    ],
    ids=["group", "equal numbers", "entries", "field", "JSON"],
)
def test_a_name_that_is_there_twice_is_refused_with_its_lines(
    tmp_path: Path, text: str, name: str, lines: tuple[int, int]
) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(text)
    refused(path, f"got {name} in line {lines[0]} and again in line {lines[1]}, in .*w.yaml")


def test_a_name_may_be_that_of_a_merged_mapping(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    base = "{batch: 1, nheads: 1, seqlen_q: 1, head_dim: 8}"
    twice = "{<<: *a, <<: {nheads: 2}, batch: 3}"
    path.write_text(
        f"m: {{common: &a {base}, workloads: [&b {twice}, {{<<: *b, seqlen_q: 2}}, {{<<: *b, seqlen_q: 3}}]}}"
    )
    (group,) = load_file(path)
    assert [(one.batch, one.seqlen_q) for one in group.workloads] == [(3, 1), (3, 2), (3, 3)]


def test_within_the_limits_everything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    entry = ONE.replace("batch: 1", f"batch: [{', '.join(map(str, range(100)))}]")
    merged = f"{{<<: *c, seqlen_k: 3, {entry[1:]}"
    path.write_text(f"2026-11-22: {{title: 2026-01-01, common: &c {{nheads_k: ~}}, workloads: [{merged}]}}")
    (group,) = load_file(path)
    assert len(group.workloads) == 100
    assert group.workloads[0].seqlen_k == 3
    assert len(group.workloads) < MAX_WORKLOADS
