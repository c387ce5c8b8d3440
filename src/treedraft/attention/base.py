"""What an attention backend is: plan once for each forward, run once for each layer.

A row sees the committed prefix of its sequence and the tree slots that its bits name (types.TreeRows). Draft levels,
verification, draft extension and plain decode all ask this one question.

    round:    plan_prefix -> forward: plan_tree -> layer: run_mla
                             forward: plan_tree -> layer: run_mla, run_mla, ...
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from treedraft.types import TreeRows

PrefixPlan = Any  # a backend's own: what all forwards of a round share
Plan = Any  # a backend's own: what all layers of a forward share


class TreeAttention(Protocol):
    """A backend. All that a layer needs is in the plan. Nothing here syncs.

    A backend with index lists holds them: a plan is valid until the same object makes the next one, in stream order.
    So each kind of forward (draft, extension, verification) has its own. Where a list is too small, the forward's rows
    see nothing, and the overflow record given to the backend says so.

    Contract, for every method:
    - What no row may see is never read as a number: freed, trash and stale slots may hold NaN.
    - A row that sees nothing (kv_len 0 and no bits) gives output 0 and log-sum-exp -inf.
    - Scores and softmax are computed in at least float32; outputs have the queries' dtype.
    """

    def plan_prefix(
        self, page_table: Tensor, kv_lens: Tensor, max_kv_len: int, tail_slots: Tensor, page_size: int
    ) -> PrefixPlan:
        """Plan what forwards over the same committed prefixes share.

        page_table: [B, W] int32; kv_lens: [B] int64, at most max_kv_len; tail_slots: [B, tail] int64, physical slots of
        logical positions kv_lens + 0, 1, ... Raise InvariantError when max_kv_len does not leave room in the row.
        """

    def plan_tree(self, prefix: PrefixPlan, ancestor_bits: Tensor, tree_len: int) -> Plan:
        """Plan one forward of rows with ancestor_bits [B, R, words] int64, naming tree slots below tree_len <= tail."""

    def plan(self, rows: TreeRows, page_size: int) -> Plan:
        """Plan one forward by itself: plan_prefix and plan_tree in one."""

    def check_fits(self, batch: int, sum_kv_lens: int) -> None:
        """Raise InvariantError when lists of a forward over prefixes of these lengths would not fit. Host integers."""

    def run_mla(self, plan: Plan, kv: Tensor, q: Tensor, v_width: int, scale: float) -> Tensor:
        """Absorbed MLA: every head reads the same rows. Returns [B, R, h, v_width], any strides.

        kv: [num_slots, w] one layer's latent | roped key; q: [B, R, h, w], any strides; the value of a slot is its
        first v_width columns. scale: multiplies scores, (dn + dr)^-0.5 and never w^-0.5.
        """

    def run_mla_with_lse(self, plan: Plan, kv: Tensor, q: Tensor, v_width: int, scale: float) -> tuple[Tensor, Tensor]:
        """As run_mla, and the log-sum-exp of the scaled scores [B, R, h], base e, at least float32, for merging."""

    def run_gqa(self, plan: Plan, k: Tensor, v: Tensor, q: Tensor, scale: float) -> Tensor:
        """Grouped-query attention. Returns [B, R, h, dv].

        k: [num_slots, hk, d], v: [num_slots, hk, dv], q: [B, R, h, d]; query head i reads KV head i // (h // hk).
        """
