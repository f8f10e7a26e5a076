"""Which mutants a file has: operators of Cosmic Ray, and one that removes a statement."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.operators.boolean_replacer import AddNot
from cosmic_ray.operators.operator import Operator
from cosmic_ray.work_item import MutationSpec, WorkItem
from parso.python.tree import Name

if TYPE_CHECKING:
    from collections.abc import Iterator

_SWAPS = ("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Is_IsNot", "IsNot_Is")
_ARITHMETIC = ("Add_Sub", "Sub_Add", "Mul_Add", "FloorDiv_Mul", "Mod_FloorDiv", "BitOr_BitAnd", "BitAnd_BitOr")

OPERATORS = (
    *(f"core/ReplaceComparisonOperator_{swap}" for swap in _SWAPS),
    *(f"core/ReplaceBinaryOperator_{swap}" for swap in (*_ARITHMETIC, "LShift_RShift", "RShift_LShift")),
    "core/ReplaceUnaryOperator_Delete_Not", "core/ReplaceUnaryOperator_Delete_USub",
    "core/ReplaceUnaryOperator_Delete_Invert", "core/ReplaceTrueWithFalse", "core/ReplaceFalseWithTrue",
    "core/ReplaceAndWithOr", "core/ReplaceOrWithAnd", "core/ReplaceBreakWithContinue",
    "core/ReplaceContinueWithBreak", "core/ExceptionReplacer", "core/NumberReplacer", "core/ZeroIterationForLoop",
    "own/Negate", "own/RemoveStatement", "own/ReplaceIn",
)  # fmt: skip
"""Each changes a decision or an amount. Other operators of Cosmic Ray mostly make a `TypeError`."""

_LOGS = ("_log.", "log.", "_LOG.")


class Negate(AddNot):  # type: ignore[misc]
    """Negate a whole condition. The operator of Cosmic Ray puts `not` before the first part of it only."""

    def mutate(self, node: Any, index: int) -> Any:
        at = 2 if node.type == "test" else 1
        node.children[at] = get_ast(f" not ({node.children[at].get_code().strip()})")
        return node


class RemoveStatement(Operator):  # type: ignore[misc]
    """Replace a call, `raise`, `del`, or assignment to a part of an object by `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "simple_stmt" and _acts(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        old = node.children[0]
        node.children[0] = Name("pass", old.start_pos, prefix=old.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class ReplaceIn(Operator):  # type: ignore[misc]
    """Replace `in` by `not in`, and the reverse."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "comparison":
            operators = (child for child in node.children[1::2] if child.get_code().split() in (["in"], ["not", "in"]))
            yield from ((child.start_pos, child.end_pos) for child in operators)

    def mutate(self, node: Any, index: int) -> Any:
        at = [n for n, child in enumerate(node.children) if child.get_code().split() in (["in"], ["not", "in"])][index]
        old = node.children[at]
        node.children[at] = Name("in" if old.type == "comp_op" else "not in", old.start_pos, prefix=" ")
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


plugins.OPERATOR_PROVIDERS["own"] = {kind.__name__: kind for kind in (Negate, RemoveStatement, ReplaceIn)}


def _acts(statement: Any) -> bool:
    if statement.type == "expr_stmt":
        target, operator = statement.children[:2]
        return target.type in ("atom_expr", "power") or (operator.type == "operator" and operator.value != "=")
    if statement.type in ("atom_expr", "power"):
        return not statement.get_code().strip().startswith(_LOGS)
    return statement.type in ("raise_stmt", "del_stmt")


def mutants(path: str) -> list[WorkItem]:
    """Return the mutants of a file.

    The name of a mutant has the function, the line's text, the operator, and a number among equal ones. So it is still
    the same after changes of other lines.
    """
    text = Path(path).read_text()
    lines, tree = text.splitlines(), ast.parse(text)
    omitted, functions = list(_omitted(tree)), list(_functions(tree, ""))
    nodes = list(ast_nodes(get_ast(text)))
    work, names = [], Counter[str]()
    for operator_name in OPERATORS:
        operator = plugins.get_operator(operator_name)()
        positions = (at for node in nodes for at in operator.mutation_positions(node))
        for occurrence, (start, stop) in enumerate(positions):
            function = next((name for name, first, last in functions if first <= start[0] <= last), "")
            removed_init = operator_name == "own/RemoveStatement" and function.endswith("__init__")
            star = re.match(r"\*+[^* ]", lines[start[0] - 1][start[1] :])  # no multiplication
            if removed_init or star or any(first <= start < last for first, last in omitted):
                continue
            short = operator_name.partition("/")[2].removeprefix("Replace").replace("Operator", "")
            name = f"{path} {function}: {lines[start[0] - 1].strip()} [{short}]"
            names[name] += 1
            spec = MutationSpec(path, operator_name, occurrence, start, stop, {}, function)
            work.append(WorkItem.single(f"{name} {names[name]}", spec))
    return work


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
    """Qualified name, first and last line of each function, inner ones first."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from _functions(child, f"{prefix}{child.name}.")
            if isinstance(child, ast.FunctionDef):
                yield prefix + child.name, child.lineno, child.end_lineno or child.lineno
        else:
            yield from _functions(child, prefix)


def _omitted(tree: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The ranges of code that no test can tell from other code: annotations, imports of types, calls that log."""
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            parts = [node.returns, *node.decorator_list]
        elif isinstance(node, ast.If | ast.Expr) and ast.unparse(node).startswith(("if TYPE_CHECKING:", *_LOGS)):
            parts = [node]
        for part in parts:
            if isinstance(part, ast.expr | ast.stmt):
                end = part.end_lineno or part.lineno, part.end_col_offset or part.col_offset
                yield (part.lineno, part.col_offset), end
