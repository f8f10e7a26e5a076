"""The parts of scripts/clients that need Python: each program reads a mount, and what it read is compared.

`clients.py look-qgis|look-napari PATH OUT.png` runs in the program's own Python.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADLESS = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"LIBGL_ALWAYS_SOFTWARE": "1"}
QGIS = HEADLESS | {"PATH": "/usr/bin:/bin", "QT_QPA_PLATFORM": "offscreen"}
"""QGIS takes the modules of the first Python on the PATH. Debian 12's wrapper `qgis_process` adds an option that this
program does not know, so the program behind it is called."""
KEY, SECRET = "reader", "not-secret"


def run(*words: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """What a command prints; SystemExit with its output if it fails."""
    completed = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, cwd=cwd, env=env, timeout=300, check=False
    )
    if completed.returncode:
        raise SystemExit(f"{words}: status {completed.returncode}\n{completed.stdout}{completed.stderr}")
    return completed.stdout


@contextmanager
def mounted(source: Path, mountpoint: Path, *options: str) -> Iterator[Path]:
    mountpoint.mkdir(parents=True)
    run(sys.executable, "-m", "shardfs", "mount", *options, source, mountpoint)
    try:
        yield mountpoint
    finally:
        run(sys.executable, "-m", "shardfs", "umount", mountpoint)


@contextmanager
def serving(*words: object) -> Iterator[int]:
    """A server that takes `--addr` as rclone does; yields its port when it answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process = subprocess.Popen([*map(str, words), "--addr", f"127.0.0.1:{port}"])
    try:
        for _ in range(1000):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(20)


def picture(name: str, top: Path) -> Path:
    return Path(os.environ.get("SHARDFS_PICTURES", top)).resolve() / f"{name}.png"


# ---- programs


def qgis(data: Path, top: Path) -> str:
    """QGIS reads two axes, and one plane of three, through GDAL; and draws them."""
    import numpy as np
    import zarr

    process = "/usr/bin/qgis_process.bin"
    version = run(process, "--help", env=QGIS).split("\n")[0]
    with (
        mounted(data / "tables.zarr", top / "tables", "--layout", "zarr2") as tables,
        mounted(data / "brain.zarr", top / "zarr2", "--layout", "zarr2") as brain,
    ):
        # qgis_process takes the names of files and directories only.
        printed = run(process, "run", "native:rasterlayerstatistics", f"--INPUT={tables}/traces", "--BAND=1", env=QGIS)
        values = np.asarray(zarr.open_array(data / "tables.zarr/traces", mode="r"))
        for name, wanted in (("MAX", values.max()), ("MEAN", values.mean()), ("MIN", values.min())):
            (text,) = re.findall(rf"^{name}:\s+(\S+)", printed, re.MULTILINE)
            assert abs(float(text) - wanted) < 1e-6, printed
        plane = f'ZARR:"{brain}/image/s0":/s0:5'
        seen = run("/usr/bin/python3", __file__, "look-qgis", plane, picture("qgis", top), env=QGIS)
        image = np.asarray(zarr.open_array(data / "brain.zarr/image/s0", mode="r")[5])
        assert json.loads(seen.splitlines()[-1]) == image.tolist()
    return f"{version}: statistics of all values of {values.shape}, all pixels of a plane of {image.shape}"


def look_qgis(path: str, out: str) -> None:
    from qgis.core import QgsApplication, QgsMapRendererParallelJob, QgsMapSettings, QgsRasterLayer
    from qgis.PyQt.QtCore import QSize

    application = QgsApplication([], False)
    application.initQgis()
    layer = QgsRasterLayer(path, "plane", "gdal")
    assert layer.isValid(), layer.error().message()
    settings = QgsMapSettings()
    settings.setLayers([layer])
    settings.setExtent(layer.extent())
    settings.setOutputSize(QSize(512, 512))
    job = QgsMapRendererParallelJob(settings)
    job.start()
    job.waitForFinished()
    job.renderedImage().save(out)
    block = layer.dataProvider().block(1, layer.extent(), layer.width(), layer.height())
    print(json.dumps([[int(block.value(y, x)) for x in range(layer.width())] for y in range(layer.height())]))
    sys.stdout.flush()
    os._exit(0)  # QGIS crashes when Python ends first


def napari(data: Path, top: Path) -> str:
    """napari shows an OME-Zarr image with its plugin, on a virtual screen; from each layout that has such images."""
    import numpy as np
    import zarr

    wanted = [int(np.asarray(zarr.open_array(data / f"brain.zarr/image/s{n}", mode="r")).sum()) for n in range(3)]
    for layout in ("zarr2", "native"):
        options = [] if layout == "native" else ["--layout", layout]
        with mounted(data / "brain.zarr", top / layout, *options) as mount:
            screen = ["xvfb-run", "-a", "-s", "-screen 0 1280x1024x24"]
            look = [shutil.which("napari"), __file__, "look-napari", mount / "image", picture(f"napari-{layout}", top)]
            look[0] = Path(str(look[0])).with_name("python")
            printed = run(*screen, *look, env=HEADLESS)
            seen = json.loads(printed.splitlines()[-1])
            assert seen.pop("sums") == wanted, seen
    return f"napari {seen['napari']}, napari-ome-zarr {seen['plugin']}: {len(wanted)} levels, sums of all voxels equal"


def look_napari(path: str, out: str) -> None:
    from importlib.metadata import version

    import napari

    viewer = napari.Viewer()
    (layer,) = viewer.open(path, plugin="napari-ome-zarr")
    viewer.screenshot(out, canvas_only=False, flash=False)
    sums = [int(level.sum()) for level in map(_computed, layer.data)]
    print(json.dumps({"napari": version("napari"), "plugin": version("napari-ome-zarr"), "sums": sums}))
    sys.stdout.flush()
    os._exit(0)


def _computed(level: Any) -> Any:
    return level.compute() if hasattr(level, "compute") else level[...]


def rclone(data: Path, top: Path) -> str:
    """rclone serves a mount by S3 and WebDAV. A second program reads it, and writes through a writable one."""
    import numpy as np
    import zarr

    version = run("rclone", "version").split("\n")[0]
    wanted = np.asarray(zarr.open_array(data / "brain.zarr/t1", mode="r"))
    s3 = ["rclone", "serve", "s3", "--auth-key", f"{KEY},{SECRET}"]
    with mounted(data / "brain.zarr", top / "served/brain") as mount:
        with serving(*s3, "--read-only", "--etag-hash", "", top / "served") as port:
            _same(_over_s3(port).astype("i8"), wanted, "zarr-python over s3fs")
            _same(_over_obstore(port), wanted, "zarr-python over obstore")
            remote = f":s3,provider=Rclone,endpoint='http://127.0.0.1:{port}',access_key_id={KEY},"
            remote += f"secret_access_key={SECRET}:brain/t1"
            run("rclone", "copy", remote, top / "s3-copy")
        with serving("rclone", "serve", "webdav", "--read-only", mount) as port:
            run("rclone", "copy", f":webdav,url='http://127.0.0.1:{port}':t1", top / "webdav-copy")
        for copy in ("s3-copy", "webdav-copy"):
            run("diff", "-r", mount / "t1", top / copy)
    shutil.copytree(data / "brain.zarr", top / "edited.zarr")
    with (
        mounted(top / "edited.zarr", top / "writable/brain", "--rw", "-o", f"journal={top}/journals"),
        serving(*s3, "--etag-hash", "", top / "writable") as port,
    ):
        array = zarr.open_array("s3://brain/t1", mode="r+", storage_options=_options(port))
        array[:32] = wanted[:32] // 2
    changed = np.concatenate([wanted[:32] // 2, wanted[32:]])
    _same(np.asarray(zarr.open_array(top / "edited.zarr/t1", mode="r")), changed, "after writing by S3")
    return f"{version}: serve s3 read by zarr-python (s3fs, obstore) and rclone, written by zarr-python; serve webdav"


def _options(port: int) -> dict[str, Any]:
    return {"key": KEY, "secret": SECRET, "endpoint_url": f"http://127.0.0.1:{port}"}


def _over_s3(port: int) -> Any:
    import numpy as np
    import zarr

    return np.asarray(zarr.open_array("s3://brain/t1", mode="r", storage_options=_options(port)))


def _over_obstore(port: int) -> Any:
    import numpy as np
    import zarr
    from obstore.store import S3Store
    from zarr.storage import ObjectStore

    store = S3Store(
        "brain",
        prefix="t1",
        endpoint=f"http://127.0.0.1:{port}",
        access_key_id=KEY,
        secret_access_key=SECRET,
        client_options={"allow_http": True},
    )
    return np.asarray(zarr.open_array(ObjectStore(store, read_only=True), mode="r"))


def _same(values: Any, wanted: Any, label: str) -> None:
    assert (values == wanted).all(), label


def annex(data: Path, top: Path) -> str:
    """git-annex and DataLad keep a copy from a mount. A mount of annexed shards shows them after `datalad get`."""
    import numpy as np
    import zarr

    identity = {f"GIT_{who}_{what}": "shardfs" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {**os.environ, **identity, "HOME": str(top)}
    version = run("git-annex", "version", "--raw", env=env)
    datalad = run("datalad", "--version", env=env).strip()
    copy, clone = top / "copy", top / "clone"
    with mounted(data / "brain.zarr", top / "mnt") as mount:
        run("datalad", "create", copy, env=env)
        shutil.copytree(mount / "t1", copy / "t1")
    run("datalad", "save", "-m", "copy", cwd=copy, env=env)
    run("git", "annex", "fsck", "--quiet", cwd=copy, env=env)
    wanted = np.asarray(zarr.open_array(data / "brain.zarr/t1", mode="r"))
    _same(np.asarray(zarr.open_array(copy / "t1", mode="r")), wanted, "the copy")

    run("datalad", "create", "-c", "text2git", top / "shards", env=env)
    shutil.copytree(data / "brain.zarr", top / "shards/brain.zarr")
    run("datalad", "save", "-m", "shards", cwd=top / "shards", env=env)
    run("datalad", "clone", top / "shards", clone, env=env)
    chunk = "brain.zarr/t1/c/0/0/0"
    with mounted(clone, top / "annexed") as mount:
        assert not (clone / chunk).exists(), "a dangling link"
        try:
            (mount / f"{chunk}/0").exists()
            np.asarray(zarr.open_array(mount / "brain.zarr/t1", mode="r"))
        except OSError as error:
            before = error.strerror
        else:
            raise SystemExit("an array whose shards are not there can be read")
        run("datalad", "get", "brain.zarr", cwd=clone, env=env)
        time.sleep(6)  # for five seconds shardfs does not try again to open a shard that it could not open
        _same(np.asarray(zarr.open_array(mount / "brain.zarr/t1", mode="r")), wanted, "after datalad get")
    return f"git-annex {version}, {datalad}: fsck of a copy; shards before `datalad get`: {before}; after: equal"


PROGRAMS = {"qgis": qgis, "napari": napari, "rclone": rclone, "annex": annex}


def main(*names: str) -> None:
    from tests.docs import sources

    for name in names:
        with tempfile.TemporaryDirectory(prefix="clients-") as directory:
            top = Path(directory)
            sources.write(top / "data")
            print(PROGRAMS[name](top / "data", top), flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["look-qgis", path, out]:
            look_qgis(path, out)
        case ["look-napari", path, out]:
            look_napari(path, out)
        case names:
            main(*names)
