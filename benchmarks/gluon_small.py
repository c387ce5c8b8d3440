"""Scratch: one small call, for compute-sanitizer."""
import sys; sys.path.insert(0, 'tests/gpu'); sys.path.insert(0, 'tests')
import torch
from test_gluon_mla_gpu import Case, run
from treedraft.attention import make_backend
b = make_backend('gluon')
c = Case([0, 65, 300, 1000], 8, 16, seed=3)
out, lse = run(b, c); torch.cuda.synchronize(); c.check(out, lse); print('small ok')
