"""Verifying and timing kernels on a GPU, in a process that can be killed."""
