"""tensorstore at work on a mount: `through_tensorstore DRIVER LOCKING PATH OUT.npz`, as through_zarr3."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from tests.clients.expected import Expected

SHAPE, CHUNK = (40, 36), (5, 6)

METADATA: dict[str, Any] = {
    "zarr3": {
        "shape": SHAPE,
        "data_type": "uint16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": CHUNK}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd"}],
    },
    "n5": {"dimensions": SHAPE, "blockSize": CHUNK, "dataType": "uint16", "compression": {"type": "gzip"}},
}
VOLUME: dict[str, Any] = {
    "multiscale_metadata": {"type": "image", "data_type": "uint16", "num_channels": 1},
    "scale_metadata": {
        "key": "s",
        "size": [40, 36, 16],
        "resolution": [4, 4, 40],
        "voxel_offset": [0, 0, 0],
        "chunk_size": [10, 12, 8],
        "encoding": "raw",
    },
}


def work(driver: str, locking: str, path: Path, told: Expected) -> None:
    import tensorstore as ts

    member = f"{driver}-{locking}"
    context = {"file_io_locking": {"mode": locking}}
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{path / member}/"}, "context": context}
    layout = VOLUME if driver == "neuroglancer_precomputed" else {"metadata": METADATA[driver]}

    def opened() -> Any:
        return ts.open(spec).result()

    array = ts.open({**spec, **layout}, create=True).result()
    data = np.arange(np.prod(array.shape), dtype=np.uint16).reshape(array.shape) + 1
    array.write(data).result()
    told(member, opened().read().result(), data)
    box = tuple(slice(n // 5, n - n // 3) for n in array.shape)
    array[box].write(data[box] // 2).result()
    data[box] //= 2
    with ts.Transaction() as transaction:
        array.with_transaction(transaction)[3:4].write(9).result()
    data[3:4] = 9
    told(member, opened().read().result(), data)
    # Chunks of nothing but the fill value are deleted.
    erased_box = tuple(slice(0, n) for n in ((10, 12, 8, 1) if data.ndim == 4 else CHUNK))
    array[erased_box].write(0).result()
    data[erased_box] = 0
    told(member, opened().read().result(), data)
    if driver != "neuroglancer_precomputed":
        array = array.resize(exclusive_max=[50, 40]).result()
        data = np.pad(data, [(0, 10), (0, 4)])
        told(member, opened().read().result(), data)
        array[45:50, 30:40].write(5).result()
        data[45:50, 30:40] = 5
        array = opened().resize(exclusive_max=[23, 40]).result()
        data = data[:23]
        told(member, opened().read().result(), data)
    # Made anew where it was.
    again = ts.open({**spec, **layout}, create=True, delete_existing=True).result()
    told(member, again.read().result(), np.zeros(again.shape, np.uint16))
    data = np.arange(np.prod(again.shape), dtype=np.uint16).reshape(again.shape) // 3
    again.write(data).result()
    told(member, opened().read().result(), data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("driver")
    parser.add_argument("locking")
    parser.add_argument("path", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    expected = Expected()
    work(args.driver, args.locking, args.path, expected)
    expected.save(args.out)
