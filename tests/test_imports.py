"""Imports go down only (design section 4, layout.md), and the host parts never load torch.

Every import counts: at the top of a module, inside a function, or for annotations only.
"""

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import treedraft

ROOT = Path(treedraft.__file__).parent
HOST_KV = {"kv.allocator", "kv.manager", "kv.prefix"}
BOTTOM = {"errors", "types", "config"}
DEVICE = {"kernels", "kv", "speculative", "weights"}
BELOW_LLM = BOTTOM | DEVICE | HOST_KV | {"engine", "runner", "models", "attention"}

# layer -> what its modules may import, beside themselves. A layer is a package or a module of src/treedraft.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "_patcher": set(),  # loaded by its path, before anything else
    "types": {"errors"},
    "config": {"errors"},
    "kv": {"errors", "types", "kv.allocator", "kernels"},
    "speculative": {"errors", "types"},  # no config, pool or request
    "kernels": {"errors", "types", "speculative"},  # a kernel knows the constants of its torch twin
    "weights": {"errors"},
    "models": {"errors", "types", "weights", "kernels", "speculative"},
    "attention": {"errors", "types", "kv", "kv.allocator", "kernels"},
    "engine": {"errors", "types", "config"} | HOST_KV,  # nothing of the device
    "grammar": {"errors", "types"},  # knows tokens alone
    "runner": BOTTOM | DEVICE | HOST_KV | {"models", "attention"},  # never a Request
    "llm": BELOW_LLM | {"grammar", "_patcher"},
    "debug": BELOW_LLM | {"llm", "bench", "_patcher"},
    "bench": BELOW_LLM | {"llm", "debug"},
    "demo": BELOW_LLM | {"llm", "debug", "bench"},
    "train": BELOW_LLM,
    "server": BELOW_LLM | {"llm", "__init__"},
    "cli": BELOW_LLM | {"llm", "debug", "bench", "server", "train", "demo", "__init__", "_patcher"},
    "__main__": {"cli"},
    "__init__": set(),  # names, resolved when first used
}
ALLOWED["kv.allocator"] = {"errors"}
ALLOWED["kv.prefix"] = {"errors"}
ALLOWED["kv.manager"] = {"errors", "types", "kv.allocator", "kv.prefix"}
FOR_ANNOTATIONS = {"bench": {"cli"}, "server": {"debug"}, "kv.page_table": set()}  # seen by the type checker alone

DEVICE_TYPES = {"TreeRows", "ModelOutput", "DraftTree", "Accepted"}
HOST_TYPES = {
    "SamplingParams",
    "PromptLogprob",
    "ScoredTokens",
    "PrefillRow",
    "DecodeRow",
    "PageUpdate",
    "StepPlan",
    "RowResult",
    "StepResult",
    "RequestMetrics",
    "Choice",
    "RequestOutput",
    "StructuredOutput",
    "Grammar",
}
TYPES_SEEN = {
    "speculative": DEVICE_TYPES,
    "kernels": DEVICE_TYPES,
    "models": DEVICE_TYPES,
    "attention": DEVICE_TYPES,
    "engine": HOST_TYPES,
    "grammar": HOST_TYPES,
}
NO_TORCH_LAYERS = {"errors", "types", "config", "engine", "grammar", "kv.allocator", "kv.manager"}


@dataclass(frozen=True)
class Import:
    module: str  # imported, as "kv.manager", or a foreign top-level name
    names: tuple[str, ...]
    is_own: bool  # of treedraft
    for_annotations: bool
    at_import: bool  # runs when the module is imported


def modules() -> dict[str, ast.Module]:
    """Parsed modules by dotted name without "treedraft."; a package's own name is that of its __init__."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def layer_of(module: str) -> str:
    return module if module in HOST_KV else module.split(".")[0]


def imports_of(tree: ast.Module) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, for_annotations: bool, at_import: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(make(alias.name, (), for_annotations, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = tuple(alias.name for alias in node.names)
            if node.module == "treedraft":  # from treedraft import x: a submodule, or a name of __init__
                found.extend(make(f"treedraft.{n}", (), for_annotations, at_import) for n in names)
            else:
                found.extend(expand(node.module or "", names, for_annotations, at_import))
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            visit(child, for_annotations or checking, at_import and not inside and not checking)

    def make(name: str, names: tuple[str, ...], for_annotations: bool, at_import: bool) -> Import:
        top, _, rest = name.partition(".")
        if top != "treedraft":
            return Import(top, names, False, for_annotations, at_import)
        is_module = (ROOT / rest.replace(".", "/")).is_dir() or (ROOT / (rest.replace(".", "/") + ".py")).exists()
        return Import(rest if rest and is_module else "__init__", names, True, for_annotations, at_import)

    def expand(name: str, names: tuple[str, ...], for_annotations: bool, at_import: bool) -> list[Import]:
        """`from treedraft.kv import manager` names a module, `from treedraft.kv.manager import KVManager` does not."""
        path = ROOT / name.removeprefix("treedraft.").replace(".", "/")
        subs = [n for n in names if name.startswith("treedraft.") and (path / f"{n}.py").exists()]
        rest = tuple(n for n in names if n not in subs)
        own = [make(f"{name}.{n}", (), for_annotations, at_import) for n in subs]
        return own + ([make(name, rest, for_annotations, at_import)] if rest else [])

    visit(tree, False, True)
    return found


MODULES = modules()


def breaches(module: str, tree: ast.Module) -> list[str]:
    """What a module imports from above, and which types it has no business with."""
    layer = layer_of(module)
    own = module.split(".")[0]
    found = []
    for each in imports_of(tree):
        if not each.is_own:
            if each.module == "torch" and layer in NO_TORCH_LAYERS and not each.for_annotations:
                found.append(f"{module} imports torch")
            continue
        to = layer_of(each.module)
        same = to == layer or (to == own and layer not in HOST_KV)
        annotated = each.for_annotations and to in FOR_ANNOTATIONS.get(own, ())
        if not (same or to in ALLOWED[layer] or annotated):
            found.append(f"{module} imports {each.module}")
        if each.module == "types" and own in TYPES_SEEN:
            found += [f"{module} sees {n}" for n in each.names if n not in TYPES_SEEN[own]]
    return found


def test_every_layer_is_placed() -> None:
    assert {layer_of(m) for m in MODULES} <= set(ALLOWED)


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_go_down_only(module: str) -> None:
    assert breaches(module, MODULES[module]) == []


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("speculative.tree", "from treedraft.config import SpeculativeConfig"),
        ("speculative.tree", "from treedraft.types import SamplingParams"),
        ("models.mla", "from treedraft.attention.paged import PagedTreeAttend"),
        ("models.mla", "def f():\n    from treedraft.runner.round import Target"),
        ("engine.scheduler", "from treedraft.kv import page_table"),
        ("engine.scheduler", "import torch"),
        ("kv.manager", "from treedraft.kv.pool import LatentPool"),
        ("kv.pool", "from treedraft.runner.state import DeviceState"),
        ("runner.runner", "from treedraft.engine.request import Request"),
        ("runner.runner", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from treedraft.llm import LLM"),
        ("runner.runner", "from treedraft import LLM"),
        ("llm", "from treedraft.debug.trace import recording"),
    ],
)
def test_breaches_of_a_planted_import_are_found(module: str, code: str) -> None:
    assert len(breaches(module, ast.parse(code))) == 1


def test_modules_have_no_import_cycle() -> None:
    graph = {
        m: {i.module for i in imports_of(t) if i.is_own and i.at_import} & set(MODULES) for m, t in MODULES.items()
    }
    while graph:
        leaves = {m for m, below in graph.items() if not below & set(graph) - {m}}
        assert leaves, f"these import each other: {sorted(graph)}"
        graph = {m: below for m, below in graph.items() if m not in leaves}


HOST_MODULES = ["treedraft", "treedraft.types", "treedraft.config", "treedraft.errors", "treedraft.kv.manager"] + [
    f"treedraft.{m}" for m in MODULES if m.split(".")[0] == "engine"
]


def test_importing_host_parts_never_loads_torch() -> None:
    code = (
        f"import importlib, sys\nfor name in {HOST_MODULES}:\n    importlib.import_module(name)\n"
        "import treedraft\ntreedraft.SamplingParams(), treedraft.SpeculativeConfig(), treedraft.RequestOutput\n"
        "heavy = {'torch', 'transformers', 'numpy', 'safetensors', 'triton'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
