"""Azurite, Microsoft's emulator of Azure Blob Storage, as a server for tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.datasets import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

ACCOUNT = "devstoreaccount1"

KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key that every Azurite has, so it is no secret."""


def program() -> Path:
    """The program azurite-blob, which `scripts/test.sh` installs; the test is skipped without it."""
    path = Path(os.environ.get("SHARDFS_AZURITE", ROOT / ".venv-azurite/node_modules/.bin/azurite-blob"))
    if not path.exists() or shutil.which("node") is None:
        pytest.skip(f"no {path} (see SHARDFS_AZURITE)")
    return path


@contextmanager
def azurite() -> Iterator[str]:
    """Yield the connection string of a new server, which keeps its data in memory."""
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry"]
    command = [str(program()), "--blobPort", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            url = _address(server)
            parts = {"DefaultEndpointsProtocol": "http", "AccountName": ACCOUNT, "AccountKey": KEY}
            parts["BlobEndpoint"] = f"{url}/{ACCOUNT}"
            yield ";".join(f"{name}={value}" for name, value in parts.items())
        finally:
            server.terminate()


def _address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    lines = []
    for line in server.stdout:
        lines.append(line)
        if (match := re.search(r"http://127\.0\.0\.1:\d+", line)) and "listens" in line:
            return match[0]
    raise AssertionError("".join(lines))
