"""How large a step of decoding may be: what calls are refused for, split at, or left to the forward families."""

MAX_SEQLEN_Q = 16
"""Queries of a sequence."""

MAX_KEYS = 2**29
"""Of a sequence: sums of positions and widths of windows stay within 32 bits."""

MAX_BATCH = 1024
"""Sequences of one launch, whose lengths every program looks at; larger batches are several launches."""
