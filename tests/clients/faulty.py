"""The command line of shardfs with stores that do what a file tells them: `python -m tests.clients.faulty MOUNT...`.

`faulty://DIR` blocks, `faultyasync://DIR` has coroutines. The environment's `FAULTS` names the file, which holds one of
`ok`, `delay`, `hang`, `cut`, `storm`, `some`, or nothing yet.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem

DELAY_S = 0.3

_calls = itertools.count()


class Unavailable(Exception):
    """As clients of HTTP raise it."""

    status = 503


def fault() -> str:
    with open(os.environ["FAULTS"]) as file:
        return file.read().strip()


def fail_if(told: str) -> None:
    if told == "storm":
        raise Unavailable("slow down")
    if told == "some" and next(_calls) % 10 == 0:
        raise ConnectionResetError("now and then")


class Faulty(fsspec.AbstractFileSystem):  # type: ignore[misc]
    protocol = "faulty"
    root_marker = ""

    def _local(self, path: str) -> str:
        return "/" + str(self._strip_protocol(path)).lstrip("/")

    def _wait(self) -> str:
        while (told := fault()) == "hang":
            time.sleep(0.02)
        if told == "delay":
            time.sleep(DELAY_S)
        fail_if(told)
        return told

    def info(self, path: str, **kwargs: Any) -> Any:
        self._wait()
        return _local.info(self._local(path))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self._wait()
        return [{**e, "name": e["name"].lstrip("/")} for e in _local.ls(self._local(path), detail=True)]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        told = self._wait()
        data: bytes = _local.cat_file(self._local(path), start=start, end=end)
        return data[: len(data) // 2] if told == "cut" else data


class FaultyAsync(AsyncFileSystem):  # type: ignore[misc]
    protocol = "faultyasync"
    root_marker = ""

    def _local(self, path: str) -> str:
        return "/" + str(self._strip_protocol(path)).lstrip("/")

    async def _wait(self) -> str:
        while (told := fault()) == "hang":
            await asyncio.sleep(0.02)
        if told == "delay":
            await asyncio.sleep(DELAY_S)
        fail_if(told)
        return told

    async def _info(self, path: str, **kwargs: Any) -> Any:
        await self._wait()
        return _local.info(self._local(path))

    async def _ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        await self._wait()
        return [{**e, "name": e["name"].lstrip("/")} for e in _local.ls(self._local(path), detail=True)]

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        told = await self._wait()
        data: bytes = _local.cat_file(self._local(path), start=start, end=end)
        return data[: len(data) // 2] if told == "cut" else data


_local = LocalFileSystem()

if __name__ == "__main__":
    fsspec.register_implementation("faulty", Faulty)
    fsspec.register_implementation("faultyasync", FaultyAsync)
    from shardfs.cli import main

    main()
