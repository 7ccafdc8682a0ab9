"""README and the charts are what the results files give, byte for byte and every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import report, spread_tables
from benchmarks.race_tables import lines_of
from benchmarks.results import ResultsFile, latest, read_rows
from benchmarks.suites import paper_grid
from tests.benchmarks.rows import SHARED, row, write_results, write_training

ROOT = Path(__file__).resolve().parents[2]
README = f"# Title\n\n{report.START}\nstale\n{report.END}\n\n## More\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text(README)
    write_results(tmp_path / "results")
    return tmp_path


def run(place: Path, *more: str) -> int:
    return report.main(["--results", str(place / "results"), "--readme", str(place / "README.md"), *more])


def test_the_second_run_changes_nothing(place: Path) -> None:
    assert run(place, "--check") == 1
    assert (place / "README.md").read_text() == README
    assert run(place) == 0
    once = (place / "README.md").read_bytes()
    images = {path.name: path.read_bytes() for path in (place / "docs/img").iterdir()}
    assert run(place, "--check") == 0
    assert run(place) == 0
    assert (place / "README.md").read_bytes() == once
    assert {path.name: path.read_bytes() for path in (place / "docs/img").iterdir()} == images
    assert set(images) == {"forward_test_gpu.png", "memory_test_gpu.png"}
    assert all(image.startswith(b"\x89PNG") and len(image) > 10_000 for image in images.values())


def test_everything_around_the_markers_stays(place: Path) -> None:
    run(place)
    text = (place / "README.md").read_text()
    assert text.startswith(f"# Title\n\n{report.START}\n### Test GPU\n")
    assert text.endswith(f"\n{report.END}\n\n## More\n")
    assert "stale" not in text


def test_the_table_says_what_the_rows_say(place: Path) -> None:
    run(place)
    lines = (place / "README.md").read_text().splitlines()
    head = "| head_dim | seqlen | causal | flashgen | FlexAttention | SDPA flash | SDPA cuDNN | FA3 | standard "
    at = next(n for n, line in enumerate(lines) if line.startswith(head))
    # speeds of the first workload are 440, 400, 330, 550, none, 55; each further one is a TFLOP/s faster
    assert lines[at + 2] == "| 64 | 512 | no | 440 | 400 | 330 | 550 | - | 55 | 1.10 | 0.80 |"
    assert lines[at + 37] == "| 256 | 16384 | yes | 475 | 435 | 365 | 585 | 635 | 90 | 1.09 | 0.81 |"
    assert not lines[at + 38].startswith("|")
    assert "| FlexAttention | 1.10 | 1.10 | 1.09 | 1.10 | 1.09 | 36 of 36 |" in lines
    assert any(line.startswith("| FA3 | ") and line.endswith("| 0 of 35 |") for line in lines)


def test_machine_versions_commit_and_day_come_from_the_rows(place: Path) -> None:
    run(place)
    text = (place / "README.md").read_text()
    assert "on Test GPU with torch 2.11.0, Triton 3.6.0, cuDNN 1.0, FA3 1.0, commit 0123456789ab, 2026-11-20." in text
    assert "flashgen 0, flashgen with LSE 64, SDPA flash 64. Standard attention holds 64.0 GiB at 32768 tokens." in text
    assert "8.0 at 2048, 8.0 at 2048 causal, 8.0 at 16384, 8.0 at 16384 causal." in text
    assert "| `flashgen/same-pointers` (pointers, descriptors) | 8.5, 16.9 |" in text
    assert "| `sdpa-flash` | 33.8 |" in text


def test_a_later_commit_replaces_a_workload_as_a_whole(place: Path) -> None:
    path = place / "results" / SHARED.slug / "forward.csv"
    workload = paper_grid()[-1]
    ResultsFile(path, append=True).write([row(workload, "flashgen", 500.0, commit="new")])
    last = lines_of(latest(read_rows(path)), "forward")[-1]
    assert (last.workload, last.tflops) == (workload, {"flashgen": 500.0})
    run(place)
    text = (place / "README.md").read_text()
    assert "| 256 | 16384 | yes | 500 | - | - | - | - | - | - | - |" in text
    assert "commit 0123456789ab and new" in text


def test_without_results_the_block_is_empty(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(README)
    assert run(tmp_path) == 0
    assert (tmp_path / "README.md").read_text() == README.replace("stale\n", "")


def test_training_is_reported_beside_what_the_papers_claim(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(README)
    write_training(tmp_path / "results")
    assert run(tmp_path) == 0
    lines = (tmp_path / "README.md").read_text().splitlines()
    head = "| seqlen | mode | flashgen | SDPA flash | SDPA cuDNN | standard | vs standard | vs better SDPA | GiB "
    at = next(n for n, line in enumerate(lines) if line.startswith(head))
    assert (
        lines[at + 2] == "| 1024 | eager | 400 | 300 | 320 | 160 | 2.50 | 1.25 | 20.0 | 40.0 | 3.0000 | 0.002 | 0.001 |"
    )
    assert lines[at + 3] == (
        "| 16384 | eager | 400 | 300 | 320 | out of memory | - | 1.25 | 20.0 | 40.0 | 3.0000 | 0.002 | 0.001 |"
    )
    claims = [line for line in lines if line.startswith("| GPT-2 trains up to 3 times")]
    assert claims == [
        "| GPT-2 trains up to 3 times as fast as with standard attention, at 1k | 2.5 at 1024, 2.5 at 1024 compiled |"
    ]
    memory = "9 times at 2048, 9 times at 4096; beside q, k, v, out and gradients 0.0 MiB against 512 MiB at 4096 |"
    assert any(line.endswith(memory) for line in lines)
    assert "| attention is 2 to 4 times as fast as standard attention | 8.0 to 8.0 times over 1 shapes, " in "\n".join(
        lines
    )
    assert "<details><summary>All 1 shapes</summary>" in lines
    assert "| flashgen, deterministic | 1.10 | 1.10 | 1.10 | 1 of 1 |" in lines
    names = {path.name for path in (tmp_path / "docs/img").iterdir()}
    assert names == {f"{stem}_test_gpu.png" for stem in ("backward", "forward_backward", "training", "training_memory")}
    assert "| 64 | 2048 | 0.0 | 256.0 | 9.0 |" in lines, "32 MiB of tensors, 8 times as much beside them"
    assert run(tmp_path, "--check") == 0


@pytest.mark.parametrize("text", ["nothing", f"{report.END}{report.START}", README + README])
def test_markers_must_be_there_once(text: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        report.insert(text, "x")


def test_readme_is_what_the_committed_results_give() -> None:
    devices = report.load(report.RESULTS)
    readme = (ROOT / "README.md").read_text()
    assert report.insert(readme, report.text_of(devices, "docs/img")) == readme, "run python -m benchmarks.report"
    page, marks = (ROOT / report.PAGE).read_text(), (spread_tables.START, spread_tables.END)
    assert report.insert(page, spread_tables.page(devices), marks) == page, "run python -m benchmarks.report"
    for slug, rows in devices.items():
        for name in report.charts_of(slug, rows):
            assert (ROOT / "docs/img" / name).is_file()
