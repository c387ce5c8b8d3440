"""Tokens a round by tree, temperature and domain: python benchmarks/acceptance.py [flags as in --help]"""

import sys

from treedraft.cli.app import app

app(["bench", "acceptance", "--noise", "both", "--out", "benchmarks/results", *sys.argv[1:]])
