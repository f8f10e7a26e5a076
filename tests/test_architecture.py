"""docs/architecture.md: its walks name functions that exist, go down, and pass through few files."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest

from tests.datasets import ROOT

STEP = re.compile(r"^\| \d+ \| `(\S+\.py)` \| `([\w.]+)` \|", re.MULTILINE)
TEXT = (ROOT / "docs/architecture.md").read_text()
WALKS = [steps for part in re.split(r"\n\n(?=\| step)", TEXT) if (steps := STEP.findall(part))]


def floors() -> dict[str, int]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return {room.strip(): -n for n, rooms in enumerate(layers) for room in rooms.split("|")}


def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / "shardfs" / file).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)}
    return names


def test_there_is_a_walk_for_a_read_and_two_for_a_write() -> None:
    assert [len(walk) for walk in WALKS] == [6, 5, 5]


@pytest.mark.parametrize("walk", WALKS, ids=["read", "write", "publish"])
def test_a_walk_names_functions_that_exist_goes_down_and_is_short(walk: list[tuple[str, str]]) -> None:
    for file, function in walk:
        assert function in functions(file), f"{file} has no {function}"
    heights = [floors()[file.partition("/")[0]] for file, _ in walk]
    assert heights == sorted(heights, reverse=True)
    assert len({file for file, _ in walk}) <= 6


def test_no_program_in_a_string_calls_a_higher_room() -> None:
    """Child programs are strings, whose imports `lint-imports` does not see."""
    floor_of = floors()
    calls = []
    for path in (ROOT / "shardfs").rglob("*.py"):
        room = path.relative_to(ROOT / "shardfs").parts[0].removesuffix(".py")
        strings = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        for text in strings:
            if room in floor_of and isinstance(text, str):
                named = re.findall(r"(?:from|import|-m) shardfs\.(\w+)", text)
                calls += [(str(path), name) for name in named if floor_of[name] > floor_of[room]]
    assert calls == []


def test_no_verb_returns_a_mere_number() -> None:
    """Exit codes are those of `ExitCode`, whose meanings the documentation lists."""
    numbers = []
    for path in (ROOT / "shardfs/cli").glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and ast.unparse(function.returns or function) in (
                "int",
                "ExitCode",
            ):
                returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
                values = [
                    v for one in returns for v in ([one.body, one.orelse] if isinstance(one, ast.IfExp) else [one])
                ]
                numbers += [f"{path.name}: {function.name}" for value in values if isinstance(value, ast.Constant)]
    assert numbers == []
