"""`python -m tests.removal ROOM [ROOM ...]`: shows that rooms come off, each by itself; `--all` takes every one so.

    copy the tree -> delete the room's paths, those of rooms that need it, and the tests, benchmarks and tools that
    import what is gone -> delete its rows (pillion/rooms.py, docs/rooms.md, the maps of packages)
    -> types -> structure, and answers beside transformers, by both doors, over a kill (tests/core)

The pages that speak of a room are its owner's to edit: that they cite what is there is not asked here.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence

from pillion.rooms import ROOMS, Room
from tests.support.source_facts import facts_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMPONENTS = ("gateway", "prefill_service", "decode_service", "engine", "kvstore", "kernels", "simulator")
# What may import a room, and goes with it where it does.
BESIDE = ("tests", "benchmarks", "testbed", "simulator", "docs", "deploy")
TABLE = pathlib.Path("pillion/rooms.py")
TYPES = pathlib.Path(".mypy_cache")
PAGE = pathlib.Path("docs/rooms.md")
# What is left has to pass these. Of the structure only the maps can break: a tree of fewer files has no import circle,
# no name twice and no forbidden import that the whole tree has not. Pages and the walkthrough name what is gone.
TESTS = ("tests/test_structure.py::test_a_package_has_a_map", "tests/core")
LOG = "removal.log"
# Python 3.11 counts how deep trees are over all threads, and fails where two threads parse at once: CPython's issue
# 106905.
PARSING = threading.Lock()
# Forks for each tree that it is told of, and says how the tests there ended. What it has imported is in no tree, and
# takes longer to import than the tests run.
FORKS = f"""
import os, sys
import hypothesis, pytest, torch
import transformers.models.auto.modeling_auto, transformers.models.llama.modeling_llama

for root in map(str.strip, sys.stdin):
    child = os.fork()
    if not child:
        os.chdir(root)
        sys.path[0] = os.environ["PYTHONPATH"] = root
        log = os.open({LOG!r}, os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.exit(pytest.main(["-q", "-n", "0", "--disable-warnings", *{TESTS!r}]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def module_of(path: pathlib.Path) -> str:
    """The dotted name of the module at a path from the root."""
    parts = path.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(("pillion", *parts) if parts and parts[0] in COMPONENTS else parts)


def imported_by(path: pathlib.Path) -> set[str]:
    """Every module that a file may import, with the names that may be modules."""
    return {name for one in facts_of(path).imports for name in (one.module, f"{one.module}.{one.name}")}


def with_dependents(names: Iterable[str]) -> list[Room]:
    """The rooms of these names, and all that need one of them. Raises KeyError for a name that is none's."""
    known = {room.name: room for room in ROOMS}
    found = {name: known[name] for name in names}
    while more := [room for room in ROOMS if room.name not in found and found.keys() & set(room.needs)]:
        found |= {room.name: room for room in more}
    return list(found.values())


def files_of(room: Room, root: pathlib.Path) -> list[pathlib.Path]:
    """The room's files, from the root. Raises FileNotFoundError for a path of the table that is not there."""
    found: list[pathlib.Path] = []
    for name in room.paths:
        path = root / name
        if not path.exists():
            raise FileNotFoundError(f"{room.name}: there is no {name}")
        found += [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]
    return [one.relative_to(root) for one in found]


def remove(rooms: Sequence[Room], root: pathlib.Path) -> tuple[int, list[pathlib.Path]]:
    """Takes rooms out of a tree. Returns how many lines of theirs went, and the files that import one and went, too."""
    gone = {path for room in rooms for path in files_of(room, root)}
    lines = sum((root / path).read_bytes().count(b"\n") for path in gone)
    modules = {module_of(path) for path in gone if path.suffix == ".py"}
    for path in gone:
        (root / path).unlink()
    beside: list[pathlib.Path] = []
    # What a file imports is read once for all removals.
    left = {
        path: imported_by(ROOT / path.relative_to(root))
        for folder in BESIDE
        for path in sorted((root / folder).rglob("*.py"))
    }
    while users := [path for path, imports in left.items() if imports & modules and path.exists()]:
        modules |= {module_of(path.relative_to(root)) for path in users}
        for path in users:
            path.unlink()
            del left[path]
        beside += [path.relative_to(root) for path in users]
    for folder in sorted((path for path in root.rglob("*") if path.is_dir() and not path.is_symlink()), reverse=True):
        if not any(one.name != "__pycache__" for one in folder.iterdir()):
            shutil.rmtree(folder)
    drop_rows(rooms, root)
    drop_from_maps(root, {*gone, *beside})
    return lines, beside


def drop_rows(rooms: Sequence[Room], root: pathlib.Path) -> None:
    """Deletes the rows of rooms from the table and from the page."""
    names = {room.name for room in rooms}
    text = (root / TABLE).read_text()
    lines = text.splitlines(keepends=True)
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and node.args]
    for call in sorted(calls, key=lambda node: node.lineno, reverse=True):
        first = call.args[0]
        is_row = isinstance(call.func, ast.Name) and call.func.id == "Room"
        if is_row and isinstance(first, ast.Constant) and first.value in names:
            # What comes after keeps its line: to mypy, else, most of the tree would have changed.
            lines[call.lineno - 1 : call.end_lineno] = "\n" * (call.end_lineno - call.lineno + 1)
    (root / TABLE).write_text("".join(lines))
    rows = tuple(f"| {name} |" for name in names)
    page = (root / PAGE).read_text().splitlines(keepends=True)
    (root / PAGE).write_text("".join(line for line in page if not line.startswith(rows)))


def drop_from_maps(root: pathlib.Path, gone: Iterable[pathlib.Path]) -> None:
    """Deletes what is gone from the maps of its packages, which are lines that begin with its name."""
    for path in gone:
        names = {path.parent: path.name, path.parent.parent: f"{path.parent.name}/"}
        for folder, name in names.items():
            init = root / folder / "__init__.py"
            if init.exists() and not (root / folder / name).exists():
                init.write_text(re.sub(rf"^ *{re.escape(name)} .*\n", "", init.read_text(), flags=re.MULTILINE))


@functools.cache
def tracked() -> list[str]:
    """The names of what git knows, and of what it does not ignore."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, text=True)
    return list(filter(None, listed.split("\0")))


def copy_tree(root: pathlib.Path) -> None:
    """Copies what git knows, and what it does not ignore, with the links as links. What Python compiled is linked."""
    for name in tracked():
        source, target = ROOT / name, root / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
            # Python asks for the time and the size of a source, which the copy has, too.
            compiled = pathlib.Path(importlib.util.cache_from_source(name))
            if name.endswith(".py") and (ROOT / compiled).exists():
                (root / compiled).parent.mkdir(exist_ok=True)
                (root / compiled).symlink_to(ROOT / compiled)


class TreeTests:
    """Runs the tests of trees, one tree at a time."""

    def __enter__(self) -> TreeTests:
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTEST_ADDOPTS", "PYTHONPATH")}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._forks = subprocess.Popen([sys.executable, "-c", FORKS], cwd="/", env=environment, **pipes)
        return self

    def __exit__(self, *_: object) -> None:
        self._forks.communicate()

    def run(self, root: pathlib.Path) -> tuple[bool, str]:
        """Whether the tests of the tree passed, and what they printed."""
        self._forks.stdin.write(f"{root}\n")
        self._forks.stdin.flush()
        passed = self._forks.stdout.readline() == "0\n"
        return passed, (root / LOG).read_text()


def types(root: pathlib.Path) -> tuple[bool, str]:
    """Whether the types of the tree are right, and what mypy printed."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=root, env=environment, capture_output=True, text=True)
    return not done.returncode, done.stdout + done.stderr


def run(names: Sequence[str], tests: TreeTests, keep: pathlib.Path | None = None) -> str:
    """Takes the rooms of these names out of a copy together, and runs what must hold. Returns "" or what failed.

    What mypy knows of the whole tree is copied, so that it reads only what is changed without the room.
    """
    with tempfile.TemporaryDirectory(prefix="pillion-room-") as place:
        root = pathlib.Path(place) if keep is None else keep.resolve()
        copy_tree(root)
        if (ROOT / TYPES).exists():
            shutil.copytree(ROOT / TYPES, root / TYPES, dirs_exist_ok=True)
        rooms = with_dependents(names)
        with PARSING:
            lines, beside = remove(rooms, root)
        also = [room.name for room in rooms if room.name not in names]
        went = f"{', '.join(names)}: {lines} lines{f', with {also}' if also else ''}"
        print(f"{went}; beside it {len(beside)} files that import it")
        for what, step in (("types", types), ("structure, answers, parity, one kill", tests.run)):
            passed, printed = step(root)
            print(f"  {what}: {'passed' if passed else 'failed'}", flush=True)
            if not passed:
                return f"without {', '.join(names)}, {what} failed:\n{printed[-6000:]}"
    return ""


def main() -> int:
    """Runs the command. Its exit status is 1 where a room does not come off."""
    parser = argparse.ArgumentParser(prog="python -m tests.removal", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=", ".join(room.name for room in ROOMS))
    parser.add_argument("--all", action="store_true", help="take each room away, one after the other")
    parser.add_argument("--keep", type=pathlib.Path, help="work in this folder, and leave the tree there")
    wanted = parser.parse_args()
    names = [room.name for room in ROOMS] if wanted.all else wanted.rooms
    if not names:
        parser.error("name a room, or say --all")
    if strangers := set(names) - {room.name for room in ROOMS}:
        parser.error(f"no such room: {', '.join(sorted(strangers))}")
    with TreeTests() as tests:
        failed = [reason for name in names if (reason := run([name], tests, wanted.keep))]
    print("\n".join(failed) or f"{len(names)} came off")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
