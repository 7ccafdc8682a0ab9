"""Which weights dropout keeps: the bits of the kernels, in plain torch on any device.

Philox 4x32 with 7 rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), in
integers of 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashgen.core.features.dropout import keep_scale, threshold
from flashgen.core.features.values import Features

Tensor = torch.Tensor
Words = tuple[Tensor, Tensor, Tensor, Tensor]

ROUNDS = 7
"""The fewest with which the generator passes BigCrush; FlashAttention-2 has as many."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """The dropout of a call; `first` is the number of its first head of queries."""

    rng_state: Tensor
    dropout_p: float
    first: int = 0

    @classmethod
    def of(cls, features: Features, first: int = 0) -> Dropout | None:
        """That of a call's features, or None."""
        if features.rng_state is None or not features.dropout_p:
            return None
        return cls(rng_state=features.rng_state, dropout_p=features.dropout_p, first=first)

    def factors(self, heads: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
        """What the weights of these heads are multiplied by, (*heads, seqlen_q, seqlen_k): 0 or 1 / (1 - p)."""
        found = kept(self.rng_state, self.dropout_p, self.first + heads, seqlen_q, seqlen_k)
        return found.double() * keep_scale(self.dropout_p)


def kept(rng_state: Tensor, dropout_p: float, heads: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """True where a weight is kept, (*heads, seqlen_q, seqlen_k).

    A weight has 16 bits of its own, and is dropped where they lie below `threshold(dropout_p)`. Eight weights share one
    call of Philox: those of queries i and keys j that differ in bit 3 of i and in bits 0 and 3 of j. Its counter is
    (j without these bits, i without that bit, the offset plus the head as two words), its key the seed.

    Args:
        rng_state: int64 (2,), seed and offset.
        dropout_p: the probability to be dropped.
        heads: the number of each head of queries in its call, sequence times nheads plus head.
        seqlen_q: queries of the heads.
        seqlen_k: keys.
    """
    device = heads.device
    i = torch.arange(seqlen_q, device=device)[:, None]
    j = torch.arange(seqlen_k, device=device)[None, :]
    seed, offset = rng_state.unbind()
    place = (offset + heads)[..., None, None]
    words = philox((j & ~9, i & ~8, place & _WORD, (place >> 32) & _WORD), (seed & _WORD, (seed >> 32) & _WORD))
    upper, right = (i & 8) != 0, (j & 8) != 0
    word = torch.where(upper, torch.where(right, words[3], words[2]), torch.where(right, words[1], words[0]))
    bits = torch.where((j & 1) != 0, word, word >> 16) & 0xFFFF
    return bits >= threshold(dropout_p)


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four words of 32 bits, as integers of 64 bits, of a counter and a key of such words that broadcast."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(ROUNDS):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # modulo 2**64: all that is read of a product
        a, b, c, d = _high(second) ^ b ^ k0, second & _WORD, _high(first) ^ d ^ k1, first & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return a, b, c, d


def _high(product: Tensor) -> Tensor:
    return (product >> 32) & _WORD
