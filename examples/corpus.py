"""The text that the examples train on: the sources of Python's own library, which every machine has."""

from __future__ import annotations

import functools
import os
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

PAD, MASK = 0, 1
"""Tokens that stand for no text."""

FIRST_BYTE, FIRST_PIECE = 2, 2 + 256
"""Then come all bytes, which spell what is too rare for a token of its own, and the frequent pieces."""

PIECES = re.compile(rb"\n *|[A-Za-z]+|[0-9]+| +|[^A-Za-z0-9 \n]")
DOCUMENTS = re.compile(rb"\n(?=(?:    )?(?:async def|def|class) )")


@dataclass(frozen=True)
class Corpus:
    """Documents one after the other: `tokens`, (total,) int32, and where each starts, (documents + 1,) int64."""

    tokens: torch.Tensor
    starts: torch.Tensor


@functools.cache
def load_bytes() -> bytes:
    """All of it, 10 MB or more, the same in every run."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    paths: list[Path] = []
    for folder, inner, names in os.walk(sysconfig.get_paths()["stdlib"]):
        inner[:] = [name for name in inner if name not in skipped]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return b"\n".join(path.read_bytes() for path in sorted(paths))


@functools.cache
def load_text() -> torch.Tensor:
    """Its bytes, one token each (uint8)."""
    return torch.frombuffer(bytearray(load_bytes()), dtype=torch.uint8)


@functools.cache
def load_corpus(vocabulary: int) -> Corpus:
    """The same text in words, numbers and signs, the most frequent ones as tokens; a document is a function or a class.

    Args:
        vocabulary: tokens that there may be.
    """
    documents = [PIECES.findall(document) for document in DOCUMENTS.split(load_bytes())]
    counts = Counter(piece for document in documents for piece in document)
    frequent = sorted(counts, key=lambda piece: (-counts[piece], piece))[: vocabulary - FIRST_PIECE]
    tokens_of = {piece: [FIRST_PIECE + place] for place, piece in enumerate(frequent)}
    tokens: list[int] = []
    starts = [0]
    for document in documents:
        for piece in document:
            tokens += tokens_of.get(piece) or [FIRST_BYTE + byte for byte in piece]
        starts.append(len(tokens))
    return Corpus(tokens=torch.tensor(tokens, dtype=torch.int32), starts=torch.tensor(starts))
