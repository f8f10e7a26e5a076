"""What an installation contains: the wheel and its metadata, and every extra in a virtualenv of its own."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.datasets import ROOT

if TYPE_CHECKING:
    from email.message import Message
    from pathlib import Path

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FOR_DEVELOPERS = {"docs", "test", "dev"}


def run(*command: str | Path) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd="/", check=False)
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
        ROOT,
    )
    (path,) = folder.glob("*.whl")
    return path


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_extra_all_contains_every_extra_for_users() -> None:
    (requirement,) = EXTRAS["all"]
    assert set(requirement[len("shardfs[") : -1].split(",")) == EXTRAS.keys() - FOR_DEVELOPERS - {"all"}


def test_nothing_says_that_shardfs_is_on_pypi() -> None:
    files = [*ROOT.glob("*.md"), *(p for d in ("docs", "shardfs", "scripts", "systemd") for p in (ROOT / d).rglob("*"))]
    texts = {p: p.read_text("utf8") for p in files if p.suffix in {".md", ".py", ".sh", ".service", ".1", ".8"}}
    assert len(texts) > 100
    published = re.compile(r"(pip|pipx) install[^\n]*\bshardfs(\[|['\"\s]|$)")
    assert [str(p) for p, text in texts.items() if published.search(text)] == []


@pytest.mark.slow
def test_the_wheel_has_types_and_documents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        cited = {c for n in names if n.endswith(".py") for c in re.findall(r"docs/\w+\.md", archive.read(n).decode())}
    assert {"docs/options.md", "docs/durability.md"} <= cited
    assert {f"shardfs/share/{name}" for name in cited} <= names
    assert {"shardfs/py.typed", "shardfs/share/scripts/entrypoint.sh"} <= names
    document = metadata(wheel)
    assert "# shardfs" in str(document.get_payload())
    assert document.get_all("Project-URL") is None, "there is no public place yet"


@pytest.mark.slow
@pytest.mark.fuse
def test_the_wheel_installs_with_every_extra_and_mounts(wheel: Path, tmp_path: Path) -> None:
    """What the test environment has is not installed anew. scripts/demo.sh installs all that it needs from an index."""
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(
        tmp_path / "src", shape=(8, 8), chunks=(2, 2), shards=(8, 8), dtype="u1", compressors=zarr.codecs.GzipCodec()
    )
    array[:] = np.arange(64, dtype="u1").reshape(8, 8)
    venv, mnt = tmp_path / "venv", tmp_path / "mnt"
    mnt.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "index.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), "install", "--quiet", "--no-compile"]
    run(*pip, "--no-deps", "--ignore-installed", wheel)
    run(*pip, f"{wheel}[all]")
    modules = "zlib_ng, yaml, blosc2, PIL, compresso, crackle, fpzip, imagecodecs, distributed, matplotlib"
    run(venv / "bin/python", "-c", f"import {modules}, s3fs, gcsfs, adlfs, aiohttp, shardfs")
    where = run(venv / "bin/python", "-c", "import shardfs; print(shardfs.__file__)")
    assert where.startswith(str(packages))
    program = venv / "bin/shardfs"
    assert "mount" in run(program, "--help")
    run(program, "install", "--root", tmp_path / "root", "--programs", venv / "bin")
    assert run(program, "verify", "--deep", tmp_path / "src")
    run(program, "mount", tmp_path / "src", mnt)
    try:
        assert sorted(p.name for p in (mnt / "c").rglob("*") if p.is_file()) == sorted("0123" * 4)
    finally:
        run(program, "umount", mnt)
