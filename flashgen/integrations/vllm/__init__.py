"""flashgen as vLLM's CUSTOM attention backend; vLLM finds `register` by the entry point group vllm.general_plugins.

vLLM is imported by `register` alone, and the classes by vLLM, when the backend is chosen.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

BACKEND = "flashgen.integrations.vllm.backend.FlashgenBackend"

_LOG = logging.getLogger(__name__)


def register() -> bool:
    """Put flashgen behind `AttentionBackendEnum.CUSTOM`; doing it twice is doing it once.

    vLLM has one such name. Where another package has taken it, it stays that package's, and a warning says so.

    Returns:
        Whether CUSTOM is flashgen's.

    Raises:
        ImportError: vLLM is not installed, or has no registry of attention backends.
    """
    registry: Any = import_module("vllm.v1.attention.backends.registry")
    custom = registry.AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        _LOG.warning("vLLM's attention backend CUSTOM is %s already: flashgen is not registered", custom.get_path())
        return False
    registry.register_backend(custom, BACKEND)
    return True
