"""Scratch: one small call, for compute-sanitizer."""
import sys; sys.path.insert(0, 'tests/gpu'); sys.path.insert(0, 'tests')
import torch
from test_gluon_mla_gpu import Case, run
from treedraft.attention import make_backend
b = make_backend('gluon')
c = Case([0, 65, 300, 1000], 8, 16, seed=3)
out, lse = run(b, c); torch.cuda.synchronize(); assert out.isfinite().all()
for i in range(4):
    d = out[i].double() - c.expected(i)[0]
    assert d.norm() / c.expected(i)[0].norm() < 3e-3
print('small ok')
