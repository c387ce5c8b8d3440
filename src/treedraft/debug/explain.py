"""Draw one round's tree: for a terminal, and as an SVG that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from xml.sax.saxutils import escape

from rich.text import Text
from rich.tree import Tree

from treedraft.debug.trace import RoundTrace

Decode = Callable[[int], str]  # one token id -> its text


def show_token(text: str) -> str:
    """A token's text with its spaces and line ends visible, at most 18 characters."""
    visible = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    visible = "".join(c if c.isprintable() else "�" for c in visible)
    return visible if len(visible) <= 18 else visible[:17] + "…"


def children_of(trace: RoundTrace) -> dict[int, list[int]]:
    """Live children of each column, likeliest first."""
    children: dict[int, list[int]] = {column: [] for column in range(len(trace.token_ids))}
    for column, parent in enumerate(trace.parents):
        if parent >= 0 and trace.is_live(column):
            children[parent].append(column)
    for columns in children.values():
        columns.sort(key=lambda c: (-trace.draft_probs[c], c))
    return children


def describe_round(trace: RoundTrace) -> str:
    """One line: nodes, accepted drafts, tokens emitted."""
    live = sum(trace.is_live(c) for c in range(len(trace.token_ids)))
    return (
        f"position {trace.kv_len}: {live} nodes, {trace.num_accepted} drafts accepted, "
        f"{len(trace.emitted_token_ids)} tokens emitted"
    )


def render_tree(trace: RoundTrace, decode: Decode) -> Tree:
    """The tree for rich: accepted path bold green, the bonus token (the target's own) magenta, the rest dim."""
    children = children_of(trace)
    accepted = set(trace.accepted_columns)

    def label(column: int) -> Text:
        style = "bold green" if column in accepted else "dim"
        text = Text(show_token(decode(trace.token_ids[column])), style=style)
        note = "root" if column == 0 else f"{trace.draft_probs[column]:.2f}"
        return text.append(f"  {note}", style="cyan" if column in accepted else "dim")

    def grow(branch: Tree, column: int) -> None:
        if column == trace.accepted_columns[-1]:
            bonus = Text(show_token(decode(trace.bonus_token_id)), style="bold magenta")
            branch.add(bonus.append("  bonus: the target's token", style="magenta"))
        for child in sorted(children[column], key=lambda c: c not in accepted):
            grow(branch.add(label(child)), child)

    tree = Tree(label(0), guide_style="dim")
    grow(tree, 0)
    return tree


# ---------------------------------------------------------------- SVG

_COLUMN, _ROW, _BOX_HEIGHT, _CHAR, _MARGIN = 168, 40, 28, 7.3, 20

# Plain classes, no CSS variables: more programs draw them. Without a media query the colours are the light ones.
_STYLE = """
  text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328; }
  text.title { font-weight: 600; font-size: 13px; }
  text.soft { fill: #656d76; font-size: 11px; }
  rect.page { fill: #ffffff; }
  rect.node { fill: #f3f5f7; stroke: #c4cad1; }
  path { fill: none; stroke: #c4cad1; stroke-width: 1.5; }
  .accepted rect.node { fill: #dafbe1; stroke: #1a7f37; stroke-width: 1.8; }
  .bonus rect.node { fill: #fbefff; stroke: #8250df; stroke-width: 1.8; }
  path.accepted { stroke: #1a7f37; stroke-width: 2.5; }
  path.bonus { stroke: #8250df; stroke-width: 2.5; stroke-dasharray: 4 3; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    text.soft { fill: #8d96a0; }
    rect.page { fill: #0d1117; }
    rect.node { fill: #1b222b; stroke: #3d444d; }
    path { stroke: #3d444d; }
    .accepted rect.node { fill: #12261e; stroke: #3fb950; }
    .bonus rect.node { fill: #261a3a; stroke: #bc8cff; }
    path.accepted { stroke: #3fb950; }
    path.bonus { stroke: #bc8cff; }
  }
"""


@dataclass(frozen=True)
class _Box:
    text: str
    note: str
    kind: str  # "accepted" | "bonus" | "draft"
    level: int
    row: float

    @property
    def x(self) -> float:
        return _MARGIN + self.level * _COLUMN

    @property
    def y(self) -> float:
        return 64 + self.row * _ROW

    @property
    def width(self) -> float:
        return max(40.0, 20 + _CHAR * len(self.text)) + (8 + 6.6 * len(self.note) if self.note else 0)


def as_svg(trace: RoundTrace, decode: Decode, title: str = "One round of tree speculation") -> str:
    """The tree as a self-contained SVG: depth from left to right, readable on light and dark pages."""
    boxes, edges = _lay_out(trace, decode)
    width = max(max(b.x + b.width for b in boxes), 480.0) + _MARGIN
    height = max(b.y for b in boxes) + _BOX_HEIGHT + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{width:.0f}" height="{height:.0f}" rx="8"/>',
        f'<text class="title" x="{_MARGIN}" y="26">{escape(title)}</text>',
        f'<text class="soft" x="{_MARGIN}" y="44">{escape(describe_round(trace))}</text>',
    ]
    # Accepted edges last, so that they lie on top.
    for start, end in sorted(edges, key=lambda e: e[1].kind != "draft"):
        parts.append(_edge(start, end))
    parts += [_node(box) for box in boxes]
    parts.append(
        f'<text class="soft" x="{_MARGIN}" y="{height - 14:.0f}">number: the draft\'s probability, '
        "sharpened as it ranks · green: accepted · violet: the target's own next token</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def _lay_out(trace: RoundTrace, decode: Decode) -> tuple[list[_Box], list[tuple[_Box, _Box]]]:
    """Leaves take rows from the top, a parent sits at its first child's row: the accepted path runs along the top."""
    children = children_of(trace)
    accepted = set(trace.accepted_columns)
    boxes: list[_Box] = []
    edges: list[tuple[_Box, _Box]] = []
    next_row = 0

    def place(column: int, level: int, row: int) -> _Box:
        nonlocal next_row
        note = "" if column == 0 else f"{trace.draft_probs[column]:.2f}"
        kind = "accepted" if column in accepted else "draft"
        box = _Box(show_token(decode(trace.token_ids[column])), note, kind, level, row)
        boxes.append(box)
        first = True
        if column == trace.accepted_columns[-1]:
            bonus = _Box(show_token(decode(trace.bonus_token_id)), "bonus", "bonus", level + 1, row)
            boxes.append(bonus)
            edges.append((box, bonus))
            first = False
        for child in sorted(children[column], key=lambda c: c not in accepted):
            if not first:
                next_row += 1
            edges.append((box, place(child, level + 1, row if first else next_row)))
            first = False
        return box

    place(0, 0, 0)
    return boxes, edges


def _edge(start: _Box, end: _Box) -> str:
    x0, y0 = start.x + start.width, start.y + _BOX_HEIGHT / 2
    x1, y1 = end.x, end.y + _BOX_HEIGHT / 2
    middle = x1 - 14
    bend = f"M{x0:.1f} {y0:.1f} H{middle - 10:.1f} " if y0 == y1 else f"M{x0:.1f} {y0:.1f} "
    if y0 == y1:
        return f'<path class="{end.kind}" d="{bend}H{x1:.1f}"/>'
    return f'<path class="{end.kind}" d="{bend}C{middle:.1f} {y0:.1f} {x0:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"/>'


def _node(box: _Box) -> str:
    middle = box.y + _BOX_HEIGHT / 2 + 4
    note = ""
    if box.note:
        note = (
            f'<text class="soft" x="{box.x + box.width - 8:.1f}" y="{middle:.1f}" text-anchor="end">{box.note}</text>'
        )
    return (
        f'<g class="{box.kind}"><rect class="node" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
        f'height="{_BOX_HEIGHT}" rx="6"/><text x="{box.x + 10:.1f}" y="{middle:.1f}" xml:space="preserve">'
        f"{escape(box.text)}</text>{note}</g>"
    )
