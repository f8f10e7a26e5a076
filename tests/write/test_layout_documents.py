"""Documents written on a tree with a layout: each reaches the documents of the source that describe the same."""

from __future__ import annotations

import errno
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardfs.formats.create_rules import Rules
from shardfs.model.errors import CorruptShardError
from shardfs.storage.writers import open_writer
from shardfs.vfs.tree import open_tree
from shardfs.write.documents import Documents
from shardfs.write.name_kind import ExpectedDatasets
from tests.data_bcolz import write_array
from tests.data_n5 import Index, attributes
from tests.data_n5 import sharding as n5_sharding
from tests.data_zarr_transformer import array_document, write_hierarchy
from tests.datasets import BIG, CRC, GZIP, LITTLE
from tests.handmade import group_document, sharding, volume_info, write_json, zarr_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNIT = {"type": "space", "unit": "nanometer"}
OME: Any = {
    "version": "0.5",
    "multiscales": [
        {
            "name": "image",
            "axes": [{"name": name, **UNIT} for name in "zyx"],
            "datasets": [
                {"path": f"{i}", "coordinateTransformations": [{"type": "scale", "scale": [4.0 * 2**i] * 3}]}
                for i in range(2)
            ],
            "unknown": 1.5,
        }
    ],
}
CODED = [n5_sharding((2, 2, 2), [{"name": "n5bytes"}, {"name": "gzip", "configuration": {"level": 5}}], Index())]


def write_sources(root: Path) -> None:
    codecs = [LITTLE, GZIP]
    volume = zarr_metadata((8,) * 3, (4,) * 3, (2,) * 3, codecs=codecs, data_type="uint16", attributes={"a": 1})
    write_json(root / "zarr.json", group_document())
    write_json(root / "array/zarr.json", volume)
    write_json(root / "image/zarr.json", group_document(ome=OME, user=1))
    write_json(root / "image/0/zarr.json", zarr_metadata((8,) * 3, (4,) * 3, (2,) * 3))
    write_json(root / "image/1/zarr.json", zarr_metadata((4,) * 3, (4,) * 3, (2,) * 3))
    write_json(root / "slabs/zarr.json", zarr_metadata((8, 4), (4, 4), (2, 4)))
    write_json(root / "volume/info", volume_info((4, 4, 2), (2, 2, 1), sharding(), unknown=1.5))
    write_json(root / "n5/attributes.json", attributes((8,) * 3, (4,) * 3, "uint8", codecs=CODED, user=1))
    plain = {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3]}}, "codecs": [BIG, GZIP]}
    write_json(root / "plain/zarr.json", {**volume, "shape": [8, 6], "attributes": {}, **plain})
    array = {"shape": [8, 6], "chunks": [2, 3], "dtype": ">u2", "order": "C", "fill_value": 0, "filters": None}
    write_json(root / "old/.zarray", {"zarr_format": 2, **array, "compressor": {"id": "gzip", "level": 5}})
    write_hierarchy(root / "draft", {"g/a": array_document((4,), (2,))}, {})
    rows = np.arange(24, dtype="i4").reshape(8, 3)
    write_array(root / "bcolz", rows, 2, 2, attributes='{"unit": {"value": "nm", "type": "str"}}', as_json=True)


class Shown:
    """The documents of a source in a layout, for clients that write them."""

    def __init__(self, root: Path, layout: str, journal: Path) -> None:
        self.root, self.tree = root, open_tree(str(root), layout=layout, skip_unsupported=True)
        self._writer = open_writer(self.tree.store, journal=journal)
        self._documents = Documents(self.tree, self._writer, ExpectedDatasets(self.tree, Rules()))
        self.close = self._writer.close

    def __getitem__(self, path: str) -> Any:
        return json.loads(self._documents.shown(path) or b"null")

    def read(self, path: str) -> Any:
        """As a program that opens the document, and may write it later."""
        self.tree.renew(path.rpartition("/")[0])
        self._documents.seen.read(path, self._documents.shown(path))
        return self[path]

    def write(self, path: str, document: Any) -> Any:
        """Write a document. Return what is shown then."""
        directory, _, name = path.rpartition("/")
        written = self._documents.write(directory, name, json.dumps(document).encode())
        assert written is not None
        for changed in written.changed:
            self.tree.renew(changed)
        return self[path]

    def change(self, path: str, **members: Any) -> None:
        """Change members of a document, and expect them to come back."""
        again = self.write(path, {**self[path], **members})
        assert {name: again[name] for name in members} == members

    def remove(self, path: str) -> None:
        directory, _, name = path.rpartition("/")
        self._documents.remove(directory, name)
        self.tree.renew("")

    def stored(self, path: str) -> Any:
        return json.loads((self.root / path).read_text())

    def refused(self, path: str, why: str, **members: Any) -> None:
        """Expect an error that names this, and an unchanged source."""
        self._refused(errno.EINVAL, path, why, members)

    def unseen(self, path: str, **members: Any) -> None:
        """Expect that another program has changed the document since it was read."""
        self._refused(errno.ESTALE, path, "since it was read here; read it again", members)

    def _refused(self, number: int, path: str, why: str, members: Any) -> None:
        before = {file: file.read_bytes() for file in self.root.rglob("*") if file.is_file()}
        with pytest.raises(OSError, match=why) as found:
            self.write(path, {**self[path], **members})
        assert found.value.errno == number
        assert before == {file: file.read_bytes() for file in before}


@pytest.fixture
def shown(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shown]:
    write_sources(tmp_path / "source")
    (tmp_path / "journal").mkdir()
    found = Shown(tmp_path / "source", request.param, tmp_path / "journal")
    yield found
    found.close()


def in_layout(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("shown", [name], indirect=True)


# ---- zarr2 ----


@in_layout("zarr2")
def test_zarr2_over_zarr3(shown: Shown) -> None:
    before = shown.stored("array/zarr.json")
    shown.change("array/.zarray", shape=[9, 8, 3])
    shown.change("array/.zattrs", a={"b": [1, None]}, _ARRAY_DIMENSIONS=["z", "y", "x"])
    after = shown.stored("array/zarr.json")
    assert (after["shape"], after["dimension_names"]) == ([9, 8, 3], ["z", "y", "x"])
    assert after["attributes"]["a"] == {"b": [1, None]}
    assert [after[n] for n in ("codecs", "chunk_grid")] == [before[n] for n in ("codecs", "chunk_grid")]
    shown.refused("array/.zarray", r"\.zarray: chunks: ", chunks=[4, 4, 4], shape=[9, 8, 8])
    shown.refused("array/.zarray", r"\.zarray: shape, fill_value: ", fill_value="x", shape=[9])
    shown.change(".zattrs", title="x")
    assert shown.stored("zarr.json")["attributes"] == {"title": "x"}


@in_layout("zarr2")
def test_an_image_of_version_0_4_arrives_as_0_5(shown: Shown) -> None:
    attributes = shown["image/.zattrs"]
    attributes["multiscales"][0]["name"] = "renamed"
    shown.change("image/.zattrs", multiscales=attributes["multiscales"])
    for part, value in (("axes", list("abc")), ("datasets", attributes["multiscales"][0]["datasets"][:1])):
        changed = [{**attributes["multiscales"][0], part: value}]
        why = "multiscales: cannot be changed through a layout; change it in the source"
        shown.refused("image/.zattrs", why, multiscales=changed)
    assert shown.write("image/.zattrs", {**shown["image/.zattrs"], "omero": {"version": "0.4", "channels": []}})
    renamed = [{**OME["multiscales"][0], "name": "renamed"}]
    assert shown.stored("image/zarr.json")["attributes"] == {
        "ome": {**OME, "multiscales": renamed, "omero": {"channels": []}},
        "user": 1,
    }
    shown.change("image/0/.zarray", shape=[9, 8, 8])


@in_layout("zarr2")
def test_zarr2_over_others(shown: Shown) -> None:
    shown.change("volume/s/.zarray", shape=[2, 6, 4])
    scale = shown.stored("volume/info")["scales"][0]
    assert (scale["size"], scale["unknown"], scale["sharding"]) == ([4, 6, 2], 1.5, sharding())
    shown.refused("volume/s/.zattrs", "precomputed, cannot", a=1)
    shown.refused("volume/.zattrs", r"\.zattrs: a: .*precomputed, cannot", a=1)
    shown.refused("volume/.zattrs", "multiscales", multiscales=[])
    shown.change("n5/.zarray", shape=[9, 8, 7])
    shown.change("n5/.zattrs", user=2)
    assert shown.stored("n5/attributes.json") == attributes((7, 8, 9), (4,) * 3, "uint8", codecs=CODED, user=2)
    shown.refused("n5/.zattrs", "dimensions", dimensions=3)
    shown.change("bcolz/.zarray", shape=[11, 3])
    shown.change("bcolz/.zattrs", more=2)
    assert shown.stored("bcolz/meta/sizes")["shape"] == [11, 3]
    assert shown.stored("bcolz/meta/attributes") == {"unit": {"value": "nm", "type": "str"}, "more": 2}
    shown.refused("bcolz/.zarray", "shape", shape=[8, 4])


@in_layout("zarr2")
def test_what_cannot_be_changed(shown: Shown) -> None:
    shown.refused("draft/g/a/.zattrs", "layouts cannot change that", a=1)
    shown.refused("draft/.zgroup", "zarr_format", zarr_format=3)
    refused = shown["array/.zarray"]
    raw = shown.stored("array/zarr.json")
    write_json(shown.root / "array/zarr.json", {**raw, "data_type": "unknown"})
    with pytest.raises(OSError, match="removed or replaced the document since it was read here"):
        shown.write("array/.zarray", refused)
    shown.tree.renew("array")
    with pytest.raises(OSError, match="data type 'unknown'"):
        shown.write("array/.zarray", {**refused, "shape": [1, 1, 1]})
    (shown.root / "array/zarr.json").write_bytes(b"{")
    with pytest.raises(CorruptShardError):
        shown.write("array/.zarray", {**refused, "shape": [1, 1, 1]})
    assert (shown.root / "array/zarr.json").read_bytes() == b"{"


@in_layout("zarr2")
def test_generated_documents_are_accepted_if_they_are_equal(shown: Shown) -> None:
    found = shown[".zmetadata"]
    assert shown.write(".zmetadata", found) == found
    assert not (shown.root / ".zmetadata").exists()
    shown.write(".zmetadata", {**found, "metadata": {".zgroup": {"zarr_format": 2}}})
    shown.refused(".zmetadata", "metadata.array/.zarray.shape", metadata={"array/.zarray": {"shape": [1, 1, 1]}})
    shown.change("array/.zarray", shape=[9, 8, 3])
    number = shown.tree.resolve(".zmetadata").number
    assert {*shown.tree.directories.generated("array")} >= {".zmetadata", "array/.zarray"}
    assert shown.tree.is_outdated(number)  # the kernel asks again, and gets another number, and the new shape
    again = shown.tree.resolve(".zmetadata").number
    assert again != number
    assert not shown.tree.is_outdated(again)
    assert shown[".zmetadata"]["metadata"]["array/.zarray"]["shape"] == [9, 8, 3]
    shown.write(".zgroup", {"zarr_format": 2})


@in_layout("zarr2")
def test_deleting(shown: Shown) -> None:
    shown.remove("array/.zattrs")
    assert shown.stored("array/zarr.json")["attributes"] == {}
    document, sharding = shown["array/.zarray"], shown.stored("array/zarr.json")["codecs"]
    shown.remove("array/.zarray")
    assert not (shown.root / "array/zarr.json").exists()
    assert shown.write("array/.zarray", {**document, "shape": [3, 4, 5]})["shape"] == [3, 4, 5]
    assert shown.stored("array/zarr.json")["codecs"] == sharding  # remembered
    for path in ("volume/s/.zarray", "volume/.zgroup"):
        with pytest.raises(PermissionError, match="describes other datasets, too"):
            shown.remove(path)
    assert (shown.root / "volume/info").exists()


@in_layout("zarr2")
def test_deleting_attributes_deletes_the_marker_that_names_of_axes_made(shown: Shown) -> None:
    write_json(shown.root / "array/zarr.json", {**shown.stored("array/zarr.json"), "fill_value": 7})
    shown.tree.renew("array")
    names, why = ["z", "y", "x"], r"\.zattrs: _FillValue: is 3 in \.zattrs, but other members say 7"
    shown.refused("array/.zattrs", why, _ARRAY_DIMENSIONS=names, _FillValue=3)
    shown.write("array/.zattrs", {"_ARRAY_DIMENSIONS": ["z", "y", "x"]})
    assert shown["array/.zattrs"]["_FillValue"] == 7
    shown.remove("array/.zattrs")
    assert shown["array/.zattrs"] == {}
    assert shown.write("array/.zattrs", {"_FillValue": 3}) == {"_FillValue": 3}
    assert shown.stored("array/zarr.json")["attributes"] == {"_FillValue": 3}


@pytest.mark.parametrize(
    ("shown", "document", "source"),
    [
        ("zarr2", "array/.zarray", "array/zarr.json"),
        ("n5", "array/attributes.json", "array/zarr.json"),
        ("zarr3", "n5/zarr.json", "n5/attributes.json"),
    ],
    indirect=["shown"],
)
@pytest.mark.parametrize("codecs", [[LITTLE, GZIP, CRC], [LITTLE, GZIP, GZIP, CRC]])
def test_an_array_whose_document_is_deleted_and_written_again(
    shown: Shown, document: str, source: str, codecs: list[Any]
) -> None:
    """The chunks are still stored, and the mount still shows them, so the array needs the same codecs."""
    if source.endswith("zarr.json"):
        inner = zarr_metadata((8,) * 3, (4,) * 3, (2,) * 3, codecs=codecs, data_type="uint16")
        write_json(shown.root / source, inner)
        shown.tree.renew("")
    before, stored = shown[document], shown.stored(source)
    directory, _, name = document.rpartition("/")
    shown._documents.remove(directory, name)
    assert not (shown.root / source).exists()
    assert shown.write(document, before) == before
    assert shown.stored(source) == stored


@in_layout("zarr2")
def test_consolidated_metadata_of_the_source_follow(shown: Shown) -> None:
    """Programs that know Zarr v2 can only write .zmetadata, so that nothing else would update them."""
    members = {name: shown.stored(f"{name}/zarr.json") for name in ("array", "plain", "image", "image/0")}
    members["image"]["consolidated_metadata"] = {"kind": "inline", "metadata": {}}
    root = group_document() | {"consolidated_metadata": {"kind": "inline", "metadata": members}}
    write_json(shown.root / "zarr.json", root)
    shown.tree.renew("")
    for name, shape in (("array", [9, 8, 8]), ("plain", [9, 6]), ("image/0", [9, 8, 8])):
        shown.change(f"{name}/.zarray", shape=shape)
        shown.change(f"{name}/.zattrs", note=1)
    shown.change("image/.zattrs", user=2)
    shown.change(".zattrs", title="x")
    found = shown.stored("zarr.json")["consolidated_metadata"]["metadata"]
    assert found.pop("image") == members["image"] | shown.stored("image/zarr.json")
    assert found == {name: shown.stored(f"{name}/zarr.json") for name in ("array", "plain", "image/0")}
    shown.remove("plain/.zarray")
    assert shown.stored("zarr.json")["consolidated_metadata"]["metadata"].keys() == {"array", "image", "image/0"}


# ---- n5, zarr3, precomputed, bcolz ----


@in_layout("n5")
def test_n5_over_zarr3(shown: Shown) -> None:
    shown.change("array/attributes.json", dimensions=[3, 8, 9], b="x")
    after = shown.stored("array/zarr.json")
    assert (after["shape"], after["attributes"]) == ([9, 8, 3], {"a": 1, "b": "x"})
    shown.refused("array/attributes.json", "attributes.json: blockSize", blockSize=[4, 4, 4])
    shown.change("attributes.json", title="x")
    assert shown.stored("zarr.json")["attributes"] == {"title": "x"}


@in_layout("n5")
def test_the_documents_of_renamed_levels(shown: Shown) -> None:
    shown.change("image/s1/attributes.json", dimensions=[4, 4, 6], note=1)
    after = shown.stored("image/1/zarr.json")
    assert (after["shape"], after["attributes"]) == ([6, 4, 4], {"note": 1})
    shown.change("image/attributes.json", user=2)
    assert shown.stored("image/zarr.json")["attributes"] == {"ome": OME, "user": 2}


@in_layout("n5")
def test_n5_over_precomputed(shown: Shown) -> None:
    shown.change("volume/s0/attributes.json", dimensions=[4, 6, 2])
    assert shown.stored("volume/info")["scales"][0]["size"] == [4, 6, 2]
    shown.refused("volume/s0/attributes.json", "note", note=1)


@in_layout("zarr3")
def test_zarr3_over_others(shown: Shown) -> None:
    shown.change("n5/zarr.json", shape=[9, 8, 7], dimension_names=["z", "y", "x"])
    after = shown.stored("n5/attributes.json")
    assert (after["dimensions"], after["axes"], after["user"]) == ([7, 8, 9], ["x", "y", "z"], 1)
    shown.refused("n5/zarr.json", "fill_value", fill_value=1)
    shown.refused("n5/zarr.json", "dimension_names", dimension_names=["z", None, "x"])
    shown.change("bcolz/zarr.json", shape=[11, 3], attributes={"b": 1})
    assert shown.stored("bcolz/meta/attributes") == {"b": 1}
    shown.refused("bcolz/zarr.json", "dimension_names", dimension_names=["y", "x"])
    shown.change("volume/s/zarr.json", shape=[2, 6, 4])
    assert shown.stored("volume/info")["scales"][0]["size"] == [4, 6, 2]


@in_layout("n5")
def test_n5_over_arrays_without_shards(shown: Shown) -> None:
    for path, document, member in (("plain", "zarr.json", "shape"), ("old", ".zarray", "shape")):
        shown.change(f"{path}/attributes.json", dimensions=[9, 6], note=1)
        assert shown.stored(f"{path}/{document}")[member] == [6, 9]
        for name, value in (("blockSize", [3, 3]), ("dataType", "uint8"), ("compression", {"type": "raw"})):
            shown.refused(f"{path}/attributes.json", f"attributes.json: {name}: ", **{name: value})
    assert shown.stored("old/.zattrs") == {"note": 1}


@in_layout("precomputed")
def test_precomputed_over_zarr3(shown: Shown) -> None:
    info = shown["image/info"]
    info["scales"][0]["size"] = [8, 8, 9]
    assert shown.write("image/info", info) == info
    assert shown.stored("image/0/zarr.json")["shape"] == [9, 8, 8]
    fixed = "cannot be changed through a layout"
    for member, value in (("resolution", [9, 9, 9]), ("chunk_sizes", [[4, 4, 4]]), ("voxel_offset", [1, 0, 0])):
        scales = [{**info["scales"][0], member: value}, info["scales"][1]]
        shown.refused("image/info", f"info: scales: {fixed}", scales=scales)
    shown.refused("image/info", f"info: scales: {fixed}", scales=info["scales"][:1])
    shown.refused("image/info", f"info: type: {fixed}", type="segmentation")
    shown.refused("image/info", "info: mesh", mesh="m")
    shown.refused("image/info", "data_type", data_type="uint16")


@in_layout("bcolz")
def test_bcolz_over_zarr3(shown: Shown) -> None:
    rows = shown["slabs/meta/sizes"]
    shown.write("slabs/meta/sizes", {**rows, "shape": [10, 4], "nbytes": 40, "cbytes": 17})
    assert shown.stored("slabs/zarr.json")["shape"] == [10, 4]
    shown.change("slabs/__attrs__", unit="nm")
    assert shown.stored("slabs/zarr.json")["attributes"] == {"unit": "nm"}
    shown.refused("slabs/meta/storage", "chunklen", chunklen=4)


def test_a_change_in_the_source_concerns_the_documents_that_show_it(tmp_path: Path) -> None:
    write_sources(tmp_path / "source")
    (tmp_path / "journal").mkdir()
    shown = Shown(tmp_path / "source", "zarr2", tmp_path / "journal")
    old = {name: shown.read(f"array/{name}") for name in (".zarray", ".zattrs")}
    raw = shown.stored("array/zarr.json")
    write_json(shown.root / "array/zarr.json", {**raw, "attributes": {"theirs": 1}})
    again = shown.write("array/.zarray", {**old[".zarray"], "shape": [9, 8, 8]})
    shown.unseen("array/.zattrs", ours=1)
    assert shown.stored("array/zarr.json") == {**raw, "shape": [9, 8, 8], "attributes": {"theirs": 1}}
    assert shown.read("array/.zattrs") == {"theirs": 1}
    with pytest.raises(OSError, match="former value of a, theirs") as caught:
        shown.write("array/.zattrs", old[".zattrs"])
    assert caught.value.errno == errno.ESTALE
    shown.change("array/.zattrs", ours=1)
    write_json(shown.root / "array/zarr.json", {**shown.stored("array/zarr.json"), "fill_value": 9})
    shown.unseen("array/.zarray", shape=[10, 8, 8])
    again = shown.read("array/.zarray")
    for length in (10, 11):  # 9.0 is shown as 9
        shown.write("array/.zarray", {**again, "fill_value": 9.0, "shape": [length, 8, 8]})
    assert shown.stored("array/zarr.json")["shape"] == [11, 8, 8]
    shown.close()
