"""Tokens per second beside transformers: python benchmarks/latency.py [flags as in --help]"""

import sys

from treedraft.cli.app import app

app(["bench", "latency", "--compare", "transformers", "--out", "benchmarks/results", *sys.argv[1:]])
