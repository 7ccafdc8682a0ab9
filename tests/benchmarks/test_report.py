"""The pages and the charts are what the results files give, byte for byte and every time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import fallback, from_nothing, report, spread_tables
from benchmarks.markdown import RAW
from benchmarks.results import TRAINING_COLUMNS, ResultsFile, read_rows
from benchmarks.search_files import STAMP, add_rows
from benchmarks.speedup import speedup_grid
from tests.benchmarks.rows import SHARED, write_encoders, write_results, write_training
from tests.tiers import EXHAUSTIVE

ROOT = Path(__file__).resolve().parents[2]
README = f"# Title\n\n{report.START}\nstale\n{report.END}\n\n## More\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text(README)
    write_results(tmp_path / "results")
    return tmp_path


@pytest.fixture
def text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the charts, which take matplotlib a second: for tests that look at none."""
    monkeypatch.setattr(report, "draw", lambda devices, images, results: None)


def run(place: Path, *more: str) -> int:
    return report.main(["--results", str(place / "results"), "--readme", str(place / "README.md"), *more])


def tables(place: Path) -> str:
    """The page of all tables, after a run."""
    assert run(place) == 0
    return (place / "docs/benchmarks.md").read_text()


@EXHAUSTIVE
def test_the_second_run_changes_nothing(place: Path) -> None:
    assert run(place, "--check") == 1
    assert (place / "README.md").read_text() == README
    assert not (place / "docs").exists()
    assert run(place) == 0
    once = [(place / name).read_bytes() for name in ("README.md", "docs/benchmarks.md")]
    images = {path.name: path.read_bytes() for path in (place / "docs/img").iterdir()}
    assert run(place, "--check") == 0
    assert run(place) == 0
    assert [(place / name).read_bytes() for name in ("README.md", "docs/benchmarks.md")] == once
    assert {path.name: path.read_bytes() for path in (place / "docs/img").iterdir()} == images
    assert set(images) == {"forward_test_gpu.png", "memory_test_gpu.png"}
    assert all(image.startswith(b"\x89PNG") and len(image) > 10_000 for image in images.values())


@pytest.mark.usefixtures("text_alone")
@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md"])
def test_a_check_tells_which_page_differs(place: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(place)
    (place / name).write_text((place / name).read_text().replace("1.10", "1.11"))
    capsys.readouterr()
    assert run(place, "--check") == 1
    assert [line for line in capsys.readouterr().out.splitlines() if "differs" in line] == [
        f"{place / name} differs: run python -m benchmarks.report"
    ]


@pytest.mark.usefixtures("text_alone")
def test_everything_around_the_markers_stays(place: Path) -> None:
    run(place)
    text = (place / "README.md").read_text()
    assert text.startswith(f"# Title\n\n{report.START}\n![Forward pass in TFLOP/s on Test GPU](")
    assert text.endswith(f"\n{report.END}\n\n## More\n")
    assert "stale" not in text


@pytest.mark.usefixtures("text_alone")
def test_the_readme_has_one_chart_and_a_line_for_each_group_of_workloads(place: Path) -> None:
    run(place)
    lines = (place / "README.md").read_text().splitlines()
    images = [line for line in lines if line.startswith("![")]
    assert images == [f"![Forward pass in TFLOP/s on Test GPU]({RAW}/docs/img/forward_test_gpu.png)"]
    at = next(n for n, line in enumerate(lines) if line.startswith("| speed of flashgen over that of "))
    assert lines[at].endswith(
        "| workloads | the fastest peer | lowest | FlexAttention | SDPA flash | SDPA cuDNN | FA3 | standard |"
    )
    # 440 + n against 600 + n, or 550 where FA3 is missing, over twelve workloads of each head_dim
    assert lines[at + 2] == "| Forward, head_dim 64 | 12 | 0.74 | 0.73 | 1.10 | 1.33 | 0.80 | 0.74 | 7.38 |"
    assert [line.split(" | ")[0] for line in lines[at + 3 : at + 5]] == [
        f"| Forward, head_dim {dim}" for dim in (128, 256)
    ]
    assert not lines[at + 5].startswith("|")
    assert lines[at + 6] == (
        "flashgen is the fastest on 0 of 36 workloads. A peer is ahead by more than 2% on 36: "
        "Forward, head_dim 64: SDPA cuDNN (0.80); Forward, head_dim 64: FA3 (0.73 to 0.74); "
        "Forward, head_dim 64, causal: FA3 (0.74); Forward, head_dim 128: FA3 (0.74); "
        "Forward, head_dim 128, causal: FA3 (0.74); Forward, head_dim 256: FA3 (0.74 to 0.75); "
        "Forward, head_dim 256, causal: FA3 (0.75)."
    )
    assert lines[at + 8].startswith("Measured on Test GPU with torch 2.11.0, Triton 3.6.0, cuDNN 1.0, FA3 1.0, commit ")


@pytest.mark.usefixtures("text_alone")
def test_the_readme_compares_with_the_fastest_peer_and_training_by_tokens(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(README)
    write_training(tmp_path / "results")
    assert run(tmp_path) == 0
    lines = (tmp_path / "README.md").read_text().splitlines()
    # FA3 is the fastest at 600; flashgen's deterministic kernels are no peer
    assert "| Backward, head_dim 64 | 1 | 0.73 | 0.73 | 1.10 | 1.33 | 0.80 | 0.73 | 0.88 | 8.00 |" in lines
    assert "| GPT-2 training, tokens/s | 3 | 1.25 | 1.25 | - | 1.33 | 1.25 | - | - | 2.50 |" in lines
    assert not any(line.startswith("![") for line in lines), "there is no forward pass to draw"


@pytest.mark.usefixtures("text_alone")
def test_the_table_says_what_the_rows_say(place: Path) -> None:
    lines = tables(place).splitlines()
    assert lines[:3] == ["# Benchmarks", "", report.HEAD.splitlines()[2]]
    assert "## Test GPU" in lines
    assert "![Forward pass in TFLOP/s](img/forward_test_gpu.png)" in lines
    head = "| head_dim | seqlen | causal | flashgen | FlexAttention | SDPA flash | SDPA cuDNN | FA3 | standard "
    at = next(n for n, line in enumerate(lines) if line.startswith(head))
    # speeds of the first workload are 440, 400, 330, 550, none, 55; each further one is a TFLOP/s faster
    assert lines[at + 2] == "| 64 | 512 | no | 440 | 400 | 330 | 550 | - | 55 | 1.10 | 0.80 |"
    assert lines[at + 37] == "| 256 | 16384 | yes | 475 | 435 | 365 | 585 | 635 | 90 | 1.09 | 0.81 |"
    assert not lines[at + 38].startswith("|")
    assert "| FlexAttention | 1.10 | 1.10 | 1.09 | 1.10 | 1.09 | 36 of 36 |" in lines
    assert any(line.startswith("| FA3 | ") and line.endswith("| 0 of 35 |") for line in lines)


@pytest.mark.usefixtures("text_alone")
def test_machine_versions_commit_and_day_come_from_the_rows(place: Path) -> None:
    text = tables(place)
    assert "on Test GPU with torch 2.11.0, Triton 3.6.0, cuDNN 1.0, FA3 1.0, commit 0123456789ab, 2026-11-20." in text
    assert "flashgen 0, flashgen with LSE 64, SDPA flash 64. Standard attention holds 64.0 GiB at 32768 tokens." in text
    assert "| 128 | 16384 | yes | 2.5 | 20 | 8.0 | - | - | - |" in text
    assert text.count(" | 8.0 | - | - | - |") == len(speedup_grid())
    assert "| `flashgen/same-pointers` (pointers, descriptors) | 8.5, 16.9 |" in text
    assert "| `sdpa-flash` | 33.8 |" in text


def test_tables_do_not_depend_on_the_order_of_a_file(tmp_path: Path) -> None:
    """GPT-2 at 1k is answered at 1k, wherever its rows stand."""
    write_training(tmp_path)
    path = tmp_path / SHARED.slug / "training.csv"
    rows = read_rows(path, TRAINING_COLUMNS)

    def texts() -> tuple[list[str], str]:
        devices = report.load(tmp_path)
        return sorted(report.page_of(devices, "img").splitlines()), report.summary_of(devices)

    before = texts()
    assert any(line.endswith("at 1k | 2.5 at 1024, 2.5 at 1024 compiled |") for line in before[0])
    for other in (rows[::-1], sorted(rows, key=lambda each: each.impl)):
        ResultsFile(path, TRAINING_COLUMNS).write(other)
        assert texts() == before


@pytest.mark.usefixtures("text_alone")
def test_races_of_searches_are_told_with_what_they_were_measured(place: Path) -> None:
    before = tables(place)
    (folder,) = (each for each in (place / "results").iterdir() if each.is_dir())
    stamp = dict(zip(STAMP, ("NVIDIA H200", "2.11.0", "3.6.0", "0123456789ab", "2026-11-26"), strict=True))
    row = {"workload": "w", "direction": "forward", "way": "20 s", "ratio": "1.0320", **stamp}
    add_rows(folder / from_nothing.FILE, (*from_nothing.COLUMNS, *STAMP), [row])
    ruled = {**row, "way": fallback.RULE, "ratio": "1.0080"}
    add_rows(folder / fallback.FILE, (*fallback.COLUMNS, *STAMP), [ruled])
    page = tables(place)
    assert page.startswith(before)
    assert "## What a search finds by itself" in page
    assert "| forward | 1 | 1.032 (1.032) |" in page
    assert "## Shapes without a record" in page
    assert "| forward | 1 | 1.008 (1.008) | - | - | - |" in page
    assert page.count("NVIDIA H200, torch 2.11.0, Triton 3.6.0, commit 0123456789ab, 2026-11-26.") == 2


def test_a_device_of_whole_models_alone_has_its_table_in_their_page() -> None:
    rows = read_rows(report.RESULTS / "nvidia_h100_80gb_hbm3" / "models_transformers.csv")
    devices = {"one": rows, "two": [rows[0], replace(rows[0], suite="forward")]}
    assert list(report.with_kernels(devices)) == ["two"]


def test_without_results_the_block_is_empty(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(README)
    assert tables(tmp_path) == report.HEAD
    assert (tmp_path / "README.md").read_text() == README.replace("stale\n", "")


def test_training_is_reported_beside_what_the_papers_claim(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(README)
    write_training(tmp_path / "results")
    lines = tables(tmp_path).splitlines()
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


@EXHAUSTIVE
def test_encoders_in_training_have_their_tables_and_charts(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(README)
    write_encoders(tmp_path / "results")
    text = tables(tmp_path)
    lines = text.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("| keys | mode | steps | flashgen | SDPA flash "))
    assert lines[at].count("|") == lines[at + 2].count("|")
    assert lines[at + 2 : at + 6] == [
        "| no | eager | 3 | 250.0 | 200.0 | 240.0 | - | - | - | 100.0 | 1.04 | 2.50 | 20.0 | 3.0000 | 0.033 | 0.033 |",
        "| no | torch.compile | 3 | 250.0 | 200.0 | 240.0 | - | 230.0 | 200.0 | 100.0 | 1.04 | 2.50 | 20.0 | 3.0000 | "
        "0.033 | 0.033 |",
        "| masked | eager | 3 | 250.0 | - | - | out of memory | - | - | - | - | - | 20.0 | 3.0000 | - | - |",
        "| masked | torch.compile | 3 | 250.0 | - | 240.0 | 200.0 | 230.0 | 200.0 | 100.0 | 1.04 | 2.50 | 20.0 | "
        "3.0000 | 0.033 | 0.033 |",
    ]
    assert "SDPA without a name is what torch chooses: flash_attention." in text
    assert "| flashgen | eager | 3 | 15.3 | 250000 | 20.0 | 6.7000 | 50.0% |" in lines
    assert (
        "3 steps, 24 images that no step saw before: guessing gives 50% with two standard deviations of 20%, so "
        in text
    )
    assert "is not beyond chance" in text
    assert (
        "| BERT-large trains 15% faster than the record of MLPerf 1.1, at 512 | 1.04 times torch's fastest "
        "attention, eager; 1.04 times torch's fastest attention, torch.compile; 1.04 times torch's fastest attention, "
        "torch.compile and masked keys |"
    ) in lines
    assert (
        "| 65536 | eager | 250 | 200 | 240 | out of memory | - | 1.04 | 20.0 | 40.0 | 3.0000 | 0.033 | 0.033 |" in lines
    )
    assert (
        "| sequences of 64k are trained (Path-256) | GPT-2 trains at 65536, 1.04 times the faster SDPA, torch.compile; "
        "standard attention: out of memory |"
    ) in lines
    names = {path.name for path in (tmp_path / "docs/img").iterdir()}
    assert names == {"bert_test_gpu.png", "paths_test_gpu.png"}
    # with a mask, SDPA's own choice and its efficient backend share a column: 250 of 230
    summary = (tmp_path / "README.md").read_text()
    assert "| BERT-large training, tokens/s | 3 | 1.04 | 1.04 | 1.25 | 1.25 | 1.04 | 2.50 | 1.09 |" in summary
    assert run(tmp_path, "--check") == 0


@pytest.mark.usefixtures("text_alone")
def test_standard_attention_that_is_recomputed_is_marked(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(README)
    write_training(tmp_path / "results")
    path = tmp_path / "results" / SHARED.slug / "training.csv"
    path.write_text(path.read_text().replace("standard,1.0,done", '"standard",1.0,"done, attention recomputed"'))
    text = tables(tmp_path)
    assert r"| 1024 | eager | 400 | 300 | 320 | 160\* | 2.50 |" in text
    assert r"A rate marked with \* is that of standard attention that computes its scores a second time" in text


@pytest.mark.parametrize("text", ["nothing", f"{report.END}{report.START}", README + README])
def test_markers_must_be_there_once(text: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        report.insert(text, "x")


def test_pages_are_what_the_committed_results_give() -> None:
    devices = report.load(report.RESULTS)
    readme = (ROOT / "README.md").read_text()
    assert report.insert(readme, report.summary_of(devices)) == readme, "run python -m benchmarks.report"
    told = report.page_of(devices, "img") + report.searches_of(report.RESULTS)
    assert told == (ROOT / report.PAGE).read_text(), "run python -m benchmarks.report"
    page, marks = (ROOT / report.SPREAD_PAGE).read_text(), (spread_tables.START, spread_tables.END)
    assert report.insert(page, spread_tables.page(devices), marks) == page, "run python -m benchmarks.report"
    for slug, rows in devices.items():
        for name in report.charts_of(slug, rows):
            assert (ROOT / report.IMAGES / name).is_file()
