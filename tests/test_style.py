"""Style is executable: sizes, import direction (docs/architecture.md) and what must never be imported."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("pillion", "gateway", "prefill_service", "decode_service", "engine", "kvstore", "kernels", "simulator")
CHECKED = (*PACKAGES, "benchmarks", "testbed", "tests", "protos")
MAX_FUNCTION_LINES = 70

# For each package, those that it may import: simulator -> services -> engine -> {kvstore, kernels} -> pillion.
MAY_IMPORT = {
    "pillion": set(),
    "kernels": {"pillion"},
    "kvstore": {"pillion"},
    "engine": {"kvstore", "kernels", "pillion"},
    "gateway": {"engine", "kvstore", "kernels", "pillion"},
    "prefill_service": {"engine", "kvstore", "kernels", "pillion"},
    "decode_service": {"engine", "kvstore", "kernels", "pillion"},
    "simulator": {"gateway", "prefill_service", "decode_service", "engine", "kvstore", "kernels", "pillion"},
}
# Composition roots import upwards, lazily, inside functions; nothing else may.
COMPOSITION_ROOTS = ("pillion/cli/", "pillion/supervisor/", "pillion/top/", "pillion/offline/")
FORBIDDEN = {
    r"^\s*(import|from) (pickle|cloudpickle|dill|marshal|shelve)\b": "no pickle",
    r"\btorch\.load\(": "no pickle: safetensors or GGUF only",
    r"trust_remote_code\s*=\s*True": "no code from models",
    r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b": "finish it or write it into an issue",
    r"/(work|farm)/": "no path of a machine",
}


def sources(*folders: str) -> list[pathlib.Path]:
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in found if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))]


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(module: str) -> str:
    """The folder at the root that an imported module is in; its first name where it is not Pillion's."""
    first, *rest = module.split(".")
    return rest[0] if first == "pillion" and rest and rest[0] in PACKAGES else first


def imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Top-level package of each import, and whether it runs when the module is imported."""
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield package_of(alias.name), id(node) not in inside
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module] if node.module != "pillion" else [f"pillion.{alias.name}" for alias in node.names]
            for name in names:
                yield package_of(name), id(node) not in inside


@pytest.mark.parametrize("path", sources(*CHECKED), ids=name_of)
def test_sizes(path: pathlib.Path) -> None:
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines < MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=name_of)
def test_imports_point_one_way(path: pathlib.Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for target, at_import in imports(ast.parse(path.read_text())):
        if target not in MAY_IMPORT or target == package or target in MAY_IMPORT[package]:
            continue
        lazily = name_of(path).startswith(COMPOSITION_ROOTS) and not at_import
        assert lazily, f"{name_of(path)} imports {target}"


@pytest.mark.parametrize("path", sources("benchmarks", "testbed"), ids=name_of)
def test_nobody_imports_tests(path: pathlib.Path) -> None:
    """Benchmarks share helpers with tests through ``testbed``, which knows neither."""
    barred = {"tests"} if path.is_relative_to(ROOT / "benchmarks") else {"tests", "benchmarks"}
    assert not barred & {target for target, _ in imports(ast.parse(path.read_text()))}


@pytest.mark.parametrize("path", sources("pillion", "gateway", "kvstore"), ids=name_of)
def test_torch_stays_below_the_edge(path: pathlib.Path) -> None:
    eager = {target for target, at_import in imports(ast.parse(path.read_text())) if at_import}
    assert not eager & {"torch", "transformers", "triton"}


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=name_of)
def test_messages_stop_at_the_wire(path: pathlib.Path) -> None:
    """Only converters, servers and clients import generated modules; others import single messages."""
    if name_of(path).startswith("pillion/wire/"):
        return
    if path.stem.endswith(("rpc", "server", "servicer", "session", "probes", "client", "client_requests", "link")):
        return
    assert not re.search(r"import .*_pb2\b", path.read_text()), "use pillion.wire"


@pytest.mark.parametrize("path", [p for p in sources(*CHECKED) if p.name != "test_style.py"], ids=name_of)
def test_nothing_forbidden(path: pathlib.Path) -> None:
    text = path.read_text()
    for pattern, why in FORBIDDEN.items():
        match = re.search(pattern, text, re.MULTILINE)
        assert match is None, f"{match.group(0)!r}: {why}" if match else ""
