"""Style is executable: sizes, import direction (docs/architecture.md) and what must never be imported."""

from __future__ import annotations

import pathlib
import re
import subprocess
from collections.abc import Iterator
from functools import cache

import pytest

from tests.support.source_facts import facts_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("pillion", "gateway", "prefill_service", "decode_service", "engine", "kvstore", "kernels", "lab")
CHECKED = (*PACKAGES, "tests", "protos")
MAX_FUNCTION_LINES = 70
# The last commit before titles had a limit.
TITLES_SINCE = "31f4af5c220090e742870c08aac59d360ebc41c1"
MAX_TITLE_CHARACTERS = 72

# For each package, those that it may import: lab -> services -> engine -> {kvstore, kernels} -> pillion.
MAY_IMPORT = {
    "pillion": set(),
    "kernels": {"pillion"},
    "kvstore": {"pillion"},
    "engine": {"kvstore", "kernels", "pillion"},
    "gateway": {"engine", "kvstore", "kernels", "pillion"},
    "prefill_service": {"engine", "kvstore", "kernels", "pillion"},
    "decode_service": {"engine", "kvstore", "kernels", "pillion"},
    "lab": {"gateway", "prefill_service", "decode_service", "engine", "kvstore", "kernels", "pillion"},
}
# Composition roots import upwards, lazily, inside functions; nothing else may.
COMPOSITION_ROOTS = ("pillion/cli/", "pillion/supervisor/", "pillion/offline/")
FORBIDDEN = {
    r"^\s*(import|from) (pickle|cloudpickle|dill|marshal|shelve)\b": "no pickle",
    r"\btorch\.load\(": "no pickle: safetensors or GGUF only",
    r"trust_remote_code\s*=\s*True": "no code from models",
    r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b": "finish it or write it into an issue",
    r"/(work|farm)/": "no path of a machine",
    # Where a thread is stopped between the two times that it looks at the clock, CPython's C code waits with a negative
    # timeout, which is for ever.
    r"(?s)SimpleQueue.*\.get\([^)\n]*timeout": "SimpleQueue.get(timeout) may never return: use queue.Queue",
    r"\)[*+?]\+": "Python before 3.11.5 matches some possessive groups wrongly: use an atomic group, (?>...)",
}

FORBIDDEN_IN_PACKAGES = {
    r"asyncio\.wait_for\(": "Python 3.11 may lose a cancel in it: use asyncio.timeout",
}


@cache
def sources(*folders: str) -> dict[str, pathlib.Path]:
    """Every module of the folders that is not generated, by its path from the root."""
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {
        path.relative_to(ROOT).as_posix(): path for path in found if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    }


def package_of(module: str) -> str:
    """The folder at the root that an imported module is in; its first name where it is not Pillion's."""
    first, *rest = module.split(".")
    return rest[0] if first == "pillion" and rest and rest[0] in PACKAGES else first


def imports(path: pathlib.Path) -> Iterator[tuple[str, bool]]:
    """Top-level package of each import, and whether it runs when the module is imported."""
    for found in facts_of(path).imports:
        module = f"pillion.{found.name}" if found.module == "pillion" and found.name else found.module
        yield package_of(module), found.at_import


def test_sizes() -> None:
    long = [
        f"{file}:{line} {name} has {lines} lines"
        for file, path in sources(*CHECKED).items()
        for line, name, lines in facts_of(path).functions
        if lines >= MAX_FUNCTION_LINES
    ]
    assert long == []


def test_imports_follow_the_package_layers() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, path in sources(*PACKAGES).items()
        for target, at_import in imports(path)
        if target in MAY_IMPORT and target not in {package := name.partition("/")[0], *MAY_IMPORT[package]}
        if at_import or target == "lab" or not name.startswith(COMPOSITION_ROOTS)
    ]
    assert wrong == []


def test_the_lab_does_not_import_tests() -> None:
    """The laboratory shares helpers with tests through ``lab.testbed``, which knows nothing else of it."""
    barred = {"lab": r"tests\b", "lab/testbed": r"lab\.(?!testbed)"}
    wrong = [
        f"{name} imports {found.module}"
        for folder, not_these in barred.items()
        for name, path in sources(folder).items()
        for found in facts_of(path).imports
        if re.match(not_these, f"{found.module}.{found.name}")
    ]
    assert wrong == []


def test_only_the_engine_imports_torch() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, path in sources("pillion", "gateway", "kvstore").items()
        for target, at_import in imports(path)
        if at_import and target in {"torch", "transformers", "triton"}
    ]
    assert wrong == []


def test_only_wire_modules_import_generated_messages() -> None:
    """Only converters, servers and clients import generated modules; others import single messages."""
    at_the_wire = ("rpc", "server", "servicer", "session", "probes", "client", "client_requests", "link")
    wrong = [
        name
        for name, path in sources(*PACKAGES).items()
        if not name.startswith(("pillion/wire/", "lab/benchmarks/", "lab/testbed/"))
        and not path.stem.endswith(at_the_wire)
        if re.search(r"import .*_pb2\b", path.read_text())
    ]
    assert wrong == [], "use pillion.wire"


def test_lists_in_docstrings_are_indented() -> None:
    """What follows "Args:" and the like at the same depth is no part of the list."""
    listed = re.compile(r"^( *)(?:Args|Attributes|Raises):\n(?:\1 +\S.*\n)*\1(?=[a-zA-Z])", re.MULTILINE)
    found = []
    for name, path in sources(*CHECKED).items():
        text = path.read_text()
        found += [f"{name}:{text.count(chr(10), 0, match.end()) + 1}" for match in listed.finditer(text)]
    assert found == []


def test_sources_match_no_forbidden_pattern() -> None:
    texts = {name: path.read_text() for name, path in sources(*CHECKED).items() if name != "tests/test_style.py"}
    wrong = [
        f"{name}: {match.group(0)!r}: {why}"
        for pattern, why in (FORBIDDEN | FORBIDDEN_IN_PACKAGES).items()
        for name, text in texts.items()
        if pattern in FORBIDDEN or name.partition("/")[0] in PACKAGES
        if (match := re.search(pattern, text, re.MULTILINE))
    ]
    assert wrong == []


def test_titles_of_commits_are_short() -> None:
    command = ["git", "-C", str(ROOT), "log", "--no-merges", "--format=%s", f"{TITLES_SINCE}..HEAD"]
    try:
        log = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("a shallow clone or an archive has no history")
    wrong = [
        title
        for title in log.splitlines()
        if len(title) > MAX_TITLE_CHARACTERS or not title[0].isupper() or title.endswith(".")
    ]
    assert wrong == [], "at most 72 characters, a capital, no full stop"
