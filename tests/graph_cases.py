"""What tests of static rounds share: a batch with every sampling stage, its rounds, and poison for its buffers."""

from dataclasses import fields

import torch

from treedraft import SamplingParams, SpeculativeConfig
from treedraft.kv.allocator import TRASH_PAGE

SHAPE = SpeculativeConfig(3, 2, 6)  # num_draft_tokens != num_steps + 1
PARAMS = [
    SamplingParams(temperature=0, max_tokens=26, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.8, seed=3, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1, repetition_penalty=1.3, presence_penalty=0.4, seed=5, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0, logit_bias={7: 3.0, 20: -4.0}, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=1, top_k=20, min_p=0.05, min_tokens=8, seed=1, max_tokens=16),
    SamplingParams(temperature=1, seed=9, max_tokens=4, ignore_eos=True),
]


def run(llm, prompts, params):
    """Every choice's tokens, and every round's trees and walks by request, in order."""
    rounds = {}

    def observe(rows, batch, result):
        for b, row in enumerate(rows):
            values = [batch.kv_lens[b], result.tree.token_ids[b], result.tree.parents[b], result.sampled[b]]
            values += [result.accepted.columns[b], result.accepted.num_accepted[b]]
            first = llm._next_id - sum(p.n for p in params)
            rounds.setdefault(row.request_id - first, []).append([v.tolist() for v in values])

    llm.runner.observer = observe
    try:
        outputs = llm.generate(prompts, params, progress=False)
    finally:
        llm.runner.observer = None
    return [o.outputs[0].token_ids for o in outputs], rounds


def poison(llm, program):
    """Fill all that a past batch could have left: inputs, outputs, the dummy slot, the trash page."""
    graphs, state = llm.runner.graphs, llm.runner.state
    program.inputs.fill_(1 << 40)
    for tensor in tensors_of(graphs.outputs):
        tensor.fill_(float("nan") if tensor.is_floating_point() else True if tensor.dtype == torch.bool else 1 << 40)
    for name in ("kv_lens", "roots"):
        getattr(state, name)[state.dummy_slot] = 1 << 40
    state.draft_hidden[state.dummy_slot] = float("nan")
    state.temperature[state.dummy_slot] = float("nan")
    page_size = llm.config.page_size
    for pool in (llm.runner.target.pool, llm.runner.drafter.pool):
        pool.data[:, TRASH_PAGE * page_size : (TRASH_PAGE + 1) * page_size] = float("nan")


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for f in fields(value) for t in tensors_of(getattr(value, f.name))]
