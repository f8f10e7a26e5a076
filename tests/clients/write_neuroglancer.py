"""Have neuroglancer's Python package write annotations: `write_neuroglancer ROOT`.

ROOT/lines: of rank 3, two relationships, one cell for all. ROOT/points: of rank 4, with a second level of cells.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

IDS = (0, 1, 7, 12345, 720575940621826310, 2**63 - 1, 2**63 + 1, 2**64 - 1)
GRID = (2, 3, 4, 5)


def space(names: str) -> Any:
    from neuroglancer import CoordinateSpace

    return CoordinateSpace(names=list(names), units=["nm"] * len(names), scales=[4] * len(names))


def write_lines(path: Path) -> None:
    from neuroglancer import AnnotationPropertySpec
    from neuroglancer.write_annotations import AnnotationWriter

    writer = AnnotationWriter(
        coordinate_space=space("xyz"),
        annotation_type="line",
        relationships=["pre", "post"],
        properties=[
            AnnotationPropertySpec(id="size", type="float32"),
            AnnotationPropertySpec(id="colour", type="rgb"),
        ],
    )
    for i, number in enumerate(IDS):
        partners = [2**63 + 2, 5][: 1 + i % 2]
        writer.add_line(
            (i, 2 * i, 3), (i + 1, i, i), id=number, size=i / 4, colour=(i, 2, 3), pre=IDS[i // 2], post=partners
        )
    writer.write(path)


def write_points(path: Path) -> None:
    from neuroglancer.write_annotations import AnnotationWriter

    writer = AnnotationWriter(coordinate_space=space("xyzt"), annotation_type="point")
    cells: dict[str, list[Any]] = {}
    for i in range(40):
        cell = (i % 2, i % 3, i % 4, i % 5)
        writer.add_point([10 * c + i / 8 for c in cell], id=IDS[i] if i < len(IDS) else 1000 + i)
        cells.setdefault("_".join(map(str, cell)), []).append(writer.annotations[-1])
    writer.write(path)
    # It knows one level of one cell only; a finer level of the same annotations, in its own encoding.
    info = json.loads((path / "info").read_text())
    info["spatial"].append({"key": "spatial1", "grid_shape": GRID, "chunk_size": [10] * 4, "limit": 10})
    (path / "info").write_text(json.dumps(info))
    (path / "spatial1").mkdir()
    for name, members in cells.items():
        encoded = io.BytesIO()
        writer._serialize_annotations(encoded, members)
        (path / "spatial1" / name).write_bytes(encoded.getvalue())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    args = parser.parse_args()
    write_lines(args.root / "lines")
    write_points(args.root / "points")
