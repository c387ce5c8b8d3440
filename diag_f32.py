import sys, json
sys.path[:0] = ['tests', 'tests/gpu']
import torch
from graph_cases import PARAMS, SHAPE, run
from treedraft import LLM
by = {}
for l in open('src/treedraft/demo/prompts.jsonl'):
    r = json.loads(l); by.setdefault(r['domain'], []).append(r['prompt'])
P = [p for g in zip(*by.values()) for p in g]
def mk(how, **o):
    return LLM('demo', device='cuda', cuda_graph=how, **({"dtype": sys.argv[1], "page_size": 3, "max_batch": 4, "max_context": 96, "speculative": SHAPE} | o))
a = mk('eager'); prompts = [a.encode(p)[:5 + 4 * i] for i, p in enumerate(P[:len(PARAMS)])]
base = run(a, prompts, PARAMS)
def show(tag, g):
    print(sys.argv[1], tag, 'tokens', g[0] == base[0], 'rounds', g[1] == base[1], flush=True)
    for r in base[1]:
        for i, (x, y) in enumerate(zip(base[1][r], g[1].get(r, []))):
            if x != y: print('   req', r, 'round', i, 'of', len(base[1][r]), '\n    ', x, '\n    ', y, flush=True); break
show('eager again', run(a, prompts, PARAMS))
show('eager new', run(mk('eager'), prompts, PARAMS))
c = mk('on')
show('captured', run(c, prompts, PARAMS)); show('captured again', run(c, prompts, PARAMS))
if len(sys.argv) > 2:
    t = run(mk('eager', attention_backend='torch'), prompts, PARAMS); base = t
    show('torch captured', run(mk('on', attention_backend='torch'), prompts, PARAMS))
