"""Tokens per second beside transformers' generate: python benchmarks/latency.py [flags of `treedraft bench latency`]"""

import sys

from treedraft.cli.app import app

app(["bench", "latency", "--compare", "transformers", "--out", "benchmarks/results", *sys.argv[1:]])
