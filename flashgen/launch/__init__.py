"""From a compiled kernel to a launch: the CUDA driver, the vocabulary of kernel arguments, and launch plans."""
