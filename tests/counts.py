"""The size of the project in numbers: ``python -m tests.counts`` prints them.

*Code lines* are the lines on which code stands: docstrings, comments, blank lines and imports do not count, nor do
files that a program writes. *Product* is what the wheel holds. With ``--since COMMIT`` the lines that have gone and
come since then are counted, too. A line that went in one place and came in another is *moved*, whatever its
indentation.
*Core* is what docs/features.toml lists under no feature. With ``--features`` each feature's price is printed: its code
lines, and those of its tests.
*Hooks* are seams, and the methods of classes whose instances are asked at moments that others choose.

Counts are a thermometer: whoever glues files or makes lines dense to lower one has changed the thermometer.
"""

from __future__ import annotations

import argparse
import ast
import io
import pathlib
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

from docs.features import calling_files, feature_of, features
from pillion import config

ROOT = pathlib.Path(__file__).resolve().parent.parent
PRODUCT = ("pillion", "gateway", "engine", "kernels", "kvstore", "decode_service", "prefill_service")
LABORATORY = ("lab",)
# Generated files: stubs of the protos, and the SDK's blocking client.
GENERATED = (re.compile(r"pillion/v1/"), re.compile(r"pillion/client/client\.py"))
# Min length of a line that can count as moved; shorter ones occur everywhere.
MOVED_CHARACTERS = 12
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def python_files(*folders: str) -> list[pathlib.Path]:
    """Return the tracked Python files in these folders that are not generated."""
    listed = subprocess.run(["git", "ls-files", "--", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in listed.stdout.splitlines() if name.endswith(".py")]
    kept = [name for name in files if not any(pattern.match(name) for pattern in GENERATED)]
    return [ROOT / name for name in kept if (ROOT / name).is_file()]


def code_lines(text: str) -> int:
    """The code lines of a file with this text."""
    uncounted: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            uncounted.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, Definition | ast.Module) and ast.get_docstring(node, clean=False) is not None:
            uncounted.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for one in tokens if one.type not in SKIPPED for line in range(one.start[0], one.end[0] + 1)}
    return len(lines - uncounted)


def classes(files: list[pathlib.Path]) -> Iterator[ast.ClassDef]:
    """All classes in these files."""
    for file in files:
        yield from (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef))


def _members(kind: ast.ClassDef) -> set[str]:
    """What a class defines by itself: methods, annotated fields, and attributes that its methods assign."""
    found = {node.name for node in kind.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    found |= {
        node.target.id for node in kind.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(kind):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return {name for name in found if not name.startswith("_") or name == "__call__"}


def protocols(files: list[pathlib.Path]) -> dict[str, list[str]]:
    """The protocols in these files, each with the classes that name it as a base or have all its members."""
    kinds = list(classes(files))
    bases = {kind.name: [ast.unparse(base).partition("[")[0] for base in kind.bases] for kind in kinds}
    by_name = {kind.name: kind for kind in kinds}

    def members(name: str) -> set[str]:
        above = (members(base) for base in bases.get(name, []) if base != name)
        return _members(by_name[name]).union(*above) if name in by_name else set()

    every = {name: members(name) for name in by_name}
    named = [name for name, above in bases.items() if "Protocol" in above]
    plain = [name for name in by_name if name not in named]
    return {
        name: [one for one in plain if name in bases[one] or (every[name] and every[name] <= every[one])]
        for name in named
    }


def _methods(kind: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {node.name: node for node in kind.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _does_nothing(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a method has no statement but its docstring, or only returns nothing, or refuses to run."""
    match [one for one in method.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]:
        case [] | [ast.Pass()] | [ast.Raise()]:
            return True
        case [ast.Return(value=None | ast.Constant() | ast.Tuple(elts=[]))]:
            return True
    return False


def hooks(files: list[pathlib.Path]) -> list[str]:
    """The methods of classes with derived ones that do nothing by themselves, and that one of these overrides at
    most."""
    kinds = list(classes(files))
    derived: dict[str, list[ast.ClassDef]] = {}
    for kind in kinds:
        for base in kind.bases:
            derived.setdefault(ast.unparse(base).partition("[")[0], []).append(kind)

    def below(name: str) -> list[ast.ClassDef]:
        return [each for one in derived.get(name, []) for each in (one, *below(one.name))]

    return [
        f"{kind.name}.{name}"
        for kind in kinds
        if kind.name in derived and "Protocol" not in map(ast.unparse, kind.bases)
        for name, method in _methods(kind).items()
        if _does_nothing(method) and sum(name in _methods(one) for one in below(kind.name)) <= 1
    ]


def flags() -> int:
    """The flags of all components, each once."""
    kinds = [kind for name, kind in vars(config).items() if name.endswith("Flags") and isinstance(kind, type)]
    return len({one.name for kind in kinds for one in fields(kind)})


def constants(files: list[pathlib.Path]) -> int:
    """The names in capitals that modules assign numbers, texts and tuples to."""
    count = 0
    for file in files:
        for node in ast.parse(file.read_text()).body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            count += sum(name.id.isupper() for name in names)
    return count


def words_of_docs() -> int:
    """The words of all pages of Markdown that a user or a contributor reads."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    pages = [ROOT / name for name in listed.stdout.splitlines() if not name.startswith(LABORATORY)]
    return sum(len(page.read_text().split()) for page in pages if page.is_file())


def changed_lines(since: str) -> dict[str, int]:
    """The lines of Python that have gone, come and moved since a commit."""
    command = ["git", "diff", "--no-renames", "-U0", since, "--", "*.py"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    gone: Counter[str] = Counter()
    come: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith(("-", "+")) and not line.startswith(("---", "+++")) and (content := line[1:].strip()):
            (gone if line[0] == "-" else come)[content] += 1
    moved = sum(count for line, count in (gone & come).items() if len(line) >= MOVED_CHARACTERS)
    return {
        "lines that have gone": gone.total() - moved,
        "lines that are new": come.total() - moved,
        "lines moved": moved,
    }


def lines_by_feature(*folders: str) -> Counter[str | None]:
    """Return the code lines of each feature in these folders, by name; those of the core under None."""
    found: Counter[str | None] = Counter()
    for file in python_files(*folders):
        found[feature_of(file.relative_to(ROOT).as_posix())] += code_lines(file.read_text())
    return found


def prices() -> list[tuple[str, int, int]]:
    """Return the code lines of the core and of each feature, and of their tests; the most expensive feature first."""
    product, tests = lines_by_feature(*PRODUCT), lines_by_feature("tests")
    names = sorted((one.name for one in features()), key=lambda name: -product[name] - tests[name])
    return [("core", product[None], tests[None]), *((name, product[name], tests[name]) for name in names)]


def counts() -> dict[str, int]:
    """The numbers, by what they count."""
    product, tests = python_files(*PRODUCT), python_files("tests")
    laboratory = python_files(*LABORATORY)
    by_protocol, by_feature = protocols(product), lines_by_feature(*PRODUCT)
    return {
        "code lines of the product": by_feature.total(),
        "code lines of the core": by_feature[None],
        "code lines of features": by_feature.total() - by_feature[None],
        "core files that import features": len(calling_files()),
        "lines of the product": sum(len(file.read_text().splitlines()) for file in product),
        "files of the product": len(product),
        "code lines of the laboratory": sum(code_lines(file.read_text()) for file in laboratory),
        "code lines of tests": sum(code_lines(file.read_text()) for file in tests),
        "lines of tests": sum(len(file.read_text().splitlines()) for file in tests),
        "files of tests that patch": sum("monkeypatch" in file.read_text() for file in tests),
        "words of docs": words_of_docs(),
        "classes": sum(1 for _ in classes(product)),
        "protocols": len(by_protocol),
        "protocols with one implementation": sum(len(found) <= 1 for found in by_protocol.values()),
        "hooks": len(hooks(product)),
        "flags": flags(),
        "module constants": constants(product),
    }


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.counts", description="The size of the project in numbers.")
    parser.add_argument("--since", metavar="COMMIT", help="Count the lines that have changed since this commit, too.")
    parser.add_argument("--protocols", action="store_true", help="Name the protocols with one implementation or none.")
    parser.add_argument("--features", action="store_true", help="Print the code lines of each feature and its tests.")
    chosen = parser.parse_args()
    if chosen.features:
        print("  product    tests  code lines")
        for name, product, tests in prices():
            print(f"{product:9,}{tests:9,}  {name}")
        return
    found = counts() | (changed_lines(chosen.since) if chosen.since else {})
    for name, number in found.items():
        print(f"{number:9,}  {name}")
    if chosen.protocols:
        for name, kinds in sorted(protocols(python_files(*PRODUCT)).items()):
            if len(kinds) <= 1:
                print(f"    {name}: {', '.join(kinds) or 'none'}")


if __name__ == "__main__":
    main()
