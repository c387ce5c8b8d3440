"""One round of tree speculation: propose, verify, sample, walk, commit, extend. Plain decode is a tree of one node."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treedraft.attention.base import TreeAttention
from treedraft.attention.paged import PagedPrefillAttend, PagedTreeAttend
from treedraft.kv.pool import LatentPool
from treedraft.models.deepseek import DeepseekModel
from treedraft.runner.batch import DecodeBatch, PrefillBatch
from treedraft.runner.drafter import Drafter
from treedraft.runner.state import DeviceState
from treedraft.speculative.noise import gumbel
from treedraft.speculative.sampling import SamplingRows, path_tokens, process, sample
from treedraft.speculative.verify import walk
from treedraft.types import Accepted, DraftTree, ModelOutput


@dataclass(frozen=True)
class Target:
    """The model whose output users get, with its KV pool and attention backend."""

    model: DeepseekModel
    attention: TreeAttention
    pool: LatentPool
    taps: tuple[int, ...]  # layers whose inputs the draft head reads

    def prefill(self, batch: PrefillBatch) -> ModelOutput:
        """Forward whole prompts. hidden [T, H], features [T, F]."""
        attend = PagedPrefillAttend(self.pool, batch.sequences, batch.write_slots, batch.page_table, batch.page_size)
        return self.model(batch.token_ids, batch.positions, attend, self.taps)

    def verify(self, batch: DecodeBatch, tree: DraftTree) -> ModelOutput:
        """Forward the tree's nodes into slots kv_len + n. hidden [B, N, H], features [B, N, F]."""
        num_nodes = tree.token_ids.shape[1]
        plan = self.attention.plan_tree(batch.prefix, tree.ancestor_bits, num_nodes)
        attend = PagedTreeAttend(self.attention, plan, self.pool, batch.tail_slots[:, :num_nodes])
        positions = batch.kv_lens[:, None] + tree.depths
        return self.model(tree.token_ids.clamp(min=0), positions, attend, self.taps)

    def commit(self, batch: DecodeBatch, accepted: Accepted) -> None:
        """Move the accepted nodes' KV to slots kv_len + 0 .. kv_len + num_accepted, in every layer at once.

        before:  kv_len + | root  n1  n2  n3  n4  n5 |    path [0, 2, 5]
        after:            | root  n2  n5  ..         |    a_j >= j and a is increasing
        """
        path = accepted.columns.shape[1]
        if path > 1:
            self.pool.move(batch.tail_slots.gather(1, accepted.columns), batch.tail_slots[:, :path])


@dataclass(frozen=True)
class RoundTensors:
    """What a round decided, on the device."""

    tree: DraftTree
    sampled: Tensor  # [B, N] int64: the target's token at every node
    accepted: Accepted
    has_nan: Tensor  # [B] bool
    logits: Tensor  # [B, N, V]: raw, at least float32
    overflow: Tensor  # [7] int64: the round's overflow record, see attention.packed.RECORD


def run_round(
    batch: DecodeBatch, rows: SamplingRows, target: Target, drafter: Drafter | None, state: DeviceState, num_steps: int
) -> RoundTensors:
    """Run one round and advance the device state. No host value is read. num_steps: levels of the tree, 0 without.

    Where an index list was too small the round is void: the device state stays as it was. Tree slots may be written.
    """
    noise = round_noise(batch, rows, target, num_steps)
    tree = single_node(batch) if drafter is None else drafter.propose(batch, rows, noise)
    output = target.verify(batch, tree)
    logits = target.model.logits(output.hidden)
    max_path = min(num_steps, tree.token_ids.shape[1] - 1) + 1
    z = process(logits, rows, paths_of(tree, rows, max_path - 1), tree.depths, batch.kv_lens)
    sampled = sample(z, noise, tree.depths, rows.temperature)
    accepted = walk(tree, sampled, max_path)
    target.commit(batch, accepted)
    if drafter is not None:
        features = output.features.gather(1, accepted.columns[..., None].expand(-1, -1, output.features.shape[-1]))
        drafter.extend(batch, features, accepted)
    advance(batch, rows, accepted, state)
    return RoundTensors(tree, sampled, accepted, path_has_nan(logits, accepted), logits, state.overflow.clone())


def run_prefill(
    batch: PrefillBatch, rows: SamplingRows, target: Target, drafter: Drafter | None, state: DeviceState
) -> RoundTensors:
    """Forward prompts, sample each one's first token, and set up the device state. Host lengths are known here."""
    output = target.prefill(batch)
    logits = target.model.logits(output.hidden[batch.last_rows])[:, None]
    last = batch.positions[batch.last_rows]
    zeros = torch.zeros_like(last)[:, None]
    noise = gumbel(rows.noise_key, last[:, None] + 1, logits.shape[-1]) if "noise" in rows.stages else None
    tree = _one_node(batch.token_ids[batch.last_rows])
    z = process(logits, rows, paths_of(tree, rows, 0), zeros, last)
    sampled = sample(z, noise, zeros, rows.temperature)
    accepted = walk(tree, sampled, 1)
    first = accepted.token_ids[:, 0]
    state.kv_lens[batch.slots] = last + 1
    state.roots[batch.slots] = first
    _count(batch.slots, rows, accepted.token_ids, state)
    if drafter is not None:
        next_tokens = batch.token_ids.roll(-1)
        next_tokens[batch.last_rows] = first
        drafter.prefill(batch, output.features, next_tokens)
    has_nan = path_has_nan(logits, accepted)
    return RoundTensors(tree, sampled, accepted, has_nan, logits, torch.zeros_like(state.overflow))


def round_noise(batch: DecodeBatch, rows: SamplingRows, target: Target, num_steps: int) -> Tensor | None:
    """[B, S + 1, V] float32: noise of token positions kv_len + 1 + d, shared by draft levels and verification."""
    if "noise" not in rows.stages:
        return None
    positions = batch.kv_lens[:, None] + torch.arange(1, num_steps + 2, device=batch.kv_lens.device)
    return gumbel(rows.noise_key, positions, target.model.config.vocab_size)


def single_node(batch: DecodeBatch) -> DraftTree:
    """The tree of plain decode: the root alone."""
    return _one_node(batch.roots)


def _one_node(token_ids: Tensor) -> DraftTree:
    column = token_ids[:, None]
    zeros = torch.zeros_like(column)
    return DraftTree(column, zeros - 1, zeros, (zeros + 1)[..., None], zeros.float())


def advance(batch: DecodeBatch, rows: SamplingRows, accepted: Accepted, state: DeviceState) -> None:
    """kv_len grows by the accepted path; the bonus token becomes the root. A void round changes nothing."""
    bonus = accepted.token_ids.gather(1, accepted.num_accepted[:, None])[:, 0]
    state.kv_lens[batch.slots] = batch.kv_lens + (accepted.num_accepted + 1) * ~state.is_void
    state.roots[batch.slots] = torch.where(state.is_void, batch.roots, bonus)
    _count(batch.slots, rows, accepted.token_ids.masked_fill(state.is_void, -1), state)


def _count(slots: Tensor, rows: SamplingRows, token_ids: Tensor, state: DeviceState) -> None:
    """Add emitted tokens [B, P], -1 for none, to the output counts that penalties read."""
    if "penalties" not in rows.stages:
        return
    vocab_size = state.output_counts.shape[1]
    flat = (slots[:, None] * vocab_size + token_ids.clamp(min=0)).flatten()
    state.output_counts.view(-1).index_add_(0, flat, (token_ids >= 0).int().flatten())


def paths_of(tree: DraftTree, rows: SamplingRows, max_depth: int) -> Tensor:
    """[B, N, D] int64: each node's own path, which only penalties read; D = 0 without them."""
    if "penalties" in rows.stages and max_depth:
        return path_tokens(tree, max_depth)
    return tree.token_ids.new_empty((*tree.token_ids.shape, 0))


def path_has_nan(logits: Tensor, accepted: Accepted) -> Tensor:
    """[B] bool: a node of the accepted path had a NaN among its logits [B, N, V]. Other nodes do not matter."""
    node_has_nan = logits.amax(-1).isnan()
    on_path = torch.arange(accepted.columns.shape[1], device=logits.device) <= accepted.num_accepted[:, None]
    return (node_has_nan.gather(1, accepted.columns) & on_path).any(-1)
