"""What Nsight Compute prints, read without it: tables, units, and everything that is no table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import counters
from benchmarks.counters import CountersError, Kernel, counted, find_ncu, parse

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum","lts__t_sectors_srcunit_tex.sum"\n'
)
UNITS = '"","","","","","","","","","","","byte","byte","ns","sector"\n'
START = """\
==WARNING== Note: Running with uncontrolled GPU caches. Profiling results may be inconsistent.
==PROF== Connected to process 598 (/usr/bin/python3.12)
==PROF== Profiling "sweep_l2" - 0: 0%....50%....100% - 1 pass
==PROF== Profiling "softmax" - 1: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 598
"""


def line(number: int, name: str, *values: str) -> str:
    cells = (str(number), "598", "python3.12", "127.0.0.1", name, "1", "7", "(128, 1, 1)", "(16384, 1, 1)", "0", "9.0")
    return ",".join(f'"{cell}"' for cell in (*cells, *values)) + "\n"


TABLE = HEAD + UNITS + line(0, "sweep_l2", "536,870,912", "0", "140,000", "16,777,216")
TABLE += line(1, "void softmax<(int)8, float>(T2 *, const T1 *)", "67108864", "1,024.0", "30500", "4194304")


def test_kernels_come_in_order_and_in_bytes_and_ms() -> None:
    first, second = parse(START + TABLE)
    assert first == Kernel(
        name="sweep_l2", hbm_read_bytes=2**29, hbm_write_bytes=0, l2_bytes=2**29, ms=pytest.approx(0.14)
    )
    assert second.name == "void softmax<(int)8, float>(T2 *, const T1 *)"
    assert (second.hbm_read_bytes, second.hbm_write_bytes, second.l2_bytes) == (2**26, 1024, 2**27)
    assert second.ms == pytest.approx(0.0305)


def test_other_units_are_converted_and_unknown_ones_refused() -> None:
    scaled = TABLE.replace('"byte","byte","ns"', '"Mbyte","Kbyte","us"')
    kernel = parse(scaled)[1]
    assert (kernel.hbm_read_bytes, kernel.hbm_write_bytes) == (67108864 * 10**6, 1024 * 10**3)
    assert kernel.ms == pytest.approx(30.5)
    with pytest.raises(CountersError, match=r"the unit of dram__bytes_read\.sum is one of byte, .*, got 'furlong'"):
        parse(TABLE.replace('"byte","byte"', '"furlong","byte"'))


@pytest.mark.parametrize(
    "error",
    [
        "ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on device 0.",
        "Failed to initialize the profiler: LibraryNotLoaded",
        "The application returned an error code (1).",
    ],
)
def test_what_the_profiler_reports_is_the_error(error: str) -> None:
    with pytest.raises(CountersError) as raised:
        parse(f"{START}==ERROR== {error}\n")
    assert error in str(raised.value)


def test_a_table_that_is_not_what_was_asked_for_is_refused() -> None:
    with pytest.raises(CountersError, match="counted no kernel"):
        parse(START + "==WARNING== No kernels were profiled.\n")
    with pytest.raises(CountersError, match=r"gave no dram__bytes_read\.sum"):
        parse(TABLE.replace("dram__bytes_read", "dram__bytes"))
    with pytest.raises(CountersError, match="of sweep_l2 is no number: 'n/a'"):
        parse(TABLE.replace("140,000", "n/a"))


def test_l2_may_be_missing() -> None:
    assert [kernel.l2_bytes for kernel in parse(TABLE.replace("lts__t_sectors_srcunit_tex", "lts__t_bytes"))] == [
        None
    ] * 2
    assert parse(TABLE.replace("16,777,216", "n/a"))[0].l2_bytes is None


def program(tmp_path: Path, body: str) -> str:
    """Something that is called as `ncu` is."""
    path = tmp_path / "ncu"
    log = 'log = open(sys.argv[sys.argv.index("--log-file") + 1], "w")'
    path.write_text(f"#!{sys.executable}\nimport sys\n{log}\n{body}\n")
    path.chmod(0o755)
    return str(path)


def place(tmp_path: Path) -> dict[str, Any]:
    return {"log": tmp_path / "log", "cwd": tmp_path, "timeout_s": 60}


def test_a_program_is_run_under_the_profiler(tmp_path: Path) -> None:
    ncu = program(tmp_path, f"assert sys.argv[-2:] == ['worker', 'cases'], sys.argv\nlog.write({START + TABLE!r})")
    kernels = counted(ncu, ["worker", "cases"], trial=["worker", "cases"], **place(tmp_path))
    assert [kernel.name[:9] for kernel in kernels] == ["sweep_l2", "void soft"]


def test_where_one_pass_is_not_enough_the_program_is_run_again_and_not_the_kernel(tmp_path: Path) -> None:
    told = "sys.argv[-1] == 'all' and '--replay-mode' not in sys.argv and sys.exit('kernels are repeated')"
    several = START.replace('"softmax" - 1: 0%....50%....100% - 1 pass', '"softmax" - 1: 0%....50%....100% - 2 passes')
    ncu = program(tmp_path, f"{told}\nlog.write({several + TABLE!r})")
    assert len(counted(ncu, ["all"], trial=["one"], **place(tmp_path))) == 2
    ncu = program(tmp_path, f"{told}\nlog.write({START + TABLE!r})")
    with pytest.raises(CountersError, match="kernels are repeated"):
        counted(ncu, ["all"], trial=["one"], **place(tmp_path))


def test_a_program_that_fails_says_why(tmp_path: Path) -> None:
    ncu = program(tmp_path, "log.write('==ERROR== The application returned an error code (1).')\nsys.exit('no memory')")
    with pytest.raises(CountersError, match=r"ended with 1: The application .* \(1\)\. no memory"):
        counted(ncu, ["worker"], trial=["worker"], **place(tmp_path))
    slow = program(tmp_path, "import time\ntime.sleep(60)")
    with pytest.raises(CountersError, match="timed out"):
        counted(slow, ["worker"], trial=["worker"], **(place(tmp_path) | {"timeout_s": 0.2}))


def test_a_machine_without_the_profiler_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(counters, "PLACES", (f"{tmp_path}/*/ncu",))
    with pytest.raises(CountersError, match="ncu is not installed here"):
        find_ncu()
    (tmp_path / "2025.3").mkdir()
    path = program(tmp_path / "2025.3", "")
    assert find_ncu() == path
    assert find_ncu(path) == path
