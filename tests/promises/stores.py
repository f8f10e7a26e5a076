"""The stores of the matrix, and what programs other than shardfs do with their objects."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from tests.write.azurite import azurite
from tests.write.object_store import object_store
from tests.write.object_store_gcs import gcs_options, gcs_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

    from tests.write.object_store import Server


class Disk:
    """A directory of the local disk."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path
        self.url = str(path)
        self.options: dict[str, Any] = {}

    def files(self) -> dict[str, bytes]:
        return {p.relative_to(self.path).as_posix(): p.read_bytes() for p in self.path.rglob("*") if p.is_file()}

    def put(self, key: str, data: bytes) -> None:
        path = self.path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{path.name}.new").write_bytes(data)
        path.with_name(f"{path.name}.new").rename(path)

    def remove(self, key: str) -> None:
        (self.path / key).unlink()


class Objects:
    """A part of the bucket `data` of a server in this process, to which a mount sends requests."""

    def __init__(self, server: Server, url: str, options: dict[str, Any]) -> None:
        self._server = server
        self._prefix = f"data/{url.rpartition('/')[2]}/"
        self.url = url
        self.options = options

    def files(self) -> dict[str, bytes]:
        with self._server.lock:
            objects = dict(self._server.objects)
        return {k.removeprefix(self._prefix): o.data for k, o in objects.items() if k.startswith(self._prefix)}

    def put(self, key: str, data: bytes) -> None:
        self._server.put(f"{self._prefix}{key}", data)

    def remove(self, key: str) -> None:
        with self._server.lock:
            del self._server.objects[f"{self._prefix}{key}"]


class Remote:
    """A part of any store that fsspec knows."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.fs, self._root = fsspec.core.url_to_fs(url, **options)
        self.url = url
        self.options = options

    def files(self) -> dict[str, bytes]:
        self.fs.invalidate_cache()
        return {key.removeprefix(f"{self._root}/"): self.fs.cat_file(key) for key in self.fs.find(self._root)}

    def put(self, key: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self._root}/{key}", data)

    def remove(self, key: str) -> None:
        self.fs.rm_file(f"{self._root}/{key}")


Store = Disk | Objects | Remote


class Servers:
    """Starts each server when a cell first needs it; they live as long as `stack`."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._started: dict[str, Any] = {}

    def _once(self, name: str, start: Callable[[], Any]) -> Any:
        if name not in self._started:
            self._started[name] = start()
        return self._started[name]

    def store(self, kind: str, top: Path) -> Store:
        """Return a new, empty place in a store of this kind."""
        name = f"b{os.urandom(4).hex()}"
        if kind == "disk":
            return Disk(top / "source")
        if kind == "memory":
            return Remote(f"memory://{name}", {"skip_instance_cache": True})
        if kind == "gs":
            server = self._once(kind, lambda: self._stack.enter_context(gcs_store()))
            return Objects(server, f"gs://data/{name}", gcs_options(server))
        if kind in ("s3", "http"):
            server = self._once("s3", lambda: self._stack.enter_context(object_store()))
            if kind == "http":
                return Objects(server, f"{server.url}/data/{name}", {})
            return Objects(server, f"s3://data/{name}", server.options())
        if kind == "azure":
            pytest.importorskip("adlfs")
            account = self._once(kind, lambda: self._stack.enter_context(azurite()))
            store = Remote(f"abfs://{name}/root", {"connection_string": account})
            store.fs.mkdir(name)
        else:
            endpoint = {"endpoint_url": self._once(kind, self._moto), "region_name": "us-east-1"}
            secrets = {"key": "not-a-real-key-id", "secret": "not-a-real-secret"}
            store = Remote(f"s3://{name}/root", {**secrets, "client_kwargs": endpoint, "skip_instance_cache": True})
            store.fs.call_s3("create_bucket", Bucket=name)
        return store

    def _moto(self) -> str:
        moto = pytest.importorskip("moto.server")
        server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        self._stack.callback(server.stop)
        host, port = server.get_host_and_port()
        return f"http://{host}:{port}"
