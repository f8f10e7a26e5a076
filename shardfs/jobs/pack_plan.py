"""What `pack` decides by the documents of an unsharded source: which arrays get which shards, and the new documents."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardfs.codecs.transcode import Transcoder
from shardfs.formats.create_rules import PARAMETERS, Rule
from shardfs.formats.documents import MAX_DOCUMENT_BYTES
from shardfs.formats.layouts import join
from shardfs.formats.precomputed import PRECOMPUTED
from shardfs.formats.precomputed.parts import INFO
from shardfs.formats.registry import format_of
from shardfs.formats.translate import document_place
from shardfs.formats.zarr2 import ZARR2
from shardfs.jobs.pack_arrays import GZIP, PackedArray, has_ids, require_packable, with_ids
from shardfs.model.errors import NotADatasetError, UnsupportedError
from shardfs.model.kinds import is_in
from shardfs.shards import rewriting
from shardfs.shards.byte_layouts.unsharded import Unsharded
from shardfs.vfs.directory_content import Content

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence, Set

    from shardfs.formats.format import Format
    from shardfs.jobs.shared_work import JobSource
    from shardfs.model.collection import Collection
    from shardfs.model.dataset import Dataset
    from shardfs.model.values import Coords
    from shardfs.storage.store import Store
    from shardfs.vfs.tree import Tree

IDS_PER_MINISHARD, IDS_PER_SHARD = 1 << 9, 1 << 13
"""The average numbers of ids in the shards of meshes, skeletons and annotations."""

ZARR3 = "zarr3"

FORMATS = (ZARR3, "n5", "precomputed", "bcolz")
"""The formats that `pack` writes."""


class FileForm(NamedTuple):
    """What the files of a dataset determine about its shards.

    Args:
        suffix: the compression suffix of its chunk files, as the first one of each part has it; "" for none.
        ids: the number of files with ids of its largest part; 0 for arrays.
        gzipped: whether the target's format has its chunks with `data_encoding: gzip`.
        chunk_bytes: the size of a chunk before compression, where the format's rules cannot know it.
    """

    suffix: str = ""
    ids: int = 0
    gzipped: bool = False
    chunk_bytes: int = 0


DEFAULT_FORM = FileForm()
"""Files of an array, without a compression suffix; the format's rules know the size of a chunk."""


@dataclass(frozen=True, slots=True)
class PackOptions:
    """What to pack, and how: hashable, and can be pickled.

    Args:
        chunks_per_shard: in the axis order of shapes in the documents of the target's format; () lets `shard_bytes`
            decide.
        shard_bytes: the size of a shard before compression; None for the defaults of `--create`.
        arrays: the directories of the documents of the arrays to pack; () for all arrays.
        format: one of `FORMATS`; "" for the source's own format, and for Zarr v3 if the source is Zarr v2.
        transcode: decode and encode chunks whose bytes the target cannot have.
        verbatim: pack only arrays whose chunk files become chunks unchanged, as a job in place must.
        forms: those of the files of each dataset, which `Packing` adds, so that all workers and all runs use the same.
            Jobs are equal without it, so that the tasks in the process of `Packing` use its opened job.
    """

    source: JobSource
    target: JobSource
    chunks_per_shard: Coords = ()
    shard_bytes: int | None = None
    arrays: tuple[str, ...] = ()
    format: str = ""
    transcode: bool = False
    verbatim: bool = False
    forms: tuple[tuple[str, FileForm], ...] = field(default=(), compare=False)

    def rule(self, format: str, form: FileForm = DEFAULT_FORM) -> Rule:
        """Return how arrays of a format, such as "zarr3", are sharded if their files have this form."""
        words, numbers, per_shard = {}, {}, self.chunks_per_shard
        if "data_encoding" in PARAMETERS.get(format, {}):
            words = {"data_encoding": "gzip" if form.suffix or form.gzipped else "raw"}
        if form.ids:
            bits = _bits(form.ids, IDS_PER_SHARD), _bits(min(form.ids, IDS_PER_SHARD), IDS_PER_MINISHARD)
            numbers = dict(zip(("shard_bits", "minishard_bits"), bits, strict=True))
        rule = Rule(format, chunks_per_shard=per_shard, words=words, numbers=numbers, shard_bytes=self.shard_bytes)
        if form.chunk_bytes and not per_shard:
            return replace(rule, chunks_per_shard=(rule.most(form.chunk_bytes),))
        return rule


def _bits(count: int, limit: int) -> int:
    """Return the number of bits that divide `count` ids into parts of at most `limit`, on average."""
    return max(-(-count // limit) - 1, 0).bit_length()


class PlainChunks(NamedTuple):
    """Chunk files, and the directory of the source with them."""

    path: str
    collection: Collection


class Part(NamedTuple):
    """A part of a dataset, such as the array of a level: its shards, and the chunk files of which they are made.

    `plain` is None if no document describes chunk files: the files have ids as names, or there are shards already.
    """

    target: Collection
    plain: PlainChunks | None


class PlainDataset(NamedTuple):
    """A dataset that is to get shards.

    Args:
        path: the directory of its documents in the target.
        format: the format of the target.
        documents: the documents without shards in this format.
        chunks: chunk files by the directories where the format shows them, also those of other datasets.
        has_objects: whether it has files with ids as names, such as meshes.
    """

    path: str
    format: Format
    documents: Mapping[str, bytes]
    chunks: Mapping[str, PlainChunks]
    has_objects: bool = False


class TargetDataset(NamedTuple):
    """The documents that a dataset gets, and the collections that they describe."""

    documents: Mapping[str, bytes]
    targets: Sequence[Collection]


@dataclass
class PackPlan:
    """What `pack` makes of a source.

    Args:
        arrays: the arrays to pack, by path.
        documents: the documents of all datasets in the target, by path.
        hidden: the paths of documents of the source that another format replaces.
        forms: the form of the files of each dataset, unless it is `DEFAULT_FORM`.
        skipped: arrays of the target's format that keep their chunk files, with reasons.
    """

    arrays: dict[str, PackedArray] = field(default_factory=dict)
    documents: dict[str, bytes] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    forms: dict[str, FileForm] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


class Planner:
    """Makes the `plan` from datasets, by `add_datasets` or `add_translated`. `complete` judges it.

    Args:
        translates: the target has another format than the source.
    """

    def __init__(
        self, job: PackOptions, store: Store, skipped: Mapping[str, str] | None = None, *, translates: bool
    ) -> None:
        self.plan = PackPlan(skipped=dict(skipped or {}))
        self._job = job
        self._store = store
        self._translates = translates
        self._described: set[str] = set()  # directories with a part of a dataset
        self._decoded: dict[str, str] = {}  # the codecs of arrays whose chunks have to be decoded
        self._refused: list[str] = []
        self._in_shards: list[str] = []  # refused if there is something to pack

    # ---- the datasets of a source

    def add_datasets(self, tree: Tree) -> None:
        """Add the datasets of a source that keeps its format. What cannot be packed is kept for `complete`."""
        foreign = []
        for directory in tree.directories.walk():
            dataset, path = (directory.content or Content()).dataset, directory.inside
            if dataset is None:
                continue
            if dataset.format in ((self._job.format,) if self._job.format else FORMATS):
                self._add_dataset(tree, path, dataset)
                if dataset.indescribable and dataset.format != PRECOMPUTED.name and not dataset.collections:
                    self.plan.skipped[path] = dataset.indescribable
            elif dataset.unsharded and self._job.format:
                foreign.append(f"{path or '/'}: is {dataset.format}, not {self._job.format}; pack it alone")
        self._refuse_problems(tree)
        self._refused += foreign if self.plan.arrays else []

    def _add_dataset(self, tree: Tree, path: str, dataset: Dataset) -> None:
        format = format_of(dataset.format)
        documents = {
            name: raw for name, raw in tree.datasets.source.documents(path).items() if name in format.documents
        }
        has_objects = format is PRECOMPUTED and not dataset.collections and format.has_objects(documents[INFO])
        has_objects = has_objects and not self._job.verbatim
        if (dataset.unsharded or has_objects) and (not self._job.arrays or path in self._job.arrays):
            if has_zarr2(self._store, path):
                self._refuse_two_formats(path)
            chunks = {join(path, c.path): PlainChunks(join(path, c.path), c) for c in dataset.unsharded}
            self._shard_dataset(PlainDataset(path, format, documents, chunks, has_objects))
        else:
            self.plan.documents |= {join(path, name): raw for name, raw in documents.items()}

    def add_translated(self, tree: Tree) -> None:
        """Add arrays and documents as the tree, in the layout of the target's format, shows them."""
        format = format_of(self._job.format or ZARR3)
        chunks: dict[str, PlainChunks] = {}
        documents: dict[str, dict[str, bytes]] = {}
        copied = set[str]()
        for directory in tree.directories.walk():
            content, path = directory.content or Content(), directory.inside
            for name, raw in content.documents.items():
                home, document = document_place(join(directory.shown, name), format.documents)
                documents.setdefault(home, {})[document] = raw
            if (dataset := content.dataset) is None:
                continue
            for c in dataset.collections:
                if isinstance(c.layers[0].format, Unsharded):
                    chunks[join(directory.shown, c.path)] = PlainChunks(join(path, c.stored_at), c)
            self.plan.hidden |= {join(path, name) for name in dataset.hidden}
            is_omitted = content.shown_dataset.is_omitted
            if is_omitted and PRECOMPUTED.has_objects(tree.datasets.source.documents(path).get(INFO, b"")):
                copied.add(directory.shown)  # meshes, for instance, have no other format
        self._hide_documents(tree, chunks.values())
        for home, shown_documents in documents.items():
            self._shard_dataset(PlainDataset(home, format, shown_documents, chunks))
        lacking = (path for path in chunks if path not in self._described)
        self._refused += [f"{path or '/'}: {format.dataset_formats[0]} has no shards for it" for path in lacking]
        self._refused += self._in_shards if self.plan.arrays or self._job.format else []
        self._refuse_problems(tree, copied)

    def _hide_documents(self, tree: Tree, arrays: Iterable[PlainChunks]) -> None:
        """Hide the documents beside chunk files. The walk does not visit all directories with levels of images."""
        for array in arrays:
            format = tree.datasets.source.format_of(array.collection.format)
            self.plan.hidden |= {join(array.path, name) for name in format.documents}
            if format is not ZARR2 and has_zarr2(self._store, array.path):
                self._refuse_two_formats(array.path)

    def _refuse_two_formats(self, path: str) -> None:
        self._refused.append(f"{path or '/'}: has documents of Zarr v2, too; delete those of one format")

    def _refuse_problems(self, tree: Tree, copied: Set[str] = frozenset()) -> None:
        problems = (p for p in tree.problems() if p.damaged or (p.skipped and p.path not in copied))
        reasons = [f"{p.path or '/'}: {p.why.replace('cannot be shown as', 'cannot become', 1)}" for p in problems]
        self._refused += [*reasons, "repair these, or move them out of the source"] if reasons else []

    # ---- one dataset

    def _shard_dataset(self, dataset: PlainDataset) -> None:
        """Add the arrays of a dataset, and its documents with shards, or the reason why it cannot be packed."""
        try:
            documents = self._sharded(dataset)
            self.plan.documents |= {join(dataset.path, name): raw for name, raw in documents.items()}
        except (ValueError, UnsupportedError) as e:
            self._refused.append(f"{dataset.path or '/'}: {e}")

    def _sharded(self, dataset: PlainDataset) -> Mapping[str, bytes]:
        """Add the arrays of a dataset; return its documents with shards, or unchanged if it keeps its files."""
        path = dataset.path
        parts = self._parts(dataset)
        self._described |= {join(path, part.target.path) for part in parts}
        if any(part.plain is None and (self._translates or not has_ids(part.target)) for part in parts):
            self._in_shards.append(f"{path or '/'}: its chunks are in shards already, or cannot be described")
            return dataset.documents  # if the format stays, the chunks are copied
        form = self._form(dataset, parts)
        if dataset.has_objects and not form.ids:
            return dataset.documents  # there are no objects yet
        if form != DEFAULT_FORM:
            self.plan.forms[path] = form
        if self._translates and parts and not any(self._is_chosen(part.plain) for part in parts):
            target_dataset = self._without_shards(dataset)
        else:
            target_dataset = self._with_shards(dataset, form)
        for target, part in zip(target_dataset.targets, parts, strict=True):
            self._add_array(path, Part(target, part.plain), form)
        return target_dataset.documents

    def _parts(self, dataset: PlainDataset) -> list[Part]:
        """Return the parts of a dataset with shards of any size. Only the parts tell the form of their files."""
        targets = self._with_shards(dataset, FileForm(ids=1) if dataset.has_objects else DEFAULT_FORM).targets
        return [Part(target, dataset.chunks.get(join(dataset.path, target.path))) for target in targets]

    def _with_shards(self, dataset: PlainDataset, form: FileForm) -> TargetDataset:
        """Return the dataset with shards for files of this form. Raise ValueError, with the reason, if it has none."""
        format, documents = dataset.format, dict(dataset.documents)
        rule = self._job.rule(format.dataset_formats[0], form)
        for name, raw in dataset.documents.items():
            documents |= format.shard(dataset.path, name, raw, rule) or {}
        opened = format.open(dataset.path, documents) if documents != dataset.documents else None
        return TargetDataset(documents, () if opened is None else opened.collections)

    def _is_chosen(self, plain: PlainChunks | None) -> bool:
        """Whether `--array` asks for shards of these chunks."""
        return not self._job.arrays or any(plain is not None and is_in(plain.path, a) for a in self._job.arrays)

    def _without_shards(self, dataset: PlainDataset) -> TargetDataset:
        """Return the dataset unchanged: each chunk is a shard of its own."""
        if dataset.format is PRECOMPUTED or self._job.verbatim:
            raise ValueError("all arrays change their format together; omit --array")
        opened = dataset.format.open(dataset.path, dataset.documents)
        return TargetDataset(dataset.documents, () if opened is None else opened.unsharded)

    def _add_array(self, path: str, part: Part, form: FileForm) -> None:
        home = join(path, part.target.stored_at)
        array: PackedArray
        if part.plain is None:
            array = with_ids(home, part.target, form.suffix)
        else:
            source = part.plain.collection
            if isinstance(source.transform, Transcoder) and source.transform.decodes:
                self._decoded[part.plain.path] = source.transform.decodes
                source = replace(source, transform=source.transform.compressing())
            array = PackedArray(part.plain.path, home, source, part.target, form.suffix)
        if why := rewriting.unwritable(part.target):
            raise ValueError(why)
        if self._job.verbatim and array.converts:
            raise ValueError("its chunk files would change, which a job in place does not do; give another directory")
        if array.path in self.plan.arrays:
            raise ValueError(f"{array.path}: the same chunks are shown twice, by two images")
        self.plan.arrays[array.path] = array

    def _form(self, dataset: PlainDataset, parts: Sequence[Part]) -> FileForm:
        """Return the form of a dataset's files. Lists directories of ids, unless the job knows the form."""
        path = dataset.path
        format = dataset.format
        if (form := dict(self._job.forms).get(path)) is not None:
            return form
        plain = [part.plain.collection for part in parts if part.plain is not None]
        if format.dataset_formats[0] == "bcolz" and plain and (array := plain[0].array) is not None:
            return FileForm(chunk_bytes=math.prod(array.chunk) * np.dtype(array.data_type).itemsize)
        if format is not PRECOMPUTED or self._translates:
            return FileForm(gzipped=format is PRECOMPUTED and any("gzip" in c.codecs for c in plain))
        suffixes, ids = set(), 0
        for part in parts:
            entries = self._store.scan(join(path, part.target.stored_at))
            names = (e.name for e in entries if not e.directory and format.chunk_like(e.name))
            if first := next(names, ""):
                require_packable(first, verbatim=self._job.verbatim)
                suffixes.add(GZIP if first.endswith(GZIP) and part.target.lead is None else "")
                ids = max(ids, 1 + sum(1 for _ in names)) if part.plain is None else ids
        return FileForm(GZIP if suffixes == {GZIP} else "", ids)

    # ---- the whole source

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to pack and nothing to refuse."""
        return not self.plan.arrays and not self._refused

    def complete(self) -> PackPlan:
        """Return the plan. Call it once, after all datasets were added.

        Raise UnsupportedError, with all reasons, if an array cannot be packed; NotADatasetError if there is none.
        """
        arrays = self._job.arrays
        skipped = self.plan.skipped
        if self.is_empty and not arrays:
            reasons = [f"{path or '/'}: {why}" for path, why in skipped.items()]
            looked_for = "no unsharded array found (looked for Zarr v2, Zarr v3, N5, precomputed, bcolz)"
            raise NotADatasetError("; ".join([looked_for, *reasons]))
        refused = list(self._refused)
        if not self._job.transcode:
            refused += [f"{path or '/'}: {codec} would have to be decoded" for path, codec in self._decoded.items()]
            refused += ["add --transcode to decode and encode chunks"] if self._decoded else []
        missing = [a for a in arrays if not any(is_in(path, a) for path in self.plan.arrays)]
        refused += [f"{a or '/'}: {skipped.get(a, 'no unsharded array has its document there')}" for a in missing]
        if refused:
            raise UnsupportedError("nothing was packed: " + "; ".join(refused))
        self._correct_copies()
        return self.plan

    def _correct_copies(self) -> None:
        """Let consolidated metadata of Zarr v3 groups describe the arrays with shards."""
        format, documents = format_of(ZARR3), self.plan.documents
        for key, raw in list(documents.items()):
            path, _, name = key.rpartition("/")
            if name in format.documents and (below := format.references(path, name, raw)):
                copies = {at: copy for at in below if (copy := documents.get(join(path, at))) is not None}
                documents[key] = format.edit(path, copies, name, raw)[name]


def has_zarr2(store: Store, path: str) -> bool:
    """Return whether a directory of the store has documents of Zarr v2. Raise CorruptShardError if they are damaged."""
    return ZARR2.open(path, store.documents(path, ZARR2.documents, MAX_DOCUMENT_BYTES)) is not None
