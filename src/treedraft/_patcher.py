"""Run treedraft without some of its fixes: `TREEDRAFT_REVERT_FIX=25015,class-9`. See debug/fixes.yaml.

Triton, inspect and tracebacks read a function's file, so the text itself must be the one without the fix:

    package folder --fixes.yaml: match -> replacement--> edited copy in a private cache, keyed by content and fixes
    treedraft.__path__ ------------------------------->  that copy: every submodule comes from there

`treedraft/__init__.py` loads this file by its path, before any submodule, when the variable is set; hence the standard
library only, and neither file can be edited itself. Either every edit applies, or nothing is imported.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

VARIABLE = "TREEDRAFT_REVERT_FIX"
PRIVATE_NAME = "_treedraft_patcher"  # where __init__ puts this module; treedraft._patcher may be another instance
FIXES_FILE = "debug/fixes.yaml"
NOT_EDITABLE = ("__init__.py", "_patcher.py")  # they run before the copy is in place
COPIED = (".py", ".yaml")  # text that is copied and verified; all else (weights, prompts) is linked
MAX_UNUSED_S = 30 * 24 * 3600.0  # copies that nobody used for so long are deleted

logger = logging.getLogger("treedraft")


class ToggleError(RuntimeError):
    """A fix cannot be reverted: unknown, registered wrongly, or its text is no longer in the code."""


@dataclass(frozen=True)
class Edit:
    """One replacement that takes the fix out again."""

    file: str  # below the package folder, with "/"
    match: str  # occurs exactly once in the file
    replacement: str


@dataclass(frozen=True)
class Fix:
    """One registered fix."""

    id: str
    title: str
    story: str  # what went wrong, how it showed, how it was fixed
    edits: tuple[Edit, ...]
    witness: str  # pytest id of a quick test that passes with the fix and fails without it


@dataclass(frozen=True)
class InForce:
    """The fixes that this process runs without."""

    ids: tuple[str, ...] = ()
    digest: str = "none"  # of the code that runs, where fixes are reverted: the same in processes that may mix
    folder: str | None = None  # the edited copy


# ------------------------------------------------------------------ the register


def load_fixes(root: str) -> dict[str, Fix]:
    """Read the register of the package in folder `root`: fixes by id, in the order of the file."""
    path = os.path.join(root, *FIXES_FILE.split("/"))
    try:
        text = _text(_read(path))
    except OSError as error:
        raise ToggleError(f"the register of fixes cannot be read: {error}") from error
    return as_fixes(parse_yaml(text))


def as_fixes(records: list[dict[str, object]]) -> dict[str, Fix]:
    """Check parsed records and return the fixes by id. Raises ToggleError."""
    fixes: dict[str, Fix] = {}
    for record in records:
        name = str(record.get("id"))
        _check_keys(record, ("id", "title", "story", "edits", "witness"), f"fix {name!r}")
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
            raise ToggleError(f"a fix's id is made of a-z, 0-9 and '-'; got {name!r}")
        if name in fixes:
            raise ToggleError(f"fix {name!r} is registered twice")
        edits = []
        for edit in record["edits"]:  # type: ignore[attr-defined]
            _check_keys(edit, ("file", "match", "replacement"), f"an edit of fix {name!r}")
            made = Edit(**edit)
            parts = made.file.split("/")
            if made.file in NOT_EDITABLE or ".." in parts or "" in parts or not made.file.endswith(".py"):
                raise ToggleError(
                    f"fix {name!r} edits {made.file!r}; only .py files of the package can be edited, and not "
                    f"{' or '.join(NOT_EDITABLE)}, which run before the edited copy is in place"
                )
            if not made.match or made.match == made.replacement:
                raise ToggleError(f"fix {name!r} has an edit of {made.file} that changes nothing")
            edits.append(made)
        fixes[name] = Fix(name, str(record["title"]), str(record["story"]), tuple(edits), str(record["witness"]))
    return fixes


def _check_keys(record: Mapping[str, object], keys: tuple[str, ...], where: str) -> None:
    if set(record) != set(keys):
        raise ToggleError(f"{where} must have the keys {', '.join(keys)}; got {', '.join(map(str, record))}")


# ------------------------------------------------------------------ a subset of YAML, strict

_KEY = re.compile(r"([a-z_]+):(?: (.*))?")
_PLAIN = re.compile(r"[A-Za-z_][\w ./:()+,;'*=-]*")
_RESERVED = frozenset("true false null yes no on off y n".split())


def parse_yaml(text: str) -> list[dict[str, object]]:
    """Parse the subset of YAML that fixes.yaml is written in, to the values that any YAML library gives. Raises
    ToggleError for everything else.

    A list of mappings, at column 0. A value is a JSON string in double quotes, a plain word or words, a literal block
    (`|-`, or `|2-` where its first line is indented further; two columns deeper than its key), or, after a bare
    `key:`, one more list of such mappings. Comments have lines of their own, outside blocks.
    """
    lines = _Lines(text.split("\n"))
    records = lines.mappings(0)
    if lines.peek() is not None:
        raise lines.error("a list item, `- key: value`, is expected")
    return records


class _Lines:
    """The lines of a YAML text and the place reached."""

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.at = lines, 0

    def error(self, message: str) -> ToggleError:
        return ToggleError(f"{FIXES_FILE}, line {self.at + 1}: {message}")

    def peek(self) -> str | None:
        """The next line that is neither blank nor a comment; None at the end."""
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if "\t" in line[: len(line) - len(line.lstrip())]:
                raise self.error("indentation is made of spaces, not tabs")
            if line.strip() and not line.lstrip().startswith("#"):
                return line
            self.at += 1
        return None

    def mappings(self, column: int) -> list[dict[str, object]]:
        """A list whose dashes stand at `column`."""
        found: list[dict[str, object]] = []
        while (line := self.peek()) is not None and line.startswith(" " * column + "- "):
            self.lines[self.at] = " " * (column + 2) + line[column + 2 :]
            found.append(self.mapping(column + 2))
        return found

    def mapping(self, column: int) -> dict[str, object]:
        """Keys at `column`, up to the first line that stands further left."""
        found: dict[str, object] = {}
        while (line := self.peek()) is not None and len(line) - len(line.lstrip(" ")) >= column:
            parts = _KEY.fullmatch(line[column:].rstrip(" "))
            if parts is None:
                raise self.error(f"`key: value` is expected at column {column + 1}; got {line.strip()!r}")
            key, value = parts.groups()
            if key in found:
                raise self.error(f"key {key!r} comes twice")
            if value is None:
                self.at += 1
                found[key] = self.mappings(column + 2)
                if not found[key]:
                    raise self.error(f"{key!r} needs a list below it, with dashes at column {column + 3}")
            elif value in ("|-", "|2-"):
                self.at += 1
                found[key] = self.block(column + 2, is_indented=value == "|2-")
            else:
                found[key] = self.scalar(value)
                self.at += 1
        return found

    def block(self, column: int, is_indented: bool) -> str:
        """A literal block whose lines start at `column`."""
        taken = []
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if line.strip(" ") and not line.startswith(" " * column):
                break
            taken.append(line[column:])
            self.at += 1
        while taken and not taken[-1].strip(" "):
            taken.pop()
        if not taken or not taken[0].strip(" "):
            raise self.error("a block must begin with text")
        if taken[0].startswith(" ") != is_indented:
            raise self.error("a block starts with |2- if its first line is indented further than two columns, else |-")
        return "\n".join(taken)

    def scalar(self, value: str) -> str:
        if value.startswith('"'):
            try:
                made = json.loads(value)
            except ValueError as error:
                raise self.error(f"not a string in double quotes: {value}") from error
            return str(made)
        is_plain = _PLAIN.fullmatch(value) and ": " not in value and not value.endswith(":")
        if not is_plain or value.lower() in _RESERVED:
            raise self.error(f"put this value in double quotes: {value}")
        return value


# ------------------------------------------------------------------ applying


def revert(files: Mapping[str, bytes], fixes: Iterable[Fix]) -> dict[str, bytes]:
    """Return the texts of `files` (path to content) that change when all of `fixes` are reverted.

    Every match must occur exactly once in the file as it is, and no two may overlap, so order does not matter.
    Raises ToggleError, naming fix, file and match, unless all of them apply and the results compile.
    """
    spans: dict[str, list[tuple[int, int, str, Fix]]] = {}
    for fix in fixes:
        for edit in fix.edits:
            if edit.file not in files:
                raise ToggleError(f"fix {fix.id!r} edits {edit.file}, which does not exist")
            text = _text(files[edit.file])
            start = text.find(edit.match)
            count = 0 if start < 0 else 1 + _is_again(text, edit.match, start)
            if count != 1:
                how = "no longer occurs" if count == 0 else "occurs more than once"
                raise ToggleError(
                    f"fix {fix.id!r} no longer applies: its match {how} in {edit.file}; it must occur exactly once. "
                    f"Bring debug/fixes.yaml up to date. The match:\n{edit.match}"
                )
            spans.setdefault(edit.file, []).append((start, start + len(edit.match), edit.replacement, fix))
    changed = {}
    for file, edits in spans.items():
        edits.sort(key=lambda span: span[:2])
        for (_, end, _, one), (start, _, _, other) in zip(edits, edits[1:]):
            if start < end:
                raise ToggleError(f"fixes {one.id!r} and {other.id!r} edit the same text of {file}")
        text = _text(files[file])
        for start, end, replacement, _ in reversed(edits):
            text = text[:start] + replacement + text[end:]
        try:
            compile(text, file, "exec", dont_inherit=True)
        except SyntaxError as error:
            names = ", ".join(sorted({fix.id for *_, fix in edits}))
            raise ToggleError(f"without {names}, {file} is no Python: {error}") from error
        changed[file] = text.encode()
    return changed


def _is_again(text: str, match: str, start: int) -> bool:
    return text.find(match, start + 1) >= 0


def read_package(root: str) -> tuple[dict[str, bytes], list[str]]:
    """Return what the package in folder `root` holds: its texts by path, and the paths of its other files."""
    texts, others = {}, []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        for name in sorted(names):
            path = os.path.join(folder, name)
            key = os.path.relpath(path, root).replace(os.sep, "/")
            if name.endswith(COPIED):
                texts[key] = _read(path)
            elif not name.endswith(".pyc"):
                others.append(key)
    return texts, others


def digest_of(texts: Mapping[str, bytes], ids: Iterable[str]) -> str:
    """Hash the texts that run and the ids of what was reverted."""
    hashed = hashlib.sha256(json.dumps(sorted(ids)).encode())
    for name in sorted(texts):
        hashed.update(f"\0{name}\0{hashlib.sha256(texts[name]).hexdigest()}".encode())
    return hashed.hexdigest()[:20]


# ------------------------------------------------------------------ the edited copy


def activate(package: ModuleType) -> None:
    """Point `package` at an edited copy of itself, as TREEDRAFT_REVERT_FIX says. Raises ToggleError, changing nothing.

    Called by the package's __init__, in every process, before any submodule is imported.
    """
    global _in_force
    wanted = _wanted(os.environ.get(VARIABLE, ""))
    if not wanted:
        return
    file, spec = package.__file__, package.__spec__
    if file is None or spec is None or not os.path.isfile(file):
        raise ToggleError(f"{VARIABLE} needs the package as files in a folder; {package.__name__} is not")
    early = sorted(name for name in sys.modules if name.startswith(package.__name__ + "."))
    if early and _in_force.folder is None:
        raise ToggleError(f"{VARIABLE} must act before any submodule is imported; {early[0]} is")
    root = os.path.dirname(os.path.abspath(file))
    fixes = load_fixes(root)
    unknown = [name for name in wanted if name not in fixes]
    if unknown:
        raise ToggleError(f"{VARIABLE} names {', '.join(unknown)}; registered are {', '.join(fixes)}")
    texts, others = read_package(root)
    texts.update(revert(texts, [fixes[name] for name in wanted]))
    digest = digest_of(texts, wanted)
    folder = _materialize(os.path.join(private_cache(), _key(root, digest)), root, texts, others)
    package.__path__[:] = [folder]
    spec.submodule_search_locations = package.__path__  # type: ignore[assignment]
    _in_force = InForce(wanted, digest, folder)
    titles = "; ".join(f"{name} ({fixes[name].title})" for name in wanted)
    logger.warning("fixes reverted by %s: %s; running %s", VARIABLE, titles, folder)


def in_force() -> InForce:
    """Return what this process runs without."""
    acting = sys.modules.get(PRIVATE_NAME)
    if acting is None:
        return InForce()
    found = acting._in_force
    return InForce(found.ids, found.digest, found.folder)


def package_root() -> str:
    """Return the folder of the package as it is installed, whatever this process runs."""
    file = sys.modules["treedraft"].__file__
    assert file is not None
    return os.path.dirname(os.path.abspath(file))


def require_same(digests: Mapping[str, str]) -> None:
    """Raise ToggleError unless all processes of an engine, by name, run without the same fixes (`InForce.digest`)."""
    if len(set(digests.values())) > 1:
        each = ", ".join(f"{name}: {digest}" for name, digest in digests.items())
        raise ToggleError(f"the processes of one engine must run the same code; set {VARIABLE} alike for all ({each})")


_in_force = InForce()


def _wanted(value: str) -> tuple[str, ...]:
    return tuple(sorted({name.strip() for name in value.split(",") if name.strip()}))


def _key(root: str, digest: str) -> str:
    """Two installations of the same text have copies of their own, since each links its own data files."""
    return f"{digest}-{hashlib.sha256(root.encode()).hexdigest()[:8]}"


def private_cache() -> str:
    """Return the folder of the copies, made if need be. Raises ToggleError unless it belongs to this user alone."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(base, "treedraft", "reverted")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:  # no home, or one that cannot be written
        user = os.getuid() if hasattr(os, "getuid") else 0
        folder = os.path.join(tempfile.gettempdir(), f"treedraft-reverted-{user}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
    state = os.lstat(folder)
    if hasattr(os, "getuid") and (os.path.islink(folder) or state.st_uid != os.getuid() or state.st_mode & 0o022):
        raise ToggleError(f"code is run from {folder}, which others can write: make it yours alone (chmod 700)")
    return os.path.realpath(folder)


def _materialize(folder: str, root: str, texts: Mapping[str, bytes], others: list[str]) -> str:
    """Return `folder`, holding exactly these texts and links to the other files; written anew unless it does."""
    cache = os.path.dirname(folder)
    with _lock(cache):
        if not _is_intact(folder, root, texts, others):
            aside = tempfile.mkdtemp(prefix=".writing-", dir=cache)
            spoiled = tempfile.mkdtemp(prefix=".spoiled-", dir=cache)
            try:
                _write(aside, root, texts, others)
                if os.path.lexists(folder):
                    os.rename(folder, os.path.join(spoiled, "copy"))
                os.rename(aside, folder)
            except OSError as error:
                raise ToggleError(f"the edited copy {folder} cannot be written: {error}") from error
            finally:
                shutil.rmtree(aside, ignore_errors=True)
                shutil.rmtree(spoiled, ignore_errors=True)
            if not _is_intact(folder, root, texts, others):
                raise ToggleError(f"the edited copy {folder} does not hold what was written")
        os.utime(folder)
        _prune(cache, folder)
    return folder


@contextmanager
def _lock(cache: str) -> Iterator[None]:
    """One process at a time: ranks that start together must not take a copy just made for a spoiled one."""
    with open(os.path.join(cache, ".lock"), "w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):  # no such locks on this platform or file system; renames stay atomic
            logger.debug("no lock on %s", cache)
        yield


def _write(folder: str, root: str, texts: Mapping[str, bytes], others: list[str]) -> None:
    for name in [*texts, *others]:
        os.makedirs(os.path.dirname(_inside(folder, name)), exist_ok=True)
    for name, text in texts.items():
        with open(_inside(folder, name), "wb") as file:
            file.write(text)
    for name in others:
        original, link = _inside(root, name), _inside(folder, name)
        try:
            os.symlink(original, link)
        except OSError:  # a platform or file system without them
            shutil.copy2(original, link)


def _is_intact(folder: str, root: str, texts: Mapping[str, bytes], others: list[str]) -> bool:
    """Whether the folder holds these files and no others, text by its hash, data linked (or copied whole)."""
    if not os.path.isdir(folder) or os.path.islink(folder):
        return False
    try:
        found, found_others = read_package(folder)
        if any(os.path.islink(_inside(folder, name)) for name in found) or sorted(found_others) != sorted(others):
            return False
        for name in others:
            original, link = _inside(root, name), _inside(folder, name)
            if not os.path.samefile(original, link) and _hash(_read(original)) != _hash(_read(link)):
                return False
    except OSError:
        return False
    return {n: _hash(t) for n, t in found.items()} == {n: _hash(t) for n, t in texts.items()}


def _prune(cache: str, kept: str) -> None:
    """Delete copies and leftovers that nobody used for long."""
    for entry in os.scandir(cache):
        try:
            is_old = time.time() - entry.stat(follow_symlinks=False).st_mtime > MAX_UNUSED_S
        except OSError:
            continue
        if is_old and entry.path != kept:
            shutil.rmtree(entry.path, ignore_errors=True)


def _inside(folder: str, name: str) -> str:
    return os.path.join(folder, *name.split("/"))


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _text(content: bytes) -> str:
    return content.decode("utf-8").replace("\r\n", "\n")


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
