"""The parts of scripts/demo.sh that need Python. It uses no code of shardfs, so errors of shardfs cannot hide."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

CHUNK = 32
CHUNKS_PER_SHARD = 4  # along each axis
ABSENT = 2**64 - 1


def brain() -> npt.NDArray[np.uint8]:
    """The T1 image of the MNI152 template, which is part of nilearn's wheel, so nothing is downloaded."""
    import nibabel

    spec = importlib.util.find_spec("nilearn")
    if spec is None or spec.origin is None:
        raise SystemExit("nilearn is not installed: run scripts/demo.sh, which installs it")
    data = Path(spec.origin).parent / "datasets" / "data"
    image = nibabel.load(data / "mni_icbm152_t1_tal_nlin_sym_09a_converted.nii.gz")
    return np.asarray(image.dataobj, dtype=np.uint8)


def write(source: Path, chunk: int) -> None:
    """Write a Zarr v3 group with one sharded array, whose shards start with their index."""
    import tensorstore

    image = brain()
    source.mkdir()
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"title": "MNI152 2009a nonlinear, T1"}}
    (source / "zarr.json").write_text(json.dumps(group))
    sharding = {
        "chunk_shape": [chunk] * 3,
        "codecs": [{"name": "bytes"}, {"name": "gzip", "configuration": {"level": 6}}],
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "index_location": "start",
    }
    array = tensorstore.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{source}/t1/"},
            "metadata": {
                "shape": list(image.shape),
                "data_type": "uint8",
                "chunk_grid": {
                    "name": "regular",
                    "configuration": {"chunk_shape": [chunk * CHUNKS_PER_SHARD] * 3},
                },
                "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
                "dimension_names": ["x", "y", "z"],
            },
        },
        create=True,
    ).result()
    array.write(image).result()
    print(f"tensorstore wrote an array of {' x '.join(map(str, image.shape))} voxels.")


def read(source: Path, mount: Path) -> None:
    """Read with z5py. It fails on the source, because it expects the index at the end; the mount must be readable."""
    import z5py

    image = brain()
    try:
        z5py.File(source, mode="r", use_zarr_format=True)["t1"][:]
    except RuntimeError as error:
        print(f"z5py on the shards: it fails ({error}).")
    else:
        raise SystemExit("z5py read the shards; this demo no longer shows anything")
    seen = z5py.File(mount, mode="r", use_zarr_format=True)["t1"][:]
    if not np.array_equal(seen, image):
        raise SystemExit("z5py on the mount: the image differs from the one that was written")
    print(f"z5py on the mount: all {image.size} voxels are right.")


def chunks_in_shards(array: Path) -> dict[str, bytes]:
    """Path and bytes of every chunk, cut out of the shards as the Zarr specification defines them."""
    found = {}
    inside = list(np.ndindex((CHUNKS_PER_SHARD,) * 3))
    for path in sorted((array / "c").glob("*/*/*")):
        shard, position = path.read_bytes(), [int(part) for part in path.parts[-3:]]
        index = np.frombuffer(shard, "<u8", 2 * len(inside)).reshape(-1, 2).tolist()
        for slot, (start, size) in zip(inside, index, strict=True):
            if start != ABSENT:
                coords = (CHUNKS_PER_SHARD * p + s for p, s in zip(position, slot, strict=True))
                found["/".join(map(str, coords))] = shard[start : start + size]
    return found


def compare(source: Path, copies: Path) -> None:
    """Check that the copied files are exactly the chunks of the shards, with the same bytes."""
    expected = chunks_in_shards(source / "t1")
    copied = {str(path.relative_to(copies)): path.read_bytes() for path in copies.rglob("*") if path.is_file()}
    if not expected or copied.keys() != expected.keys():
        raise SystemExit(f"{len(expected)} chunks are in the shards, but {len(copied)} files were copied")
    differing = [name for name in expected if copied[name] != expected[name]]
    if differing:
        raise SystemExit(f"{len(differing)} chunks differ from the shards, for instance {differing[0]}")
    total = sum(map(len, expected.values()))
    print(f"{len(expected)} chunks, {total} bytes: every copy is byte for byte what its shard holds.")


def main() -> None:
    match sys.argv[1:]:
        case ["write", source]:
            write(Path(source), CHUNK)
        case ["write", source, chunk]:
            write(Path(source), int(chunk))
        case ["read", source, mount]:
            read(Path(source), Path(mount))
        case ["compare", source, copies]:
            compare(Path(source), Path(copies))
        case _:
            raise SystemExit("usage: demo.py write SOURCE [CHUNK] | read SOURCE MOUNT | compare SOURCE COPIES")


if __name__ == "__main__":
    main()
