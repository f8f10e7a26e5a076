"""Libraries and programs that write: `python -m tests.write.clients WHAT DIRECTORY` raises what they meet."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS, INCREMENTS = 4, 100


def counters(directory: Path, mode: str) -> None:
    """Conditional writes of several threads to one key, through handles of their own: none may be lost."""
    import tensorstore as ts

    def opened() -> Any:
        context = ts.Context({"file_io_locking": {"mode": mode}})
        return ts.KvStore.open({"driver": "file", "path": f"{directory}/"}, context=context).result()

    opened().write("n", b"0").result()

    def increment(times: int) -> None:
        store = opened()
        while times:
            found = store.read("n").result()
            value = b"%d" % (int(found.value) + 1)
            if store.write("n", value, if_equal=found.stamp.generation).result().generation:
                times -= 1

    threads = [threading.Thread(target=increment, args=(INCREMENTS,)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = int(opened().read("n").result().value)
    if told != THREADS * INCREMENTS:
        raise AssertionError(f"{told} of {THREADS * INCREMENTS} increments are there")


def keys(directory: Path, mode: str) -> None:
    """What one process does with keys, which must work however tensorstore locks."""
    import tensorstore as ts

    context = ts.Context({"file_io_locking": {"mode": mode}})
    store = ts.KvStore.open({"driver": "file", "path": f"{directory}/"}, context=context).result()
    for i in range(50):
        store.write(f"a/{i % 7}/{i}", b"%d" % i * 100).result()
    for i in range(0, 50, 2):
        store.delete_range(ts.KvStore.KeyRange(f"a/{i % 7}/{i}", f"a/{i % 7}/{i}\0")).result()
    found = {bytes(key).decode(): bytes(store[key]) for key in store.list().result()}
    if found != {f"a/{i % 7}/{i}": b"%d" % i * 100 for i in range(1, 50, 2)}:
        raise AssertionError(f"{sorted(found)}")


def tensorstore_array(directory: Path, mode: str) -> None:
    """An array, written in parallel, read anew, resized."""
    import tensorstore as ts

    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{directory}/"},
        "metadata": {
            "shape": [64, 64],
            "data_type": "uint16",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [16, 16]}},
        },
    }
    context = ts.Context({"file_io_locking": {"mode": mode}})
    data = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    array = ts.open(spec, create=True, delete_existing=True, context=context).result()
    array[...] = data
    array[3:40, 5:50] = data[3:40, 5:50] + 1
    data[3:40, 5:50] += 1
    array.resize(exclusive_max=[48, 80]).result()
    again = ts.open({"driver": "zarr3", "kvstore": spec["kvstore"]}).result()
    np.testing.assert_array_equal(again[:48, :64].read().result(), data[:48])


def zarr_arrays(directory: Path) -> None:
    """Nested groups and arrays, mode w, resize, append, attributes, and all deleted."""
    import zarr

    for format in (2, 3):
        root = zarr.open_group(directory / f"v{format}", mode="w", zarr_format=format)
        array = root.create_array("a/b/c", shape=(100, 100), chunks=(10, 30), dtype="int32", fill_value=7)
        data = np.arange(10_000, dtype=np.int32).reshape(100, 100)
        array[:] = data
        array[5:17, 3:44] = 9
        data[5:17, 3:44] = 9
        array.attrs["unit"] = "mm"
        array.resize((60, 100))
        array.append(np.ones((10, 100), np.int32))
        found = zarr.open_array(directory / f"v{format}" / "a/b/c", mode="r")
        np.testing.assert_array_equal(found[:], np.vstack([data[:60], np.ones((10, 100), np.int32)]))
        if dict(found.attrs) != {"unit": "mm"}:
            raise AssertionError(dict(found.attrs))
        again = zarr.open_array(
            directory / f"v{format}" / "a/b/c", mode="w", shape=(5,), chunks=(2,), dtype="u1", zarr_format=format
        )
        again[:] = 3
        np.testing.assert_array_equal(zarr.open_group(directory / f"v{format}", mode="r")["a/b/c"], np.full(5, 3))
        del root["a"]
        if list(root.members()):
            raise AssertionError(list(root.members()))


def z5_arrays(directory: Path) -> None:
    """An N5 container and a Zarr one."""
    import z5py

    for name in ("a.n5", "a.zarr"):
        data = np.arange(60 * 50, dtype=np.uint16).reshape(60, 50)
        with z5py.File(str(directory / name), "a") as file:
            made = file.create_dataset("g/x", shape=data.shape, chunks=(16, 16), dtype="uint16", compression="gzip")
            made.n_threads = 4
            made[:] = data
            made[10:20, 10:20] = 0
            made.attrs["unit"] = "mm"
        data[10:20, 10:20] = 0
        with z5py.File(str(directory / name), "r") as file:
            np.testing.assert_array_equal(file["g/x"][:], data)
            if file["g/x"].attrs["unit"] != "mm":
                raise AssertionError("the attributes are lost")


CLIENTS: dict[str, Callable[[Path], None]] = {
    **{f"counters-{mode}": lambda d, mode=mode: counters(d, mode) for mode in ("os", "lockfile")},  # type: ignore[misc]
    **{
        f"{name}-{mode}": lambda d, what=what, mode=mode: what(d, mode)  # type: ignore[misc]
        for name, what in (("keys", keys), ("array", tensorstore_array))
        for mode in ("os", "lockfile", "none", "non_atomic")
    },
    "zarr": zarr_arrays,
    "z5": z5_arrays,
}


if __name__ == "__main__":
    where = Path(sys.argv[2]) / sys.argv[1]
    os.mkdir(where)
    CLIENTS[sys.argv[1]](where)
    print("ok")
