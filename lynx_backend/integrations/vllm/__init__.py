"""Progressive decode in stock vLLM: three lines of configuration, no patched file.

Nothing here may import LMCache or numba at the top of a module: vLLM on a CPU rebinds Triton's
kernels while it imports its connector, and fails when they come in then.
"""
