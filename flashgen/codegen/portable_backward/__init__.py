"""The portable backward families, in plain Triton."""
