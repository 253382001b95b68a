"""What the rules of style and structure ask of a module, read from its text once: syntax trees take too much memory."""

from __future__ import annotations

import ast
import pathlib
from dataclasses import dataclass, field
from functools import cache

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Imported:
    """One absolute import: ``import module``, or ``from module import name``; whether it runs with its module."""

    module: str
    name: str | None
    at_import: bool


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """``functions`` has each function's first line, name and number of lines."""

    docstring: str
    functions: list[tuple[int, str, int]] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    imports: list[Imported] = field(default_factory=list)

    def note(self, node: ast.AST, at_import: bool) -> None:
        """Collects from a node and everything in it."""
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
            # No statement is within an expression.
            return
        for inner in ast.iter_child_nodes(node):
            self.note(inner, at_import)


@cache
def facts_of(path: pathlib.Path) -> SourceFacts:
    """The facts of the module at ``path``. Raises SyntaxError where it is none."""
    tree = ast.parse(path.read_text())
    facts = SourceFacts(ast.get_docstring(tree) or "")
    facts.note(tree, True)
    return facts
