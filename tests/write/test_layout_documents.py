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
def view(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shown]:
    write_sources(tmp_path / "source")
    (tmp_path / "journal").mkdir()
    fixture = Shown(tmp_path / "source", request.param, tmp_path / "journal")
    yield fixture
    fixture.close()


def in_layout(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("view", [name], indirect=True)


# ---- zarr2 ----


@in_layout("zarr2")
def test_zarr2_over_zarr3(view: Shown) -> None:
    before = view.stored("array/zarr.json")
    view.change("array/.zarray", shape=[9, 8, 3])
    view.change("array/.zattrs", a={"b": [1, None]}, _ARRAY_DIMENSIONS=["z", "y", "x"])
    after = view.stored("array/zarr.json")
    assert (after["shape"], after["dimension_names"]) == ([9, 8, 3], ["z", "y", "x"])
    assert after["attributes"]["a"] == {"b": [1, None]}
    assert [after[n] for n in ("codecs", "chunk_grid")] == [before[n] for n in ("codecs", "chunk_grid")]
    view.refused("array/.zarray", r"\.zarray: chunks: ", chunks=[4, 4, 4], shape=[9, 8, 8])
    view.refused("array/.zarray", r"\.zarray: shape, fill_value: ", fill_value="x", shape=[9])
    view.change(".zattrs", title="x")
    assert view.stored("zarr.json")["attributes"] == {"title": "x"}


@in_layout("zarr2")
def test_an_image_of_version_0_4_arrives_as_0_5(view: Shown) -> None:
    attributes = view["image/.zattrs"]
    attributes["multiscales"][0]["name"] = "renamed"
    view.change("image/.zattrs", multiscales=attributes["multiscales"])
    for part, value in (("axes", list("abc")), ("datasets", attributes["multiscales"][0]["datasets"][:1])):
        changed = [{**attributes["multiscales"][0], part: value}]
        why = "multiscales: cannot be changed through a layout; change it in the source"
        view.refused("image/.zattrs", why, multiscales=changed)
    assert view.write("image/.zattrs", {**view["image/.zattrs"], "omero": {"version": "0.4", "channels": []}})
    renamed = [{**OME["multiscales"][0], "name": "renamed"}]
    assert view.stored("image/zarr.json")["attributes"] == {
        "ome": {**OME, "multiscales": renamed, "omero": {"channels": []}},
        "user": 1,
    }
    view.change("image/0/.zarray", shape=[9, 8, 8])


@in_layout("zarr2")
def test_zarr2_over_others(view: Shown) -> None:
    view.change("volume/s/.zarray", shape=[2, 6, 4])
    scale = view.stored("volume/info")["scales"][0]
    assert (scale["size"], scale["unknown"], scale["sharding"]) == ([4, 6, 2], 1.5, sharding())
    view.refused("volume/s/.zattrs", "precomputed, cannot", a=1)
    view.refused("volume/.zattrs", r"\.zattrs: a: .*precomputed, cannot", a=1)
    view.refused("volume/.zattrs", "multiscales", multiscales=[])
    view.change("n5/.zarray", shape=[9, 8, 7])
    view.change("n5/.zattrs", user=2)
    assert view.stored("n5/attributes.json") == attributes((7, 8, 9), (4,) * 3, "uint8", codecs=CODED, user=2)
    view.refused("n5/.zattrs", "dimensions", dimensions=3)
    view.change("bcolz/.zarray", shape=[11, 3])
    view.change("bcolz/.zattrs", more=2)
    assert view.stored("bcolz/meta/sizes")["shape"] == [11, 3]
    assert view.stored("bcolz/meta/attributes") == {"unit": {"value": "nm", "type": "str"}, "more": 2}
    view.refused("bcolz/.zarray", "shape", shape=[8, 4])


@in_layout("zarr2")
def test_what_cannot_be_changed(view: Shown) -> None:
    view.refused("draft/g/a/.zattrs", "layouts cannot change that", a=1)
    view.refused("draft/.zgroup", "zarr_format", zarr_format=3)
    refused = view["array/.zarray"]
    raw = view.stored("array/zarr.json")
    write_json(view.root / "array/zarr.json", {**raw, "data_type": "unknown"})
    with pytest.raises(OSError, match="removed or replaced the document since it was read here"):
        view.write("array/.zarray", refused)
    view.tree.renew("array")
    with pytest.raises(OSError, match="data type 'unknown'"):
        view.write("array/.zarray", {**refused, "shape": [1, 1, 1]})
    (view.root / "array/zarr.json").write_bytes(b"{")
    with pytest.raises(CorruptShardError):
        view.write("array/.zarray", {**refused, "shape": [1, 1, 1]})
    assert (view.root / "array/zarr.json").read_bytes() == b"{"


@in_layout("zarr2")
def test_generated_documents_are_accepted_if_they_are_equal(view: Shown) -> None:
    consolidated = view[".zmetadata"]
    assert view.write(".zmetadata", consolidated) == consolidated
    assert not (view.root / ".zmetadata").exists()
    view.write(".zmetadata", {**consolidated, "metadata": {".zgroup": {"zarr_format": 2}}})
    view.refused(".zmetadata", "metadata.array/.zarray.shape", metadata={"array/.zarray": {"shape": [1, 1, 1]}})
    view.change("array/.zarray", shape=[9, 8, 3])
    number = view.tree.resolve(".zmetadata").number
    assert {*view.tree.directories.generated("array")} >= {".zmetadata", "array/.zarray"}
    assert view.tree.is_outdated(number)  # the kernel asks again, and gets another number, and the new shape
    again = view.tree.resolve(".zmetadata").number
    assert again != number
    assert not view.tree.is_outdated(again)
    assert view[".zmetadata"]["metadata"]["array/.zarray"]["shape"] == [9, 8, 3]
    view.write(".zgroup", {"zarr_format": 2})


@in_layout("zarr2")
def test_deleting(view: Shown) -> None:
    view.remove("array/.zattrs")
    assert view.stored("array/zarr.json")["attributes"] == {}
    document, sharding = view["array/.zarray"], view.stored("array/zarr.json")["codecs"]
    view.remove("array/.zarray")
    assert not (view.root / "array/zarr.json").exists()
    assert view.write("array/.zarray", {**document, "shape": [3, 4, 5]})["shape"] == [3, 4, 5]
    assert view.stored("array/zarr.json")["codecs"] == sharding  # remembered
    for path in ("volume/s/.zarray", "volume/.zgroup"):
        with pytest.raises(PermissionError, match="describes other datasets, too"):
            view.remove(path)
    assert (view.root / "volume/info").exists()


@in_layout("zarr2")
def test_deleting_attributes_deletes_the_marker_that_names_of_axes_made(view: Shown) -> None:
    write_json(view.root / "array/zarr.json", {**view.stored("array/zarr.json"), "fill_value": 7})
    view.tree.renew("array")
    names, why = ["z", "y", "x"], r"\.zattrs: _FillValue: is 3 in \.zattrs, but other members say 7"
    view.refused("array/.zattrs", why, _ARRAY_DIMENSIONS=names, _FillValue=3)
    view.write("array/.zattrs", {"_ARRAY_DIMENSIONS": ["z", "y", "x"]})
    assert view["array/.zattrs"]["_FillValue"] == 7
    view.remove("array/.zattrs")
    assert view["array/.zattrs"] == {}
    assert view.write("array/.zattrs", {"_FillValue": 3}) == {"_FillValue": 3}
    assert view.stored("array/zarr.json")["attributes"] == {"_FillValue": 3}


@pytest.mark.parametrize(
    ("view", "document", "source"),
    [
        ("zarr2", "array/.zarray", "array/zarr.json"),
        ("n5", "array/attributes.json", "array/zarr.json"),
        ("zarr3", "n5/zarr.json", "n5/attributes.json"),
    ],
    indirect=["view"],
)
@pytest.mark.parametrize("codecs", [[LITTLE, GZIP, CRC], [LITTLE, GZIP, GZIP, CRC]])
def test_an_array_whose_document_is_deleted_and_written_again(
    view: Shown, document: str, source: str, codecs: list[Any]
) -> None:
    """The chunks are still stored, and the mount still shows them, so the array needs the same codecs."""
    if source.endswith("zarr.json"):
        inner = zarr_metadata((8,) * 3, (4,) * 3, (2,) * 3, codecs=codecs, data_type="uint16")
        write_json(view.root / source, inner)
        view.tree.renew("")
    before, source_document = view[document], view.stored(source)
    directory, _, name = document.rpartition("/")
    view._documents.remove(directory, name)
    assert not (view.root / source).exists()
    assert view.write(document, before) == before
    assert view.stored(source) == source_document


@in_layout("zarr2")
def test_consolidated_metadata_of_the_source_follow(view: Shown) -> None:
    """Programs that know Zarr v2 can only write .zmetadata, so that nothing else would update them."""
    members = {name: view.stored(f"{name}/zarr.json") for name in ("array", "plain", "image", "image/0")}
    members["image"]["consolidated_metadata"] = {"kind": "inline", "metadata": {}}
    root = group_document() | {"consolidated_metadata": {"kind": "inline", "metadata": members}}
    write_json(view.root / "zarr.json", root)
    view.tree.renew("")
    for name, shape in (("array", [9, 8, 8]), ("plain", [9, 6]), ("image/0", [9, 8, 8])):
        view.change(f"{name}/.zarray", shape=shape)
        view.change(f"{name}/.zattrs", note=1)
    view.change("image/.zattrs", user=2)
    view.change(".zattrs", title="x")
    metadata = view.stored("zarr.json")["consolidated_metadata"]["metadata"]
    assert metadata.pop("image") == members["image"] | view.stored("image/zarr.json")
    assert metadata == {name: view.stored(f"{name}/zarr.json") for name in ("array", "plain", "image/0")}
    view.remove("plain/.zarray")
    assert view.stored("zarr.json")["consolidated_metadata"]["metadata"].keys() == {"array", "image", "image/0"}


# ---- n5, zarr3, precomputed, bcolz ----


@in_layout("n5")
def test_n5_over_zarr3(view: Shown) -> None:
    view.change("array/attributes.json", dimensions=[3, 8, 9], b="x")
    after = view.stored("array/zarr.json")
    assert (after["shape"], after["attributes"]) == ([9, 8, 3], {"a": 1, "b": "x"})
    view.refused("array/attributes.json", "attributes.json: blockSize", blockSize=[4, 4, 4])
    view.change("attributes.json", title="x")
    assert view.stored("zarr.json")["attributes"] == {"title": "x"}


@in_layout("n5")
def test_the_documents_of_renamed_levels(view: Shown) -> None:
    view.change("image/s1/attributes.json", dimensions=[4, 4, 6], note=1)
    after = view.stored("image/1/zarr.json")
    assert (after["shape"], after["attributes"]) == ([6, 4, 4], {"note": 1})
    view.change("image/attributes.json", user=2)
    assert view.stored("image/zarr.json")["attributes"] == {"ome": OME, "user": 2}


@in_layout("n5")
def test_n5_over_precomputed(view: Shown) -> None:
    view.change("volume/s0/attributes.json", dimensions=[4, 6, 2])
    assert view.stored("volume/info")["scales"][0]["size"] == [4, 6, 2]
    view.refused("volume/s0/attributes.json", "note", note=1)


@in_layout("zarr3")
def test_zarr3_over_others(view: Shown) -> None:
    view.change("n5/zarr.json", shape=[9, 8, 7], dimension_names=["z", "y", "x"])
    after = view.stored("n5/attributes.json")
    assert (after["dimensions"], after["axes"], after["user"]) == ([7, 8, 9], ["x", "y", "z"], 1)
    view.refused("n5/zarr.json", "fill_value", fill_value=1)
    view.refused("n5/zarr.json", "dimension_names", dimension_names=["z", None, "x"])
    view.change("bcolz/zarr.json", shape=[11, 3], attributes={"b": 1})
    assert view.stored("bcolz/meta/attributes") == {"b": 1}
    view.refused("bcolz/zarr.json", "dimension_names", dimension_names=["y", "x"])
    view.change("volume/s/zarr.json", shape=[2, 6, 4])
    assert view.stored("volume/info")["scales"][0]["size"] == [4, 6, 2]


@in_layout("n5")
def test_n5_over_arrays_without_shards(view: Shown) -> None:
    for path, document, member in (("plain", "zarr.json", "shape"), ("old", ".zarray", "shape")):
        view.change(f"{path}/attributes.json", dimensions=[9, 6], note=1)
        assert view.stored(f"{path}/{document}")[member] == [6, 9]
        for name, value in (("blockSize", [3, 3]), ("dataType", "uint8"), ("compression", {"type": "raw"})):
            view.refused(f"{path}/attributes.json", f"attributes.json: {name}: ", **{name: value})
    assert view.stored("old/.zattrs") == {"note": 1}


@in_layout("precomputed")
def test_precomputed_over_zarr3(view: Shown) -> None:
    info = view["image/info"]
    info["scales"][0]["size"] = [8, 8, 9]
    assert view.write("image/info", info) == info
    assert view.stored("image/0/zarr.json")["shape"] == [9, 8, 8]
    fixed = "cannot be changed through a layout"
    for member, value in (("resolution", [9, 9, 9]), ("chunk_sizes", [[4, 4, 4]]), ("voxel_offset", [1, 0, 0])):
        scales = [{**info["scales"][0], member: value}, info["scales"][1]]
        view.refused("image/info", f"info: scales: {fixed}", scales=scales)
    view.refused("image/info", f"info: scales: {fixed}", scales=info["scales"][:1])
    view.refused("image/info", f"info: type: {fixed}", type="segmentation")
    view.refused("image/info", "info: mesh", mesh="m")
    view.refused("image/info", "data_type", data_type="uint16")


@in_layout("bcolz")
def test_bcolz_over_zarr3(view: Shown) -> None:
    rows = view["slabs/meta/sizes"]
    view.write("slabs/meta/sizes", {**rows, "shape": [10, 4], "nbytes": 40, "cbytes": 17})
    assert view.stored("slabs/zarr.json")["shape"] == [10, 4]
    view.change("slabs/__attrs__", unit="nm")
    assert view.stored("slabs/zarr.json")["attributes"] == {"unit": "nm"}
    view.refused("slabs/meta/storage", "chunklen", chunklen=4)


def test_a_change_in_the_source_concerns_the_documents_that_show_it(tmp_path: Path) -> None:
    write_sources(tmp_path / "source")
    (tmp_path / "journal").mkdir()
    view = Shown(tmp_path / "source", "zarr2", tmp_path / "journal")
    old = {name: view.read(f"array/{name}") for name in (".zarray", ".zattrs")}
    raw = view.stored("array/zarr.json")
    write_json(view.root / "array/zarr.json", {**raw, "attributes": {"theirs": 1}})
    again = view.write("array/.zarray", {**old[".zarray"], "shape": [9, 8, 8]})
    view.unseen("array/.zattrs", ours=1)
    assert view.stored("array/zarr.json") == {**raw, "shape": [9, 8, 8], "attributes": {"theirs": 1}}
    assert view.read("array/.zattrs") == {"theirs": 1}
    with pytest.raises(OSError, match="former value of a, theirs") as caught:
        view.write("array/.zattrs", old[".zattrs"])
    assert caught.value.errno == errno.ESTALE
    view.change("array/.zattrs", ours=1)
    write_json(view.root / "array/zarr.json", {**view.stored("array/zarr.json"), "fill_value": 9})
    view.unseen("array/.zarray", shape=[10, 8, 8])
    again = view.read("array/.zarray")
    for length in (10, 11):  # 9.0 is shown as 9
        view.write("array/.zarray", {**again, "fill_value": 9.0, "shape": [length, 8, 8]})
    assert view.stored("array/zarr.json")["shape"] == [11, 8, 8]
    view.close()
