"""The packed layout: for each query row the list of KV slots it sees, and the one contract about the lists' size.

Kernels without a tree mask take the slots of every row as one flat list, row (b, r) after row (b, r - 1), at slot
granularity whatever the page size (such kernels get the pool viewed with page size 1):

    kv_indices:  | prefix of 0 | path of (0, 0) | prefix of 0 | path of (0, 1) | ... | prefix of 1 | path of (1, 0) ...
    kv_indptr:   0                              ^ kv_indptr[1]                 ^ kv_indptr[2]

    need  = rows * sum(kv_lens) + sum of path lengths       what one forward writes
    width = max_batch * rows * (max_context + tail)         what is allocated: `packed_width`, nothing else

A path is the row's true ancestors and itself, ascending, as its bits name them. Drafting level s has topk rows whose
paths are s long; verification has num_draft_tokens rows whose paths are depth + 1 long.

Offsets and kv_indptr come from one cumulative sum of row lengths, in 64 bits. Where a forward needs more than the row's
width, kv_indptr is all zeros: nothing is written, no row sees anything, and the round's overflow record says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treedraft.attention.reference import check_room, unpack_bits
from treedraft.errors import ConfigError, InvariantError
from treedraft.kv.allocator import NUM_RESERVED_PAGES
from treedraft.kv.buffers import Buffers

SLOT_DTYPE = torch.int32  # holds every slot: see LatentPool
# What a forward is for, and what its rows are called in messages. An overflow record names it by its place here.
FORWARDS = {"draft": "topk", "extend": "path rows", "verify": "nodes", "rows": "rows"}
RECORD = ("forward", "rows", "num_steps", "width", "batch", "sum_kv_lens", "need")  # of int64; need 0: no overflow


# ------------------------------------------------------------------ the size contract


def packed_width(max_batch: int, rows: int, max_context: int, tail: int) -> int:
    """Words of kv_indices that the largest forward needs: the one place where this is computed.

    rows: query rows of a sequence. max_context: longest committed prefix. tail: most slots of a row's path. Eager
    buffers, those of captured graphs, the memory budget and the documentation all ask here.
    """
    return max_batch * rows * (max_context + tail)


@dataclass(frozen=True)
class RowLimits:
    """The largest forward of one kind, for which index lists are allocated once."""

    forward: str  # a key of FORWARDS
    max_batch: int
    rows: int  # query rows of a sequence: topk, num_draft_tokens, ...
    num_steps: int  # levels of the draft tree; 0 without
    max_context: int  # longest committed prefix, growth by rounds in flight included
    tail: int  # tree slots that one row may name, slack included
    longest_path: int  # most tree slots that one row names
    has_prefix: bool = True  # False: another object of the same backend plans the prefixes

    @property
    def width(self) -> int:
        """Words of kv_indices with prefix and path in each row's list."""
        return packed_width(self.max_batch, self.rows, self.max_context, self.tail)

    @property
    def prefix_width(self) -> int:
        """Words of kv_indices with each sequence's prefix once."""
        return packed_width(self.max_batch, 1, self.max_context, 0)

    @property
    def path_width(self) -> int:
        """Words of kv_indices with each row's path alone."""
        return packed_width(self.max_batch, self.rows, 0, self.tail)

    def formula(self, part: str) -> str:
        """The width of a part ("all", "prefix", "path") in the names that users know."""
        rows = {"draft": "topk", "verify": "num_draft_tokens", "extend": "max_path"}.get(self.forward, "rows")
        tail = {"draft": "num_steps", "verify": "(num_steps + 1)", "extend": "max_path"}.get(self.forward, "tail")
        return {
            "all": f"max_batch * {rows} * (max_context + {tail.strip('()')})",
            "prefix": "max_batch * max_context",
            "path": f"max_batch * {rows} * {tail}",
        }[part]


def draft_limits(max_batch: int, topk: int, num_steps: int, max_context: int) -> RowLimits:
    """Limits of the draft levels: topk rows; the longest path is num_steps - 1, and one step is slack."""
    return RowLimits("draft", max_batch, topk, num_steps, max_context, tail=num_steps, longest_path=num_steps - 1)


def extend_limits(max_batch: int, max_path: int, num_steps: int, max_context: int) -> RowLimits:
    """Limits of the draft extension: a chain of max_path rows, of which row r sees r + 1."""
    return RowLimits("extend", max_batch, max_path, num_steps, max_context, tail=max_path, longest_path=max_path)


def verify_limits(max_batch: int, num_nodes: int, num_steps: int, max_context: int) -> RowLimits:
    """Limits of the verification, or of plain decode (one node, no steps): paths are at most num_steps + 1 long."""
    longest = min(num_steps, num_nodes - 1) + 1
    return RowLimits("verify", max_batch, num_nodes, num_steps, max_context, tail=num_steps + 1, longest_path=longest)


def check_addressable(width: int, index_bits: int, what: str) -> None:
    """Raise ConfigError when a kernel's signed index of index_bits cannot address the width. At start."""
    largest = 2 ** (index_bits - 1) - 1
    if width > largest:
        raise ConfigError(
            f"{what} = {width} words, but this attention backend addresses them with {index_bits} bits (at most "
            f"{largest}); lower max_batch, max_context or the tree, or choose another attention backend"
        )


def check_fits(limits: RowLimits, batch: int, sum_kv_lens: int, need: int, width: int) -> None:
    """Raise InvariantError, with every number, when a forward needs more words than its row has. Host integers."""
    if need > width:
        raise InvariantError(
            overflow_message(limits.forward, limits.rows, limits.num_steps, width, batch, sum_kv_lens, need)
        )


def overflow_message(
    forward: str, rows: int, num_steps: int, width: int, batch: int, sum_kv_lens: int, need: int
) -> str:
    """What is said of a forward that needs more words of kv_indices than its row has."""
    return (
        f"the packed KV list of a {forward} forward is too small: batch={batch}, {FORWARDS[forward]}={rows}, "
        f"steps={num_steps}, sum of lengths={sum_kv_lens} need {need} words, the row's width is {width}; nothing was "
        "written. Its width is not that of attention.packed.packed_width: this is a bug in treedraft, please report it"
    )


def read_overflow(record: Sequence[int]) -> str | None:
    """The message of an overflow record on the host (RECORD names its numbers), or None when all lists did fit."""
    forward, rows, num_steps, width, batch, sum_kv_lens, need = record
    if need == 0:
        return None
    return overflow_message(list(FORWARDS)[forward], rows, num_steps, width, batch, sum_kv_lens, need)


# ------------------------------------------------------------------ lists


@dataclass(frozen=True)
class Reserved:
    """What a backend with lists is made for."""

    limits: RowLimits
    memory: Buffers
    record: Tensor  # [7] int64, see RECORD; shared by all backends of a runner, which clears it before each round


def new_record(memory: Buffers) -> Tensor:
    """Return an overflow record without an overflow."""
    return memory.allocate("overflow record", "index", (len(RECORD),), torch.int64, formula="numbers of a record")


@dataclass(frozen=True)
class Lists:
    """The slots of some queries, as kernels take them: query i has kv_indices[kv_indptr[i] : kv_indptr[i + 1]]."""

    kv_indptr: Tensor  # [queries + 1] int64
    kv_indices: Tensor  # [width] int32 physical slots; written up to kv_indptr[-1], stale beyond
    max_len: int  # host bound of a query's list


class IndexLists:
    """kv_indptr and kv_indices of one kind of forward. Allocated once; each `build` overwrites the one before."""

    def __init__(self, reserved: Reserved, part: str, backend: str, index_bits: int):
        """part: "all" (prefix and path in each row's list), "prefix" (once for a sequence) or "path" (of each row).

        Raise ConfigError when index_bits cannot address the lists.
        """
        limits, memory = reserved.limits, reserved.memory
        self.limits, self.part, self.record = limits, part, reserved.record
        self.rows = 1 if part == "prefix" else limits.rows
        self.width = {"all": limits.width, "prefix": limits.prefix_width, "path": limits.path_width}[part]
        name, formula = f"{limits.forward} {part}" if part != "all" else limits.forward, limits.formula(part)
        check_addressable(self.width, index_bits, f"{name} kv_indices: {formula}")
        queries = limits.max_batch * self.rows
        self.kv_indptr = memory.allocate(
            f"{name} kv_indptr", "index", (queries + 1,), torch.int64, backend, "(max_batch * rows + 1)"
        )
        table = memory.allocate_rows(f"{name} kv_indices", "index", (1, self.width), SLOT_DTYPE, backend, formula)
        self.kv_indices = memory.room(table)[0]
        constants = (list(FORWARDS).index(limits.forward), self.rows, limits.num_steps, self.width)
        self._constants = torch.tensor(constants, dtype=torch.int64).to(memory.device)

    def check_fits(self, batch: int, sum_kv_lens: int) -> None:
        """Raise InvariantError when a forward of these lengths, with the longest paths, needs more than there is."""
        prefix = 0 if self.part == "path" else self.rows * sum_kv_lens
        path = 0 if self.part == "prefix" else batch * self.rows * self.limits.longest_path
        check_fits(self.limits, batch, sum_kv_lens, prefix + path, len(self.kv_indices))

    def build(
        self,
        page_table: Tensor,
        prefix_lens: Tensor,
        tail_slots: Tensor,
        ancestor_bits: Tensor,
        tree_len: int,
        max_prefix_len: int,
        page_size: int,
    ) -> Lists:
        """Write the lists of a forward; see `build_packed`. The first overflow since the record was cleared is kept."""
        batch, rows = ancestor_bits.shape[:2]
        kv_indptr = self.kv_indptr[: batch * rows + 1]
        max_len = max_prefix_len + tree_len
        need = build_packed(
            page_table,
            prefix_lens,
            tail_slots,
            ancestor_bits,
            tree_len,
            max_len,
            page_size,
            kv_indptr,
            self.kv_indices,
        )
        numbers = torch.stack((torch.full_like(need, batch), prefix_lens.sum(), need))
        is_first = (self.record[-1] == 0) & (need > len(self.kv_indices))
        self.record.copy_(torch.where(is_first, torch.cat((self._constants, numbers)), self.record))
        return Lists(kv_indptr, self.kv_indices, max_len)


def build_packed(
    page_table: Tensor,
    prefix_lens: Tensor,
    tail_slots: Tensor,
    ancestor_bits: Tensor,
    tree_len: int,
    max_len: int,
    page_size: int,
    kv_indptr: Tensor,
    kv_indices: Tensor,
) -> Tensor:
    """Write each row's prefix slots and path slots; return need, the words asked for, [] int64. Nothing here syncs.

    page_table [B, W] int32, prefix_lens [B] int64, tail_slots [B, tail] int64 (physical), ancestor_bits [B, R, words]
    int64 naming tail slots below tree_len <= tail; max_len: host bound of a row's list. Out: kv_indptr [B * R + 1]
    int64 and kv_indices [width] int32. When need > width, kv_indptr is all zeros and no index is written.
    """
    path_lens = unpack_bits(ancestor_bits, tree_len).sum(-1)  # [B, R]
    ends = (prefix_lens[:, None] + path_lens).flatten().cumsum(0)
    need = ends[-1]
    kv_indptr[:1].zero_()  # an assignment would copy from the host, which a capture refuses
    torch.mul(ends, need <= len(kv_indices), out=kv_indptr[1:])
    arguments = page_table, prefix_lens, tail_slots, ancestor_bits, tree_len, max_len, page_size, kv_indptr, kv_indices
    if kv_indices.is_meta:  # a dry run; on a GPU filling takes no memory of its own, on a CPU less than reading
        return need
    if kv_indices.is_cuda:
        from treedraft.kernels.packed import fill_packed_triton  # here: triton is needed on a GPU alone

        fill_packed_triton(*arguments)
    else:
        fill_packed(*arguments)
    return need


def fill_packed(
    page_table: Tensor,
    prefix_lens: Tensor,
    tail_slots: Tensor,
    ancestor_bits: Tensor,
    tree_len: int,
    max_len: int,
    page_size: int,
    kv_indptr: Tensor,
    kv_indices: Tensor,
) -> None:
    """Write kv_indices where kv_indptr says, and nowhere else: the torch twin of kernels.packed.fill_packed_triton.

    Word by word: which row it belongs to, and which column of that row's list it is. Arguments as of `build_packed`.
    """
    batch, rows = ancestor_bits.shape[:2]
    num_words = min(len(kv_indices), batch * rows * max_len)
    if num_words == 0:
        return
    word = torch.arange(num_words, device=kv_indices.device)
    query = torch.searchsorted(kv_indptr[1:], word, right=True).clamp_(max=batch * rows - 1)
    b = torch.div(query, rows, rounding_mode="floor")
    column = word - kv_indptr[query]
    slots = _prefix_slots(page_table, b, column, page_size)
    if tree_len:
        is_ancestor = unpack_bits(ancestor_bits, tree_len).flatten(0, 1)  # [B * R, tree_len]
        nodes = is_ancestor.argsort(dim=-1, descending=True, stable=True)  # ancestors ascending, then the others
        place = column - prefix_lens[b]
        node = nodes[query, place.clamp(0, tree_len - 1)]
        slots = torch.where(place < 0, slots, tail_slots[b, node])
    written = kv_indices[:num_words]
    torch.where(word < kv_indptr[-1], slots.to(written.dtype), written, out=written)


def _prefix_slots(page_table: Tensor, b: Tensor, column: Tensor, page_size: int) -> Tensor:
    page = torch.div(column, page_size, rounding_mode="floor").clamp_(max=page_table.shape[1] - 1)
    return page_table[b, page] * page_size + column % page_size


# ------------------------------------------------------------------ what packed backends share


@dataclass(frozen=True)
class PackedPrefixPlan:
    """What the forwards of a round share."""

    page_table: Tensor  # [B, W] int32
    kv_lens: Tensor  # [B] int64
    max_kv_len: int
    tail_slots: Tensor  # [B, tail] int64; the zero slot where a sequence owns no page
    page_size: int
    prefix: Lists | None  # each sequence's prefix once, for backends that merge two passes


def plan_prefix(
    page_table: Tensor, kv_lens: Tensor, max_kv_len: int, tail_slots: Tensor, page_size: int
) -> PackedPrefixPlan:
    """Plan a round without a list of the prefixes. See base.TreeAttention.plan_prefix."""
    check_room(page_table, max_kv_len, page_size)
    return PackedPrefixPlan(
        page_table=page_table,
        kv_lens=kv_lens,
        max_kv_len=max_kv_len,
        tail_slots=tail_slots * (tail_slots >= NUM_RESERVED_PAGES * page_size),
        page_size=page_size,
        prefix=None,
    )


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of keys. out [..., h, dv], lse [..., h], base e; -inf: an empty set.

    Both empty gives 0 and -inf.
    """
    high = torch.maximum(lse, other_lse)
    high = high.masked_fill(high == -torch.inf, 0)
    weight, other_weight = (lse - high).exp(), (other_lse - high).exp()
    total = weight + other_weight
    share = 1 / total.masked_fill(total == 0, 1)
    joined = out * (weight * share)[..., None] + other_out * (other_weight * share)[..., None]
    return joined, high + total.log()
