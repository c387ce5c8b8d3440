"""Scratch: which of several small calls fail, each in its own process, with the error by part."""
import subprocess, sys
if len(sys.argv) == 1:
    for name in ['1', '64', '65', '128', '130', '200', '1000', '0', '63', 'many']:
        try:
            r = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, timeout=12)
            print(name, r.returncode, (r.stdout + r.stderr[-300:]).replace('\n', ' | '), flush=True)
        except subprocess.TimeoutExpired: print(name, 'HANGS', flush=True)
    sys.exit()
sys.path.insert(0, 'tests/gpu'); sys.path.insert(0, 'tests')
import torch
from test_gluon_mla_gpu import Case, run
from treedraft.attention import make_backend
import treedraft.kernels.mla_plan as mp
b = make_backend('gluon')
lens = [5, 700, 64] if sys.argv[1] == 'many' else [int(sys.argv[1])]
c = Case(lens, 8, 16, seed=3)
for part in (1000, 2):
    mp.MIN_PART = part
    out, lse = run(b, c); torch.cuda.synchronize()
    for i in range(len(lens)):
        w, wl = c.expected(i)
        d = (out[i].double() - w)
        e = [float(x.norm() / w.norm()) for x in (d[..., :256], d[..., 256:])]
        print(part, 'seq', i, 'nan', int(out[i].isnan().sum()), 'left/right err', e, 'lse', float((lse[i] - wl).abs().max()), 'bad rows', int((d.abs().amax(-1) > 0.05).sum()))
