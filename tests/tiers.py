"""Which cases of a test are in the default run; `make test-all` has the others, which are marked `exhaustive`.

Those stay that have the most features, and those that would notice lost data, wrong results or an open door. Others are
variants of the rule that these check: other shapes, other knobs, another device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

EXHAUSTIVE = pytest.mark.exhaustive


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """All cases of a `parametrize`, of which those behind the first ones are marked."""
    found = list(cases)
    assert 0 < count < len(found)
    return found[:count] + [_marked(case) for case in found[count:]]


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """All cases of a `parametrize`, of which those but the first one, and each so many behind it, are marked."""
    found = list(cases)
    assert 1 < step <= len(found)
    return [_marked(case) if number % step else case for number, case in enumerate(found)]


def only(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """All cases of a `parametrize`, of which those but the `kept` ones, by their values, are marked."""
    found = list(cases)
    values = [_parts(case)[0] for case in kept]
    stays = [_parts(case)[0] in values for case in found]
    assert 0 < sum(stays) == len(kept) < len(found), "a case that is none, or nothing to mark"
    return [case if stay else _marked(case) for case, stay in zip(found, stays, strict=True)]


def _marked(case: Any) -> Any:
    values, marks, name = _parts(case)
    return pytest.param(*values, marks=(*marks, EXHAUSTIVE), id=name)


def _parts(case: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], str | None]:
    """The values of a case, its marks and its name; a tuple has those of several arguments, without `pytest.param`."""
    if isinstance(case, type(pytest.param())):
        return case
    assert not (isinstance(case, tuple) and len(case) == 1), "one argument that is a tuple, or a tuple of arguments?"
    return (case if isinstance(case, tuple) else (case,)), (), None
