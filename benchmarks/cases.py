"""What benchmarks that race one case after the other share: shards, a time limit, and going on with a file."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from benchmarks.exit_codes import MISSING, STOPPED
from benchmarks.prepared import release
from benchmarks.provenance import add_arguments, add_shard_argument
from benchmarks.results import ResultsFile, Subject, left_of, subject_of
from benchmarks.time_limit import TimeLimit
from flashgen.core.workload import Workload
from flashgen.tuning.shards import Shard


class Case(Protocol):
    """What is raced; its workload has a profile of lengths."""

    @property
    def workload(self) -> Workload:
        """The key of its rows."""


C = TypeVar("C", bound=Case)


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is left to do of a file of results, and how long.

    Args:
        file: rows of `commit` that are there are not measured again.
        impls: names; a case that has a row of any is done.
        shard: the cases of this process.
        limit: when no further case is begun.
    """

    file: ResultsFile
    commit: str
    impls: Sequence[str]
    shard: Shard
    limit: TimeLimit

    def left(self, cases: Sequence[C], suite_of: Callable[[C], str]) -> list[C]:
        """The cases of this process that have no row."""

        def subjects_of(case: C) -> list[Subject]:
            key, profile = case.workload.key, case.workload.lengths
            return [subject_of(suite_of(case), key, impl, profile) for impl in self.impls]

        return left_of(cases[self.shard.index :: self.shard.count], subjects_of, self.file.done(self.commit))

    def race(self, cases: Sequence[C], suite_of: Callable[[C], str], one: Callable[[C], bool]) -> int:
        """Race each case with `one`, which says whether flashgen has its row; returns the exit code."""
        missing = False
        for case in self.left(cases, suite_of):
            if not self.limit.has_room():
                print("stopped at the time limit: run again with --append")
                return STOPPED
            print(case.workload.key, flush=True)
            missing = not one(case) or missing
            release()
            self.limit.part_ended()
        print(f"{self.file.path}: {len(self.file.rows)} rows")
        return MISSING if missing else 0


def selected(cases: Sequence[C], patterns: Sequence[str]) -> list[C]:
    """The cases whose keys one of the patterns fits, all without patterns."""
    return [
        case for case in cases if not patterns or any(fnmatch.fnmatch(case.workload.key, each) for each in patterns)
    ]


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of such a benchmark."""
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="workload keys; repeatable")
    parser.add_argument("--impls", default="", help="names, separated by commas (default: all)")
    parser.add_argument("--window", type=float, default=0.075, help="seconds of a window (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="windows of each (default: %(default)s)")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start no race that would end later")
    add_shard_argument(parser)
    add_arguments(parser)
