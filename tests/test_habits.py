"""Habits that make code hard to search and to follow, and that the rooms in `ROOMS` do not have."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, TypeAlias

import pytest

from tests.datasets import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOMS = (
    "cli",
    "codecs",
    "config",
    "daemon",
    "formats",
    "fsspec_fs",
    "fuse",
    "jobs",
    "model",
    "shards",
    "storage",
    "vfs",
    "write",
)
"""All rooms."""

VAGUE = frozenset((
    "found", "known", "held", "made", "own", "its", "there", "was", "left", "done", "given", "kept", "asked",
    "stored", "shown", "gone", "had", "taken", "used", "began", "begun", "seen", "which", "rest", "others",
    "most", "least", "same", "next_", "here", "it", "them", "they", "these", "those", "such", "what", "that",
    "this", "result", "results", "obj", "res",
))  # fmt: skip
"""They say what happened to a thing, or nothing. A name says what the thing is: `entry`, `mount`, `reason`, `match`."""

Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda"


def is_plain(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and is_plain(node.value))


def is_outer(node: ast.AST, own_names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id not in own_names


def of_assignment(node: ast.Assign) -> Iterator[str]:
    """One attribute, one assignment, one line: then a search for `self._writer =` finds who sets it. So with names."""
    for target in node.targets:
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Attribute):
            if isinstance(node.value, ast.Lambda):
                yield "another object's callback is set late: pass it to the constructor, or call the other way round"
        elif isinstance(target, ast.Tuple):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else []
            is_swap = {ast.unparse(t) for t in target.elts} == {ast.unparse(v) for v in values}
            if sum(isinstance(t, ast.Attribute) for t in target.elts) > 1:
                yield "several attributes are assigned in one statement"
            elif len(values) > 1 and all(map(is_plain, values)) and not is_swap:
                yield "several names are given to existing things in one statement"


def of_class(node: ast.ClassDef) -> Iterator[str]:
    """A method is a `def`, to which an editor can jump."""
    called = {
        n.func.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and ast.unparse(n.func.value) == "self"
    }
    for n in ast.walk(node):
        if isinstance(n, ast.Assign) and isinstance(n.value, ast.Attribute):
            for target in n.targets:
                if isinstance(target, ast.Attribute) and target.attr in called and ast.unparse(target.value) == "self":
                    yield f"self.{target.attr} is the method of another object"


def of_function(node: Function, *, is_inner: bool) -> Iterator[str]:
    a = node.args
    arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
    yield from (f"the argument {x.arg} is vague" for x in arguments if x is not None and x.arg in VAGUE)
    if is_inner and any(is_plain(d) for d in (*a.defaults, *a.kw_defaults) if d is not None):
        yield "a default value only carries a variable into the function"
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    yield from (f"the name {name.id} is vague" for name in names if name.id in VAGUE and not is_inner)
    own_names = {name.id for name in names} | {x.arg for x in arguments if x is not None}
    for n in ast.walk(node) if is_inner else ():
        if isinstance(n, ast.Attribute) and n.attr in ("append", "extend") and is_outer(n.value, own_names):
            yield f"the list {ast.unparse(n.value)} only gives a value back from an inner function"


def habits(node: ast.AST, *, is_inner: bool = False) -> Iterator[tuple[int, str]]:
    """The habits in a piece of code: lines, and what is there. `is_inner`: inside of a function."""
    line = getattr(node, "lineno", 0)
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    if isinstance(node, ast.Assign):
        yield from ((line, text) for text in of_assignment(node))
    elif isinstance(node, ast.ClassDef):
        yield from ((line, text) for text in of_class(node))
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        yield from ((line, text) for text in of_function(node, is_inner=is_inner or isinstance(node, ast.Lambda)))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.IfExp):
        yield line, "which function is called is chosen inside of the call"
    for child in ast.iter_child_nodes(node):
        yield from habits(child, is_inner=is_inner or is_function)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_none_of_the_habits(room: str) -> None:
    files = sorted((ROOT / "shardfs" / room).rglob("*.py"))
    assert files
    places = [f"{f.relative_to(ROOT)}:{line}: {text}" for f in files for line, text in habits(ast.parse(f.read_text()))]
    assert places == []


def test_few_names_in_the_tests_are_vague() -> None:
    """At most two per 1,000 lines of code."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    places = [f"{f}:{line}" for f in files for line, text in habits(ast.parse(f.read_text())) if "is vague" in text]
    assert 0 < len(places) <= 100


@pytest.mark.every_case
@pytest.mark.parametrize(
    "code",
    [
        "self.a, self.b = a, b",
        "a, b = x.a, x.b",
        "tree.hooks.changed = lambda: None",
        "(a if x else b)(1)",
        "class A:\n def f(self):\n  self.read = x.read\n  self.read()",
        "def f(found): pass",
        "def f():\n for left in x: pass",
        "def f():\n with x as made: pass",
        "def f():\n return lambda x=y: x",
        "def f():\n out = []\n def g(): out.append(1)",
    ],
)
def test_each_habit_is_found(code: str) -> None:
    assert len(list(habits(ast.parse(code)))) == 1


@pytest.mark.every_case
@pytest.mark.parametrize("code", ["a, b = b, a", "a, b = f(), 1", "self.a = a", "def f(entry=None): x = x.found"])
def test_other_code_has_none(code: str) -> None:
    assert list(habits(ast.parse(code))) == []


def test_the_first_line_of_a_test_file_says_what_it_shows() -> None:
    docstrings = {p: ast.get_docstring(ast.parse(p.read_text())) or "" for p in (ROOT / "tests").rglob("test_*.py")}
    lines = {str(path): text.partition("\n")[0] for path, text in docstrings.items()}
    assert {path: line for path, line in lines.items() if not line.endswith(".") or len(line.split()) < 4} == {}
