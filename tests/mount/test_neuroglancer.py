"""Neuroglancer's own viewer, in a browser without a screen, shows a sharded OME-Zarr image that nginx serves it."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import client_python, run_client
from tests.data_pyramid import CHUNK, write_pyramid
from tests.mount.web import find_nginx, serving

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.mount.web import Request

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.slow]

SHADER = "void main() { emitGrayscale(toNormalized(getDataValue())); }"


@pytest.fixture(scope="module")
def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (program := shutil.which(name)) is not None:
            return program
    pytest.skip("no chromium")


def _phantom() -> Any:
    """A head of ellipsoids (z, y, x); what lies around it is zero, so that chunks are missing."""
    z, y, x = np.meshgrid(*(np.linspace(-1, 1, n) for n in (141, 233, 197)), indexing="ij")
    head = (x / 0.7) ** 2 + (y / 0.8) ** 2 + (z / 0.75) ** 2
    inside = head < 0.7
    folds = 120 + 70 * np.sin(9 * x + 4 * y) * np.cos(11 * y - 5 * z)
    return np.where(inside, folds, np.where(head < 0.8, 250, 0)).astype("uint8")


def _state(source: str, **members: Any) -> dict[str, Any]:
    """Of a viewer of one layer, without anything drawn on it; a pixel is a voxel of the finest level."""
    layer = {"type": "image", "name": "image", "source": source, "shader": SHADER}
    bare = {"showAxisLines": False, "showDefaultAnnotations": False, "showScaleBar": False}
    return {"layers": [layer], "crossSectionScale": 1, "crossSectionBackgroundColor": "#000000", **bare, **members}


def test_every_pixel_is_the_voxel_that_was_written(browser: str, mounted: Mounted, tmp_path: Path) -> None:
    if find_nginx() is None:
        pytest.skip("no nginx")
    python = client_python("cv")
    image = _phantom()
    (tmp_path / "source/head").mkdir(parents=True)
    write_pyramid(tmp_path / "source/head", image, 3, [0.5, 0.25, 0.25], "micrometer")
    (tmp_path / "nginx").mkdir()
    with (
        mounted(tmp_path / "source", "--layout", "precomputed") as mount,
        serving(mount, tmp_path / "nginx") as web,
        web.requests() as requests,
    ):
        dimensions = {"x": [2.5e-7, "m"], "y": [2.5e-7, "m"], "z": [5e-7, "m"]}
        middle = [98.5, 116.5, 70.5]
        state = _state(f"precomputed://{web.url('head')}", layout="xy", dimensions=dimensions, position=middle)
        (tmp_path / "state.json").write_text(json.dumps(state))
        out = tmp_path / "seen.png"
        told = run_client(
            "view_neuroglancer", browser, tmp_path / "state.json", out, "197", "233", python=python, timeout=250
        )
    pixels = np.asarray(Image.open(out).convert("RGB"))
    for channel in range(3):
        np.testing.assert_array_equal(pixels[..., channel], image[70])
    reached = json.loads(told.stdout.splitlines()[-1])
    assert reached["layers"][0]["source"] == state["layers"][0]["source"]
    assert reached["position"] == middle
    _check_requests(requests, image)


def _check_requests(requests: list[Request], image: Any) -> None:
    """The viewer asked the server for the document, and got every chunk of the slice that there is."""
    head_requests = [r for r in requests if r.path.startswith("/head/")]
    assert [r.status for r in head_requests if r.path == "/head/info"] == [200]
    assert {r.status for r in head_requests} <= {200, 206, 404}
    slab = image[64:96]
    chunk_paths = {
        f"/head/250_250_500/{x}-{min(x + CHUNK, 197)}_{y}-{min(y + CHUNK, 233)}_64-96"
        for x in range(0, 197, CHUNK)
        for y in range(0, 233, CHUNK)
        if slab[:, y : y + CHUNK, x : x + CHUNK].any()
    }
    finest = [r for r in head_requests if r.path.startswith("/head/250_250_500/") and r.path.endswith("_64-96")]
    assert {r.path for r in finest if r.status != 404} == chunk_paths
