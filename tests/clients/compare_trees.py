"""Read a tree again and again: `compare_trees TREE EXPECTED STOP`.

Each time, `TREE` must have the same names and bytes as `EXPECTED`. Ends with the number of times after the file `STOP`
exists.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def names(root: Path) -> set[str]:
    return {os.path.relpath(Path(top, name), root) for top, _, files in os.walk(root, onerror=_fail) for name in files}


def _fail(error: OSError) -> None:
    raise error


def compare(tree: Path, expected: dict[str, bytes]) -> None:
    found = names(tree)
    if found != set(expected):
        raise ValueError(f"other names: {sorted(found ^ set(expected))[:9]}")
    for name, data in expected.items():
        if (read := (tree / name).read_bytes()) != data:
            raise ValueError(f"{name}: {len(read)} other bytes instead of {len(data)}")


def main(tree: str, wanted: str, stop: str) -> None:
    expected = {name: Path(wanted, name).read_bytes() for name in names(Path(wanted))}
    times, ends = 0, False
    while not ends:
        ends = Path(stop).exists()
        compare(Path(tree), expected)
        times += 1
    print(json.dumps(times))


if __name__ == "__main__":
    main(*sys.argv[1:])
