"""Results as JSON, each with the commit, the machine and the versions that gave it."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("treedraft", "torch", "transformers", "triton", "numpy")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, threads torch uses, memory and GPUs."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": gpus,
        "system": platform.platform(),
    }


def describe_versions() -> dict[str, str | None]:
    """Python and the packages that matter; None where one is absent."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def describe_commit() -> str | None:
    """The source's commit, with "-dirty" when files differ from it; None where neither git nor a note knows it.

    A checkout that was copied without its .git may name its commit in a file COMMIT beside pyproject.toml.
    """
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        note = Path(__file__).parents[3] / "COMMIT"
        return note.read_text(encoding="utf-8").strip() if note.exists() else None


def json_safe(value: Any) -> Any:
    """`value` with dataclasses as dicts, tuples as lists, NaN and infinities as None, all through."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_result(folder: Path, name: str, data: dict[str, Any]) -> Path:
    """Write `data` with its circumstances to FOLDER/NAME-TIME.json; returns the file."""
    return write_result_file(folder / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%S}.json", name, data)


def write_result_file(file: Path, name: str, data: dict[str, Any]) -> Path:
    """Write `data` with its circumstances to a file; returns it."""
    now = datetime.now(UTC)
    circumstances = {
        "benchmark": name,
        "date": now.isoformat(timespec="seconds"),
        "commit": describe_commit(),
        "machine": describe_machine(),
        "versions": describe_versions(),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(json_safe(circumstances | data), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return file


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
