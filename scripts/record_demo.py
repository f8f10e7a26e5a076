"""Record docs/demo.svg, the picture in README.md, from the commands of its section "First mount".

    python scripts/record_demo.py [FILE]

The commands run in an empty directory; those before the first empty line are not shown. Needs FUSE, shardfs and zarr.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
WIDTH = 80


def commands() -> tuple[str, list[str]]:
    """The commands of the README: those that prepare, and those to show."""
    section = (ROOT / "README.md").read_text().partition("## First mount")[2].partition("\n## ")[0]
    block = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[-1]
    before, _, shown = block.partition("\n\n")
    return before, shown.splitlines()


def run(command: str, directory: str) -> str:
    """Run a command in a terminal, where `ls` writes columns, and return what it prints."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(WIDTH), "LC_ALL": "C.UTF-8"}
    subprocess.run(
        ["bash", "-c", command], cwd=directory, env=environment, stdout=theirs, stderr=theirs, check=True, timeout=60
    )
    os.close(theirs)
    return "".join(_read(ours)).replace("\r\n", "\n").expandtabs()


def _read(terminal: int) -> Iterator[str]:
    """What was written to a terminal. Reading fails with EIO at its end."""
    try:
        while data := os.read(terminal, 65536):
            yield data.decode()
    except OSError:
        os.close(terminal)


def record() -> str:
    """Run the commands and draw them."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    before, shown = commands()
    with tempfile.TemporaryDirectory() as directory:
        run(before, directory)
        try:
            for command in shown:
                console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
                if printed := run(command, directory):
                    console.print(Text(printed.rstrip("\n")))
        finally:
            subprocess.run(["fusermount3", "-uzq", f"{directory}/mnt"], check=False, timeout=60)
    picture = console.export_svg(title="shardfs", unique_id="shardfs")
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)  # rich loads fonts from another host


if __name__ == "__main__":
    Path(sys.argv[1] if sys.argv[1:] else ROOT / "docs/demo.svg").write_text(record())
