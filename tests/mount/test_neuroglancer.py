"""Neuroglancer's own viewer, in a browser without a screen, shows a sharded OME-Zarr image from a mount and nginx."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from tests.conftest import client_python, run_client
from tests.data_pyramid import CHUNK, write_pyramid
from tests.mount.web import find_nginx, serving

if TYPE_CHECKING:
    from collections.abc import Callable
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


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A source with the image `head`, and its voxels."""
    source, image = tmp_path_factory.mktemp("source"), _phantom()
    (source / "head").mkdir()
    write_pyramid(source / "head", image, 3, [0.5, 0.25, 0.25], "micrometer")
    return source, image


def _state(source: str, **members: Any) -> dict[str, Any]:
    """Of a viewer of one layer, without anything drawn on it; a pixel is a voxel of the finest level."""
    layer = {"type": "image", "name": "image", "source": source, "shader": SHADER}
    bare = {"showAxisLines": False, "showDefaultAnnotations": False, "showScaleBar": False}
    return {"layers": [layer], "crossSectionScale": 1, "crossSectionBackgroundColor": "#000000", **bare, **members}


class Shown(NamedTuple):
    """How Neuroglancer reads a layout.

    Args:
        options: of the mount.
        middle: the position of the view (x, y, z). Voxels of precomputed begin at whole numbers; those of OME-Zarr have
            their centers there.
        chunk: the finest chunk that begins at a voxel (z, y, x).
    """

    options: tuple[str, ...]
    middle: tuple[float, float, float]
    document: str
    chunk: Callable[[int, int, int], str]


SHOWN = {
    "precomputed": Shown(
        ("--layout", "precomputed"),
        (98.5, 116.5, 70.5),
        "info",
        lambda z, y, x: f"250_250_500/{x}-{min(x + CHUNK, 197)}_{y}-{min(y + CHUNK, 233)}_{z}-{z + CHUNK}",
    ),
    "zarr2": Shown(
        ("--layout", "zarr2"), (98, 116, 70), ".zattrs", lambda z, y, x: f"0/{z // CHUNK}/{y // CHUNK}/{x // CHUNK}"
    ),
    "zarr3": Shown((), (98, 116, 70), "zarr.json", lambda z, y, x: f"0/c/{z // CHUNK}/{y // CHUNK}/{x // CHUNK}"),
}


@pytest.mark.parametrize("scheme", ["precomputed", "zarr2", pytest.param("zarr3", marks=pytest.mark.torture)])
def test_every_pixel_is_the_voxel_that_was_written(
    scheme: str, browser: str, head: tuple[Path, Any], mounted: Mounted, tmp_path: Path
) -> None:
    if find_nginx() is None:
        pytest.skip("no nginx")
    python, shown = client_python("cv"), SHOWN[scheme]
    source, image = head
    (tmp_path / "nginx").mkdir()
    with (
        mounted(source, *shown.options) as mount,
        serving(mount, tmp_path / "nginx") as web,
        web.requests() as requests,
    ):
        dimensions = {"x": [2.5e-7, "m"], "y": [2.5e-7, "m"], "z": [5e-7, "m"]}
        state = _state(f"{scheme}://{web.url('head')}", layout="xy", dimensions=dimensions, position=shown.middle)
        (tmp_path / "state.json").write_text(json.dumps(state))
        out = tmp_path / "seen.png"
        printed = run_client(
            "view_neuroglancer", browser, tmp_path / "state.json", out, "197", "233", python=python, timeout=250
        )
    pixels = np.asarray(Image.open(out).convert("RGB"))
    for channel in range(3):
        np.testing.assert_array_equal(pixels[..., channel], image[70])
    reached = json.loads(printed.stdout.splitlines()[-1])
    assert reached["layers"][0]["source"].removesuffix("/") == state["layers"][0]["source"]
    assert reached["position"] == list(shown.middle)
    _check_requests(shown, requests, image)


def _check_requests(shown: Shown, requests: list[Request], image: Any) -> None:
    """The viewer asked the server for the document, and got every chunk of the slice that there is."""
    head_requests = [r for r in requests if r.path.startswith("/head/")]
    assert [r.status for r in head_requests if r.path == f"/head/{shown.document}"] == [200]
    assert {r.status for r in head_requests} <= {200, 206, 404}
    chunks = {
        f"/head/{shown.chunk(64, y, x)}": bool(image[64:96, y : y + CHUNK, x : x + CHUNK].any())
        for x in range(0, 197, CHUNK)
        for y in range(0, 233, CHUNK)
    }
    received = {r.path for r in head_requests if r.path in chunks and r.status != 404}
    assert received == {path for path, exists in chunks.items() if exists}
