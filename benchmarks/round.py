"""A round by part, its launches and idle time, on a model of DeepSeek-V2-Lite's shape with random weights.

Usage: python benchmarks/round.py [flags of `treedraft bench round`]
"""

import os
import sys
from pathlib import Path

from treedraft.cli.app import app

shapes = Path(os.path.relpath(Path(__file__).parent / "shapes"))  # the result names it: not where the checkout lies
model = ["--model", str(shapes / "v2-lite"), "--draft", str(shapes / "v2-lite-head"), "--load-format", "dummy"]
app(["bench", "round", *model, "--out", "benchmarks/results", *sys.argv[1:]])
