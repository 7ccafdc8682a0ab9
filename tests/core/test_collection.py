"""The garbage collector, paused by several threads at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from flashgen.core import collection
from flashgen.core.collection import CollectionPaused


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_nobody_collects_until_the_last_one_has_left() -> None:
    first, second = CollectionPaused(), CollectionPaused()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert not gc.isenabled()
    second.__exit__()
    assert gc.isenabled()


def test_one_that_comes_while_another_leaves_lets_it_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = CollectionPaused(), CollectionPaused()
    waiting, ask = [first], gc.isenabled

    def isenabled() -> bool:
        found = ask()
        while waiting:  # another thread has its turn here
            waiting.pop().__exit__()
        return found

    first.__enter__()
    monkeypatch.setattr(collection.gc, "isenabled", isenabled)
    second.__enter__()
    while waiting:
        waiting.pop().__exit__()
    assert not ask()
    second.__exit__()
    assert ask()


def test_what_was_off_stays_off() -> None:
    gc.disable()
    with CollectionPaused(), CollectionPaused():
        assert not gc.isenabled()
    assert not gc.isenabled()
