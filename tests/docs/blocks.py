"""The code blocks of a page, and a directory in which they run.

A block without a mark runs. A comment on the line before a block may say otherwise:

    <!-- not run: REASON -->      the block is not run
    <!-- python: NAME -->         it runs in the virtualenv NAME (`client_python`)
    <!-- needs: PROGRAM ... -->   it runs only if these programs are installed

A block of the language `text` right behind one that runs is what this block prints, with `...` for any text.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.conftest import client_python, mount_entries
from tests.datasets import ROOT
from tests.mount.programs import attempt

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN = ("sh", "python")
"""The languages that are run. Blocks in other languages (json, nginx, text) are only shown."""

_BLOCK = re.compile(
    r"^(?:<!-- ([\w ]+): (.+?) -->\n)?```(\w*)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)
_PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+")
_PLACE = re.compile(r"(?<!\w)/(data|mnt|elsewhere)(?=[/\s\"']|$)")


class Block(NamedTuple):
    mark: str
    """The word of the comment before the block, or nothing."""
    value: str
    language: str
    text: str
    printed: str = ""
    """What the page says that the block prints; empty if it says nothing."""


def blocks(page: str) -> list[Block]:
    """The fenced code blocks of a page of the repository."""
    return [Block(*match) for match in _BLOCK.findall((ROOT / page).read_text())]


@dataclass
class Workshop:
    """A directory in which blocks find `/data`, `/mnt` and `/elsewhere`, and a home directory that is empty.

    Servers get other ports than the page has, because other test runs may use these.
    """

    path: Path
    ports: dict[str, str] = field(default_factory=dict)

    def run(self, block: Block) -> str:
        """Run a block and return what it prints; an AssertionError if it fails."""
        python = client_python(block.value) if block.mark == "python" else Path(sys.executable)  # type: ignore[arg-type]
        text = _PORT.sub(self._port, _PLACE.sub(rf"{self.path}/\1", block.text))
        command = (
            ["bash", "-euo", "pipefail", "-c", text] if block.language == "sh" else [python, "-W", "ignore", "-c", text]
        )
        completed = attempt(*command, timeout=250, cwd=self.path, env=self._environment())
        assert completed.returncode == 0, (
            f"{block.text}\nstatus {completed.returncode}\n{completed.stdout}{completed.stderr}"
        )
        return completed.stdout

    def check(self, block: Block) -> None:
        """Run a block; an AssertionError if it fails, or prints something else than the page says."""
        out = self.run(block).replace(str(self.path), "/home/me/tutorial")
        pattern = re.escape(block.printed).replace(r"\.\.\.", ".*?")
        assert not block.printed or re.fullmatch(pattern, out, re.DOTALL), f"{block.text}\nprints\n{out}"

    def _port(self, match: re.Match[str]) -> str:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            return self.ports.setdefault(match[0], str(listener.getsockname()[1]))

    def _environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        home = {"HOME": f"{self.path}/home", "XDG_STATE_HOME": f"{self.path}/home/state"}
        return {**os.environ, **home, "PATH": path, "COLUMNS": "100", "LC_ALL": "C.UTF-8", "PYTHONWARNINGS": "ignore"}

    def unmount(self) -> None:
        """Unmount what the blocks have left mounted."""
        for entry in mount_entries():
            if entry.path.is_relative_to(self.path):
                attempt(Path(sys.executable).parent / "shardfs", "umount", entry.path, env=self._environment())


def run_page(page: str, workshop: Workshop) -> list[str]:
    """Run the blocks of a page, one after the other. Return the programs that are missing."""
    missing = set()
    try:
        for block in runnable(page):
            lacking = {p for p in block.value.split() if not shutil.which(p)} if block.mark == "needs" else set()
            missing |= lacking
            if not lacking:
                workshop.check(block)
    finally:
        workshop.unmount()
    return sorted(missing)


def runnable(page: str) -> Iterator[Block]:
    """The blocks of a page that run."""
    return (b for b in blocks(page) if b.language in RUN and b.mark != "not run")
