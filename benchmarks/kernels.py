"""Attention kernels at a grid of shapes, beside those of other projects where installed.

Usage: python benchmarks/kernels.py [flags of `treedraft bench kernels`]
"""

import sys

from treedraft.cli.app import app

app(["bench", "kernels", "--compare", "flashmla,flashinfer", "--out", "benchmarks/results", *sys.argv[1:]])
