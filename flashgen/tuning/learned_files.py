"""What was learned from runs, as files that ship: JSON of what serves and where it comes from, CSV of each workload."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import TuningError
from flashgen.core.folders import write_public
from flashgen.core.search_log import SearchLog
from flashgen.runtime.lookup import rules
from flashgen.runtime.lookup.rules import Expected, Node, Split
from flashgen.tuning import learned_fallback, learned_seeds, seed_lists
from flashgen.tuning.learned_fallback import DEFAULT, FREQUENT, LearnedRule
from flashgen.tuning.learned_seeds import LearnedList, is_near

KINDS = ("default", "hand", "generated", "left_out")
WAYS = (DEFAULT, FREQUENT, rules.NEAREST, rules.TREE)

DIGITS = 4
"""Of a ratio: more than a clock has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """From what something was learned: a device, so many records, tables with their files, and the commit of both."""

    device: Device
    records: int
    tables: tuple[tuple[str, SearchLog], ...]
    commit: str = ""

    def to_json(self) -> dict[str, object]:
        """As a file has it: the tables one by one, and how many searches there were, which had no plan of a table."""
        planned = [(name, log.search.workload.key, _kind(log), log) for name, log in self.tables if log.search]
        searches = [log for _, log in self.tables if not _kind(log)]
        return {
            "device": {"name": self.device.name, "identity": self.device.identity, "arch": self.device.arch},
            "learned_from": {
                "commit": self.commit,
                "records": self.records,
                "tables": [
                    {"file": name, "workload": key, "kind": kind, "configs": len(log.trials)}
                    for name, key, kind, log in planned
                    if kind
                ],
                "searches": {"count": len(searches), "trials": sum(len(log.trials) for log in searches)},
            },
        }


def _kind(log: SearchLog) -> object:
    """What plan a table was measured by; nothing of a search."""
    return dict(log.search.settings).get("kind") if log.search else None


def seeds_text(lists: Sequence[LearnedList], learned: Learned) -> str:
    """The file of lists that `tuning.seed_lists` reads; `near` counts workloads with a config near their best."""
    content = {
        "version": seed_lists.VERSION,
        **learned.to_json(),
        "rule": {"within": learned_seeds.WITHIN, "most": learned_seeds.MOST},
        "classes": {
            each.name: {
                "serves": each.serves,
                "why": each.why,
                "configs": [seed_lists.config_json(config) for config in each.configs],
                "hand_written_configs": each.hand_configs,
                "workloads": len(each.judged),
                "near": {kind: sum(is_near(getattr(judged, kind)) for judged in each.judged) for kind in KINDS},
            }
            for each in lists
        },
    }
    return lines(content)


def seeds_csv(lists: Sequence[LearnedList]) -> str:
    """What each list leaves a workload, a line for each: ratios to the best that is known, empty where nobody knows."""
    rows = (
        (each.name, judged.workload, judged.timed, *(_cell(getattr(judged, kind)) for kind in KINDS))
        for each in lists
        for judged in each.judged
    )
    return _csv(("class", "workload", "timed_configs", *KINDS), rows)


def rules_csv(found: Sequence[LearnedRule]) -> str:
    """What each way to choose costs a workload that was left out, a line for each; `timed` are measured times."""
    rows = (
        (each.name, key, int(timed), *(_cell(_of(each, way, number)) for way in WAYS))
        for each in found
        for number, (key, timed) in enumerate(zip(each.workloads, each.timed, strict=True))
    )
    return _csv(("class", "workload", "timed", *WAYS), rows)


def _of(learned: LearnedRule, way: str, number: int) -> float | None:
    return learned.outcomes[way].ratios[number] if way in learned.outcomes else None


def _csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def _cell(ratio: float | None) -> str:
    """A config that was tried and failed is as good as none."""
    return "" if ratio is None or math.isinf(ratio) else f"{ratio:.{DIGITS}f}"


def rules_text(found: Sequence[LearnedRule], learned: Learned) -> str:
    """The file of rules that `runtime.lookup.rules` reads, which is short: the first call of a process waits for it."""
    content = {
        "version": rules.VERSION,
        **learned.to_json(),
        "rule": {"least_workloads": learned_fallback.LEAST_WORKLOADS, "least_timed": learned_fallback.LEAST_TIMED},
        "classes": {each.name: _rule_json(each) for each in found},
    }
    return lines(content)


def _rule_json(learned: LearnedRule) -> dict[str, object]:
    configs = list(dict.fromkeys(leaf.config for leaf in rules.leaves(learned.rule.tree)))
    nearest = learned.rule.nearest
    return {
        "serves": learned.serves,
        "why": learned.rule.why,
        "tree": None if learned.rule.tree is None else _tree_json(learned.rule.tree, configs),
        "nearest": None if nearest is None else _expected_json(nearest),
        "configs": [seed_lists.config_json(config) for config in configs],
    }


def _tree_json(node: Node, configs: Sequence[Config]) -> dict[str, object]:
    if not isinstance(node, Split):
        return {"config": configs.index(node.config), "expected": _expected_json(node.expected)}
    ways = {"then": _tree_json(node.below, configs), "else": _tree_json(node.above, configs)}
    return {"if": node.question, "at_most": node.most, **ways}


def _expected_json(expected: Expected) -> dict[str, object]:
    return {**asdict(expected), "mean": round(expected.mean, DIGITS), "worst": round(expected.worst, DIGITS)}


def lines(value: object, indent: str = "") -> str:
    """JSON in which what has nothing nested, and what is an item of a list, is one line."""
    inner = indent + " "
    if isinstance(value, dict) and any(isinstance(each, (dict, list)) for each in value.values()):
        parts = [f"{inner}{json.dumps(str(name))}: {lines(each, inner)}" for name, each in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}" + ("" if indent else "\n")
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"{inner}{json.dumps(each)}" for each in value) + f"\n{indent}]"
    return json.dumps(value)


def write(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        TuningError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_public(path, text.encode())
    except OSError as error:
        raise TuningError(f"what was learned needs a place that can be written, got {path}: {error}") from error
