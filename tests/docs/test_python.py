"""The examples in docstrings, the notebook and the recorded terminal show what really happens."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import fsspec
import pytest
import zarr

import shardfs
from shardfs.fsspec_fs.filesystem import ShardFileSystem
from tests.datasets import ROOT
from tests.docs import sources

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.fuse
@pytest.mark.parametrize(
    "documented",
    [shardfs.mounted, shardfs.pack, shardfs.unpack, ShardFileSystem],
    ids=lambda function: function.__name__,
)
def test_examples_in_docstrings(documented: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources.write(tmp_path / "data")
    monkeypatch.chdir(tmp_path / "data")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    names = {"shardfs": shardfs, "zarr": zarr, "fsspec": fsspec}
    (example,) = doctest.DocTestFinder(recurse=False).find(documented, globs=names)
    assert example.examples
    report: list[str] = []
    assert doctest.DocTestRunner().run(example, out=report.append).failed == 0, "".join(report)


def outputs(notebook: Path) -> list[Any]:
    """What the cells of a notebook print and return."""
    cells = json.loads(notebook.read_text())["cells"]
    return [[o.get("text") or o.get("data") for o in c["outputs"]] for c in cells if c["cell_type"] == "code"]


@pytest.mark.fuse
@pytest.mark.slow
def test_the_notebook_has_its_outputs(tmp_path: Path) -> None:
    """If not: jupyter nbconvert --to notebook --execute --inplace docs/notebook.ipynb"""
    if find_spec("nbconvert") is None or find_spec("ipykernel") is None:
        pytest.skip("no nbconvert: pip install '.[docs]'")
    notebook = str(ROOT / "docs/notebook.ipynb")
    command = [sys.executable, "-m", "nbconvert", "--execute", "--to=notebook", f"--output-dir={tmp_path}", notebook]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert completed.returncode == 0, completed.stderr
    expected = outputs(ROOT / "docs/notebook.ipynb")
    assert sum(map(bool, expected)) >= 6
    assert outputs(tmp_path / "notebook.ipynb") == expected


def text(picture: Path) -> str:
    """The text in a picture, whatever the version of rich that drew it."""
    elements = ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")
    return " ".join("".join(element.text or "" for element in elements).split())


@pytest.mark.fuse
def test_the_recorded_terminal_is_current(tmp_path: Path) -> None:
    """If not: python scripts/record_demo.py"""
    script = str(ROOT / "scripts/record_demo.py")
    subprocess.run([sys.executable, script, tmp_path / "demo.svg"], check=True, timeout=250)
    recorded = text(tmp_path / "demo.svg")
    assert recorded.count("c.17.0.0") == 2
    assert recorded == text(ROOT / "docs/demo.svg")
