"""Writes its share of an array's chunks, one by one: `write_tokens TOOL ARRAY TARGET LOG WRITER WRITERS ROUNDS`.

TOOL is zarr, tensorstore, z5 or direct (open, write, close). Each chunk is noted in LOG before and after. SIGTERM ends
it between two chunks.
"""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.write import tokens
from tests.write.history import Log
from tests.write.targets import LAYOUTS, TARGETS, Target

WriteChunk = Callable[[int, int], None]


def opened(tool: str, path: Path, target: Target) -> WriteChunk:
    """What writes a token to a chunk."""
    if tool == "direct":
        return lambda number, token: _write(path / target.path(number), target.shown(token))
    array = _zarr2(path) if (tool, target.layout) == ("tensorstore", "zarr2") else _OPEN[tool](path)

    def write(number: int, token: int) -> None:
        array[tokens.where(target.chunks[number], target.chunk)] = tokens.content(token, target.chunk)

    return write


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _zarr(path: Path) -> Any:
    import zarr

    return zarr.open_array(path, mode="r+")


def _tensorstore(path: Path) -> Any:
    import tensorstore as ts

    return ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}).result()


def _z5(path: Path) -> Any:
    import z5py

    return z5py.File(str(path.parent), mode="a", use_zarr_format=True, zarr_format=3)[path.name]


def _zarr2(path: Path) -> Any:
    import tensorstore as ts

    return ts.open({"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/"}}).result()


_OPEN = {"zarr": _zarr, "tensorstore": _tensorstore, "z5": _z5}


def main(tool: str, path: str, name: str, log_path: str, writer: str, writers: str, rounds: str) -> None:
    warnings.simplefilter("ignore")
    target, log = {**TARGETS, **LAYOUTS}[name], Log(Path(log_path))
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    write = opened(tool, Path(path), target)
    for round_ in range(1, int(rounds) + 1):
        for number in range(int(writer), len(target.chunks), int(writers)):
            if ended.is_set():
                return
            token = 1000 * round_ + number
            log.issue(number, token)
            write(number, token)
            log.ack(number, "closed")


if __name__ == "__main__":
    main(*sys.argv[1:])
