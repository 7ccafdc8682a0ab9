"""Lists that ship: which class and device they are for, what a search takes from them, and files that are none."""

from __future__ import annotations

import csv
import json
import re
import statistics
from pathlib import Path

import pytest

from benchmarks.markdown import table_row
from flashgen.codegen.families import default_config, invalid
from flashgen.codegen.family import Sizes
from flashgen.core.device import find_device
from flashgen.core.errors import FlashgenError
from flashgen.core.workload import Specialization, Workload
from flashgen.measure.protocol import specialization
from flashgen.tuning import seed_lists
from flashgen.tuning.candidates import Candidates, seed_configs
from flashgen.tuning.context import Options
from flashgen.tuning.learned_files import KINDS, Learned, seeds_text
from flashgen.tuning.learned_seeds import MOST, LearnedList, is_near
from flashgen.tuning.seed_lists import FILE, GENERATED, HAND, as_valid, read_lists, seed_class, shipped_lists
from flashgen.tuning.starts import starting_points
from tests.tuning.fakes import H200

WORKLOAD = Workload.parse("b4-h16-s4096-d128")
FOUND = Candidates.of(WORKLOAD, H200)
HOPPER = next(space for space in FOUND.spaces if space.family == "hopper_forward").configs
LIST = HOPPER[50:53]
ROOT = Path(__file__).parents[2]
RULES_CSV = "fallback.csv"


def learned(serves: str = GENERATED, configs: tuple[object, ...] = LIST, device: str = "h200") -> str:
    one = LearnedList(
        name="fwd-16bit-d128-full",
        configs=configs,
        judged=(),
        hand_configs=3,
        serves=serves,
        why="planted",  # type: ignore[arg-type]
    )
    return seeds_text([one], Learned(device=find_device(device), records=2, tables=(), commit="abc"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(seed_lists, "shipped", lambda name: tmp_path)
    (tmp_path / "some_device").mkdir()
    return tmp_path


def put(folder: Path, text: str, device: str = "some_device") -> None:
    (folder / device).mkdir(exist_ok=True)
    (folder / device / FILE).write_text(text)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("fwd-bf16-d128-causal", "fwd-16bit-d128-causal"),
        ("fwd-fp16-d96-causal", "fwd-16bit-d128-causal"),
        ("fwd-bf16-d192-dv128-causal-window", "fwd-16bit-d256-window"),
        ("fwd-bf16-d40-window", "fwd-16bit-d64-window"),
        ("fwd-tf32-d64", "fwd-tf32-d64-full"),
        ("bwd-bf16-d128-causal-deterministic", "bwd-16bit-d128-causal"),
        ("fwd-bf16-d512-causal-softcap", "fwd-16bit-d512-causal-softcap"),
        ("fwd-bf16-d64-causal-sink-alibi", "fwd-16bit-d64-causal"),
        ("fwd-bf16-d64-keymask", "fwd-16bit-d64-full-scores"),
        ("bwd-bf16-d128-bias", "bwd-16bit-d128-full-scores"),
        ("fwd-bf16-d128-causal-varlen", "fwd-16bit-d128-causal-varlen"),
        ("dec-bf16-d128-page16", "dec-16bit-d128"),
    ],
)
def test_classes_are_of_directions_elements_widths_and_masks(key: str, name: str) -> None:
    assert seed_class(Specialization.parse(key)) == name


def test_a_search_begins_with_the_learned_list_in_place_of_the_hand_written_ones(folder: Path) -> None:
    put(folder, learned())
    sources = seed_configs(FOUND, WORKLOAD, H200, 6)
    assert tuple(config for config, source in sources if source == "seed") == LIST
    kinds = list(dict.fromkeys(source for _, source in starting_points(FOUND, WORKLOAD, H200, Options())))
    assert kinds == ["default", "seed", "model"]
    nothing = starting_points(FOUND, WORKLOAD, H200, Options(from_nothing=True))
    assert nothing == []


@pytest.mark.parametrize("text", [learned(HAND), learned(device="b200"), "{}", "[", '{"version": 7}', None])
def test_else_the_hand_written_ones_serve(text: str | None, folder: Path) -> None:
    if text is not None:
        put(folder, text)
    by_hand = [each for each in seed_configs(FOUND, WORKLOAD, H200, 6, seed_lists.by_hand) if each[1] == "seed"]
    if text in ("{}", "[", '{"version": 7}'):
        with pytest.warns(UserWarning, match="seed lists are not used"):
            found = seed_configs(FOUND, WORKLOAD, H200, 6)
    else:
        found = seed_configs(FOUND, WORKLOAD, H200, 6)
    assert [each for each in found if each[1] == "seed"] == by_hand
    assert len(by_hand) > len(LIST)


def test_a_list_without_configs_says_that_the_default_is_enough(folder: Path) -> None:
    put(folder, learned(configs=()))
    assert not [each for each in seed_configs(FOUND, WORKLOAD, H200, 6) if each[1] == "seed"]


def test_a_search_of_other_families_keeps_their_own_lists(folder: Path) -> None:
    workload = Workload.parse("bwd-b4-h16-s4096-d128")
    portable = Candidates.of(workload, H200, ("portable_backward_fused",))
    text = learned().replace("fwd-16bit-d128-full", "bwd-16bit-d128-full")
    put(folder, text)
    found = [each for each in seed_configs(portable, workload, H200, 6) if each[1] == "seed"]
    assert found
    assert {config.family for config, _ in found} == {"portable_backward_fused"}


def test_the_lists_of_the_device_come_before_those_of_its_architecture(folder: Path) -> None:
    put(folder, learned(configs=LIST[:1], device="h200"), "a")
    assert shipped_lists(find_device("h100")) == {"fwd-16bit-d128-full": LIST[:1]}
    seed_lists._lists_in.cache_clear()
    put(folder, learned(configs=LIST[1:2], device="h100"), "b")
    assert shipped_lists(find_device("h100")) == {"fwd-16bit-d128-full": LIST[1:2]}
    assert shipped_lists(H200) == {"fwd-16bit-d128-full": LIST[:1]}
    assert shipped_lists(find_device("a100")) == {}


def test_configs_are_fitted_to_the_sizes_and_those_that_are_not_valid_are_left_out() -> None:
    short = Workload.parse("b4-h16-hk4-sq4-sk4096-d128-causal")
    spec, sizes = specialization(short), Sizes.of(short)
    default = default_config(spec, H200)
    causal = [default.replace(heads_per_group=heads) for heads in (2, 4, 16)]
    found = list(as_valid([*causal, causal[0]], spec, sizes, H200))
    assert len(found) == 3
    assert {config["packed_heads"] for config in found} == {4}
    assert list(as_valid(causal, spec, sizes, find_device("a100"))) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["classes"]["fwd-16bit-d128-full"]["configs"][0].pop("family"),
        lambda content: content["classes"]["fwd-16bit-d128-full"]["configs"][0]["knobs"].update(block_n=127),
        lambda content: content["classes"]["fwd-16bit-d128-full"]["configs"][0].update(family="__import__('os')"),
        lambda content: content["classes"]["fwd-16bit-d128-full"].pop("serves"),
        lambda content: content.update(classes=[1]),
        lambda content: content.pop("device"),
        lambda content: content.update(version="1"),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused(change: object, tmp_path: Path) -> None:
    content = json.loads(learned())
    change(content)  # type: ignore[operator]
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(FlashgenError):
        read_lists(tmp_path / FILE)


def test_the_shipped_lists_are_short_and_valid_for_their_class() -> None:
    for path in sorted((ROOT / "tuning_db").glob(f"*/{FILE}")):
        lists, rows = read_lists(path), list(csv.DictReader(path.with_suffix(".csv").read_text().splitlines()))
        assert lists.classes
        for name, configs in lists.classes.items():
            assert len(configs) <= 8
            specs = [specialization(Workload.parse(row["workload"])) for row in rows if row["class"] == name]
            assert all(any(invalid(config, spec, H200) is None for spec in specs) for config in configs)
            assert {seed_class(spec) for spec in specs} == {name}


def test_the_decision_has_the_figures_of_the_shipped_files() -> None:
    folder = ROOT / "tuning_db/nvidia_h200"
    page = " ".join((ROOT / "docs/decisions/learned-lists.md").read_text().split())
    rows = list(csv.DictReader((folder / "seed_configs.csv").read_text().splitlines()))
    near = {kind: sum(bool(row[kind]) and is_near(float(row[kind])) for row in rows) for kind in KINDS}
    classes = json.loads((folder / FILE).read_text())["classes"]
    taken = [each for each in classes.values() if each["serves"] == GENERATED]
    count = len(rows)
    assert f"| {near['generated']} of {count};" in page
    assert (
        f"| {near['left_out']} of {count}; by hand, knowing them, {near['hand']}; by the default alone "
        f"{near['default']} |" in page
    )
    timed = [row for row in rows if int(row["timed_configs"])]
    assert f"{count} workloads, of which {len(timed)} have times of other configs" in page
    assert all(row["generated"] for row in rows), "all are known"
    behind = [float(row["generated"]) - 1 for row in rows if not is_near(float(row["generated"]))]
    goal = next(part for part in page.split(" | ") if part.startswith(f"{near['generated']} of {count};"))
    assert sorted(re.findall(r"\d\.\d", goal)) == sorted(f"{100 * share:.1f}" for share in behind)
    workloads = sum(each["workloads"] for each in taken)
    assert f"{len(taken)} of {len(classes)} classes take the learned list, {workloads} of {count} workloads" in page
    assert sum(each["workloads"] for each in classes.values()) == count
    assert all(len(each["configs"]) <= MOST for each in classes.values())
    nearest = [
        float(row["nearest"])
        for row in csv.DictReader((folder / RULES_CSV).read_text().splitlines())
        if int(row["timed"])
    ]
    asked = f"| nearest record, {len(nearest)} timed workloads left out, mean and worst |"
    assert f"{asked} {statistics.geometric_mean(nearest):.3f} and {max(nearest):.2f} |" in page


def test_the_log_has_the_classes_of_the_shipped_files() -> None:
    folder = ROOT / "tuning_db/nvidia_h200"
    page = (ROOT / "docs/experiments/learned-lists.md").read_text()
    content = json.loads((folder / FILE).read_text())
    learned, classes = content["learned_from"], content["classes"]
    said = f"{learned['records']} records and {len(learned['tables'])} tables of an H200 (commit {learned['commit']},"
    assert said in " ".join(page.split())
    listed = [line for line in page.splitlines() if line.endswith(("| generated |", "| hand |"))]
    assert listed == [
        table_row([name, *map(str, (each["workloads"], *(each["near"][kind] for kind in KINDS))), *_lists_of(each)])
        for name, each in sorted(classes.items())
    ]
    rows = list(csv.DictReader((folder / FILE).with_suffix(".csv").read_text().splitlines()))
    timed = {
        kind: [float(row[kind]) for row in rows if row[kind] and int(row["timed_configs"])]
        for kind in ("default", "hand", "generated", "left_out")
    }
    words = " ".join(page.split())
    costs = {kind: f"{statistics.geometric_mean(ratios):.3f}" for kind, ratios in timed.items()}
    worst = {kind: f"{max(ratios):.2f}" for kind, ratios in timed.items()}
    assert f"the default costs {costs['default']} in the mean and {worst['default']} at most" in words
    assert f"hand-written lists {costs['hand']} and {worst['hand']}" in words
    assert f"learned ones {costs['generated']} and {worst['generated']}" in words
    assert f"without the workload {costs['left_out']} and {worst['left_out']}" in words


def _lists_of(learned: dict[str, object]) -> list[str]:
    return [str(learned["hand_written_configs"]), str(len(learned["configs"])), str(learned["serves"])]  # type: ignore[arg-type]
