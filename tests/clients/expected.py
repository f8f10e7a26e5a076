"""What a client expects to find where it has written."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable


class Expected:
    """Arrays, by the paths of what is to hold them at last."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}

    def __call__(self, path: str, array: Any, data: Any) -> None:
        """Look whether it reads so here and now, and note it."""
        np.testing.assert_array_equal(np.asarray(array[:]), data, err_msg=path)
        self.arrays[path] = np.array(data)

    def save(self, out: Path) -> None:
        np.savez(out, **self.arrays)


def main(words: str | None, work: Callable[[Path, Expected], None]) -> None:
    """What a client is told: a path to work at, and where it is to say what it expects there. `words` explain it."""
    parser = argparse.ArgumentParser(description=words)
    parser.add_argument("path", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    expected = Expected()
    work(args.path, expected)
    expected.save(args.out)
