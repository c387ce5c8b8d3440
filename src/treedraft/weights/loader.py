"""Reads and writes checkpoints in the Hugging Face layout: config.json and sharded or single safetensors files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from treedraft.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Stays in float32 whatever the checkpoint's dtype: it decides between experts whose scores are close.
FLOAT32_SUFFIXES = ("e_score_correction_bias",)


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json as a dict. Raises CheckpointError when it is missing or no JSON object."""
    return _read_json(folder / "config.json")


def shards(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor. Raises CheckpointError for a missing, truncated or contradictory file."""
    index = folder / INDEX
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index} holds no weight_map")
        files = sorted(set(weight_map.values()))
    else:
        weight_map = None
        files = [SINGLE] if (folder / SINGLE).exists() else sorted(p.name for p in folder.glob("*.safetensors"))
    if not files:
        found = sorted(p.name for p in folder.glob("*.bin"))
        hint = f"; {found[0]} is not read, convert it to safetensors" if found else ""
        raise CheckpointError(f"{folder} holds neither {INDEX} nor a .safetensors file{hint}")
    where: dict[str, Path] = {}
    for file in files:
        path = folder / file
        if not path.exists():
            raise CheckpointError(f"{index} names {file}, which is not in {folder}")
        with _open(path) as tensors:
            for name in tensors.keys():
                if name in where:
                    raise CheckpointError(f"tensor {name} is in both {where[name].name} and {file}")
                where[name] = path
    if weight_map is not None:
        lost = sorted(set(weight_map) - set(where))
        if lost:
            raise CheckpointError(f"{index} places {lost[0]} in {weight_map[lost[0]]}, which does not hold it")
    return where


def load_weights(
    views: Iterable[tuple[str, Tensor]],
    folder: Path,
    is_skipped: Callable[[str], bool] = lambda name: False,
    aliases: dict[str, str] | None = None,
) -> None:
    """Fill every view from the folder's safetensors files, converting between float dtypes.

    `aliases`: names that may be present and must then equal the tensor that they alias.
    Raises CheckpointError naming the tensors that are missing, left over, of another shape or of a quantised dtype.
    """
    by_name = dict(views)
    where = shards(folder)
    aliases = {name: original for name, original in (aliases or {}).items() if name in where}
    missing = [name for name in by_name if name not in where]
    if missing:
        raise CheckpointError(f"{folder} lacks {_some(missing)}")
    left_over = [name for name in where if name not in by_name and name not in aliases and not is_skipped(name)]
    if left_over:
        raise CheckpointError(f"{folder} holds {_some(left_over)}, which the model described by config.json has not")
    by_file: dict[Path, list[str]] = {}
    for name in (*by_name, *aliases):
        by_file.setdefault(where[name], []).append(name)
    for path, names in by_file.items():
        with _open(path) as tensors:
            for name in names:
                if name in by_name:
                    _fill(by_name[name], _get(tensors, name, path), name)
    for name, original in aliases.items():
        with _open(where[name]) as tensors:
            _check_same(_get(tensors, name, where[name]), by_name[original], name, original)


def save_checkpoint(
    folder: Path,
    views: Iterable[tuple[str, Tensor]],
    config: dict[str, Any],
    dtype: torch.dtype | None = None,
    shard_bytes: int = 2**32,
) -> None:
    """Write config.json and the tensors, in files of at most `shard_bytes` (one tensor at least).

    `dtype`: what float tensors are stored in, but for those that must stay float32; None keeps each one's own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, view in views:
        tensor = view.detach().to("cpu", _stored_dtype(name, view, dtype)).reshape(stored_shape(view)).contiguous()
        if groups[-1] and size + tensor.nbytes > shard_bytes:
            groups.append({})
            size = 0
        # A clone where the view shares storage with its neighbours: safetensors refuses shared memory.
        groups[-1][name] = tensor.clone() if tensor.data_ptr() == view.data_ptr() else tensor
        size += tensor.nbytes
    count = len(groups)
    files = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for file, group in zip(files, groups, strict=True):
        save_file(group, folder / file, metadata={"format": "pt"})
    if count > 1:
        total = sum(t.nbytes for group in groups for t in group.values())
        weight_map = {name: file for file, group in zip(files, groups, strict=True) for name in group}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / "config.json", config)


def stored_shape(view: Tensor) -> list[int]:
    """Return the shape in the checkpoint: a view of three dimensions is stored as a matrix of its rows."""
    return [view.shape[0] * view.shape[1], view.shape[2]] if view.dim() == 3 else list(view.shape)


METADATA_FILES = ("*.json", "*.model", "*.txt", "*.jinja")  # all but weights
CHECKPOINT_FILES = (*METADATA_FILES, "*.safetensors")
CONFIG_FILES = ("config.json",)


def resolve_folder(name: str, kind: str = "model", files: tuple[str, ...] = CHECKPOINT_FILES) -> Path:
    """Return the folder that holds a checkpoint. kind: "model" or "draft", what "demo" means; files: to download.

    `name` is "demo", a folder, or a hub id, which is downloaded (or found in the hub's cache).
    Raises CheckpointError when it is none of these.
    """
    if name == "demo":
        folder = Path(__file__).resolve().parent.parent / "demo" / kind
        if not (folder / "config.json").exists():
            raise CheckpointError(f"the demo {kind} is not installed: {folder} holds no config.json")
        return folder
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or not name:
        raise CheckpointError(f"{kind} {name!r}: no such folder")
    return _download(name, kind, files)


def _download(name: str, kind: str, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"unknown {kind} {name!r}: it is neither 'demo' nor a folder here, and the hub gave: {reason}"
        ) from error


# ------------------------------------------------------------------ private


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is truncated or no safetensors file ({error})") from error


def _get(tensors: Any, name: str, path: Path) -> Tensor:
    try:
        return tensors.get_tensor(name)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {name} cannot be read ({error})") from error


def _fill(view: Tensor, tensor: Tensor, name: str) -> None:
    expected = stored_shape(view)
    if list(tensor.shape) != expected:
        raise CheckpointError(f"tensor {name} must have shape {expected}; got {list(tensor.shape)}")
    if (tensor.dtype in FLOATS) != (view.dtype in FLOATS) or (view.dtype == torch.bool) != (tensor.dtype == torch.bool):
        raise CheckpointError(f"tensor {name} must hold {_kind(view)}; got {tensor.dtype}")
    with torch.no_grad():
        view.copy_(tensor.view(view.shape))


def _kind(view: Tensor) -> str:
    return "float64, float32, bfloat16 or float16" if view.dtype in FLOATS else str(view.dtype)


def _check_same(tensor: Tensor, view: Tensor, name: str, original: str) -> None:
    if tensor.shape != view.shape or not torch.equal(tensor.to(view.dtype), view.cpu()):
        raise CheckpointError(f"tie_word_embeddings is true, but {name} differs from {original}")


def _stored_dtype(name: str, view: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None or view.dtype not in FLOATS:
        return view.dtype
    return torch.float32 if name.endswith(FLOAT32_SUFFIXES) and dtype != torch.float64 else dtype


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:5])
    return shown + (f" and {len(names) - 5} more tensors" if len(names) > 5 else "")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} holds no {path.name}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no readable JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object; got {type(content).__name__}")
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
