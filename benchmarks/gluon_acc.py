"""Scratch: errors by length, old and new kernel."""
import sys, os; sys.path[:0] = ['tests/gpu', 'tests', os.path.dirname(__file__)]
import torch
from test_gluon_mla_gpu import Case, run
from treedraft.attention import make_backend
import treedraft.kernels.gluon_mla as g
b = make_backend('gluon')
kernel = g._mla_kernel
for tokens in (1, 8):
    for length in (0, 1, 3, 8, 30, 63, 130, 1000, 4097):
        line = f'tokens {tokens} len {length:5d}: '
        for name, k in (('new', kernel),):
            g._mla_kernel = k
            worst = rms = lse_err = 0
            for seed in range(6):
                c = Case([length] * 2, tokens, 16, seed=seed)
                out, lse = run(b, c)
                for i in range(2):
                    w, wl = c.expected(i)
                    d = out[i].double() - w
                    worst = max(worst, float((d.abs().amax(-1) / w.abs().amax(-1)).max())); rms = max(rms, float(d.norm() / w.norm())); lse_err = max(lse_err, float((lse[i] - wl).abs().max()))
            line += f'{name} worst {worst:.2e} rms {rms:.2e} lse {lse_err:.1e}   '
        print(line, flush=True)
