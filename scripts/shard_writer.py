"""A program that writes shards, driven by scripts/torture_writers.py: `shard_writer.py PROGRAM`.

It runs in the virtualenv of PROGRAM, and needs numpy besides. For each line of JSON on standard input it forks a
process that writes or reads one array, and prints its number. The array has CHUNKS chunks, one plane each. All
values of a chunk are the same number, its token: `token % CHUNKS` is the number of the chunk.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from typing import Any

import numpy as np

CHUNKS, SIDE = 64, 128
DTYPE = np.dtype("<u4")


class Zarr:
    """zarr-python."""

    def __init__(self, path: str) -> None:
        import zarr

        self.array: Any = zarr.open_array(path, mode="r+")

    def write(self, number: int, token: int) -> None:
        self.array[number : number + 1] = np.full((1, SIDE, SIDE), token, DTYPE)

    def read(self, number: int) -> Any:
        return np.asarray(self.array[number : number + 1])


class Zarrs(Zarr):
    """zarr-python with the codec pipeline of zarrs, which is written in Rust."""

    def __init__(self, path: str) -> None:
        import zarr
        import zarrs  # noqa: F401 - registers the pipeline

        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
        super().__init__(path)


class Tensorstore:
    """tensorstore; MODE is `file_io_locking` of its driver for files."""

    def __init__(self, path: str, mode: str, driver: str = "zarr3") -> None:
        import tensorstore as ts

        context = {"file_io_locking": {"mode": mode}}
        spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{path}/"}, "context": context}
        self.array: Any = ts.open(spec).result()

    def write(self, number: int, token: int) -> None:
        self.array[number : number + 1].write(np.full((1, SIDE, SIDE), token, DTYPE)).result()

    def read(self, number: int) -> Any:
        return np.asarray(self.array[number : number + 1].read().result())


class Volume(Tensorstore):
    """tensorstore, for a precomputed volume (x, y, z, channel)."""

    def __init__(self, path: str, mode: str) -> None:
        super().__init__(path, mode, "neuroglancer_precomputed")
        self.array = self.array[..., 0].T


class Z5:
    """z5py."""

    def __init__(self, path: str) -> None:
        import z5py

        group, _, name = path.rpartition("/")
        self.array: Any = z5py.File(group, mode="a", use_zarr_format=True, zarr_format=3)[name]

    def write(self, number: int, token: int) -> None:
        self.array[number : number + 1] = np.full((1, SIDE, SIDE), token, DTYPE)

    def read(self, number: int) -> Any:
        return np.asarray(self.array[number : number + 1])


class CloudVolume:
    """CloudVolume."""

    def __init__(self, path: str) -> None:
        import cloudvolume

        self.volume: Any = cloudvolume.CloudVolume(f"file://{path}", progress=False, compress=False, cache=False)

    def write(self, number: int, token: int) -> None:
        self.volume[:, :, number : number + 1] = np.full((SIDE, SIDE, 1, 1), token, DTYPE)

    def read(self, number: int) -> Any:
        return np.asarray(self.volume[:, :, number : number + 1])


class Acquire:
    """acquire-zarr, which creates an array of shards, and appends planes at the pace of a camera."""

    def __init__(self, path: str) -> None:
        import acquire_zarr as aqz

        lengths = {"t": (CHUNKS, 1, CHUNKS), "y": (SIDE, SIDE, 1), "x": (SIDE, SIDE, 1)}
        dimensions = [
            aqz.Dimension(
                name=name,
                kind=aqz.DimensionType.TIME if name == "t" else aqz.DimensionType.SPACE,
                array_size_px=0 if name == "t" else size,
                chunk_size_px=chunk,
                shard_size_chunks=chunks,
            )
            for name, (size, chunk, chunks) in lengths.items()
        ]
        array = aqz.ArraySettings(output_key="array", dimensions=dimensions, data_type=aqz.DataType.UINT32)
        self.stream = aqz.ZarrStream(aqz.StreamSettings(store_path=path.rpartition("/")[0], arrays=[array]))

    def write(self, number: int, token: int) -> None:
        time.sleep(0.005)
        self.stream.append(np.full((1, SIDE, SIDE), token, DTYPE))


PROGRAMS: dict[str, tuple[Any, ...]] = {
    "zarr-python": (Zarr,),
    "zarrs": (Zarrs,),
    **{f"tensorstore {mode}": (Tensorstore, mode) for mode in ("os", "lockfile", "none", "non_atomic")},
    "tensorstore precomputed": (Volume, "os"),
    "z5py": (Z5,),
    "CloudVolume": (CloudVolume,),
    "acquire-zarr": (Acquire,),
}
MODULES = {Zarr: "zarr", Zarrs: "zarrs", Tensorstore: "tensorstore", Volume: "tensorstore", Z5: "z5py"}
MODULES |= {CloudVolume: "cloudvolume", Acquire: "acquire_zarr"}


def token_of(values: Any) -> int | None:
    """The token of a chunk; None if its values differ."""
    return int(values.flat[0]) if values.size and values.min() == values.max() else None


def write(program: Any, log: Any, numbers: list[int], first_round: int, rounds: int) -> None:
    """Write each chunk once in each round. The log has a line before and after each write."""
    for round_ in range(first_round, first_round + rounds):
        for number in numbers:
            token = round_ * CHUNKS + number
            log(f"issue {number} {token}")
            program.write(number, token)
            log(f"ack {number} closed")


def read(program: Any, log: Any, seconds: float, seed: int) -> None:
    """Read chunks at random. The log gets one line of JSON: the number of reads, and what was wrong by kind."""
    chance, latest = random.Random(seed), dict.fromkeys(range(CHUNKS), 0)
    counts: dict[str, int] = {"reads": 0}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        number = chance.randrange(CHUNKS)
        counts["reads"] += 1
        try:
            token = token_of(program.read(number))
        except Exception as error:  # noqa: BLE001 - whatever a library raises for a shard that it cannot read
            kind = f"error {type(error).__name__}"
        else:
            if token is None:
                kind = "mixed"
            elif token == 0:
                kind = "absent"
            elif token % CHUNKS != number:
                kind = "of another chunk"
            elif token < latest[number]:
                kind = "older"
            else:
                latest[number] = token
                continue
        counts[kind] = counts.get(kind, 0) + 1
    log(json.dumps(counts))


def work(name: str, command: dict[str, Any]) -> None:
    """Do what a line of input says, and note in its log how that ended."""
    fd = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def log(line: str) -> None:
        os.write(fd, f"{line}\n".encode())

    try:
        factory, *arguments = PROGRAMS[name]
        program = factory(command["path"], *arguments)
        {"write": write, "read": read}[command["do"]](program, log, *command["arguments"])
        log("end")
    except Exception as error:  # noqa: BLE001 - whatever a library raises
        traceback.print_exc()
        log(f"error {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def main(name: str) -> None:
    warnings.simplefilter("ignore")
    __import__(MODULES[PROGRAMS[name][0]])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            work(name, json.loads(line))
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
