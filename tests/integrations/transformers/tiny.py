"""Tiny models by name, with flashgen's attention."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny_models import MODELS

TINY = {model.name: model for model in MODELS}


def made(name: str, attention: str = "fgen") -> Any:
    return TINY[name].made(attention, torch.float32)
