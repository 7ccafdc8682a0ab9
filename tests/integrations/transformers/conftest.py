"""Models on a CPU: what their attention calls is the reference in torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashgen.integrations import transformers as door


@pytest.fixture
def fgen() -> Iterator[str]:
    """The name that flashgen's reference is registered under."""
    door.register("fgen", reference=True)
    yield "fgen"
    door.unregister("fgen")
