"""Facts about a module for tests of style and structure, parsed once: syntax trees take too much memory."""

from __future__ import annotations

import ast
import pathlib
from dataclasses import dataclass, field
from functools import cache

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Imported:
    """One absolute import: ``import module``, or ``from module import name``; and whether it runs at import."""

    module: str
    name: str | None
    at_import: bool


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Facts of one module. ``functions`` has each function's first line, name and number of lines."""

    docstring: str
    functions: list[tuple[int, str, int]] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    imports: list[Imported] = field(default_factory=list)

    def note(self, node: ast.AST, at_import: bool) -> None:
        """Collect from a node and its descendants."""
        if isinstance(node, ast.Import):
            self.imports.extend(Imported(alias.name, None, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module and not node.level:
                self.imports.extend(Imported(node.module, alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            self.classes.append(node.name)
        elif isinstance(node, _Function):
            self.functions.append((node.lineno, node.name, (node.end_lineno or 0) - node.lineno + 1))
            at_import = False
        elif isinstance(node, ast.expr):
            return
        for inner in ast.iter_child_nodes(node):
            self.note(inner, at_import)


@cache
def facts_of(path: pathlib.Path) -> SourceFacts:
    """Return the facts of the module at ``path``. Raises SyntaxError."""
    tree = ast.parse(path.read_text())
    facts = SourceFacts(ast.get_docstring(tree) or "")
    facts.note(tree, True)
    return facts
