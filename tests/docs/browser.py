"""A browser without a screen that reports every address a page asks for."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

FLAGS = (
    *("--headless=new", "--no-sandbox", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def visit(browser: str, url: str, wanted: str, seconds: float = 60) -> tuple[list[str], str]:
    """Open a page and wait until the JavaScript expression `wanted` is a text that is not empty.

    Returns the addresses that the page asked for, and this text.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            return asyncio.run(asyncio.wait_for(_visit(Path(profile), url, wanted), seconds))
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


async def _visit(profile: Path, url: str, wanted: str) -> tuple[list[str], str]:
    """Speak the DevTools protocol with the browser's only page."""
    while not (port_file := profile / "DevToolsActivePort").exists() or "\n" not in port_file.read_text():
        await asyncio.sleep(0.1)
    host = f"http://127.0.0.1:{port_file.read_text().splitlines()[0]}"
    addresses: list[str] = []
    async with aiohttp.ClientSession() as session:
        pages: list[dict[str, Any]] = []
        while not pages:
            async with session.get(f"{host}/json") as answer:
                pages = [page for page in await answer.json(content_type=None) if page["type"] == "page"]
        async with session.ws_connect(pages[0]["webSocketDebuggerUrl"]) as socket:
            await socket.send_json({"id": 1, "method": "Network.enable"})
            await socket.send_json({"id": 2, "method": "Page.navigate", "params": {"url": url}})
            await _ask(socket, wanted)
            async for message in socket:
                event = message.json()
                if event.get("method") == "Network.requestWillBeSent":
                    addresses.append(event["params"]["request"]["url"])
                elif event.get("id") == 3:
                    if text := event.get("result", {}).get("result", {}).get("value"):
                        return addresses, str(text)
                    await asyncio.sleep(0.2)
                    await _ask(socket, wanted)
    raise ConnectionError("the browser ended")


async def _ask(socket: aiohttp.ClientWebSocketResponse, wanted: str) -> None:
    await socket.send_json({"id": 3, "method": "Runtime.evaluate", "params": {"expression": wanted}})
