"""The structure is executable: no import circle, no name twice, a map in every package, pages whose names are there."""

from __future__ import annotations

import ast
import os
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache

import pytest

from docs import features
from tests.support.source_facts import facts_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
PRODUCT = ("pillion", "gateway", "prefill_service", "decode_service", "engine", "kvstore", "kernels")
SIMULATED = ("lab/simulator", "lab/fleets")
ALL = (*PRODUCT, "lab", "tests")
# Root folders imported as pillion.NAME: by their own name they would be a second copy.
LINKED = PRODUCT[1:]
# Max modules and folders of a package without a map.
UNMAPPED = 8
# Features whose work is in a step's products and in weights, which the core's classes hand over by type.
MORE_CALLERS = {"adapters": 7, "quantized checkpoints": 7}
# Max core files outside the assemble pages that import any feature.
MAX_CALLING_FILES = 25
IO_MODULES = {"asyncio", "grpc", "redis", "socket", "threading", "time", "subprocess", "torch", "queue"}


@cache
def modules(*folders: str) -> dict[str, pathlib.Path]:
    """Every module of the folders by its dotted name; generated stubs are left out."""
    found = {}
    for folder in folders:
        for place, inner, files in os.walk(ROOT / folder):
            inner[:] = sorted(name for name in inner if name != "v1" and not os.path.islink(os.path.join(place, name)))
            for file in files:
                if file.endswith(".py"):
                    path = pathlib.Path(place, file)
                    parts = path.relative_to(ROOT).with_suffix("").parts
                    parts = parts[:-1] if parts[-1] == "__init__" else parts
                    found[".".join(("pillion", *parts) if folder in LINKED else parts)] = path
    return found


def imported(path: pathlib.Path, known: Iterable[str]) -> Iterator[str]:
    """The modules of ``known`` that a module imports anywhere in it: at the top, in functions, for types alone."""
    for found in facts_of(path).imports:
        if found.name is None:
            names = [found.module]
        else:
            inner = f"{found.module}.{found.name}"
            names = [inner if inner in known else found.module]
        yield from (name for name in names if name in known)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            circle = stack[at:]
            del stack[at:]
            if len(circle) > 1:
                found.append(sorted(circle))

    for module in graph:
        if module not in index:
            visit(module)
    return found


def test_import_cycles_are_detected() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_there_is_no_import_cycle() -> None:
    """Type-only and lazy imports count: a reader meets them like any other."""
    known = modules(*PRODUCT, "lab")
    graph = {
        name: {other for other in imported(path, known) if other in known and other != name}
        for name, path in known.items()
    }
    assert circles(graph) == []


def test_class_names_are_unique() -> None:
    places = defaultdict(set)
    for path in modules(*ALL).values():
        for name in facts_of(path).classes:
            places[name].add(path.relative_to(ROOT).as_posix())
    assert {name: sorted(files) for name, files in places.items() if len(files) > 1} == {}


@pytest.mark.parametrize("name", LINKED)
def test_a_folder_is_imported_by_one_name(name: str) -> None:
    assert os.readlink(ROOT / "pillion" / name) == f"../{name}"
    pattern = re.compile(rf"^\s*(from|import) {name}\b", re.MULTILINE)
    assert [str(path) for path in modules(*ALL).values() if pattern.search(path.read_text())] == []


def packages() -> list[pathlib.Path]:
    return [path for path in modules(*PRODUCT, "lab").values() if path.name == "__init__.py"]


def test_a_large_package_has_a_map() -> None:
    """The docstring of a package with more than UNMAPPED modules and folders names every one of them."""
    missing = []
    for path in packages():
        text = facts_of(path).docstring
        inside = {p.stem for p in path.parent.glob("*.py") if not p.stem.startswith("_")}
        inside |= {p.name for p in path.parent.iterdir() if (p / "__init__.py").exists()}
        if len(inside) <= UNMAPPED:
            continue
        place = path.parent.relative_to(ROOT).as_posix()
        missing += [f"{place}: {name}" for name in sorted(inside) if not re.search(rf"\b{name}\b", text)]
    assert missing == []


def sans_io() -> list[pathlib.Path]:
    """Modules whose docstring says that they are sans-IO or cites I9, and all of a package that says it of itself."""

    def says(path: pathlib.Path, pattern: str) -> bool:
        return re.search(pattern, facts_of(path).docstring, re.IGNORECASE) is not None

    return [
        path
        for path in modules(*PRODUCT, *SIMULATED).values()
        if path.name != "__init__.py"
        and (says(path, r"sans-io|\(I9\)") or says(path.parent / "__init__.py", r"everything here is sans-io"))
    ]


def test_sans_io_modules_import_no_io() -> None:
    """What decides sees events and a clock that is handed to it (I9)."""
    wrong = []
    for path in sans_io():
        names = {found.module.partition(".")[0] for found in facts_of(path).imports}
        wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in sorted(names & IO_MODULES)]
    assert wrong == []


def test_decision_modules_are_marked_as_sans_io() -> None:
    found = {path.stem for path in sans_io()}
    assert found >= {
        "scheduler",
        "sequence",
        "step_cost",
        "planner",
        "request_machine",
        "turns",
        "tenants",
        "ledger",
        "eviction",
        "restarts",
        *("load", "traces", "figures", "slo", "sweep"),
    }
    assert len(found) >= 35


# Pages that cite functions, classes and tables of the code as ``file.py:name``.
NAMING_PAGES = ("docs/walkthrough.md", "docs/architecture.md", "docs/tiers.md")


def cited(page: str) -> list[tuple[str, str]]:
    """``file.py:name`` of a page."""
    return re.findall(r"`([a-z0-9_/]+\.py):([A-Za-z_.]+)`", (ROOT / page).read_text())


def names_of(node: ast.stmt) -> set[str]:
    """What a statement defines: a class, a function, or the names that it assigns to."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = {ast.Assign: "targets", ast.AnnAssign: "target"}.get(type(node), "")
    found = getattr(node, targets, [])
    return {one.id for one in (found if isinstance(found, list) else [found]) if isinstance(one, ast.Name)}


def is_defined(file: str, name: str) -> bool:
    if not (ROOT / file).exists():
        return False
    body: list[ast.stmt] = ast.parse((ROOT / file).read_text()).body
    for part in name.split("."):
        found = [node for node in body if part in names_of(node)]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


@pytest.mark.parametrize("page", NAMING_PAGES)
def test_names_cited_on_a_page_exist(page: str) -> None:
    assert cited(page)
    assert [f"{file} has no {name}" for file, name in cited(page) if not is_defined(file, name)] == []


def test_a_missing_cited_name_is_detected() -> None:
    here = "tests/test_structure.py"
    assert is_defined(here, "PRODUCT")
    assert is_defined(here, "is_defined")
    assert is_defined("tests/way.py", "Tracer.begin")
    assert not is_defined(here, "NOWHERE")
    assert not is_defined("tests/way.py", "Tracer.nowhere")
    assert not is_defined("tests/nowhere.py", "PRODUCT")


def all_pages() -> list[pathlib.Path]:
    named = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "deploy/README.md")
    beside_code = [page for folder in PRODUCT for page in (ROOT / folder).rglob("README.md")]
    return [
        *(ROOT / name for name in named),
        *beside_code,
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "lab/docs").rglob("*.md"),
    ]


def anchors(text: str) -> set[str]:
    """The names by which links reach a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_cited_headings_exist() -> None:
    known = {page: anchors(page.read_text()) for page in all_pages()}
    missing = [
        (page.name, link, anchor)
        for page in known
        for link, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)]+)\)", page.read_text())
        if anchor not in known.get((page.parent / link).resolve() if link else page, {anchor})
    ]
    assert missing == []


def test_cited_files_exist() -> None:
    pages = all_pages()
    known = tuple(f"{name}/" for name in (*PRODUCT, "lab", "tests", "docs", "deploy", "examples"))
    missing = []
    for page in pages:
        text = page.read_text()
        for place in re.findall(r"`([a-z0-9_./-]+\.(?:py|md|json|lua|proto|toml))`", text):
            if place.startswith(known) and not (ROOT / place).exists():
                missing.append((page.name, place))
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            if not (page.parent / link).exists():
                missing.append((page.name, link))
    assert missing == []


def test_features_exist_and_have_code() -> None:
    places = [place for one in features.features() for place in (*one.where, *one.tests)]
    assert [place for place in places if not (ROOT / place).exists()] == []
    owners = {features.feature_of(file) for file in features.product_files()}
    assert {one.name for one in features.features()} - owners == set()


def test_the_page_of_features_is_generated() -> None:
    """The page lists each feature's core callers, found by reading imports."""
    text = features.PAGE.read_text()
    assert features.BEGIN in text
    assert features.render(text) == text, "run make dashboards"


def test_few_core_files_call_a_feature() -> None:
    """Outside the assemble pages: at most three per feature, and few in all."""
    outside = {name: set(files) - set(features.ASSEMBLE_PAGES) for name, files in features.callers().items()}
    assert {name: sorted(files) for name, files in outside.items() if len(files) > MORE_CALLERS.get(name, 3)} == {}
    assert len(features.calling_files()) <= MAX_CALLING_FILES


def test_a_core_file_that_imports_a_feature_is_found() -> None:
    assert "gateway/assemble.py" in features.callers()["page"]
    assert features.feature_of("gateway/ui/ui_api.py") == "page"
    assert features.feature_of("gateway/gateway.py") is None
    assert features.feature_of("tests/gateway/ui/test_ui.py") == "page"
    lazy = "def f():\n    from pillion.gateway.ui import ui_api\n"
    assert "pillion.gateway.ui.ui_api" in features.imported_modules(lazy)


@pytest.mark.parametrize("name", ["min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_sampling_field_is_named_in_five_files(name: str) -> None:
    """Its row and its number in the proto, the arrays of a step, and each place that computes with it are enough."""
    fields = ("id", "attr", "arg", "value", "name")
    named = {"protos/pillion/v1/common.proto"}
    for module, path in modules(*PRODUCT, "lab").items():
        source = path.read_text()
        nodes = ast.walk(ast.parse(source)) if name in source else ()
        if any(getattr(node, field, None) == name for node in nodes for field in fields):
            named.add(module)
    assert len(named) <= 5, named
