"""What docs/durability.md says of files and operations: on a real mount, and on the tree itself over memory://."""

from __future__ import annotations

import json
import sys
import uuid

import fsspec
import pytest

from shardfs.vfs.tree import open_tree
from shardfs.write.journal import Journal
from shardfs.write.tree import open_write_tree
from tests import handmade
from tests.conftest import _run
from tests.datasets import ROOT
from tests.write.mounts import writable
from tests.write.semantics import cases, files, kinds  # noqa: F401 - they register what they have
from tests.write.semantics.calls import InProcess


@pytest.fixture(scope="module")
def on_a_mount(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What failed there. All cases run in one program, on one mount."""
    top = tmp_path_factory.mktemp("semantics")
    handmade.write_files(top / "source", cases.files())
    with writable(top / "source", top) as mount:
        mount.mount()
        run = _run([sys.executable, "-m", "tests.write.semantics", mount.path, mount.source], 100, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["ran"] == len(cases.CASES) > 450
    failed: dict[str, str] = told["failed"]
    return failed


@pytest.mark.fuse
@pytest.mark.every_case
@pytest.mark.parametrize("name", cases.CASES)
def test_on_a_mount(on_a_mount: dict[str, str], name: str) -> None:
    assert on_a_mount.get(name) is None


REMOTE = [name for name, found in cases.CASES.items() if not found.local]


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What failed there."""
    store, root = fsspec.filesystem("memory"), f"/{uuid.uuid4()}"
    for path, data in cases.files().items():
        store.pipe_file(f"{root}/{path}", data)
    journal = Journal.open(tmp_path_factory.mktemp("journal") / "j", f"memory:/{root}", limit_bytes=256 << 20)
    tree = open_write_tree(open_tree(f"memory:/{root}"), journal)

    def source(path: str) -> bytes | None:
        found: bytes | None = store.cat_file(f"{root}/{path}") if store.isfile(f"{root}/{path}") else None
        return found

    try:
        return cases.run(InProcess(tree), source, REMOTE)
    finally:
        tree.close(20)
        store.rm(root, recursive=True)


@pytest.mark.every_case
@pytest.mark.parametrize("name", REMOTE)
def test_in_memory(in_memory: dict[str, str], name: str) -> None:
    assert in_memory.get(name) is None
