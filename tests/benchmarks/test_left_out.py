"""What the ladder loses without a record, by the searches that ship: the score that a change of it must not worsen."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from benchmarks.left_out import Forgetful, LeftOut, known_on, left_out, line_of, main, page
from flashgen.core.device import find_device
from flashgen.core.workload import Workload
from flashgen.db.layers import Layers
from flashgen.measure.protocol import specialization
from flashgen.runtime.lookup.ladder import resolve
from flashgen.tuning.regrets import Known
from tests.tiers import first

H200 = find_device("h200")
SHIPPED = Workload.parse("b4-h16-s4096-d128-causal")


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> list[Known]:
    with Layers.open([tmp_path_factory.mktemp("empty") / "none.sqlite3"]) as layers:
        return known_on(layers, H200)


def ratios_of(found: list[LeftOut]) -> list[float]:
    return [each.ratio for each in found if each.ratio is not None]


@pytest.mark.parametrize("step", first(1, [3, 1]))
def test_the_mean_loss_where_nobody_has_a_record_is_small(layers: Layers, known: list[Known], step: int) -> None:
    nobody = left_out(layers, known[::step], H200)
    assert statistics.geometric_mean(ratios_of(nobody)) < 1.015


def test_the_mean_loss_of_records_that_are_left_out_is_small(layers: Layers, known: list[Known]) -> None:
    assert len(known) > 300
    here = left_out(layers, known, H200, whose=H200)
    assert not any(each.served.is_exact for each in here)
    assert len(ratios_of(here)) > 0.7 * len(here)
    assert statistics.geometric_mean(ratios_of(here)) < 1.008
    assert max(ratios_of(here)) < 1.1


def test_one_workload_is_forgotten_and_no_other(layers: Layers) -> None:
    spec, others = specialization(SHIPPED), SHIPPED.with_shape(batch=8, seqlen_q=2048, seqlen_k=2048)
    records = Forgetful(layers, SHIPPED)
    assert resolve(others, spec, H200, records).is_exact
    assert not resolve(SHIPPED, spec, H200, records).is_exact
    mine = {record.device.identity for record, _ in Forgetful(layers, SHIPPED, H200).of(spec, H200)}
    theirs = [record for record, _ in Forgetful(layers, SHIPPED, H200).of(spec, H200) if record.workload == SHIPPED]
    assert len(mine) > 1
    assert {record.device.name for record in theirs} == {"NVIDIA H100 80GB HBM3"}


def test_what_is_printed_says_what_differs(
    layers: Layers, known: list[Known], capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = left_out(layers, [each for each in known if each.workload == SHIPPED], H200)
    served = replace(found.served, config=found.winner.replace(heads_per_group=2))
    line = line_of(replace(found, served=served, ratio=1.25))
    assert line == f"1.250 {SHIPPED.key}, rung {served.rung}: heads_per_group 2 for {found.winner['heads_per_group']}"
    table = page([replace(found, ratio=1.25), replace(found, ratio=0.8), replace(found, ratio=None)])
    assert table.splitlines()[-1] == "| all | 3 | 2 | 1.000 | 1 | 1.250 |"
    assert "backward" not in table
    with pytest.raises(SystemExit):
        main(["--device", "rtx 9999"])
    assert "rtx 9999" in capsys.readouterr().err
