"""How full tiles are: counted by hand on small lengths, and what the page says of the measured batches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.packed_tiles import Filled, Tiles, main, page, rates_beside_dense, visible_share
from benchmarks.provenance import ROOT
from benchmarks.results import RESULTS, read_rows
from benchmarks.varlen_cases import PACKS
from flashgen.codegen.families import HOPPER_FORWARD
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.workload import Workload

H200 = find_device("h200")
MEASURED = RESULTS / "nvidia_h200/varlen.csv"


def tile(warpgroups: int, block_n: int, hidden_blocks: str = "computed", packed_heads: int = 1) -> Config:
    default = HOPPER_FORWARD.default(Workload.parse("b1-h8-hk1-s4096-d128").specialization, H200)
    return default.replace(
        warpgroups=warpgroups, block_n=block_n, hidden_blocks=hidden_blocks, packed_heads=packed_heads
    )


@pytest.mark.parametrize(
    ("key", "config", "visible", "computed"),
    [
        ("b1-h8-hk1-s128-d128", tile(2, 128), 128 * 128, 128 * 128),
        ("b1-h8-hk1-s129-d128", tile(2, 128), 129 * 129, 256 * 256),
        ("b1-h8-hk1-s256-d128-causal", tile(2, 128), 256 * 257 // 2, 128 * 128 + 128 * 256),
        ("b1-h8-hk1-s128-d128-causal", tile(2, 64), 128 * 129 // 2, 128 * 128),
        ("b1-h8-hk1-s128-d128-causal", tile(2, 64, "skipped"), 128 * 129 // 2, 64 * 64 + 64 * 128),
        ("b1-h8-hk1-sq64-sk256-d128-causal", tile(1, 64), 64 * 192 + 64 * 65 // 2, 64 * 256),
        ("b1-h8-hk1-s64-d128", tile(2, 64, packed_heads=2), 64 * 64, 64 * 64),
        ("b2-h7-hk1-s64-d128", tile(2, 64, packed_heads=2), 7 * 64 * 64, 8 * 64 * 64),
        ("b2-h8-hk1-tq130-s65-d128-varlen-same", tile(2, 64, packed_heads=4), 2 * 65 * 65, 2 * 80 * 128),
        ("b2-h8-hk1-tq130-s65-d128-varlen-same", tile(1, 64), 2 * 65 * 65, 2 * 128 * 128),
        ("b2-h8-hk1-tq130-s65-d128-varlen-same", tile(2, 64), 2 * 65 * 65, 2 * 128 * 128),
        ("b2-h8-hk1-tq130-s65-d128-varlen-same", tile(4, 64), 2 * 65 * 65, 2 * 128 * 128),
        ("b2-h8-hk1-s65-d128", tile(4, 64), 2 * 65 * 65, 2 * 256 * 128),
        ("b2-h8-hk1-tq130-s65-d128-causal-varlen-same", tile(2, 64), 65 * 66, 2 * 128 * 128),
        ("b2-h8-hk1-tq192-s128-d128-varlen-tail", tile(1, 64), 128 * 128 + 64 * 64, 128 * 128 + 64 * 64),
    ],
)
def test_what_tiles_compute_is_counted(key: str, config: Config, visible: int, computed: int) -> None:
    assert visible_share(config, Workload.parse(key)) == visible / computed


def test_rates_are_those_of_forward_batches_with_a_dense_call() -> None:
    rates = rates_beside_dense(read_rows(MEASURED))
    assert rates.keys() == {pack.workload.key for pack in PACKS if pack.is_self_attention and not pack.trains}
    assert all(0.8 < rate < 1.1 for rate in rates.values())


def test_a_table_says_what_is_reached_of_what_tiles_leave() -> None:
    pack = next(pack for pack in PACKS if pack.is_self_attention)
    packed, dense = Tiles(pack.workload, "1 x 64 x 64", 0.6), Tiles(pack.dense, "2 x 64 x 128", 0.8)
    found, slow, fast = (Filled(packed=packed, dense=dense, rate=rate) for rate in (0.72, 0.66, 0.75))
    assert (found.most, found.reached) == pytest.approx((0.75, 0.96))
    last = page([found, slow, fast])
    assert "| 0.80 | 0.75 | 0.72 | 0.96 |" in last
    assert last.endswith("1 of 3 batches reach 0.97 of what their tiles leave.\n")


def test_the_page_has_the_table_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--results", str(MEASURED)]) == 0
    printed = capsys.readouterr().out
    text = (ROOT / "docs/experiments/packed-sequences.md").read_text()
    assert re.search(r"\d+ of \d+ batches reach 0\.97 of what their tiles leave", printed)
    assert printed.strip() in text


def test_a_missing_file_is_an_error_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--results", str(tmp_path / "none.csv")])
    assert "none.csv" in capsys.readouterr().err
