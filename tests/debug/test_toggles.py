"""Reverting fixes: the register, the edited copy in every kind of process, and the proof of each toggle."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from treedraft import _patcher
from treedraft._patcher import Edit, Fix, ToggleError
from treedraft.debug import toggles
from treedraft.debug.toggles import Outcome, Proof

TESTS = Path(__file__).parent.parent
ROOT = Path(_patcher.package_root())
FIXES = _patcher.load_fixes(str(ROOT))


def run_python(*arguments: str, root: Path = ROOT, cache: Path, revert: str = "", **env: str) -> Any:
    """Run python over the package in `root`, with an edited copy's cache of its own."""
    kept = {k: v for k, v in os.environ.items() if k != _patcher.VARIABLE and not k.startswith("PYTEST_")}
    kept |= {"PYTHONPATH": str(root.parent), "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", **env}
    if revert:
        kept[_patcher.VARIABLE] = revert
    return subprocess.run([sys.executable, *arguments], env=kept, cwd=cache, capture_output=True, text=True)


def copy_package(folder: Path, **edits: tuple[str, str]) -> Path:
    """A copy of the package, data linked. edits: of the register, (old, new)."""
    texts, others = _patcher.read_package(str(ROOT))
    for old, new in edits.values():
        text = texts["debug/fixes.yaml"].decode()
        assert text.count(old) == 1, old
        texts["debug/fixes.yaml"] = text.replace(old, new).encode()
    root = folder / "treedraft"
    _patcher._write(str(root), str(ROOT), texts, others)
    return root


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


# ------------------------------------------------------------------ the register


def test_register_is_what_a_yaml_library_reads() -> None:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "debug" / "fixes.yaml").read_text(encoding="utf-8")
    assert _patcher.parse_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    "text",
    [
        'a:\n  - b: "c"',  # a mapping at the top
        "- a: 17",  # a number
        "- a: yes",
        "- a: b: c",
        "- a: b # c",
        "- a: 'b'",
        '- a: "b',
        "- a: [b]",
        "- a: |\n    b",
        "- a: >-\n    b",
        "- a: |-\n      b",  # indented further, and not said
        "- a: |2-\n    b",
        "- a: |-",
        "- a: b\n  a: c",
        "- a: b\n   c: d",
        "- a: b\n\tc: d",
        "- a:",
        "- a: &b c",
        "- a: !b c",
        "--- b",
    ],
)
def test_parse_yaml_refuses_what_it_does_not_know(text) -> None:
    with pytest.raises(ToggleError, match=r"fixes\.yaml, line \d+"):
        _patcher.parse_yaml(text)


@pytest.mark.parametrize("text", ['- a: |-\n    b\n\n      c\n\n  d: e f, (g)\n\n# h\n- a: "\\n: #"\n  d: ""\n'])
def test_parse_yaml_agrees_with_a_library_on_what_it_knows(text) -> None:
    yaml = pytest.importorskip("yaml")
    assert _patcher.parse_yaml(text) == yaml.safe_load(text)


RECORD = {
    "id": "x",
    "title": "t",
    "story": "s",
    "witness": "w",
    "edits": [{"file": "a.py", "match": "1", "replacement": "2"}],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "X"}, "id is made of"),
        ({"id": "a,b"}, "id is made of"),
        ({"extra": "y"}, "must have the keys"),
        ({"edits": [{"file": "__init__.py", "match": "1", "replacement": "2"}]}, "run before the edited copy"),
        ({"edits": [{"file": "_patcher.py", "match": "1", "replacement": "2"}]}, "run before the edited copy"),
        ({"edits": [{"file": "../a.py", "match": "1", "replacement": "2"}]}, "only .py files of the package"),
        ({"edits": [{"file": "/a.py", "match": "1", "replacement": "2"}]}, "only .py files of the package"),
        ({"edits": [{"file": "a.json", "match": "1", "replacement": "2"}]}, "only .py files of the package"),
        ({"edits": [{"file": "a.py", "match": "1", "replacement": "1"}]}, "changes nothing"),
        ({"edits": [{"file": "a.py", "match": "1"}]}, "must have the keys"),
    ],
)
def test_register_refuses_a_malformed_fix(change, message) -> None:
    with pytest.raises(ToggleError, match=message):
        _patcher.as_fixes([{**RECORD, **change}])


def test_register_refuses_an_id_twice() -> None:
    with pytest.raises(ToggleError, match="twice"):
        _patcher.as_fixes([RECORD, RECORD])


@pytest.mark.parametrize("name", FIXES)
def test_every_fix_applies_and_names_a_witness_that_exists(name) -> None:
    fix = FIXES[name]
    texts, _ = _patcher.read_package(str(ROOT))
    assert set(_patcher.revert(texts, [fix])) == {edit.file for edit in fix.edits}
    file, _, function = fix.witness.partition("::")
    tree = ast.parse((TESTS.parent / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


# ------------------------------------------------------------------ applying


def fix_of(name: str, *edits: tuple[str, str], file: str = "a.py") -> Fix:
    return Fix(name, "t", "s", tuple(Edit(file, match, replacement) for match, replacement in edits), "w")


def test_revert_applies_several_fixes_in_any_order() -> None:
    files = {"a.py": b"x = 1\ny = 2\nz = 3\n", "b.py": b"x = 1\n"}
    one, other = fix_of("one", ("1", "22"), ("3", "1")), fix_of("other", ("y = 2", "y = 1"))
    expected = {"a.py": b"x = 22\ny = 1\nz = 1\n"}
    assert _patcher.revert(files, [one, other]) == _patcher.revert(files, [other, one]) == expected


@pytest.mark.parametrize(
    ("fixes", "message"),
    [
        ([fix_of("f", ("q", "r"))], "'f' no longer applies: its match no longer occurs in a.py"),
        ([fix_of("f", ("=", "=="))], "occurs more than once in a.py"),
        ([fix_of("f", ("aba", "r"))], "occurs more than once in a.py"),  # overlapping itself
        ([fix_of("f", ("1", "2"), file="c.py")], "'f' edits c.py, which does not exist"),
        ([fix_of("f", ("x = 1", "x ="))], "without f, a.py is no Python"),
        ([fix_of("f", ("x = 1", "2")), fix_of("g", ("1\ny", "2\ny"))], "'f' and 'g' edit the same text of a.py"),
        ([fix_of("f", ("x = 1", "2")), fix_of("g", ("x = 1", "3"))], "'f' and 'g' edit the same text of a.py"),
        ([fix_of("f", ("x = 1", "x = 2"), ("q", "r"))], "no longer occurs"),
    ],
)
def test_revert_applies_all_edits_or_none(fixes, message) -> None:
    with pytest.raises(ToggleError, match=message):
        _patcher.revert({"a.py": b"x = 1\ny = 2\n# ababa\n"}, fixes)


# ------------------------------------------------------------------ every kind of process

LOOK = """
import inspect, json, os, sys
def look():
    import treedraft.config, treedraft.speculative, treedraft.engine.request as request
    from treedraft import _patcher
    found = _patcher.in_force()
    return {
        "ids": list(found.ids), "digest": found.digest, "folder": found.folder, "pid": os.getpid(),
        "config": "+ speculative_tail" in inspect.getsource(treedraft.config.max_logical_len),
        "request": "i == len(token_ids) - 1" in inspect.getsource(request.Request.append),
        "runs": treedraft.config.max_logical_len(100, None, 0),
        "search": [list(treedraft.__path__), list(treedraft.__spec__.submodule_search_locations)],
        "private": "_treedraft_patcher" in sys.modules,
    }
"""
BOTH = "class-17,26972"


def look(cache: Path, revert: str = BOTH, **options: Any) -> dict[str, Any]:
    done = run_python("-c", LOOK + "print(json.dumps(look()))", cache=cache, revert=revert, **options)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "log": done.stderr}


def test_two_fixes_are_reverted_at_once(tmp_path) -> None:
    found = look(tmp_path)
    assert found["ids"] == ["26972", "class-17"]
    assert (found["config"], found["request"], found["runs"]) == (False, True, 100)
    assert found["search"] == [[found["folder"]]] * 2
    assert found["folder"].startswith(str(tmp_path))
    assert found["log"].count("fixes reverted by TREEDRAFT_REVERT_FIX: 26972 (") == 1
    copy = Path(found["folder"])
    assert os.stat(copy).st_mode & 0o077 == 0 and os.stat(copy.parent).st_mode & 0o077 == 0
    assert (copy / "demo/model/tokenizer.json").samefile(ROOT / "demo/model/tokenizer.json")
    assert {p.name for p in copy.parent.iterdir()} == {copy.name, ".lock"}


def test_digest_tells_sets_of_fixes_apart_and_not_their_order(tmp_path) -> None:
    digests = [look(tmp_path, revert)["digest"] for revert in (BOTH, "26972, class-17,", "26972")]
    assert digests[0] == digests[1] != digests[2]
    _patcher.require_same({"rank 0": digests[0], "rank 1": digests[1]})
    with pytest.raises(ToggleError, match="rank 1: " + digests[2]):
        _patcher.require_same({"rank 0": digests[0], "rank 1": digests[2]})


def test_without_the_variable_nothing_is_copied(tmp_path) -> None:
    found = look(tmp_path, revert="")
    assert (found["ids"], found["digest"], found["private"], found["config"]) == ([], "none", False, True)
    assert list(tmp_path.iterdir()) == []


def test_python_m_runs_the_copy(tmp_path) -> None:
    done = run_python("-m", "treedraft", "toggles", "list", cache=tmp_path, revert="class-9")
    assert done.returncode == 0, done.stderr
    assert "class-9 (reverted)" in done.stdout and str(tmp_path) in done.stdout


def test_spawned_workers_run_the_copy(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        LOOK + "import multiprocessing\nif __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(json.dumps([look(), pool.apply(look)]))\n"
    )
    done = run_python(str(script), cache=tmp_path, revert=BOTH)
    assert done.returncode == 0, done.stderr
    parent, child = json.loads(done.stdout)
    assert parent.pop("pid") != child.pop("pid")
    assert parent == child and child["request"]


def test_ranks_started_together_share_one_copy(tmp_path) -> None:
    """As torchrun starts them: at once, each finding the cache empty."""
    launcher = tmp_path / "launch.py"
    (tmp_path / "rank.py").write_text(LOOK + "print(json.dumps(look()))\n")
    launcher.write_text(
        "import os, subprocess, sys\n"
        "ranks = [subprocess.Popen([sys.executable, 'rank.py'], env={**os.environ, 'RANK': str(i)},\n"
        "         stdout=subprocess.PIPE, text=True) for i in range(4)]\n"
        "for rank in ranks:\n    print(rank.communicate()[0], end='')\n    assert rank.returncode == 0\n"
    )
    done = run_python(str(launcher), cache=tmp_path, revert=BOTH)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 4 and len({(f["digest"], f["folder"], f["runs"]) for f in found}) == 1
    copy = Path(found[0]["folder"])
    assert {p.name for p in copy.parent.iterdir()} == {copy.name, ".lock"}, "leftovers"


@pytest.mark.parametrize("fault", ["text", "stray", "missing", "link"])
def test_a_spoiled_copy_is_written_anew(tmp_path, fault) -> None:
    first = look(tmp_path)
    copy = Path(first["folder"])
    if fault == "text":
        (copy / "config.py").write_text("raise SystemExit('spoiled')")
    elif fault == "stray":
        (copy / "kv" / "config.py").write_text("")
    elif fault == "missing":
        (copy / "errors.py").unlink()
    else:
        link = copy / "demo/model/config.json"
        link.unlink()
        link.write_text("{}")
    assert {**look(tmp_path), "pid": 0} == {**first, "pid": 0}
    assert not (copy / "kv" / "config.py").exists() and (copy / "errors.py").exists()
    assert (copy / "demo/model/config.json").read_text() != "{}"


def test_a_cache_that_others_can_write_is_refused(tmp_path) -> None:
    folder = tmp_path / "treedraft" / "reverted"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    done = run_python("-c", "import treedraft", cache=tmp_path, revert="26972")
    assert done.returncode == 1 and "others can write" in done.stderr


def test_an_unknown_fix_stops_the_import(tmp_path) -> None:
    code = (
        "import sys\ntry:\n    import treedraft\nexcept RuntimeError as error:\n    print(error)\n"
        "print([m for m in sys.modules if m.startswith('treedraft')])"
    )
    done = run_python("-c", code, cache=tmp_path, revert="26972,nonsense")
    message, modules = done.stdout.splitlines()
    assert message.startswith("TREEDRAFT_REVERT_FIX names nonsense; registered are 25015, 26972,")
    assert modules == "[]" and not (tmp_path / "treedraft").exists()


def test_one_drifted_fix_reverts_none(tmp_path) -> None:
    root = copy_package(tmp_path / "site")
    replace_in(
        root / "config.py", "return max_context + max_pending * path +", "return max_pending * path + max_context +"
    )
    done = run_python("-c", "import treedraft", root=root, cache=tmp_path, revert=BOTH)
    assert done.returncode == 1 and "fix '26972' no longer applies" in done.stderr
    assert look(tmp_path, "class-17", root=root)["request"]


def test_triton_kernels_are_edited(tmp_path) -> None:
    """The kernel that runs, and the source that Triton compiles, are the edited ones."""
    pytest.importorskip("triton")
    edits = [{"file": "kernels/noise.py", "match": "g.to(tl.float32)", "replacement": "(g + 1).to(tl.float32)"}]
    root = copy_package(tmp_path / "site")
    lines = [f'- id: kernel\n  title: t\n  story: s\n  witness: w\n  edits:\n    - file: "{edits[0]["file"]}"\n']
    lines += [f'      match: "{edits[0]["match"]}"\n      replacement: "{edits[0]["replacement"]}"\n']
    (root / "debug" / "fixes.yaml").write_text("".join(lines))
    code = (
        "import inspect, torch\nfrom treedraft.kernels import noise\nfrom treedraft.speculative.noise import gumbel\n"
        "keys, positions = torch.tensor([5]), torch.tensor([[7]])\n"
        "print((noise.gumbel_triton(keys, positions, 64) - gumbel(keys, positions, 64)).mean().item())\n"
        "print(inspect.getsource(noise._gumbel_of.fn).count('(g + 1)'), noise.__file__)"
    )
    done = run_python("-c", code, root=root, cache=tmp_path, revert="kernel", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    mean, source = done.stdout.splitlines()
    assert float(mean) == pytest.approx(1, abs=1e-6)
    assert source.startswith("1 " + str(tmp_path / "treedraft"))


def test_llm_info_reports_the_set_in_force(tmp_path) -> None:
    code = (
        "from treedraft import LLM\ninfo = LLM('demo', device='cpu', max_batch=1, max_context=32).info()\n"
        "print(info['reverted_fixes'], info['revert_digest'])"
    )
    done = run_python("-c", code, cache=tmp_path, revert="class-17")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"['class-17'] {look(tmp_path, 'class-17')['digest']}"


def test_llm_info_reports_that_no_fix_is_reverted(plain64) -> None:
    info = plain64.info()
    assert (info["reverted_fixes"], info["revert_digest"]) == ([], "none")


def test_a_wheel_has_the_register_and_reverts(tmp_path) -> None:
    """Without the tests folder, check proves application alone, and says so."""
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((TESTS.parent / name).read_bytes())
    copy_package(source / "src")
    code = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    built = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    [wheel] = source.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    root = tmp_path / "site" / "treedraft"
    assert look(tmp_path, root=root)["runs"] == 100
    done = run_python("-m", "treedraft", "toggles", "check", root=root, cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "application was proven, the witnesses did not run" in done.stdout


# ------------------------------------------------------------------ the proof

PROOF = Proof("x", "t", ("a.py",), "w", applies=True)
PASSED = Outcome(1, (), (), 0.1)


def failed(message: str) -> Outcome:
    return Outcome(0, (message,), (), 0.1)


@pytest.mark.parametrize(
    ("with_fix", "without", "problem"),
    [
        (PASSED, failed("AssertionError: assert 1 == 2"), None),
        (PASSED, failed("treedraft.errors.InvariantError: slot 0"), None),
        (PASSED, PASSED, "does not notice"),
        (PASSED, failed("NameError: name 'kv_lens' is not defined"), "does not run"),
        (PASSED, Outcome(0, (), ("fixture 'x' not found",), 0), "could not run"),
        (failed("AssertionError"), failed("AssertionError"), "does not pass with the fix"),
        (Outcome(0, (), (), 0), failed("AssertionError"), "does not pass with the fix: no such test"),
        (Outcome(1, (), (), 10.5), failed("AssertionError"), "the limit is 10 s"),
    ],
)
def test_judge_accepts_a_witness_that_notices_and_nothing_else(with_fix, without, problem) -> None:
    proof = toggles.judge(PROOF, with_fix, without)
    if problem is None:
        assert proof.is_good and proof.passes_with_fix and proof.fails_without
    else:
        assert len(proof.problems) == 1 and problem in proof.problems[0]


@pytest.mark.slow
def test_check_proves_every_fix() -> None:
    problems = {p.id: p.problems for p in toggles.check(list(FIXES.values()), TESTS, jobs=2)}
    assert problems == dict.fromkeys(FIXES, ())


def test_check_proves_a_fix_and_fails_where_text_replacement_or_witness_drifted(tmp_path) -> None:
    root = copy_package(
        tmp_path / "site",
        replacement=("i == len(token_ids) - 1 and", "i == len(tokens) - 1 and"),
        witness=("self.allocator.free(own[:-1])", "self.allocator.free(own[:])"),  # as good as the fix
    )
    replace_in(root / "runner" / "drafter.py", "+ (level - 2)).expand", "+ level - 2).expand")
    ids = ("25015", "class-12", "class-17", "class-9")
    done = run_python(
        "-m", "treedraft", "toggles", "check", *ids, "--json", "--tests", str(TESTS), root=root, cache=tmp_path
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert (report["num_bad"], report["proven"]) == (3, "application and witness")
    text, unnoticed, broken, good = report["fixes"]
    assert not text["applies"] and "fix '25015' no longer applies" in text["problems"][0]
    assert unnoticed["applies"] and "does not notice that the fix is gone" in unnoticed["problems"][0]
    assert broken["applies"] and "NameError: name 'tokens' is not defined" in broken["problems"][0]
    assert good["applies"] and good["passes_with_fix"] and good["fails_without"] and good["problems"] == []


def test_check_without_the_tests_folder_says_so(tmp_path) -> None:
    root = copy_package(tmp_path / "site")
    done = run_python("-m", "treedraft", "toggles", "check", root=root, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "application was proven, the witnesses did not run" in done.stdout
    assert done.stdout.endswith(f"{len(FIXES)} of {len(FIXES)} proven\n")


def test_show_prints_the_diff_that_takes_a_fix_out(tmp_path) -> None:
    done = run_python("-m", "treedraft", "toggles", "show", "26972", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "-    return max_context + max_pending * path + speculative_tail(speculative)" in done.stdout
    assert "+    return max_context + max_pending * path\n" in done.stdout
    assert "torch" not in run_python("-X", "importtime", "-m", "treedraft", "toggles", "list", cache=tmp_path).stderr


def test_commands_refuse_an_unknown_fix(tmp_path) -> None:
    done = run_python("-m", "treedraft", "toggles", "show", "nonsense", cache=tmp_path)
    assert done.returncode == 2 and "no fix is registered as nonsense" in done.stderr
