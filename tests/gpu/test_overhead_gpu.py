"""Every case of the overhead benchmark that a database of its own serves can be made and called on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flashgen
from benchmarks.overhead_cases import HOPPER, cases_of
from benchmarks.overhead_decode import decode_cases
from flashgen.core.settings import settings

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The cases change what serves: what was before comes back."""
    monkeypatch.setenv("FLASHGEN_POLICY", "generated")
    monkeypatch.setenv("FLASHGEN_DB", "")
    yield
    monkeypatch.undo()
    settings.cache_clear()
    flashgen.reload()


def test_every_decode_case_can_be_called() -> None:
    with torch.no_grad():
        for case in decode_cases():
            for arguments in case.arguments(0, 2):
                case.call(*arguments)
    torch.cuda.synchronize()


@pytest.mark.parametrize("loads", ["descriptor", "pointer", HOPPER])
def test_every_case_can_be_called(loads: str, tmp_path: Path) -> None:
    with torch.no_grad():
        cases = cases_of(loads, tmp_path)
        assert cases or loads == HOPPER
        for case in cases:
            with case.context():
                for arguments in case.arguments(0, min(2, case.most_calls)):
                    case.call(*arguments)
    torch.cuda.synchronize()
