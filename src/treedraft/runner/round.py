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
from treedraft.runner.operators import Operators, join, logits_parts
from treedraft.runner.seam import Seam
from treedraft.runner.state import DeviceState
from treedraft.speculative.sampling import SamplingRows
from treedraft.types import Accepted, DraftTree, ModelOutput, TreeRows

DETERMINISTIC_ROWS = 512  # prefilled tokens forwarded at once


@dataclass(frozen=True)
class Target:
    """The model whose output users get, with its KV pool and attention backend."""

    model: DeepseekModel
    attention: TreeAttention
    pool: LatentPool
    taps: tuple[int, ...]  # layers whose inputs the draft head reads
    is_deterministic: bool = False  # prompts too go through the kernels of decoding, which are row-invariant

    def prefill(self, batch: PrefillBatch) -> ModelOutput:
        """Forward chunks of prompts. hidden [T, H], features [T, F]."""
        if self.is_deterministic:
            return self._prefill_as_decode(batch)
        attend = PagedPrefillAttend(self.pool, batch.sequences, batch.write_slots, batch.page_table, batch.page_size)
        return self.model(batch.token_ids, batch.positions, attend, self.taps)

    def _prefill_as_decode(self, batch: PrefillBatch) -> ModelOutput:
        """Forward each token as a sequence of its own that decodes one: the positions before it, then itself.

        All rows of a layer are written before the first is read, so the tokens of a prompt go together.
        """
        counts = torch.tensor([length for _, length in batch.sequences])
        owner = torch.repeat_interleave(torch.arange(len(counts)), counts).to(batch.positions.device)
        last = max(start + length - 1 for start, length in batch.sequences)
        outputs = []
        for start in range(0, len(owner), DETERMINISTIC_ROWS):
            part = slice(start, start + DETERMINISTIC_ROWS)
            positions = batch.positions[part]
            bits = torch.ones_like(positions)[:, None, None]
            plan = self.attention.plan(
                TreeRows(batch.page_table[owner[part]], positions, bits, 1, last), batch.page_size
            )
            attend = PagedTreeAttend(self.attention, plan, self.pool, batch.write_slots[part, None])
            outputs.append(self.model(batch.token_ids[part, None], positions[:, None], attend, self.taps))
        hidden, features = (torch.cat([getattr(o, name)[:, 0] for o in outputs]) for name in ("hidden", "features"))
        return ModelOutput(hidden, features)

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
    has_nan: Tensor  # [B] bool: a node of the accepted path had a NaN among its logits; other nodes do not matter
    hidden: Tensor  # [B, N, H]: what the target's logits are made of, for those that are asked for afterwards
    overflow: Tensor  # [7] int64: the round's overflow record, see attention.packed.RECORD


def run_round(
    batch: DecodeBatch,
    rows: SamplingRows,
    target: Target,
    drafter: Drafter | None,
    state: DeviceState,
    num_steps: int,
    seam: Seam | None = None,
) -> RoundTensors:
    """Run one round and advance the device state. num_steps: levels of the tree, 0 without.

    No host value is read but at the seam, which a batch with a grammar has: between its last two calls the target runs.
    Where an index list was too small the round is void: the device state stays as it was. Tree slots may be written.
    """
    operators = state.operators
    noise = round_noise(batch, rows, target, num_steps, operators)
    root_masks = None if seam is None else seam.root_masks(len(batch.slots))
    tree = single_node(batch) if drafter is None else drafter.propose(batch, rows, noise, root_masks)
    if seam is not None:
        seam.drafted(tree)
    output = target.verify(batch, tree)
    masks = None if seam is None else seam.masks()
    max_path = min(num_steps, tree.token_ids.shape[1] - 1) + 1
    paths = paths_of(tree, rows, max_path - 1, operators)
    sampled, node_has_nan = sample_nodes(
        target, output.hidden, rows, paths, tree.depths, batch.kv_lens, noise, masks, operators
    )
    accepted, has_nan = operators.walk(tree, sampled, max_path, node_has_nan)
    target.commit(batch, accepted)
    if drafter is not None:
        features = output.features.gather(1, accepted.columns[..., None].expand(-1, -1, output.features.shape[-1]))
        drafter.extend(batch, features, accepted)
    counts = state.output_counts if "penalties" in rows.stages else None
    operators.advance(
        batch.slots, batch.kv_lens, batch.roots, accepted, state.overflow, state.kv_lens, state.roots, counts
    )
    return RoundTensors(tree, sampled, accepted, has_nan, output.hidden, state.overflow.clone())


def run_prefill(
    batch: PrefillBatch,
    rows: SamplingRows | None,
    target: Target,
    drafter: Drafter | None,
    state: DeviceState,
    seam: Seam | None = None,
) -> tuple[RoundTensors | None, Tensor]:
    """Forward chunks of known tokens, and sample the first token of the sequences that have none.

    Return what was sampled, and the states of all rows, [T, H].
    rows, seam: of those sequences, `batch.sampled`; rows is None when there are none. Every chunk
    leaves the device state as if the sequence ended there, so that after its last one rounds may follow.
    """
    output = target.prefill(batch)
    state.kv_lens[batch.slots] = batch.positions[batch.last_rows] + 1
    state.roots[batch.slots] = batch.next_tokens[batch.last_rows]
    result, next_tokens = None, batch.next_tokens
    if rows is not None:
        result = first_tokens(batch, rows, output, target, state, seam)
        next_tokens = next_tokens.clone()
        next_tokens[batch.last_rows[batch.sampled]] = result.sampled[:, 0]
    if drafter is not None:
        drafter.prefill(batch, output.features, next_tokens)
    return result, output.hidden


def first_tokens(
    batch: PrefillBatch,
    rows: SamplingRows,
    output: ModelOutput,
    target: Target,
    state: DeviceState,
    seam: Seam | None = None,
) -> RoundTensors:
    """Sample behind the last rows of `batch.sampled`, each a tree of one node, and make the tokens roots."""
    operators, last_rows = state.operators, batch.last_rows[batch.sampled]
    hidden, last = output.hidden[last_rows][:, None], batch.positions[last_rows]
    noise = None
    if "noise" in rows.stages:
        noise = operators.noise(rows.noise_key, last[:, None] + 1, target.model.config.vocab_size)
    tree, masks = _one_node(batch.token_ids[last_rows]), None if seam is None else seam.root_masks(len(last))
    paths = paths_of(tree, rows, 0, operators)
    sampled, node_has_nan = sample_nodes(target, hidden, rows, paths, tree.depths, last, noise, masks, operators)
    accepted, has_nan = operators.walk(tree, sampled, 1, node_has_nan)
    fits = torch.zeros_like(state.overflow)
    counts = state.output_counts if "penalties" in rows.stages else None
    slots, first = batch.slots[batch.sampled], accepted.token_ids[:, 0]
    operators.advance(slots, last, first, accepted, fits, state.kv_lens, state.roots, counts)
    return RoundTensors(tree, sampled, accepted, has_nan, hidden, fits)


def sample_nodes(
    target: Target,
    hidden: Tensor,
    rows: SamplingRows,
    paths: Tensor,
    depths: Tensor,
    kv_lens: Tensor,
    noise: Tensor | None,
    masks: Tensor | None,
    operators: Operators,
) -> tuple[Tensor, Tensor]:
    """The target's token at every node, int64 [B, N], and whether its logits hold a NaN, bool [B, N].

    hidden [B, N, H]; masks [B, N, words] of `mask_tokens`, where there is a grammar; the others as of `process` and
    `sample`. A large batch goes in parts: its logits are never whole.
    """
    batch, num_nodes, _ = hidden.shape
    parts = logits_parts(batch, num_nodes, target.model.config.vocab_size, hidden.dtype)

    def logits_of(part: slice) -> Tensor:
        logits = target.model.logits(hidden[part])
        return logits if masks is None else operators.mask_tokens(logits, masks[part])

    if len(parts) == 1:
        return operators.sample(logits_of(parts[0]), rows, paths, depths, kv_lens, noise)
    return join(
        [
            operators.sample(
                logits_of(part),
                rows.part(part),
                paths[part],
                depths[part],
                kv_lens[part],
                None if noise is None else noise[part],
            )
            for part in parts
        ]
    )


def round_noise(
    batch: DecodeBatch, rows: SamplingRows, target: Target, num_steps: int, operators: Operators
) -> Tensor | None:
    """[B, S + 1, V] float32: noise of token positions kv_len + 1 + d, shared by draft levels and verification."""
    if "noise" not in rows.stages:
        return None
    positions = batch.kv_lens[:, None] + torch.arange(1, num_steps + 2, device=batch.kv_lens.device)
    return operators.noise(rows.noise_key, positions, target.model.config.vocab_size)


def single_node(batch: DecodeBatch) -> DraftTree:
    """The tree of plain decode: the root alone."""
    return _one_node(batch.roots)


def _one_node(token_ids: Tensor) -> DraftTree:
    column = token_ids[:, None]
    zeros = torch.zeros_like(column)
    return DraftTree(column, zeros - 1, zeros, (zeros + 1)[..., None], zeros.float())


def paths_of(tree: DraftTree, rows: SamplingRows, max_depth: int, operators: Operators) -> Tensor:
    """[B, N, D] int64: each node's own path, which only penalties read; D = 0 without them."""
    if "penalties" in rows.stages and max_depth:
        return operators.path_tokens(tree, max_depth)
    return tree.token_ids.new_empty((*tree.token_ids.shape, 0))
