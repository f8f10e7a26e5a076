"""A process that says whether a dataset holds what writers were told: by other libraries, never by shardfs.

`python -m tests.write.oracle` reads commands from standard input, one JSON object per line, and answers each by one:
{"wrong": [...]}, what is wrong. Commands have `target` (its name), `root`, `log` (a file of `history.Log`), `initial`
([[chunk, token], ...]), `level` (null: any whole version will do) and `readers` (names; null: the quickest).
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.datasets import ROOT
from tests.write.history import History
from tests.write.targets import LAYOUTS, TARGETS, Target, token_in
from tests.write.tokens import token_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType


def found_by(target: Target, reader: str, root: Path) -> tuple[dict[int, int | None], list[str]]:
    """The tokens of all chunks, and what was wrong with those that have none."""
    tokens: dict[int, int | None] = {}
    wrong = []
    for number, block in target.split(target.readers[reader](root)):
        try:
            tokens[number] = token_of(block)
        except ValueError as e:
            wrong.append(f"{reader}: chunk {number}: {e}")
    tokens[target.described_as] = token_in((root / target.document).read_bytes(), target)
    return tokens, wrong


def judge(target: Target, root: Path, history: History, level: str | None, readers: Sequence[str] | None) -> list[str]:
    """What is wrong with a dataset."""
    out = []
    for reader in readers or [next(iter(target.readers))]:
        try:
            tokens, torn = found_by(target, reader, root)
        except Exception as e:  # noqa: BLE001 - whatever a library says of a dataset that it cannot read
            out.append(f"{reader}: {type(e).__name__}: {str(e)[:500]}")
            continue
        out += torn or [f"{reader}: {why}" for why in history.wrong(tokens, level)]
    return out


def _answer(command: Mapping[str, Any]) -> list[str]:
    target = {**TARGETS, **LAYOUTS}[command["target"]]
    history = History({int(n): int(t) for n, t in command["initial"]}, len(target.chunks) + 1)
    log = Path(command["log"])
    history.read(log.read_text().splitlines() if log.exists() else [])
    return judge(target, Path(command["root"]), history, command["level"], command["readers"])


def main() -> None:
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        print(json.dumps({"wrong": _answer(json.loads(line))}), flush=True)


class Oracle:
    """The process, as tests ask it."""

    def __init__(self, python: str | Path = sys.executable) -> None:
        self._process = subprocess.Popen(
            [str(python), "-m", "tests.write.oracle"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wrong(
        self,
        target: Target,
        root: Path,
        log: Path,
        initial: Mapping[int, int],
        level: str | None,
        readers: Sequence[str] | None = None,
    ) -> list[str]:
        """What is wrong; nothing if nothing is."""
        command = {
            "target": target.name,
            "root": str(root),
            "log": str(log),
            "initial": list(initial.items()),
            "level": level,
            "readers": readers,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer: dict[str, list[str]] = json.loads(self._process.stdout.readline())
        return answer["wrong"]

    def __enter__(self) -> Oracle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()


if __name__ == "__main__":
    main()
