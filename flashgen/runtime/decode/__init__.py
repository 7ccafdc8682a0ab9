"""Decoding over caches: the public call (api), its rules (call, contents), and what serves it (runs)."""
