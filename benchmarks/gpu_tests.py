"""Run every test that needs a GPU, several files at once, and write what passed to FOLDER/gpu-tests-TIME.json.

Usage: python benchmarks/gpu_tests.py [--out FOLDER] [--only WORD ...] [--limit SECONDS]

Compile FlashInfer's kernels first where it is installed: its tests are skipped where it is not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

from treedraft.bench.results import write_result

ROOT = Path(__file__).parents[1]
FILES = [
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests/gpu").glob("test_*.py")),
    "tests/kernels",
    "tests/conformance",
]
ALONE = ("test_auto_gpu", "test_bench_gpu")  # they look at times: after all others
WORKERS = {"gluon": 5, "flashinfer": 4, "model_kernels": 3, "round_kernels": 3, "triton_attention": 2}


def run_file(file: str, folder: Path, limit_s: float) -> dict[str, object]:
    """Run one file's tests in a process of their own; its counts, and the names of those that did not pass."""
    report, started = folder / (file.replace("/", "-") + ".xml"), time.monotonic()
    workers = next((n for word, n in WORKERS.items() if word in file), 1)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", file]
    command += [f"--junitxml={report}", *(["-n", str(workers), "--dist=worksteal"] if workers > 1 else [])]
    log = folder / (file.replace("/", "-") + ".log")
    with log.open("w") as out:
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out, timeout=limit_s, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
    found: dict[str, object] = {"file": file, "exit": code, "seconds": round(time.monotonic() - started, 1)}
    if report.exists():
        cases = ElementTree.parse(report).getroot().findall(".//testcase")
        state = {f"{c.get('classname')}::{c.get('name')}": {child.tag for child in c} for c in cases}
        failed = [name for name, tags in state.items() if tags & {"failure", "error"}]
        skipped = [name for name, tags in state.items() if "skipped" in tags]
        found |= {"passed": len(state) - len(failed) - len(skipped), "skipped": skipped, "failed": failed}
    print(f"{file}: exit {code}, {found.get('passed')} passed, {found['seconds']} s; {found.get('failed')}", flush=True)
    return found


def main() -> None:
    """Run the files, at most eight at once; exit with 1 when one did not pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--only", nargs="*", default=[""], metavar="WORD", help="files whose name holds one of these")
    parser.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="for each file")
    parser.add_argument("--logs", type=Path, help="where pytest's output stays")
    given = parser.parse_args()
    files = [f for f in FILES if any(word in f for word in given.only)]
    folder = given.logs or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    together = [f for f in files if not any(word in f for word in ALONE)]
    together.sort(key=lambda f: not any(word in f for word in WORKERS))  # the long ones first
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda f: run_file(f, folder, given.limit), together))
    results += [run_file(f, folder, given.limit) for f in files if f not in together]
    is_good = all(r["exit"] in (0, 5) for r in results)  # 5: no test was chosen
    passed = sum(int(str(r.get("passed", 0))) for r in results)
    print(write_result(given.out, "gpu-tests", {"passed": passed, "all_passed": is_good, "files": results}))
    raise SystemExit(not is_good)


if __name__ == "__main__":
    main()
