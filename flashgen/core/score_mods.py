"""`UserFunction` and `ScoreMods`: a user's own score functions, as source with a digest.

The source is written in Triton's language and goes into the rendered kernel as it is. It comes from the running program
alone: no database, file or network message ever carries it, only its digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from flashgen.core.errors import WorkloadError

DIGEST_LENGTH = 8
MASK_BLOCK = 128
"""Query rows and keys of one block of a block mask (FlexAttention's default); the tiles of a kernel divide it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFunction:
    """One function in Triton's language: its name and its source, which starts with `def` and ends with a newline.

    `label` is what the user calls it: for people, no part of its identity.
    """

    name: str
    source: str
    label: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise WorkloadError(f"a score function has the name of a Python function, got {self.name!r}")
        if not self.source.startswith(f"def {self.name}(") or not self.source.endswith("\n"):
            raise WorkloadError(f"the source of {self.name} starts with its def line, got {self.source[:60]!r}")

    @property
    def digest(self) -> str:
        """The first 8 hexadecimal digits of the source's SHA-256."""
        return hashlib.sha256(self.source.encode()).hexdigest()[:DIGEST_LENGTH]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreMods:
    """What of a user's code is compiled into a kernel (FlexAttention's semantics).

    Attributes:
        score_mod: `score_mod(score, b, h, q_idx, k_idx, *aux)` gives the score that takes part in the softmax.
        mask_mod: `mask_mod(b, h, q_idx, k_idx, *aux)` is true where a key is visible.
        aux: Triton element types (`fp32`, `i32` ...) of the tensors that both get as pointers, last.
        block_mask: whether the kernel walks the blocks of a block mask instead of all keys.
        aux_grads: which of the tensors a backward pass gives a gradient, in order; empty in a forward pass.
    """

    score_mod: UserFunction | None = None
    mask_mod: UserFunction | None = None
    aux: tuple[str, ...] = ()
    block_mask: bool = False
    aux_grads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.score_mod is None and self.mask_mod is None:
            raise WorkloadError("score modifications have a score_mod or a mask_mod, got neither")
        if self.block_mask and self.mask_mod is None:
            raise WorkloadError("a block mask belongs to a mask_mod, got none")

    @property
    def title(self) -> str:
        """What `explain` shows, e.g. `score_mod alibi (1f3a9c0b), mask_mod document (77aa0012), aux i32`."""
        functions = (("score_mod", self.score_mod), ("mask_mod", self.mask_mod))
        parts = [f"{kind} {f.label or f.name} ({f.digest})" for kind, f in functions if f]
        parts += [f"aux {' '.join(self.aux)}"] if self.aux else []
        parts += [f"gradient of aux {' '.join(map(str, self.aux_grads))}"] if self.aux_grads else []
        return ", ".join(parts + (["block mask"] if self.block_mask else []))

    @property
    def key(self) -> str:
        """Readable identity, e.g. `score_1f3a9c0b-mask_77aa0012-i32-blocks`: digests, never source."""
        parts = [f"score_{self.score_mod.digest}"] if self.score_mod else []
        parts += [f"mask_{self.mask_mod.digest}"] if self.mask_mod else []
        gradients = (f"daux{number}" for number in self.aux_grads)
        return "-".join([*parts, *self.aux, *(["blocks"] if self.block_mask else []), *gradients])
