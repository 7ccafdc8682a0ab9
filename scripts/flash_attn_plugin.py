"""The part of `scripts.flash_attn_tests` inside of pytest: flashgen as `flash_attn`, a sample, a limit and a log."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashgen
import flashgen.flash_attn
import flashgen.flash_attn_interface
from flashgen import reference
from flashgen.core.errors import UnsupportedError
from flashgen.core.settings import settings

OPTIONS: dict[str, Any] = json.loads(os.environ["FLASH_ATTN_TESTS"])
LIMIT = "the time limit came first"
MOST_SCORES, MOST_COLUMNS = 300 * 300, 128
"""Of a case on a CPU: scores of a head, and its head_dim."""

REPEATED = {"test_flash_attn_race_condition"}
"""Left out on a CPU, where hundreds of equal calls show nothing and take minutes."""

LEFT_OUT = {"test_flash_attn_generator_arg_must_be_none", "test_flash3_bw_compatibility"}
"""Tests of FlashAttention's C++ ops, which are no functions of its modules; and those without a case that fits."""

CHECKED = {"test_flash_attn_kvcache_paged_block_table_bounds"}
"""Run with FLASHGEN_CHECKS=1: they ask for errors about lengths on the GPU, for which flashgen waits only then."""

REASON_CHARACTERS = 300


def pytest_configure(config: pytest.Config) -> None:
    """Put flashgen where FlashAttention is imported from; on a CPU the references, and what tests ask of a GPU."""
    if OPTIONS["device"] == "cpu":
        for name in reference.__all__:
            setattr(flashgen, name, getattr(reference, name))
        torch.cuda.get_device_capability = lambda device=None: (9, 0)
        torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(total_memory=2**40)
    flashgen.flash_attn.install()
    flashgen.flash_attn_interface.install()


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draw the sample of a function before there are items of it: of some there are 100,000.

    Every worker of xdist draws the same.
    """
    name, calls = metafunc.function.__name__, metafunc._calls
    fitting = [call for call in calls if OPTIONS["device"] == "cuda" or _is_small(name, call.params)]
    fitting = [call for call in fitting if OPTIONS["all"] or not _is_refused(call.params)]
    if calls and not fitting:
        LEFT_OUT.add(name)
    drawn = random.Random(f"{OPTIONS['seed']} {name}").sample(fitting, min(len(fitting), OPTIONS["sample"]))
    calls[:] = drawn


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the functions in turns."""
    turns: Counter[str] = Counter()
    order = []
    for item in items:
        order.append((turns[_name(item)], item))
        turns[_name(item)] += 1
    items[:] = [item for turn, item in sorted(order, key=lambda each: each[0]) if _name(item) not in LEFT_OUT]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin nothing after the limit."""
    if time.time() > OPTIONS["ends"]:
        pytest.skip(LIMIT)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Set what a test needs."""
    if _name(item) not in CHECKED:
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHGEN_CHECKS", "1")
        settings.cache_clear()
        try:
            return (yield)
        finally:
            patch.undo()
            settings.cache_clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Say in the report, which xdist sends on, what the error was."""
    report = yield
    error = None if call.excinfo is None else call.excinfo.value
    report.error = "" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0][:REASON_CHARACTERS]
    report.is_refusal = isinstance(error, UnsupportedError)
    report.function = _name(item)
    return report


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note a case that begins: a run that is ended says where it was."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _note(nodeid.rpartition("::")[2].partition("[")[0], nodeid, "not ended", "")


def pytest_runtest_logreport(report: Any) -> None:
    """Note a case as soon as it is known what came of it; of xdist, the process that has all reports does."""
    if "PYTEST_XDIST_WORKER" in os.environ or not (report.when == "call" or (report.when == "setup" and report.error)):
        return
    outcome = "refused" if report.outcome == "failed" and report.is_refusal else report.outcome
    outcome = "not started" if outcome == "skipped" and LIMIT in report.error else outcome
    _note(report.function, report.nodeid, outcome, report.error)


def _note(function: str, case: str, outcome: str, reason: str) -> None:
    line = {"function": function, "case": case, "outcome": outcome, "reason": reason}
    with open(OPTIONS["log"], "a") as file:
        file.write(json.dumps(line) + "\n")


def _name(item: pytest.Item) -> str:
    return item.nodeid.rpartition("::")[2].partition("[")[0]


def _is_small(function: str, given: dict[str, Any]) -> bool:
    scores = max(given.get("seqlen_q", 1) * given.get("seqlen_k", 1), given.get("seqlen", 1) ** 2)
    return bool(function not in REPEATED and scores <= MOST_SCORES and given.get("d", 32) <= MOST_COLUMNS)


def _is_refused(given: dict[str, Any]) -> bool:
    return bool(given.get("has_qv")) or "float8" in str(given.get("dtype", ""))
