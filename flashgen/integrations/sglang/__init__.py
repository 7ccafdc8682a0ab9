"""flashgen as SGLang's attention backend "flashgen".

SGLang finds `register` by the entry point group sglang.srt.plugins. It is imported by `register` alone, and the classes
when the backend is made.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

NAME = "flashgen"


def register() -> None:
    """Make "flashgen" known to SGLang's registry, and to `--attention-backend`; doing it twice is doing it once.

    Raises:
        ImportError: SGLang is not installed, or has no registry of attention backends.
    """
    registry: Any = import_module("sglang.srt.layers.attention.attention_registry")
    arguments: Any = import_module("sglang.srt.server_args")
    registry.register_attention_backend(NAME)(_made)
    if NAME not in arguments.ATTENTION_BACKEND_CHOICES:
        arguments.add_attention_backend_choices([NAME])


def _made(runner: Any) -> Any:
    """The backend of a model runner.

    Raises:
        UnsupportedError: the model or the server asks for what is not supported, which is named.
    """
    from flashgen.integrations.sglang.backend import FlashgenBackend

    return FlashgenBackend(runner)
