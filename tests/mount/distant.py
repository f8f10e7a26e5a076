"""`scripts/delaying_server.py` for the length of a test: a store with latency and faults that counts requests."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.datasets import ROOT
from tests.mount.processes import end

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


SECRETS = ("not-a-real-key-id", "not-a-real-secret")
"""The key id and the secret of the user of `s3_server`."""


class Store:
    """A source behind a web server with latency."""

    def __init__(self, url: str) -> None:
        self.url = url

    def requests(self) -> list[dict[str, Any]]:
        """Return the requests for bytes of shards of the array `a` since the last call."""
        with urllib.request.urlopen(f"{self.url}/.requests") as answer:
            rows: list[dict[str, Any]] = json.load(answer)
        return [r for r in rows if r["method"] == "GET" and r["path"].startswith("/a/c/") and r["bytes"]]

    def fail(self, *faults: dict[str, Any]) -> None:
        """Replace the faults of the server."""
        request = urllib.request.Request(f"{self.url}/.faults", json.dumps(faults).encode(), method="PUT")
        urllib.request.urlopen(request).close()


@contextmanager
def serving(origin: Path | str, latency_ms: float = 5) -> Iterator[Store]:
    """Serve a directory, or pass requests on to a URL."""
    command = [sys.executable, str(ROOT / "scripts" / "delaying_server.py"), str(origin)]
    command += ["--latency-ms", str(latency_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            yield Store(process.stdout.readline().strip())
        finally:
            end(process)


@contextmanager
def s3_server(root: Path) -> Iterator[str]:
    """Serve the files of a directory as the bucket `data` of moto's S3."""
    moto = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    boto3 = pytest.importorskip("boto3")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        who = {"aws_access_key_id": SECRETS[0], "aws_secret_access_key": SECRETS[1]}
        client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **who)
        client.create_bucket(Bucket="data")
        for path in sorted(root.rglob("*")):
            if path.is_file():
                client.put_object(Bucket="data", Key=str(path.relative_to(root)), Body=path.read_bytes())
        client.close()
        yield url
    finally:
        server.stop()


def s3_options(endpoint: str) -> dict[str, Any]:
    """Return the storage options of fsspec for `s3_server`."""
    return {"key": SECRETS[0], "secret": SECRETS[1], "client_kwargs": {"endpoint_url": endpoint}}


def in_words(options: Mapping[str, Any]) -> list[str]:
    """Return storage options as `-o` takes them."""
    words = [f"storage_option.{key}={value}" for key, value in options.items() if isinstance(value, str)]
    inner = [(key, value) for key, value in options.items() if isinstance(value, dict)]
    words += [f"storage_option.{key}.{name}={text}" for key, value in inner for name, text in value.items()]
    return ["-o", ",".join(words)]
