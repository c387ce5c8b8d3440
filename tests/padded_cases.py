"""The demo model padded to latent 512 + rope 64, which fixed kernels want: trees and text against plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import treedraft
from graph_cases import run
from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.debug.differences import gaps_at
from treedraft.demo.padding import pad_checkpoint

GREEDY = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 4
# Logits are near 10, where neighbouring bfloat16 numbers lie 0.06 apart, and several layers add up.
NEAR_IN_BFLOAT16 = 0.25


class PaddedDemo:
    """Runs of the padded demo in bfloat16 on a GPU; the torch backend's are kept."""

    def __init__(self, folder: Path, prompts: list[str]) -> None:
        demo = Path(treedraft.__file__).parent / "demo"
        self.folders = [str(pad_checkpoint(demo / part, folder / part)) for part in ("model", "draft")]
        self.prompts = prompts
        self._torch_runs: dict[int, Any] = {}

    def make_llm(self, backend: str, topk: int, page_size: int, cuda_graph: str = "off") -> LLM:
        return LLM(
            *self.folders,
            device="cuda",
            dtype="bfloat16",
            page_size=page_size,
            max_batch=4,
            max_context=128,
            speculative=SpeculativeConfig(3, topk, 2 + 2 * topk),
            attention_backend=backend,
            cuda_graph=cuda_graph,
        )

    def check_backend(
        self, name: str, topk: int, page_size: int, record_property: Any, uncaptured: str = "off"
    ) -> None:
        """Captured rounds equal others, tree for tree; they equal torch's, texts up to near-ties.

        uncaptured: "eager" where a kernel's sums depend on the number of rows, padded ones included.
        """
        eager = run(self.make_llm(name, topk, page_size, uncaptured), self.prompts, GREEDY)
        graph = run(self.make_llm(name, topk, page_size, "on"), self.prompts, GREEDY)
        assert graph == eager
        torch_llm, (wanted, wanted_rounds) = self._of_torch(topk)
        texts = zip(self.prompts, eager[0], wanted, strict=True)
        gaps = [gap for each in texts if (gap := gap_of_first_difference(torch_llm, *each)) is not None]
        record_property("gaps of texts", gaps)
        assert all(gap < NEAR_IN_BFLOAT16 for gap in gaps), gaps
        # The first round's tree comes from the same state in both: the same nodes, but for near-ties of draft scores.
        shares = [share_of_nodes(eager[1][i][0], wanted_rounds[i][0]) for i in range(len(self.prompts))]
        record_property("share of the first tree's nodes", shares)
        assert sum(shares) / len(shares) >= 0.85, shares

    def _of_torch(self, topk: int) -> Any:
        if topk not in self._torch_runs:
            llm = self.make_llm("torch", topk, 16)
            self._torch_runs[topk] = llm, run(llm, self.prompts, GREEDY)
        return self._torch_runs[topk]


def gap_of_first_difference(llm: LLM, prompt: str, given: Any, wanted: Any) -> float | None:
    """None for equal texts; else how far apart the target's two best tokens were there."""
    differing = [i for i, (a, b) in enumerate(zip(given, wanted, strict=True)) if a != b]
    if not differing:
        return None
    return gaps_at(llm, llm.encode(prompt), wanted[: differing[0]], GREEDY[0], 0).top_two


def share_of_nodes(given: Any, wanted: Any) -> float:
    """Of the wanted tree's nodes, named by their paths of tokens, the share that the given tree has too."""
    paths = [tree_paths(*round_[1:3]) for round_ in (given, wanted)]
    return len(paths[0] & paths[1]) / len(paths[1])


def tree_paths(token_ids: Any, parents: Any) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(token_ids, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)
