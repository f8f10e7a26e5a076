"""The parts of scripts/neuroglancer.sh that need Python. It uses no code of shardfs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from demo import brain

from tests.data_pyramid import write_pyramid
from tests.mount.web import serving

SIZE = (1000, 640)
STATE = {
    "layout": "4panel",
    "crossSectionScale": 0.75,
    "projectionScale": 190,
    "projectionOrientation": [0.19, -0.33, -0.07, 0.92],
    "crossSectionBackgroundColor": "#000000",
    "projectionBackgroundColor": "#000000",
    "showAxisLines": False,
    "showDefaultAnnotations": False,
}
SHADER = "void main() { emitGrayscale(toNormalized(getDataValue())); }"


def write(path: Path) -> None:
    """Convert the template: one voxel is a cubic millimeter, and in Neuroglancer y and z grow downwards."""
    write_pyramid(path, brain().T[::-1, ::-1], 3, [1, 1, 1], "millimeter")


def look(mount: Path, scratch: Path, python: str, out: str) -> None:
    with serving(mount, scratch / "nginx") as web:
        layer = {"type": "image", "name": "brain", "source": f"precomputed://{web.url('brain')}", "shader": SHADER}
        state = {"layers": [layer], "dimensions": {axis: [0.001, "m"] for axis in "xyz"}, **STATE}
        (scratch / "state.json").write_text(json.dumps(state))
        view = [python, "-m", "tests.clients.view_neuroglancer", "chromium", str(scratch / "state.json"), out]
        subprocess.run([*view, *map(str, SIZE)], check=True, timeout=100)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", path]:
            write(Path(path))
        case ["look", mount, scratch, python, out]:
            look(Path(mount), Path(scratch), python, out)
        case _:
            raise SystemExit("usage: neuroglancer.py write PATH | look MOUNT SCRATCH PYTHON OUT.png")
