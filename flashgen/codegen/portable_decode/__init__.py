"""Decoding over caches in plain Triton: few queries of many sequences against long keys."""
