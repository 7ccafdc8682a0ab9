"""Attention of packed sequences: the public call (api), its arguments (arguments) and a look at data (contents)."""
