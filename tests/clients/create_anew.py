"""Arrays created, written, changed and made anew as if there were no shards: `create_anew TOOL PATH`."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

DATA = np.arange(70 * 90, dtype="uint16").reshape(70, 90)

SEGMENTS = (1, 2, 3, 2**63 + 7)


def zarr3(path: str) -> None:
    """`new`, `new/x`, `old` changed, `anew` in place of a sharded array, and all of it consolidated."""
    import zarr

    group = zarr.open_group(path, mode="a")
    new = group.create_array("new/x", shape=DATA.shape, chunks=(10, 10), dtype="uint16")
    new[:] = DATA
    old = zarr.open_array(f"{path}/old", mode="r+")
    assert old.shards is None
    old.attrs["k"] = 1
    old.append(np.ones((20, 90), "uint16"))
    old.resize((100, 100))
    old[90:] = 7
    zarr.create_array(f"{path}/anew", shape=DATA.shape, chunks=(10, 10), dtype="uint16", overwrite=True)[:] = DATA + 1
    zarr.consolidate_metadata(path).attrs["k"] = 2
    assert dict(zarr.open_consolidated(path)["old"].attrs) == {"k": 1}


def tensorstore(path: str) -> None:
    """The same by tensorstore, which has no groups."""
    import tensorstore as ts

    def spec(name: str, **more: Any) -> dict[str, Any]:
        return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/{name}/"}, **more}

    chunks = {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [10, 10]}}}
    metadata = {"shape": DATA.shape, "data_type": "uint16", **chunks}
    ts.open(spec("new/x", metadata=metadata, create=True)).result().write(DATA).result()
    old = ts.open(spec("old"), open=True).result()
    old = old.resize(exclusive_max=(100, 100)).result()
    old[70:90, :90].write(np.ones((20, 90), "uint16")).result()
    old[90:].write(np.full((10, 100), 7, "uint16")).result()
    anew = ts.open(spec("anew", metadata=metadata, create=True, delete_existing=True)).result()
    anew.write(DATA + 1).result()
    try:
        sharding = {"name": "sharding_indexed", "configuration": {"chunk_shape": [5, 5]}}
        ts.open(spec("sharded", metadata={**metadata, "codecs": [sharding]}, create=True)).result()
    except ValueError:
        return
    raise AssertionError("a sharded array was created through the mount")


def zarr2(path: str) -> None:
    """The same as `zarr3` by zarr-python 2.18, and arrays in every form that Zarr v2 has of its own."""
    import numcodecs
    import zarr as library

    zarr: Any = library  # of version 2
    group = zarr.open_group(path, mode="a")
    new = group.create_dataset("new/x", shape=DATA.shape, chunks=(10, 10), dtype="uint16")
    new[:] = DATA
    new.attrs.update({"_ARRAY_DIMENSIONS": ["y", "x"], "unit": "nm"})
    old = zarr.open_array(f"{path}/old", mode="r+")
    old.attrs["k"] = 1
    old.append(np.ones((20, 90), "uint16"))
    old.resize(100, 100)
    old[90:] = 7
    group.create_dataset("anew", shape=DATA.shape, chunks=(10, 10), dtype="uint16", overwrite=True)[:] = DATA + 1
    for name, codec in (("zlib", numcodecs.Zlib(1)), ("lz4", numcodecs.LZ4()), ("raw", None)):
        dataset = group.create_dataset(
            f"forms/{name}", shape=DATA.shape, chunks=(30, 20), dtype=">f4", compressor=codec, order="F",
            dimension_separator="/", fill_value=np.nan,
        )  # fmt: skip
        dataset[:50] = DATA[:50]
    group["forms"].create_dataset("text", data=DATA[0].astype("U5"), chunks=(20,))
    zarr.consolidate_metadata(path)
    assert dict(zarr.open_consolidated(path)["old"].attrs) == {"k": 1}
    np.testing.assert_array_equal(group["forms/lz4"][:50], DATA[:50])


def omezarr(path: str) -> None:
    """An image and its labels as OME-Zarr 0.4, by ome-zarr-py."""
    import zarr
    from ome_zarr.format import FormatV04
    from ome_zarr.io import parse_url
    from ome_zarr.reader import Reader
    from ome_zarr.writer import write_image, write_labels

    root = zarr.group(store=parse_url(f"{path}/i", mode="w", fmt=FormatV04()).store)
    chunks = {"chunks": (10, 10)}
    write_image(image=DATA, group=root, axes="yx", storage_options=chunks, fmt=FormatV04())
    write_labels(labels=DATA % 3, group=root, name="cells", axes="yx", storage_options=chunks, fmt=FormatV04())
    image, _, labels = Reader(parse_url(f"{path}/i"))()
    np.testing.assert_array_equal(np.asarray(image.data[0]), DATA)
    np.testing.assert_array_equal(np.asarray(labels.data[0]), DATA % 3)


def bigendian(path: str) -> None:
    """What zarr-python 2.18 can have in N5."""
    import zarr as library

    zarr: Any = library  # of version 2
    group = zarr.open_group(f"{path}/n", mode="a")
    dataset = group.create_dataset("x", shape=DATA.shape, chunks=(10, 10), dtype=">u2", dimension_separator="/")
    dataset[:] = DATA
    dataset.attrs["k"] = 1
    np.testing.assert_array_equal(group["x"][:], DATA)


def z5py(path: str) -> None:
    import z5py

    with z5py.File(f"{path}/f.n5", mode="a") as file:
        dataset = file.create_dataset("x", shape=DATA.shape, chunks=(10, 10), dtype="uint16", compression="gzip")
        dataset[:] = DATA
        dataset.attrs["k"] = 1


def n5store(path: str) -> None:
    import zarr as library

    zarr: Any = library  # of version 2
    group = zarr.open_group(store=zarr.N5Store(f"{path}/f.n5"), mode="a")
    group.create_dataset("x", shape=DATA.shape, chunks=(10, 10), dtype="uint16")[:] = DATA
    group["x"].attrs["k"] = 1
    group["x"].resize(80, 90)
    group["x"].resize(70, 90)


def draft(path: str) -> None:
    from tests.clients.zarr_draft import zarr_of_the_draft

    zarr = zarr_of_the_draft(sharding=False)
    store = zarr.Store(f"{path}/h")
    dataset = zarr.api.create(DATA.shape, chunks=(10, 10), dtype="uint16", store=store, path="g/x", zarr_version=3)
    dataset[:] = DATA
    dataset.attrs["k"] = 1
    dataset.resize(80, 90)
    dataset[70:] = 5


def cloudvolume(path: str) -> None:
    from cloudvolume import CloudVolume

    info = CloudVolume.create_new_info(
        num_channels=1, layer_type="image", data_type="uint16", encoding="raw", resolution=[1, 1, 1],
        voxel_offset=[0, 0, 0], chunk_size=[10, 10, 1], volume_size=[*DATA.shape, 1],
    )  # fmt: skip
    volume = CloudVolume(f"file://{path}/v", info=info, progress=False)
    volume.commit_info()
    volume.commit_provenance()
    volume[:] = DATA[:, :, None, None]
    volume.add_scale((2, 2, 1))
    volume.commit_info()
    coarse = CloudVolume(f"file://{path}/v", mip=1, progress=False)
    coarse[:] = DATA[::2, ::2, None, None]
    np.testing.assert_array_equal(volume[:][..., 0, 0], DATA)


def skeletons(path: str) -> None:
    from cloudvolume import CloudVolume, Skeleton

    info = CloudVolume.create_new_info(
        num_channels=1, layer_type="segmentation", data_type="uint64", encoding="raw", resolution=[1, 1, 1],
        voxel_offset=[0, 0, 0], chunk_size=[10, 10, 1], volume_size=[10, 10, 1], skeletons="skeletons",
    )  # fmt: skip
    volume = CloudVolume(f"file://{path}/v", info=info, progress=False)
    volume.commit_info()
    volume.skeleton.meta.commit_info()
    for segment in SEGMENTS:
        vertices = np.full((3, 3), segment % 1000, np.float32)
        volume.skeleton.upload(Skeleton(vertices, np.array([[0, 1], [1, 2]], np.uint32), segid=segment))


def xarray(path: str) -> None:
    """Arrays without a marker of missing values, and one whose marker is 0, by xarray and zarr-python 2.18."""
    import xarray as library

    xr: Any = library
    names = ("y", "x")
    values = {name: (names, DATA.astype(kind)) for name, kind in (("i", "i4"), ("marked", "i2"))}
    wanted = xr.Dataset({**values, "flag": ("y", DATA[:, 0] > 0)})
    encoding: dict[str, Any] = {name: {"chunks": (10, 10)} for name in values}
    encoding["marked"]["_FillValue"] = 0
    wanted.to_zarr(f"{path}/d", mode="w", encoding=encoding)
    table = xr.open_zarr(f"{path}/d").load()
    xr.testing.assert_identical(table.drop_vars("marked"), wanted.drop_vars("marked"))
    assert int(np.isnan(table.marked).sum()) == 1


if __name__ == "__main__":
    tools = (zarr3, tensorstore, zarr2, omezarr, bigendian, z5py, n5store, draft, cloudvolume, skeletons, xarray)
    {f.__name__: f for f in tools}[sys.argv[1]](sys.argv[2])
