"""Mutations of conditions, of their order and of effects, beside those of mutmut that suit rules.

mutmut mutates each operator and literal. A rule for failures breaks in other ways: a condition of several is missing, a
clause never or always holds, an effect is forgotten, two keys of an order are exchanged. Mutants that any call kills
(an argument that becomes None) and those of messages are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import libcst as cst
from mutmut.mutation import file_mutation, mutators

# Checks of state are oracles of the tests, and texts are no rules.
UNMUTATED_FUNCTIONS = {"check", "check_integrity", "__repr__", "__str__"}
LOGGERS = {"_LOG", "LOG", "logger", "_logger", "log", "_log"}
OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}


def drop_operand(node: cst.BooleanOperation) -> Iterable[cst.BaseExpression]:
    for operand in (node.left, node.right):
        yield operand.with_changes(lpar=[cst.LeftParen(), *operand.lpar], rpar=[*operand.rpar, cst.RightParen()])


def fix_condition(node: cst.If) -> Iterable[cst.If]:
    for value in ("True", "False"):
        yield node.with_changes(test=cst.Name(value), whitespace_before_test=cst.SimpleWhitespace(" "))


def never_loop(node: cst.While) -> Iterable[cst.While]:
    yield node.with_changes(test=cst.Name("False"), whitespace_after_while=cst.SimpleWhitespace(" "))


def drop_filters(node: cst.CompFor) -> Iterable[cst.CompFor]:
    for number in range(len(node.ifs)):
        yield node.with_changes(ifs=[*node.ifs[:number], *node.ifs[number + 1 :]])


def drop_effect(node: cst.SimpleStatementLine) -> Iterable[cst.SimpleStatementLine]:
    """Replace a call, or a change of an attribute or of an element, by ``pass``."""
    match node.body:
        case [cst.Expr(value=cst.Call() | cst.Await()) | cst.AugAssign() | cst.Del()]:
            pass
        case [cst.Assign(targets=[cst.AssignTarget(target=cst.Attribute() | cst.Subscript())])]:
            pass
        case [cst.AnnAssign(target=cst.Attribute())]:
            pass
        case _:
            return
    yield node.with_changes(body=[cst.Pass()])


def exchange_keys(node: cst.Lambda | cst.Return) -> Iterable[cst.CSTNode]:
    """Exchange neighbours in a tuple that a function returns, e.g. the keys of an order."""
    field = "body" if isinstance(node, cst.Lambda) else "value"
    value = getattr(node, field)
    if not isinstance(value, cst.Tuple):
        return
    for left in range(len(value.elements) - 1):
        elements = list(value.elements)
        first, second = elements[left].value, elements[left + 1].value
        elements[left], elements[left + 1] = (
            elements[left].with_changes(value=second),
            elements[left + 1].with_changes(value=first),
        )
        yield node.with_changes(**{field: value.with_changes(elements=elements)})


def replace_choice(node: cst.Call) -> Iterable[cst.BaseExpression]:
    """Exchange min and max, any and all; of bounds, ``max(a, b)``, take one."""
    if not isinstance(node.func, cst.Name) or node.func.value not in OPPOSITES:
        return
    yield node.with_changes(func=cst.Name(OPPOSITES[node.func.value]))
    if len(node.args) > 1 and not any(arg.keyword or arg.star for arg in node.args):
        for arg in node.args:
            yield arg.value.with_changes(
                lpar=[cst.LeftParen(), *arg.value.lpar], rpar=[*arg.value.rpar, cst.RightParen()]
            )


def drop_keyword(node: cst.Call) -> Iterable[cst.Call]:
    for number, arg in enumerate(node.args):
        if arg.keyword is not None:
            yield node.with_changes(args=[*node.args[:number], *node.args[number + 1 :]])


OPERATORS: list[tuple[type, Any]] = [
    (cst.BaseNumber, mutators.operator_number),
    (cst.Name, mutators.operator_name),
    (cst.UnaryOperation, mutators.operator_remove_unary_ops),
    (cst.CSTNode, mutators.operator_keywords),
    (cst.CSTNode, mutators.operator_swap_op),
    (cst.Match, mutators.operator_match),
    (cst.IfExp, mutators.operator_if_exp),
    (cst.BooleanOperation, drop_operand),
    (cst.If, fix_condition),
    (cst.While, never_loop),
    (cst.CompFor, drop_filters),
    (cst.SimpleStatementLine, drop_effect),
    (cst.Lambda | cst.Return, exchange_keys),
    (cst.Call, replace_choice),
    (cst.Call, drop_keyword),
]


def is_property(function: cst.FunctionDef) -> bool:
    match function.decorators:
        case [cst.Decorator(decorator=cst.Name(value="property"))]:
            return True
    return False


def is_message(node: cst.CSTNode) -> bool:
    """True for assertions, exceptions that are raised, and calls of a logger."""
    match node:
        case cst.Assert() | cst.Raise() | cst.FormattedString():
            return True
        case cst.FunctionDef(name=cst.Name(value=name)):
            return name in UNMUTATED_FUNCTIONS
        case cst.SimpleStatementLine(body=[cst.Expr(value=cst.Call(func=cst.Attribute(value=cst.Name(value=name))))]):
            return name in LOGGERS
    return False


class Visitor(file_mutation.MutationVisitor):
    """Visitor of mutmut that mutates properties, but no messages."""

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if is_message(node):
            return True
        if isinstance(node, cst.FunctionDef) and is_property(node):
            return False
        return super()._skip_node_and_children(node)


def arrangement(function: cst.FunctionDef, mutants: Any, class_name: str | None) -> Any:
    """Arrange a function and its mutants as mutmut does. Copies of a property are plain functions."""
    before, nodes, after, names = plain_arrangement(function, mutants, class_name)
    if is_property(function):
        nodes = [nodes[0], *(node.with_changes(decorators=[]) for node in nodes[1:])]
    return before, nodes, after, names


def install() -> None:
    """Make mutmut use these mutations."""
    mutators.mutation_operators[:] = OPERATORS
    file_mutation.MutationVisitor = Visitor
    file_mutation.function_trampoline_arrangement = arrangement


plain_arrangement = file_mutation.function_trampoline_arrangement
