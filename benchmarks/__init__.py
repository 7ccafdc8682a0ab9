"""Benchmarks of flashgen beside other implementations; `README.md` says how to run them and what a number means."""
