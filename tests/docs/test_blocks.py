"""The code blocks of README.md, the tutorial and the recipes do what they say."""

from __future__ import annotations

import re
import shlex
import shutil
from typing import TYPE_CHECKING

import click
import pytest

from shardfs.cli import commands
from shardfs.config import loading
from tests.datasets import ROOT
from tests.docs import sources
from tests.docs.blocks import RUN, Workshop, blocks, run_page, runnable

if TYPE_CHECKING:
    from pathlib import Path

RECIPES = sorted(f"docs/recipes/{path.name}" for path in (ROOT / "docs/recipes").glob("*.md"))
ELSEWHERE = {"docs/recipes/create.md"}  # tests/write/test_recipes.py also looks at the shards
PAGES = ["README.md", "docs/tutorial.md", "docs/recipes.md", "docs/python.md", *RECIPES]
KNOWN = {*RUN, "nginx", "json", "text", "toml"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("docs") / "data"
    sources.write(path)
    return path


@pytest.mark.every_case
@pytest.mark.fuse
@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE and any(runnable(page))])
def test_page(page: str, data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    missing = run_page(page, Workshop(tmp_path))
    if missing:
        pytest.skip(f"the rest of the page ran, but not blocks that need {', '.join(missing)}")


@pytest.mark.every_case
@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_language_and_a_known_mark(page: str) -> None:
    page_blocks = blocks(page)
    assert {block.language for block in page_blocks} <= KNOWN
    assert {block.mark for block in page_blocks} <= {"", "not run", "python", "needs"}
    fences = re.findall(r"^ *```", (ROOT / page).read_text(), re.MULTILINE)
    count = len(page_blocks) + sum(bool(block.printed) for block in page_blocks)
    assert len(fences) == 2 * count, "a fence is indented or not closed"


@pytest.mark.every_case
@pytest.mark.parametrize("page", PAGES)
def test_commands_are_in_blocks_that_run(page: str) -> None:
    """An indented block would not be run. The README's two commands for developers are run by CI."""
    indented = re.findall(r"(?:^\n|\A)((?:    .*\n)+)", (ROOT / page).read_text(), re.MULTILINE)
    prose = [block for block in indented if block.lstrip().startswith(("- ", "* "))]
    allowed = {"    sh scripts/demo.sh\n", "    sh scripts/test.sh\n"} if page == "README.md" else set()
    assert set(indented) - allowed - set(prose) == set()


def shown_commands(page: Path) -> list[list[str]]:
    """The words of each `shardfs` command in the code blocks of a page, without comments and redirections."""
    text = page.read_text().replace("\\\n", " ")
    fenced = "".join(re.findall(r"^```(?:sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    code = fenced + "\n".join(re.findall(r"^    (\S.*)$", text, re.MULTILINE))
    lines = re.findall(r"^(?:\$ )?shardfs (.+)$", code, re.MULTILINE)
    words = (shlex.split(re.split(r" [>|&]", line)[0], comments=True) for line in lines)
    return [command for command in words if command and "VERB" not in command]


WRITTEN = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/recipes").glob("*.md")]


@pytest.mark.every_case
@pytest.mark.parametrize("page", WRITTEN, ids=lambda path: path.name)
def test_every_command_that_a_page_shows_exists(page: Path) -> None:
    """Its verb and its options, also on pages whose blocks are not run."""
    for words in shown_commands(page):
        command: click.Command | None = commands
        arguments = words if commands.get_command(click.Context(commands), words[0]) else ["mount", *words]
        while isinstance(command, click.Group):
            command, arguments = command.get_command(click.Context(command), arguments[0]), arguments[1:]
        assert command is not None, words
        parameters, _, _ = command.make_parser(click.Context(command)).parse_args(arguments)
        loading.from_mount_options(parameters.get("words") or ())
