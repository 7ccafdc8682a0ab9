"""Words and tokens of keys: how workloads and specializations are written, and how their keys are read."""

from __future__ import annotations

import re

from flashgen.core.checks import text
from flashgen.core.errors import WorkloadError
from flashgen.core.features.table import FEATURES
from flashgen.core.lengths import ALL_PROFILES
from flashgen.core.names import meant

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4}
"""Bytes of one element, by the dtype names used in keys and databases; tf32 is fp32 data in products of TF32."""

MAX_KEY = 1000
"""Characters of a key; the longest that there can be has about 200."""

BROADCASTS = ("", "full", "keys")
"""Kinds of a bias or a mask: none; one value for every query and key; one for every key, the same for all queries."""

DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
"""The passes of `flashgen.attention`."""

DECODE = "decode"
"""The direction of a step of decoding over caches, which is `flashgen.attention_decode`."""

ALL_DIRECTIONS = {**DIRECTIONS, "dec": DECODE}
SHORT = {direction: token for token, direction in ALL_DIRECTIONS.items()}

TOKENS = tuple(token for feature in FEATURES for token in feature.tokens)
FLAGS: dict[str, dict[str, object]] = {token.text: {token.field: True} for token in TOKENS if token.value is True}
"""Tokens of a key for what is there or not, and the field that each sets."""

KINDS: dict[str, dict[str, object]] = {
    token.text: {token.field: token.value} for token in TOKENS if isinstance(token.value, str)
}
"""Tokens of a key that name the kind of a bias or a mask."""

SIZED = {token.text: token.field for token in TOKENS if token.value is None}
"""Prefixes of tokens with a number, which is that of a field."""


def flag_tokens(value: object) -> list[str]:
    """The tokens of a workload's or a specialization's key for features without a number, in one order."""
    return [t.text for t in TOKENS if t.value is not None and getattr(value, t.field) == t.value]


_PLACES = ("class", "alignment", "offset", "dtype", "gradient")
VARIANTS: dict[str, dict[str, object]] = {
    "unaligned": {"aligned16": False},
    **{
        variant.text: {variant.field: variant.value}
        for place in _PLACES
        for feature in sorted(FEATURES, key=lambda feature: feature.name)
        for variant in feature.variants
        if variant.place == place
    },
}
"""Tokens of a specialization's key that a workload's key does not have, in order."""

_INT_TOKENS = {
    "b": ("batch",),
    "h": ("nheads",),
    "hk": ("nheads_k",),
    "sq": ("seqlen_q",),
    "sk": ("seqlen_k",),
    "s": ("seqlen_q", "seqlen_k"),
    "d": ("head_dim",),
    "dv": ("head_dim_v",),
    "tq": ("total_q",),
    "tk": ("total_k",),
    **{prefix: (field,) for prefix, field in SIZED.items()},
}


_WORDS: dict[str, dict[str, object]] = {
    **{token: {"direction": direction} for token, direction in ALL_DIRECTIONS.items()},
    **{dtype: {"dtype": dtype} for dtype in DTYPE_BYTES},
    **FLAGS,
    **KINDS,
    **{profile: {"lengths": profile} for profile in ALL_PROFILES},
}
"""Tokens without a number."""


def tokens_of(what: str, key: object) -> list[str]:
    """The tokens of a key, which messages call `what`.

    Raises:
        WorkloadError: it is no text, or far too long.
    """
    return text(what, key, most=MAX_KEY).strip().split("-")


def fields_of(token: str, text: str) -> dict[str, object]:
    """The fields that a token of the key `text` sets, with their values.

    Raises:
        WorkloadError: there is no such token.
    """
    if fields := _fields(token):
        return fields
    known = ", ".join([*ALL_DIRECTIONS, *DTYPE_BYTES, *ALL_PROFILES, *(f"{t}<n>" for t in _INT_TOKENS), *FLAGS, *KINDS])
    small = token.lower()
    near = meant(token, [small] if _fields(small) else _WORDS)
    raise WorkloadError(f"a shape is made of the tokens {known}, with - between them; {text!r} has {token!r}{near}")


def _fields(token: str) -> dict[str, object]:
    """The fields that a token sets, with their values; none if there is no such token."""
    if token in _WORDS:
        return dict(_WORDS[token])
    match = re.fullmatch(r"([a-z]+)([0-9]+)", token)
    return dict.fromkeys(_INT_TOKENS[match[1]], int(match[2])) if match and match[1] in _INT_TOKENS else {}
