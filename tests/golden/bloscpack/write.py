"""Write the files of this directory with bloscpack itself: `python write.py`, under a Python that has it.

`plain-*.blp` hold the bytes 0, 1, 2, ... 255, 0, ... in chunks of 96 bytes, `array-*.blp` numpy arrays; `golden.json`
says how each was made and by which versions.
"""

from __future__ import annotations

import collections
import collections.abc
import importlib.metadata
import io
import json
import platform
from pathlib import Path

# bloscpack 0.16 was written for Pythons that had it there.
collections.MutableMapping = collections.abc.MutableMapping  # type: ignore[attr-defined]

import blosc  # noqa: E402
import bloscpack  # noqa: E402
import numpy as np  # noqa: E402
from bloscpack.args import BloscArgs, BloscpackArgs, MetadataArgs, calculate_nchunks  # noqa: E402
from bloscpack.file_io import CompressedFPSink, PlainFPSource  # noqa: E402

HERE = Path(__file__).parent
SUMS = ("None", "adler32", "crc32", "md5", "sha1", "sha224", "sha256", "sha384", "sha512")
PLAIN = bytes(i % 256 for i in range(400))


def write_plain(
    name: str, *, metadata: object = None, metadata_args: dict[str, object] | None = None, **args: object
) -> dict[str, object]:
    """Five chunks, of which the last is shorter."""
    nchunks, chunk_size, last = calculate_nchunks(len(PLAIN), 96)
    source = PlainFPSource(io.BytesIO(PLAIN))
    with open(HERE / f"{name}.blp", "wb") as file:
        sink = CompressedFPSink(file)
        bloscpack.abstract_io.pack(
            source, sink, nchunks, chunk_size, last, metadata=metadata,
            blosc_args=BloscArgs(typesize=4), bloscpack_args=BloscpackArgs(**args),
            metadata_args=MetadataArgs(**(metadata_args or {})),
        )  # fmt: skip
    return {"bytes": len(PLAIN), "chunk": 96, "metadata": metadata, **args}


def write_array(name: str, array: np.ndarray, chunk_bytes: int, **args: object) -> dict[str, object]:
    bloscpack.pack_ndarray_to_file(
        array, str(HERE / f"{name}.blp"), chunk_size=chunk_bytes, bloscpack_args=BloscpackArgs(**args)
    )
    np.save(HERE / f"{name}.npy", array)
    return {"array": f"{name}.npy", "chunk": chunk_bytes, **args}


def main() -> None:
    files: dict[str, object] = {}
    for kind in SUMS:
        files[f"plain-{kind.lower()}"] = write_plain(f"plain-{kind.lower()}", checksum=kind, max_app_chunks=2)
    for kind in ("None", "adler32", "sha512"):
        name = f"plain-no-offsets-{kind.lower()}"
        files[name] = write_plain(name, checksum=kind, offsets=False, max_app_chunks=0)
    meta = {"unit": "nm", "steps": [1, 2, 3]}
    files["plain-metadata"] = write_plain("plain-metadata", metadata=meta, checksum="crc32", max_app_chunks=0)
    for kind in ("None", "sha1"):
        name = f"plain-metadata-raw-{kind.lower()}"
        raw = {"meta_codec": "None", "meta_checksum": kind, "max_meta_size": 100}
        files[name] = write_plain(name, metadata=meta, metadata_args=raw, offsets=False, max_app_chunks=0)
    files["plain-defaults"] = write_plain("plain-defaults")  # ten times as many offsets as chunks, adler32
    rng = np.random.default_rng(7)
    arrays: dict[str, tuple[np.ndarray, int]] = {
        "array-1d": (np.arange(100, dtype="<i4"), 28 * 4),
        "array-2d": (np.arange(20 * 15, dtype="<u2").reshape(20, 15), 6 * 15 * 2),
        "array-big-endian": (np.linspace(0, 1, 40).astype(">f8"), 16 * 8),
        "array-fortran": (np.asfortranarray(np.arange(12, dtype="<i8").reshape(3, 4)), 32),
        "array-structured": (
            np.array([(i, i / 2) for i in range(11)], dtype=[("x", "<i4"), ("y", "<f8")]),
            48,
        ),
        "array-rows-cut": (rng.integers(0, 99, (10, 7), dtype="<i4"), 40),
        "array-one-chunk": (np.ones((3, 2, 2), "|b1"), 1000),
    }
    for name, (array, chunk_bytes) in arrays.items():
        files[name] = write_array(name, array, chunk_bytes, max_app_chunks=1)
    versions = {p: importlib.metadata.version(p) for p in ("bloscpack", "blosc", "numpy")}
    producer = {**versions, "c-blosc": blosc.blosclib_version, "python": platform.python_version()}
    (HERE / "golden.json").write_text(json.dumps({"producer": producer, "files": files}, indent=1) + "\n")


if __name__ == "__main__":
    main()
