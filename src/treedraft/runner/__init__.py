"""The only place that orders kernels: a step's host integers in, tokens out."""
