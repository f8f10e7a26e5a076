"""What a writer was told, chunk by chunk, and what may be found afterwards.

A log is a file to which every line is appended by one call, so that what was noted stays noted when the process is
killed. Its lines: `issue CHUNK TOKEN` before the first call that may bring the content (0: deletes it), `ack CHUNK
LEVEL` when it was acknowledged, `all LEVEL` for every chunk.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

LEVELS = ("closed", "synced", "published")
"""What acknowledged: close, which survives kill -9; fsync, which survives power loss; a publish, which is in the store.

Each is as good as the ones before it.
"""


class Log:
    """The writing end. `also` is told every line, too."""

    def __init__(self, path: Path, also: Callable[[str], None] = lambda line: None) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._also = also

    def note(self, *words: object) -> None:
        line = " ".join(map(str, words))
        os.write(self._fd, f"{line}\n".encode())
        self._also(line)

    def issue(self, number: int, token: int | None) -> None:
        self.note("issue", number, token or 0)

    def ack(self, number: int, level: str) -> None:
        self.note("ack", number, level)

    def ack_all(self, level: str) -> None:
        self.note("all", level)

    def close(self) -> None:
        os.close(self._fd)


@dataclass
class _Chunk:
    tokens: list[int | None]
    acked: dict[str, int] = field(default_factory=dict)

    def ack(self, level: str) -> None:
        for lower in LEVELS[: LEVELS.index(level) + 1]:
            self.acked[lower] = len(self.tokens) - 1


class History:
    """What the log says; `initial` are the tokens of the chunks that were there before."""

    def __init__(self, initial: Mapping[int, int], chunks: int) -> None:
        self._chunks = {n: _Chunk([initial.get(n)], dict.fromkeys(LEVELS, 0)) for n in range(chunks)}

    def read(self, lines: Iterable[str]) -> History:
        """Take up further notes."""
        for line in lines:
            match line.split():
                case ["issue", number, token]:
                    self._chunks[int(number)].tokens.append(int(token) or None)
                case ["ack", number, level]:
                    self._chunks[int(number)].ack(level)
                case ["all", level]:
                    for chunk in self._chunks.values():
                        chunk.ack(level)
        return self

    def allowed(self, number: int, level: str) -> list[int | None]:
        """What a chunk may be: the last content that was acknowledged so, or any that was to come after it."""
        chunk = self._chunks[number]
        return chunk.tokens[chunk.acked[level] :]

    def wrong(self, present: Mapping[int, int | None], level: str | None) -> list[str]:
        """What must not be there. `level` None: anything that was ever issued may be."""
        out = []
        for number, chunk in self._chunks.items():
            allowed = chunk.tokens if level is None else self.allowed(number, level)
            if present.get(number) not in allowed:
                out.append(f"chunk {number} is {present.get(number)}, not one of {allowed} of {chunk.tokens} ({level})")
        return out
