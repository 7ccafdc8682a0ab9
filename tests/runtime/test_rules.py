"""Rules for calls without a record: what they prefer to the nearest one, what they leave alone, and hostile files."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.codegen.family import Sizes
from flashgen.core.device import Device, find_device
from flashgen.core.errors import FlashgenError
from flashgen.core.workload import Workload
from flashgen.db.layers import Layers
from flashgen.measure.protocol import specialization
from flashgen.runtime.lookup import rules
from flashgen.runtime.lookup.by_sizes import SizesLookup
from flashgen.runtime.lookup.explanation import explain
from flashgen.runtime.lookup.ladder import NEAREST_HERE, Served, resolve
from flashgen.runtime.lookup.records import Records
from flashgen.runtime.lookup.rules import FILE, Expected, Leaf, Rule, Split, answers, read_rules, shipped_rules
from tests.db.samples import H200
from tests.runtime.ladders import CAUSAL, Ladder, config, measured

EXPECTED = Expected(mean=1.004, worst=1.02, workloads=9, timed=3)
NEAREST = Expected(mean=1.03, worst=1.11, workloads=9, timed=3)
SHORT, LONG, USUAL, OWN = config(1), config(32), config(8), config(0)
TREE = Split(
    question="seqlen_k",
    most=3000,
    below=Leaf(config=SHORT, expected=EXPECTED),
    above=Leaf(config=LONG, expected=replace(EXPECTED, mean=1.01)),
)
RULE = Rule(tree=TREE, nearest=NEAREST, why="planted")
CLASS = CAUSAL.specialization.workload_class
ROOT = Path(__file__).parents[2]


def of_class(device: Device, rule: Rule = RULE) -> Mapping[str, Rule]:
    return {CLASS: rule}


def shape(seqlen: int, batch: int = 4) -> Workload:
    return CAUSAL.with_shape(seqlen_q=seqlen, seqlen_k=seqlen, batch=batch)


@pytest.fixture
def served(ladder: Ladder) -> Callable[..., Served]:
    """The nearest record to 2048 has another config than the rule names, and so has that to 8192."""
    ladder.ship(
        measured(shape(1024), config=SHORT), measured(shape(2000), config=USUAL), measured(shape(9000), config=LONG)
    )

    def ask(workload: Workload, rule: Rule | None = RULE) -> Served:
        known = {} if rule is None else {CLASS: rule}
        with Layers.open([ladder.user_path]) as layers:
            return resolve(workload, workload.specialization, H200, Records(layers, lambda device: known))

    return ask


def test_the_rule_comes_before_the_nearest_record_where_both_ship(served: Callable[..., Served]) -> None:
    found = served(shape(2048))
    assert (found.rung, found.config, found.rule) == (NEAREST_HERE, SHORT, RULE)
    assert found.record is not None
    assert found.record.workload == shape(1024), "its record serves, so that backends of torch are known, too"
    assert served(shape(3072)).config == LONG
    assert served(shape(2048), None).config == served(shape(3072), None).config == USUAL
    assert served(shape(2000)).is_exact


def test_what_no_record_has_or_cannot_serve_leaves_the_nearest_record(served: Callable[..., Served]) -> None:
    for leaf in (OWN, SHORT.replace(block_m=64)):
        rule = replace(RULE, tree=Leaf(config=leaf, expected=EXPECTED))
        found = served(shape(2048), rule)
        assert (found.config, found.rung) == (USUAL, NEAREST_HERE)
    assert served(shape(2048), replace(RULE, tree=None)).config == USUAL


def test_a_record_of_the_user_that_is_as_near_is_not_overruled(ladder: Ladder, served: Callable[..., Served]) -> None:
    ladder.user(measured(shape(2048 - 1), config=OWN))
    assert served(shape(2048)).config == OWN
    assert served(shape(1100)).config == SHORT, "one that is farther away is"


def test_other_classes_and_devices_have_no_part_in_it(ladder: Ladder, served: Callable[..., Served]) -> None:
    full = replace(shape(2048), causal=False)
    ladder.ship(measured(replace(shape(2000), causal=False), config=USUAL), measured(shape(1024), config=SHORT))
    assert served(full).config == USUAL
    with Layers.open([ladder.user_path]) as layers:
        elsewhere = resolve(shape(2048), CAUSAL.specialization, find_device("h100"), Records(layers, of_class))
    assert (elsewhere.rung, elsewhere.config) == (6, USUAL)


def test_explain_says_why_and_what_is_expected(ladder: Ladder, served: Callable[..., Served]) -> None:
    assert served(shape(2048)).rung == NEAREST_HERE
    workload = shape(2048)
    with Layers.open([ladder.user_path]) as layers:
        found = explain(workload, workload.specialization, H200, Records(layers, of_class))
        nearest = replace(RULE, tree=None)
        plain = explain(workload, workload.specialization, H200, Records(layers, lambda device: {CLASS: nearest}))
        none = explain(workload, workload.specialization, H200, Records(layers, lambda device: {}))
    assert "chosen     by the rule of its class, for seqlen_k <= 3000" in str(found)
    assert "expected   1.004 times the best config's time, at most 1.02 (9 workloads left out, 3 of them timed)" in str(
        found
    )
    facts = found.to_dict()
    assert (facts["expected_ratio"], facts["expected_worst_ratio"]) == (1.004, 1.02)
    assert "chosen" not in str(plain)
    assert "expected   1.030 times the best" in str(plain)
    assert "expected" not in str(none)
    assert none.to_dict()["chosen_by"] is None


def test_open_look_ups_answer_as_the_ladder(ladder: Ladder) -> None:
    draw = random.Random(7)
    configs = [SHORT, LONG, USUAL, OWN]
    ladder.ship(
        *(
            measured(shape(draw.randrange(64, 9000), draw.choice((1, 2, 8))), config=draw.choice(configs))
            for _ in range(12)
        )
    )
    ladder.user(*(measured(shape(draw.randrange(64, 9000), 3), config=draw.choice(configs)) for _ in range(3)))
    spec = specialization(CAUSAL)
    by_rule = 0
    with Layers.open([ladder.user_path]) as layers:
        records, plain = Records(layers, of_class), Records(layers, lambda device: {})
        lookup = SizesLookup(records.choices(spec, H200), CAUSAL, spec, H200, records)
        for _ in range(300):
            workload = shape(draw.randrange(300, 9000), draw.choice((1, 2, 4, 16)))
            found = lookup.config(Sizes.of(workload), generated_only=True)
            expected = resolve(workload, spec, H200, records)
            assert found == (None if expected.is_exact else expected.config)
            by_rule += expected.config != resolve(workload, spec, H200, plain).config
    assert by_rule > 50


# --- trees and files -----------------------------------------------------------------------------------------------


def test_a_tree_is_asked_with_the_sizes_of_a_call() -> None:
    sizes = Sizes.of(Workload.parse("b3-h32-hk8-sq100-sk3001-d128-causal"))
    assert dict(zip(rules.QUESTIONS, answers(sizes), strict=True)) == {
        "seqlen_q": 100,
        "seqlen_k": 3001,
        "heads": 96,
        "group": 4,
        "rows": 9600,
    }
    leaf = RULE.leaf(answers(sizes))
    assert leaf is not None
    assert (leaf.config, RULE.words(answers(sizes))) == (LONG, "seqlen_k > 3000")
    assert replace(RULE, tree=None).leaf(answers(sizes)) is None
    assert replace(RULE, tree=leaf).words(answers(sizes)) == "all sizes"


def content(serves: str = "tree") -> dict[str, object]:
    expected = {"mean": 1.01, "worst": 1.05, "workloads": 8, "timed": 2}
    leaves = [{"config": number, "expected": expected} for number in (0, 1)]
    return {
        "version": 1,
        "device": {"name": "NVIDIA H200", "identity": H200.identity, "arch": "sm90"},
        "classes": {
            CLASS: {
                "serves": serves,
                "why": "planted",
                "tree": {"if": "heads", "at_most": 64, "then": leaves[0], "else": leaves[1]},
                "nearest": expected,
                "configs": [{"family": each.family, "knobs": dict(each.knobs)} for each in (SHORT, LONG)],
            }
        },
    }


def test_a_file_comes_back_and_a_tree_that_does_not_serve_only_where_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_text(json.dumps(content()))
    identity, found = read_rules(path)
    assert identity == H200.identity
    assert isinstance(found[CLASS].tree, Split)
    path.write_text(json.dumps(content("nearest")))
    assert read_rules(path)[1][CLASS].tree is None
    assert isinstance(read_rules(path, every=True)[1][CLASS].tree, Split)


def test_a_bad_file_costs_a_warning_and_another_device_s_file_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "shipped", lambda name: tmp_path)
    for name, text in (("a", "["), ("b", json.dumps(content()))):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_text(text)
    with pytest.warns(UserWarning, match="rules for calls without a record are not used"):
        assert shipped_rules(H200).keys() == {CLASS}
    with pytest.warns(UserWarning, match="not used"):
        assert shipped_rules(find_device("h100")) == {}


@pytest.mark.filterwarnings("error")
def test_a_device_s_own_folder_is_read_first_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "shipped", lambda name: tmp_path)
    for name, text in (("a", "["), (H200.folder, json.dumps(content()))):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_text(text)
    assert shipped_rules(H200).keys() == {CLASS}


def _set(path: str, value: object) -> Callable[[dict[str, object]], None]:
    def change(whole: dict[str, object]) -> None:
        *way, last = path.split("/")
        node = whole["classes"][CLASS]  # type: ignore[index]
        for name in way:
            node = node[name]
        node[last] = value

    return change


def deep(whole: dict[str, object]) -> None:
    one = whole["classes"][CLASS]  # type: ignore[index]
    for _ in range(rules.MAX_DEPTH + 1):
        one["tree"] = {"if": "heads", "at_most": 1, "then": one["tree"], "else": one["tree"]}


@pytest.mark.parametrize(
    "change",
    [
        _set("tree/if", "__class__"),
        _set("tree/at_most", 1.5),
        _set("tree/at_most", -1),
        _set("tree/then", {"config": 2, "expected": {}}),
        _set("tree/then", {"config": -1}),
        _set("tree/then", {"config": True}),
        _set("tree/then", []),
        _set("nearest", {"mean": float("nan"), "worst": 1, "workloads": 1, "timed": 0}),
        _set("nearest", {"mean": 0.5, "worst": 1, "workloads": 1, "timed": 0}),
        _set("nearest", {"mean": 1, "worst": 1, "workloads": "all", "timed": 0}),
        _set("configs", [{"family": "portable_forward", "knobs": {"block_m": "x"}}] * 2),
        lambda whole: whole.update(version=2),
        lambda whole: whole.update(classes=[]),
        deep,
    ],
)
def test_a_file_that_breaks_a_rule_is_refused(change: Callable[[dict[str, object]], None], tmp_path: Path) -> None:
    whole = content()
    change(whole)
    path = tmp_path / FILE
    path.write_text(json.dumps(whole))
    with pytest.raises(FlashgenError):
        read_rules(path)


def test_the_shipped_rules_name_configs_of_records_of_their_class(tmp_path: Path) -> None:
    with Layers.open([tmp_path / "none.sqlite3"]) as layers:
        known = {(r.workload.specialization.workload_class, r.config) for r, _ in layers.records(provenance="measured")}
    for path in sorted((ROOT / "tuning_db").glob(f"*/{FILE}")):
        _, found = read_rules(path, every=True)
        assert found
        for name, rule in found.items():
            assert {(name, leaf.config) for leaf in rules.leaves(rule.tree)} <= known
