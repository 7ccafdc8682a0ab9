"""What a benchmark's process ends with, beside 0 for done and 2 for wrong arguments."""

MISSING = 1
"""flashgen has no row where it should have one."""

STOPPED = 3
"""The time limit came first: the same command with --append goes on."""
