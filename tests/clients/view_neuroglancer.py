"""Neuroglancer's viewer in a browser without a screen: `view_neuroglancer BROWSER STATE.json OUT.png WIDTH HEIGHT`.

OUT.png is what is seen when the viewer says that all of it is there. On standard output: the viewer's state by then.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import neuroglancer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FLAGS = (
    *("--headless=new", "--no-sandbox", "--no-first-run", "--disable-dev-shm-usage", "--disable-extensions"),
    *("--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--hide-scrollbars", "--mute-audio"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps"),
)
"""No window, no graphics card, and no word to the browser's maker."""


def new_viewer(state: Any, size: Sequence[int]) -> Any:
    """Of this state and size in pixels, with nothing around what is seen."""
    neuroglancer.set_server_bind_address("127.0.0.1")
    viewer = neuroglancer.Viewer()
    viewer.set_state(state)
    with viewer.config_state.txn() as config:
        config.show_ui_controls = config.show_panel_borders = False
        config.viewer_size = list(size)
    return viewer


@contextmanager
def browsing(browser: str, url: str, size: tuple[int, int]) -> Iterator[subprocess.Popen[bytes]]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, tempfile.TemporaryFile() as log:
        command = [browser, *FLAGS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}", url]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def look(viewer: Any, seconds: float) -> bytes:
    """A screenshot, which the viewer takes when nothing is missing in it; PNG."""
    shots: list[Any] = []
    told: list[Any] = []
    arrival = threading.Event()

    def take(shot: Any) -> None:
        shots.append(shot)
        arrival.set()

    viewer.async_screenshot(take, statistics_callback=told.append)
    if not arrival.wait(seconds):
        last = told[-1].total.to_json() if told else "nothing at all"
        raise TimeoutError(f"not everything is there after {seconds:g} s; the viewer tells: {last}")
    picture: bytes = shots[0].screenshot.image
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("browser")
    parser.add_argument("state")
    parser.add_argument("out")
    parser.add_argument("size", type=int, nargs=2)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    viewer = new_viewer(json.loads(Path(args.state).read_text()), args.size)
    with browsing(args.browser, viewer.get_viewer_url(), args.size):
        Path(args.out).write_bytes(look(viewer, args.seconds))
        print(json.dumps(viewer.state.to_json()))


if __name__ == "__main__":
    main()
