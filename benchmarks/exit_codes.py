"""What a benchmark's process ends with, beside 0 for done, 1 for an error of its own and 2 for wrong arguments."""

MISSING = 4
"""All was run, and flashgen has no row where it should have one."""

STOPPED = 3
"""The time limit came first: the same command with --append goes on."""
