"""The comparison of lists on tables: what is left out when one is learned, and who takes part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import seed_lists
from benchmarks.search_replay import Table
from benchmarks.search_synthetic import synthetic
from benchmarks.seed_lists import contestants, counts, left_out, no_list
from flashgen.core.device import find_device
from flashgen.core.workload import Workload
from flashgen.db.log_files import write_log
from tests.db.samples import MEASURED
from tests.tiers import EXHAUSTIVE
from tests.tuning.fakes import H200

KEYS = ("b4-h16-s4096-d256", "b8-h16-s2048-d256", "b2-h8-s8192-d256")
LOGS = [synthetic(Workload.parse(key), H200, families=("hopper_forward",), seed=1) for key in KEYS]
TABLES = [Table.of(log) for log in LOGS]
OWN = replace(MEASURED, workload=TABLES[0].workload, device=H200, config=next(iter(TABLES[0].answers)))


def test_a_list_knows_nothing_of_the_table_that_it_is_judged_on() -> None:
    spec = TABLES[0].workload.specialization
    learned = left_out(TABLES[0], [OWN], LOGS)(spec, H200)
    assert learned
    assert learned == left_out(TABLES[0], [], LOGS[1:])(spec, H200)
    assert left_out(TABLES[1], [], LOGS[:1])(spec, H200)
    assert left_out(TABLES[0], [OWN], LOGS[:1])(spec, H200) == ()
    assert no_list(spec, H200) == ()
    elsewhere = synthetic(Workload.parse(KEYS[1]), find_device("h100"), families=("hopper_forward",), seed=1)
    assert left_out(TABLES[0], [], [*LOGS[1:], elsewhere])(spec, H200) == learned, "nor what another device measured"


def test_every_list_takes_part_alone_and_behind_records() -> None:
    found = contestants(TABLES[:1], [OWN], LOGS)
    assert len(found) == 6
    first = {}
    for name, make in found.items():
        search = make(TABLES[0], 0)
        asked = [search.ask() for _ in range(6)]
        assert all(config in TABLES[0].answers for config in asked)
        first[name] = asked
    assert first["lists: learned"] != first["lists: hand-written"] != first["lists: none"]
    assert first["lists: none"] == first["lists: none, with records"], "its own record is left out"


@EXHAUSTIVE
def test_the_command_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"{log.search.workload.key}.jsonl.gz" for log in LOGS if log.search]
    for log, path in zip(LOGS, paths, strict=True):
        write_log(log, path)
    assert seed_lists.main([*map(str, paths), "--seeds", "1", "--trials", "12", "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "over 3 tables and 1 seeds" in text
    assert text.count("| lists: ") == 6
    assert text.count("`fwd-bf16-b2-h8-hk8-sq8192-sk8192-d256`") == 2
    assert counts(TABLES[:1], [], LOGS).count("| 3 |") == 1, "hand-written configs of heads of 256"
    assert (tmp_path / "out" / "search.csv").is_file()
    with pytest.raises(SystemExit, match="2"):
        seed_lists.main([str(tmp_path / "none.jsonl.gz")])
