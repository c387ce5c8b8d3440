"""Triton kernels. Each has a torch twin of the same signature, and a test that compares the two."""
