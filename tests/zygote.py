"""A process that has imported shardfs, and becomes `python -m shardfs` again and again, each time in a fork.

`python -m tests.zygote SOCKET [clients]` takes requests from a socket that it inherits, as `tests.forking` sends them.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import socket
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

MODULES = (
    *(f"shardfs.formats.{name}" for name in ("bcolz", "blosc2", "n5", "precomputed", "zarr3", "zarr_transformer")),
    *(f"shardfs.cli.{name}" for name in ("job_options", "ls", "mount", "printing", "status", "verify")),
    "shardfs.daemon.serving", "shardfs.daemon.unmount", "shardfs.fuse.server", "shardfs.jobs.shared_work",
    "shardfs.vfs.tree", "shardfs.write.open_rw", "shardfs.write.recover",
)  # fmt: skip
"""They import most of what commands need, which takes longer than what commands then do."""

CLIENTS = ("aiohttp", "fsspec.implementations.http", "gcsfs", "obstore.store", "s3fs")
"""What commands need for stores. None of them starts a thread when it is imported."""


def serve(requests: socket.socket) -> dict[str, Any]:
    """Answer with process ids and exit codes; in each new process, return what the request asks for."""
    while True:
        data, files, _, _ = socket.recv_fds(requests, 1 << 20, 2)
        if not data:
            os._exit(0)
        request: dict[str, Any] = json.loads(data)
        pid = os.fork()
        if pid == 0:
            requests.close()
            become(request, files)
            return request
        for file in files:
            os.close(file)
        requests.send(str(pid).encode())
        requests.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def become(request: dict[str, Any], files: list[int]) -> None:
    """Make this process one that was started with this environment and these streams."""
    os.setsid()
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(request["environment"])


def main(number: str, *clients: str) -> None:
    for name in MODULES:
        import_module(name)
    for name in CLIENTS if clients else ():
        with suppress(ImportError):
            import_module(name)
    gc.freeze()  # a collection would copy all pages of what was imported
    request = serve(socket.socket(fileno=int(number)))
    sys.argv = ["shardfs", *request["arguments"]]
    runpy.run_module("shardfs", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
