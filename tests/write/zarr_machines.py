"""zarr-python's state machines of stores and hierarchies, which it compares with stores in memory.

`python -m tests.write.zarr_machines MACHINE MOUNTPOINT SOURCE --examples N --steps N` runs one on `LocalStore` over a
writable mount of a source; each example has a directory of its own. Here stands what of them is changed, and why.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from hypothesis import HealthCheck, Phase, assume, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from zarr.storage import LocalStore
from zarr.testing.stateful import ZarrHierarchyStateMachine, ZarrStoreStateMachine
from zarr.testing.strategies import keys as zarr_keys
from zarr.testing.strategies import node_names, np_array_and_chunks

from shardfs.model.kinds import OWN_PREFIX, is_scratch
from tests.write.scale import times

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import DataObject
    from zarr.abc.store import Store


# What is called as temporary files are is not published, if it lies beside shards; shardfs's own names are refused.
names = node_names.filter(lambda name: not is_scratch(name.lower()) and not name.lower().startswith(OWN_PREFIX))


class Hierarchy(ZarrHierarchyStateMachine):
    """Groups and arrays. Now and then all is published, and what is in the source must be the same."""

    def __init__(self, store: Store, publish: Callable[[], None], source: Path) -> None:
        super().__init__(store)
        self._publish, self._source = publish, source

    @rule(name=names, data=st.data())
    def add_group(self, name: str, data: DataObject) -> None:
        super().add_group(name, data)

    @rule(name=names, data=st.data(), array_and_chunks=np_array_and_chunks())
    def add_array(self, name: str, data: DataObject, array_and_chunks: Any) -> None:
        super().add_array(data, name, array_and_chunks)

    @rule()
    def read_natively(self) -> None:
        self._publish()
        for path in sorted(self.all_arrays):
            wanted = zarr.open_array(self.model, path=path, mode="r")
            array = zarr.open_array(self._source / path, mode="r")
            assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype), path
            np.testing.assert_equal(array[...], wanted[...])
        for path in sorted(self.all_groups):
            zarr.open_group(self._source / path, mode="r")

    @precondition(lambda self: bool(self.all_groups))
    @rule(data=st.data())
    def check_list_dir(self, data: DataObject) -> None:
        """Directories outlive what was in them, as on any disk: zarr-python leaves `LocalStore` out."""
        path = self.draw_directory(data).rstrip("/")
        wanted = sorted(self._sync_iter(self.model.list_dir(path)))
        names = self._sync_iter(self.store.list_dir(path))
        keys = self._sync_iter(self.store.list_prefix(""))
        assert sorted(name for name in names if any(f"{k}/".startswith(f"{path}/{name}/") for k in keys)) == wanted

    @precondition(lambda self: bool(self.all_arrays) or bool(self.all_groups))
    @rule(data=st.data())
    def delete_dir(self, data: DataObject) -> None:
        """The original forgets `ab` when `a` goes."""
        path = self.draw_directory(data)
        note(f"delete_dir with {path=!r}")
        self._sync(self.model.delete_dir(path))
        self._sync(self.store.delete_dir(path))
        removed = {node for node in self.all_groups | self.all_arrays if f"{node}/".startswith(f"{path.rstrip('/')}/")}
        self.all_groups -= removed
        self.all_arrays -= removed


GRID = [f"array/c/{i}/{j}" for i in range(2) for j in range(3)]
BEYOND = ["array/c/0/3", "array/c/7", "other/c/0/0"]
DOCUMENTS = ["array/zarr.json", "other/zarr.json"]
keys = st.sampled_from([*GRID, *BEYOND]) | zarr_keys().filter(lambda key: f"/{OWN_PREFIX}" not in f"/{key}")


def _document(note: int) -> bytes:
    """Of an array whose chunks `GRID` are; with `--create` it becomes a sharded one."""
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [4, 6],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 2]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": [{"name": "bytes"}],
            "attributes": {"note": note},
        }
    ).encode()


class Keys(ZarrStoreStateMachine):
    """Keys and values. Half of the keys are the chunks of an array, of which there is a document, or not (yet)."""

    def __init__(self, store: Store, publish: Callable[[], None], source: Path) -> None:
        super().__init__(store)
        self._publish, self._source = publish, source
        self._directories: set[str] = set()

    def _fits(self, key: str) -> bool:
        """A directory cannot be a file, also after all in it is gone: zarr-python leaves `LocalStore` out."""
        parents = {key[:i] for i, c in enumerate(key) if c == "/"}
        return key not in self._directories and not parents & self.model.keys()

    @rule(key=keys, data=st.binary(max_size=100) | st.binary(min_size=4, max_size=4))
    def set(self, key: str, data: bytes) -> None:
        assume(self._fits(key))
        self._directories |= {key[:i] for i, c in enumerate(key) if c == "/"}
        super().set(key, data)

    @rule(key=st.sampled_from(DOCUMENTS), note=st.integers(0, 9))
    def set_document(self, key: str, note: int) -> None:
        self.set(key, _document(note))

    @rule(key=keys)
    def get_invalid_zarr_keys(self, key: str) -> None:
        assume(key not in self.model)
        assert self.store.get(key, self.prototype) is None

    @rule(key=keys)
    def exists(self, key: str) -> None:
        assume(key not in self._directories)  # which exist, too
        assert self.store.exists(key) == (key in self.model)

    @rule()
    def read_natively(self) -> None:
        self._publish()
        for key in sorted(self.model.keys() & set(DOCUMENTS)):
            array = zarr.open_array((self._source / key).parent, mode="r")
            for chunk in GRID:
                value = self.model.get(chunk.replace("array", key.partition("/")[0]))
                wanted = bytes(4) if value is None else value.to_bytes()
                if len(wanted) == 4:
                    i, j = (2 * int(part) for part in chunk.split("/")[-2:])
                    assert np.asarray(array[i : i + 2, j : j + 2]).tobytes() == wanted, chunk


MACHINES = {"hierarchy": Hierarchy, "keys": Keys}


def run(make: Callable[[int], Any], examples: int, steps: int) -> None:
    """`make` takes the number of an example. The quick tests are the same each time, and do not look for less."""
    quick = times() == 1
    told = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=quick,
        phases=(Phase.generate,) if quick else (Phase.generate, Phase.shrink),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    machine: Any = partial(next, map(make, count()))
    run_state_machine_as_test(machine, settings=told)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("machine", choices=list(MACHINES))
    parser.add_argument("mountpoint", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("--examples", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)

    def publish() -> None:
        subprocess.run([sys.executable, "-m", "shardfs", "flush", options.mountpoint], check=True, timeout=250)

    def make(number: int) -> Any:
        root = options.mountpoint / str(number)
        root.mkdir()
        return MACHINES[options.machine](LocalStore(root), publish, options.source / str(number))

    run(make, options.examples, options.steps)


if __name__ == "__main__":
    main(sys.argv[1:])
