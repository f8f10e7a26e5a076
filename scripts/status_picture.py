"""Draw docs/status.png: the status page of three real mounts, one behind a network, one with data to publish, one dead.

    python scripts/status_picture.py docs/status.png

Needs chromium and the packages of the extra `test`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorstore
import zarr
from bench_remote import delaying

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOKS = 30
"""Times that the page asks for its data, once a second, before the picture is taken."""


class Slowly(BaseHTTPRequestHandler):
    """Passes on the daemon's answers, one a second: the browser's clock stands still meanwhile."""

    daemon = ""

    def do_GET(self) -> None:
        """Answer."""
        if self.path == "/favicon.ico":
            return self.send_error(404)
        time.sleep(1)
        with urllib.request.urlopen(f"http://{self.daemon}{self.path}") as answer:
            body = answer.read()
            self.send_response(200)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@contextmanager
def serving(handler: Any) -> Iterator[str]:
    """Serve; yield HOST:PORT."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield "127.0.0.1:{1}".format(*server.server_address)
        server.shutdown()


@contextmanager
def mounted(source: str | Path, at: Path, *options: str) -> Iterator[Path]:
    """Mount a source."""
    at.mkdir()
    shardfs = [sys.executable, "-m", "shardfs"]
    subprocess.run([*shardfs, "mount", str(source), str(at), *options], check=True)
    try:
        yield at
    finally:
        subprocess.run([*shardfs, "umount", "--lazy", str(at)], check=True)


def work(brain: Path, cells: Path, end: threading.Event) -> None:
    """Read one mount, and write to the other."""
    array, out = (
        zarr.open_array(brain, mode="r"),
        tensorstore.open({"driver": "n5", "kvstore": {"driver": "file", "path": str(cells)}}).result(),
    )
    for i in range(1 << 20):
        array[16 * i % 256 : 16 * i % 256 + 16]
        out[..., 16 * i % 256] = i % 250
        if end.wait(0.1 + 0.4 * (i % 3)):
            return


def main(picture: str) -> None:
    """Draw it."""
    with tempfile.TemporaryDirectory(prefix="shardfs-") as name, ExitStack() as stack:
        scratch = Path(name)
        data = np.random.default_rng(1).integers(0, 255, (256, 256, 256), np.uint8)
        for name, codecs in (("brain.zarr", "auto"), ("cells.zarr", None)):
            at, shapes = scratch / "data" / name, {"chunks": (16, 64, 64), "shards": (64, 256, 256)}
            zarr.create_array(at, data=data, **shapes, compressors=codecs)
        web = stack.enter_context(delaying(str(scratch / "data"), 20))
        brain = stack.enter_context(
            mounted(f"{web}/brain.zarr", scratch / "brain", "-o", "direct_io", "--metrics-addr", "127.0.0.1:0")
        )
        writable = ("--rw", "--layout", "n5", "-o", f"journal={scratch / 'journal'}")
        cells = stack.enter_context(mounted(scratch / "data/cells.zarr", scratch / "cells", *writable))
        dead = stack.enter_context(mounted(scratch / "data/cells.zarr", scratch / "old"))
        os.kill(json.loads((dead / ".shardfs/status.json").read_text())["pid"], signal.SIGKILL)
        Slowly.daemon = json.loads((brain / ".shardfs/status.json").read_text())["metrics_addr"]
        page = stack.enter_context(serving(Slowly))
        end = threading.Event()
        worker = threading.Thread(target=work, args=(brain, cells, end))
        worker.start()
        browser = shutil.which("chromium") or sys.exit("chromium is not installed")
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,830"]
        flags += [f"--virtual-time-budget={2000 * LOOKS}", f"--screenshot={Path(picture).absolute()}"]
        subprocess.run([browser, *flags, f"http://{page}/"], check=True, capture_output=True, timeout=20 * LOOKS)
        end.set()
        worker.join()


if __name__ == "__main__":
    main(sys.argv[1])
