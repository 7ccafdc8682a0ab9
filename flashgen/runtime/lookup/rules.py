"""Rules for calls without a record: which of the configs that won in a class serves at which sizes.

`tuning_db/<device>/fallback.json` has a decision tree for each class where that was better than the nearest record, and
of all others what the nearest record is expected to cost (`flashgen.tuning.learned_fallback` writes it). A tree asks
for sizes; a leaf names the config of a record. It serves in the place of the nearest record where that one ships, too:
a record of the user is not overruled.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.codegen.families import validate
from flashgen.codegen.family import Sizes
from flashgen.core.checks import MAX_SIZE
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import DatabaseError, FlashgenError
from flashgen.core.quoting import printable, shown
from flashgen.core.settings import shipped

FILE = "fallback.json"
VERSION = 1

QUESTIONS = ("seqlen_q", "seqlen_k", "heads", "group", "rows")
"""What a tree asks for, in the order of `answers`: both lengths, heads of all batch elements, heads that share keys,
and query rows of all heads."""

TREE, NEAREST = "tree", "nearest"
"""What serves a class: the decision tree, or the nearest record."""

MAX_DEPTH = 8

Answers = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The time of what serves over that of the best config, learned by leaving each of so many workloads out.

    `mean` is the geometric mean and `worst` the most. Of `timed` workloads that is by measured times, of the others an
    estimate.
    """

    mean: float
    worst: float
    workloads: int
    timed: int

    def __str__(self) -> str:
        how = f"{self.timed} of them timed" if self.timed else "estimated"
        each = f"{self.workloads} workloads" if self.workloads > 1 else "1 workload"
        return f"{self.mean:.3f} times the best config's time, at most {self.worst:.2f} ({each} left out, {how})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """The config that serves."""

    config: Config
    expected: Expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A question, the largest answer that goes `below`, and both ways."""

    question: str
    most: int
    below: Node
    above: Node


Node = Leaf | Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What serves a class: by a tree, or, where that is None, by the nearest record."""

    tree: Node | None
    nearest: Expected | None
    why: str

    def leaf(self, answers: Answers) -> Leaf | None:
        """What the tree says at some sizes; None without one."""
        node = self.tree
        while node.__class__ is Split:
            node = node.below if answers[_PLACES[node.question]] <= node.most else node.above
        return node  # type: ignore[return-value]

    def words(self, answers: Answers) -> str:
        """The questions on the way to a leaf, as they are answered at some sizes."""
        found, node = [], self.tree
        while isinstance(node, Split):
            is_below = answers[_PLACES[node.question]] <= node.most
            found.append(f"{node.question} {'<=' if is_below else '>'} {node.most}")
            node = node.below if is_below else node.above
        return " and ".join(found) or "all sizes"


_PLACES = {name: place for place, name in enumerate(QUESTIONS)}


def answers(sizes: Sizes) -> Answers:
    """What a tree is told of a call."""
    heads = sizes.batch * sizes.nheads
    return sizes.seqlen_q, sizes.seqlen_k, heads, sizes.nheads // sizes.nheads_k, heads * sizes.seqlen_q


def shipped_rules(device: Device) -> Mapping[str, Rule]:
    """The rules that ship for a device, by `Specialization.workload_class`; none where it has no file.

    A file that cannot be read is left out with one warning.
    """
    return _rules_in(shipped("tuning_db"), device)


@functools.lru_cache(maxsize=16)
def _rules_in(folder: Path, device: Device) -> Mapping[str, Rule]:
    own = device.folder  # read first: the first call of a process waits for it
    for path in sorted(folder.glob(f"*/{FILE}"), key=lambda path: (path.parent.name != own, path)):
        try:
            identity, rules = read_rules(path)
        except FlashgenError as error:
            warnings.warn(
                printable(f"rules for calls without a record are not used: {error}", lines=True), stacklevel=2
            )
            continue
        if identity in (device.identity, device.usual_identity):
            return rules
    return {}


def read_rules(path: Path, *, every: bool = False) -> tuple[str, dict[str, Rule]]:
    """The identity of the device of a file, and the rules in it; with `every` also trees that do not serve.

    Raises:
        DatabaseError: it is none, or of another version.
        ConfigError: a config breaks a rule of its family.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            raise DatabaseError(f"a file of rules is of version {VERSION}, got {shown(content['version'])} in {path}")
        return str(content["device"]["identity"]), {
            name: _rule(each, every=every) for name, each in content["classes"].items()
        }
    except (OSError, ValueError, RecursionError) as error:
        raise DatabaseError(f"a file of rules is JSON that can be read; {path}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise DatabaseError(f"a file of rules has a device and classes; {path}: {shown(str(error))}") from error


def _rule(content: dict[str, Any], *, every: bool) -> Rule:
    configs = [validate(Config.of(each["family"], each["knobs"])) for each in content["configs"]]
    is_used = content["tree"] is not None and (every or content["serves"] == TREE)
    tree = _node(content["tree"], configs, MAX_DEPTH) if is_used else None
    nearest = content["nearest"]
    return Rule(tree=tree, nearest=nearest and _expected(nearest), why=str(content["why"]))


def _node(content: dict[str, Any], configs: list[Config], depth: int) -> Node:
    if "config" in content:
        number = content["config"]
        if type(number) is not int or not 0 <= number < len(configs):
            raise DatabaseError(f"a leaf names one of {len(configs)} configs, got {shown(number)}")
        return Leaf(config=configs[number], expected=_expected(content["expected"]))
    question, most = content["if"], content["at_most"]
    if question not in QUESTIONS or type(most) is not int or not 0 <= most <= MAX_SIZE**3 or not depth:
        raise DatabaseError(
            f"a question is one of {', '.join(QUESTIONS)} with a size, {MAX_DEPTH} deep at most, "
            f"got {shown(question)} and {shown(most)}"
        )
    below, above = (_node(content[way], configs, depth - 1) for way in ("then", "else"))
    return Split(question=question, most=most, below=below, above=above)


def _expected(content: dict[str, Any]) -> Expected:
    ratios = [content[name] for name in ("mean", "worst")]
    counts = [content[name] for name in ("workloads", "timed")]
    if not all(type(each) in (int, float) and 1 <= each < float("inf") for each in ratios):
        raise DatabaseError(f"an expected ratio is finite and at least 1, got {shown(ratios)}")
    if not all(type(each) is int and each >= 0 for each in counts):
        raise DatabaseError(f"workloads are counted, got {shown(counts)}")
    return Expected(mean=ratios[0], worst=ratios[1], workloads=counts[0], timed=counts[1])


def leaves(node: Node | None) -> Iterator[Leaf]:
    """Those of a tree, from below to above."""
    if isinstance(node, Split):
        yield from leaves(node.below)
        yield from leaves(node.above)
    elif node is not None:
        yield node
