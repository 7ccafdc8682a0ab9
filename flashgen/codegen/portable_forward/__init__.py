"""The portable forward family: FlashAttention-2 in plain Triton."""
