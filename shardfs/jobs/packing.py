"""What `pack` makes of an unsharded source: its arrays with their new shards, its documents, and its other files."""

from __future__ import annotations

import math
import os
from array import array as typed_array
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardfs.codecs.transcode import Transcoder
from shardfs.formats.create_rules import PARAMETERS, Rule
from shardfs.formats.documents import MAX_DOCUMENT_BYTES
from shardfs.formats.layouts import PACKED, join
from shardfs.formats.precomputed import PRECOMPUTED
from shardfs.formats.precomputed.parts import INFO
from shardfs.formats.registry import creating_view, format_of
from shardfs.formats.translate import document_place
from shardfs.formats.zarr2 import ZARR2
from shardfs.jobs.packed_arrays import (
    GZIP,
    ONLY_ONE,
    ArrayPlan,
    PackedArray,
    has_ids,
    require_packable,
    stray,
    with_ids,
)
from shardfs.jobs.target import NOTES, JobState, JobTarget, is_zip
from shardfs.jobs.zip_target import ZipTarget
from shardfs.model.dataset import Problem
from shardfs.model.errors import NotADatasetError, UnsupportedError
from shardfs.model.kinds import is_in
from shardfs.shards import rewriting
from shardfs.shards.byte_layouts.unsharded import Unsharded
from shardfs.storage.load_ahead import load_ahead
from shardfs.storage.local import LocalStore
from shardfs.storage.pack_state import PACK, require_settled
from shardfs.storage.source_errors import opening
from shardfs.storage.store import OWN
from shardfs.vfs.discovery import NATIVE
from shardfs.vfs.nodes import Content

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

    from shardfs.formats.format import Format
    from shardfs.jobs.shared_work import JobSource
    from shardfs.model.blobs import Blob
    from shardfs.model.collection import Collection
    from shardfs.model.dataset import Dataset
    from shardfs.model.values import U64, Coords
    from shardfs.storage.store import Store
    from shardfs.vfs.tree import Tree

ZARR3 = "zarr3"

FORMATS = (ZARR3, "n5", "precomputed", "bcolz")
"""The formats that `pack` writes."""

IDS_PER_MINISHARD, IDS_PER_SHARD = 1 << 9, 1 << 13
"""The average numbers of ids in the shards of meshes, skeletons and annotations."""


class FileForm(NamedTuple):
    """What the files of a dataset determine about its shards.

    Args:
        suffix: the compression suffix of all its chunk files; "" for none.
        ids: the number of its files with ids; 0 for arrays.
        gzipped: whether the target's format has its chunks with `data_encoding: gzip`.
        chunk_bytes: the size of a chunk before compression, where the format's rules cannot know it.
    """

    suffix: str = ""
    ids: int = 0
    gzipped: bool = False
    chunk_bytes: int = 0


PLAIN = FileForm()


@dataclass(frozen=True, slots=True)
class PackJob:
    """What to pack, and how: hashable, and can be pickled.

    Args:
        chunks_per_shard: in the axis order of shapes in the documents of the target's format; () lets `shard_bytes`
            decide.
        shard_bytes: the size of a shard before compression; None for the defaults of `--create`.
        arrays: the directories of the documents of the arrays to pack; () for all arrays.
        format: one of `FORMATS`; "" for the source's own format, and for Zarr v3 if the source is Zarr v2.
        transcode: decode and encode chunks whose bytes the target cannot have.
        verbatim: pack only arrays whose chunk files become chunks unchanged, as a job in place must.
        found: the forms of the source's files, which `Packing` adds, so that all workers and all runs use the same.
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
    found: tuple[tuple[str, FileForm], ...] = field(default=(), compare=False)

    def opened(self) -> Packing:
        """The opened source, once per process. Raises the errors of `Packing`."""
        return _packing(self)

    def rule(self, format: str, form: FileForm = PLAIN) -> Rule:
        """How arrays of a format are sharded."""
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

    def state(self) -> JobState:
        """What to pack, and how, without the plan."""
        choices = {
            "chunks_per_shard": self.chunks_per_shard,
            "shard_size": self.shard_bytes,
            "array": sorted(self.arrays),
            "format": self.format,
            "transcode": self.transcode,
        }
        return JobState.of(PACK, self.source, choices)


def _bits(count: int, most: int) -> int:
    """The number of bits that divide `count` ids into parts of at most `most`, on average."""
    return max(-(-count // most) - 1, 0).bit_length()


@lru_cache(2)
def _packing(job: PackJob) -> Packing:
    return Packing(job)


@dataclass
class SourceSurvey:
    """All files of a source.

    Args:
        files: the number of other files, which are copied.
        problems: files that are not packed; `damaged` ones prevent that the job is finished.
    """

    plans: list[ArrayPlan] = field(default_factory=list)
    files: int = 0
    problems: list[Problem] = field(default_factory=list)


class PlainChunks(NamedTuple):
    """Chunk files, and the directory of the source with them."""

    path: str
    collection: Collection


class Packing:
    """An opened job.

    Attributes:
        arrays: the arrays to pack, by path.
        documents: the documents of all datasets in the target, by path.

    Raise UnsupportedError, with all arrays and reasons, if an array cannot be packed; NotADatasetError if the source
    has no unsharded array.
    """

    target: JobTarget | ZipTarget
    """Set by `begin`."""

    def __init__(self, job: PackJob) -> None:
        self.job = job
        self.arrays: dict[str, PackedArray] = {}
        self.documents: dict[str, bytes] = {}
        self._hidden: set[str] = set()
        self._refused: list[str] = []
        self._decoded: dict[str, str] = {}
        self._forms: dict[str, FileForm] = {}
        self._in_shards: list[str] = []
        self._unknown: dict[str, str] = {}  # arrays that keep their files, with reasons
        self._translates = False
        self._only_chunks: Set[str] = frozenset()  # arrays that have no other files
        self._plans: Sequence[ArrayPlan] = ()
        self._homes: dict[str, list[PackedArray]] = {}  # by the directories of their shards
        tree = self._tree(NATIVE)
        self.store: Store = tree.store
        is_zarr2 = not tree.datasets.documents("") and _has_zarr2(tree.store, "")
        self._translates = is_zarr2 or not self._describe(tree)
        if self._translates:
            self.documents.clear()
            self._translate(self._tree(job.format or ZARR3))
        self._require_complete()
        self._correct_copies()
        self.job = replace(job, found=tuple(sorted(self._forms.items())))

    def begin(self, *, new: bool) -> None:
        """Open the target for writing: see `JobTarget.begin` and `ZipTarget.begin`."""
        target = self.job.target
        documents = ((key, raw) for key, raw in self.documents.items() if not self._is_linked(key.rpartition("/")[0]))
        state = self.job.state().planned((path for path in self.arrays if not self._is_linked(path)), documents)
        if is_zip(target.url):
            self.target = ZipTarget.begin(target.url, state, self.documents)
        else:
            with opening(target.url):
                self.target = JobTarget.begin(target, state, new=new)

    def _is_linked(self, path: str) -> bool:
        """Whether a directory is behind a symbolic link. The job cannot end before that link is removed."""
        store = self.store
        return isinstance(store, LocalStore) and os.path.realpath(store.path(path)) != store.path(path)

    # ---- documents and arrays ----

    def _tree(self, layout: str) -> Tree:
        codec = PACKED if layout != NATIVE else None
        tree = self.job.source.open(layout=layout, skip_unsupported=True, may_be_empty=True, chunk_codec=codec)
        if layout == ZARR3:
            tree.datasets.view = creating_view(ZARR3)  # unlike the view of a mount, it keeps all codecs
        return tree

    def _describe(self, tree: Tree) -> bool:
        """Collect arrays and documents of sources that keep their format; return whether there is an array to pack."""
        others = []
        for directory in tree.directories.walk():
            dataset, path = (directory.content or Content()).dataset, directory.inside
            if dataset is None:
                continue
            if dataset.format in ((self.job.format,) if self.job.format else FORMATS):
                self._add_native(tree, path, dataset)
                if dataset.indescribable and dataset.format != PRECOMPUTED.name and not dataset.collections:
                    self._unknown[path] = dataset.indescribable
            elif dataset.unsharded and self.job.format:
                others.append(f"{path or '/'}: is {dataset.format}, not {self.job.format}; pack it alone")
        self._refuse_problems(tree)
        self._refused += others if self.arrays else []
        return bool(self.arrays or self._refused)

    def _add_native(self, tree: Tree, path: str, dataset: Dataset) -> None:
        format, stored = format_of(dataset.format), tree.datasets.documents(path)
        documents = {name: stored[name] for name in format.documents if name in stored}
        has_objects = format is PRECOMPUTED and not dataset.collections and format.has_objects(documents[INFO])
        has_objects = has_objects and not self.job.verbatim
        if (dataset.unsharded or has_objects) and self._is_selected(path):
            if _has_zarr2(tree.store, path):
                self._refuse_two_formats(path)
            plain = {join(path, c.path): PlainChunks(join(path, c.path), c) for c in dataset.unsharded}
            documents = self._sharded(path, format, documents, plain, FileForm(ids=1) if has_objects else PLAIN)
        self.documents |= {join(path, name): raw for name, raw in documents.items()}

    def _translate(self, tree: Tree) -> None:
        """Collect arrays and documents as the layout of the target's format shows them."""
        format = format_of(self.job.format or ZARR3)
        plain: dict[str, PlainChunks] = {}
        copied = set[str]()
        documents: dict[str, dict[str, bytes]] = {}
        for directory in tree.directories.walk():
            content, path = directory.content or Content(), directory.inside
            for name, raw in content.documents.items():
                at, own = document_place(join(directory.shown, name), format.documents)
                documents.setdefault(at, {})[own] = raw
            for c in content.dataset.collections if content.dataset is not None else ():
                if isinstance(c.layers[0].format, Unsharded):
                    plain[join(directory.shown, c.path)] = PlainChunks(join(path, c.stored_at), c)
            if content.dataset is not None:
                self._hidden |= {join(path, name) for name in content.dataset.hidden}
                if content.dataset.hidden_entirely and PRECOMPUTED.has_objects(
                    tree.datasets.documents(path).get(INFO, b"")
                ):
                    copied.add(directory.shown)  # meshes, for instance, have no other format
        for found in plain.values():  # levels of images may be in directories that the walk does not visit
            its = next(f for f in tree.datasets.formats if found.collection.format in f.dataset_formats)
            self._hidden |= {join(found.path, name) for name in its.documents}
            if its is not ZARR2 and _has_zarr2(self.store, found.path):
                self._refuse_two_formats(found.path)
        for at, own_documents in documents.items():
            sharded = self._sharded(at, format, own_documents, plain)
            self.documents |= {join(at, name): raw for name, raw in sharded.items()}
        self._refused += [f"{path or '/'}: {format.dataset_formats[0]} has no shards for it" for path in plain]
        self._refused += self._in_shards if self.arrays or self.job.format else []
        self._refuse_problems(tree, copied)

    def _refuse_two_formats(self, path: str) -> None:
        self._refused.append(f"{path or '/'}: has documents of Zarr v2, too; delete those of one format")

    def _refuse_problems(self, tree: Tree, but: Set[str] = frozenset()) -> None:
        found = (p for p in tree.problems() if p.damaged or (p.skipped and p.path not in but))
        reasons = [f"{p.path or '/'}: {p.why.replace('cannot be shown as', 'cannot become', 1)}" for p in found]
        self._refused += [*reasons, "repair these, or move them out of the source"] if reasons else []

    def _is_selected(self, path: str) -> bool:
        return not self.job.arrays or path in self.job.arrays

    def _sharded(
        self,
        path: str,
        format: Format,
        documents: Mapping[str, bytes],
        plain: dict[str, PlainChunks],
        assumed: FileForm = PLAIN,
    ) -> dict[str, bytes]:
        """The documents of a dataset with shards. Adds its arrays, or the reason why they cannot be packed.

        Args:
            plain: chunk files by the directories where the target's format shows them. The dataset's own are removed.
            assumed: the form of its files while its parts are unknown.
        """
        made = dict(documents)
        try:
            made, targets = self._with_shards(path, format, documents, assumed)
            own = [(target, plain.pop(join(path, target.path), None)) for target in targets]
            if any(found is None and (self._translates or not has_ids(target)) for target, found in own):
                self._in_shards.append(f"{path or '/'}: its chunks are in shards already, or cannot be described")
                return dict(documents)  # if the format stays, the chunks are copied
            form = self._form(path, format, own)
            if assumed.ids and not form.ids:
                return dict(documents)  # there are no objects yet
            if self._translates and own and not any(self._is_named(found) for _, found in own):
                made, targets = dict(documents), self._without_shards(path, format, documents)
            elif form != assumed:
                made, targets = self._with_shards(path, format, documents, form)
            if form != PLAIN:
                self._forms[path] = form
            for target, (_, found) in zip(targets, own, strict=True):
                self._add_array(path, target, found, form)
        except (ValueError, UnsupportedError) as e:
            self._refused.append(f"{path or '/'}: {e}")
        return made

    def _with_shards(
        self, path: str, format: Format, documents: Mapping[str, bytes], form: FileForm
    ) -> tuple[dict[str, bytes], Sequence[Collection]]:
        made, rule = dict(documents), self.job.rule(format.dataset_formats[0], form)
        for name, raw in documents.items():
            made |= format.shard(path, name, raw, rule) or {}
        dataset = format.open(path, made) if made != documents else None
        return made, () if dataset is None else dataset.collections

    def _is_named(self, found: PlainChunks | None) -> bool:
        """Whether `--array` asks for shards of these chunks."""
        return not self.job.arrays or any(found is not None and is_in(found.path, a) for a in self.job.arrays)

    def _without_shards(self, path: str, format: Format, documents: Mapping[str, bytes]) -> Sequence[Collection]:
        """The arrays of documents without shards, in which each chunk is a shard of its own."""
        if format is PRECOMPUTED or self.job.verbatim:
            raise ValueError("all arrays change their format together; omit --array")
        dataset = format.open(path, documents)
        return () if dataset is None else dataset.unsharded

    def _add_array(self, path: str, target: Collection, found: PlainChunks | None, form: FileForm) -> None:
        home = join(path, target.stored_at)
        array: PackedArray
        if found is None:
            array = with_ids(home, target, form.suffix)
        else:
            source = found.collection
            if isinstance(source.transform, Transcoder) and source.transform.decodes:
                self._decoded[found.path] = source.transform.decodes
                source = replace(source, transform=source.transform.compressing())
            array = PackedArray(found.path, home, source, target, form.suffix)
        if why := rewriting.unwritable(target):
            raise ValueError(why)
        if self.job.verbatim and array.converts:
            raise ValueError("its chunk files would change, which a job in place does not do; give another directory")
        if array.path in self.arrays:
            raise ValueError(f"{array.path}: the same chunks are shown twice, by two images")
        self.arrays[array.path] = array
        self._homes.setdefault(home, []).append(array)

    def _form(self, path: str, format: Format, own: Sequence[tuple[Collection, PlainChunks | None]]) -> FileForm:
        """The form of a dataset's files. Lists directories of ids, unless the job has the result."""
        if (known := dict(self.job.found).get(path)) is not None:
            return known
        plain = [found.collection for _, found in own if found is not None]
        if format.dataset_formats[0] == "bcolz" and plain and (array := plain[0].array) is not None:
            return FileForm(chunk_bytes=math.prod(array.chunk) * np.dtype(array.data_type).itemsize)
        if format is not PRECOMPUTED or self._translates:
            return FileForm(gzipped=format is PRECOMPUTED and any("gzip" in c.codecs for c in plain))
        suffixes, most = set(), 0
        for target, found in own:
            entries = self.store.scan(join(path, target.stored_at))
            names = (e.name for e in entries if not e.directory and format.chunk_like(e.name))
            if first := next(names, ""):
                require_packable(first, verbatim=self.job.verbatim)
                suffixes.add(GZIP if first.endswith(GZIP) and target.lead is None else "")
                most = max(most, 1 + sum(1 for _ in names)) if found is None else most
        return FileForm(GZIP if suffixes == {GZIP} else "", most)

    def _require_complete(self) -> None:
        if not (self.arrays or self._refused or self.job.arrays):
            what = "no unsharded array found (looked for Zarr v2, Zarr v3, N5, precomputed, bcolz)"
            raise NotADatasetError("; ".join([what, *(f"{path or '/'}: {why}" for path, why in self._unknown.items())]))
        refused = list(self._refused)
        if not self.job.transcode:
            refused += [f"{path or '/'}: {which} would have to be decoded" for path, which in self._decoded.items()]
            refused += ["add --transcode to decode and encode chunks"] if self._decoded else []
        missing = [a for a in self.job.arrays if not any(is_in(path, a) for path in self.arrays)]
        refused += [f"{a or '/'}: {self._unknown.get(a, 'no unsharded array has its document there')}" for a in missing]
        if refused:
            raise UnsupportedError("nothing was packed: " + "; ".join(refused))

    def _correct_copies(self) -> None:
        """Let consolidated metadata of Zarr v3 groups describe the arrays with shards."""
        format = format_of(ZARR3)
        for key, raw in list(self.documents.items()):
            path, _, name = key.rpartition("/")
            if name in format.documents and (below := format.references(path, name, raw)):
                stored = {at: made for at in below if (made := self.documents.get(join(path, at))) is not None}
                self.documents[key] = format.edit(path, stored, name, raw)[name]

    # ---- files ----

    def document_names(self) -> set[str]:
        """The paths of documents in the source and in the target. A document need not exist in both."""
        return self._hidden.union(self.documents)

    def survey(self) -> SourceSurvey:
        """List the source."""
        found, chunks = SourceSurvey(), {path: typed_array("Q") for path in self.arrays}
        unknown = ((path, why) for path, why in self._unknown.items() if self._is_selected(path))
        found.problems = [Problem(path, f"was not packed, and keeps its chunk files: {why}") for path, why in unknown]
        with_others = set[str]()
        for array, name, key in self._walk("", None, self._names("")):
            if key.endswith("/"):
                why = "is a directory, but has the name of a chunk; move it out of the source"
                found.problems.append(Problem(key[:-1], why, damaged=True))
            elif array is not None and (number := array.number(name)) is not None:
                chunks[array.path].append(number)
            elif (problem := self._problem_of(array, name, key)) is None:
                found.files += 1
                if array is not None:
                    with_others.add(array.path)
            else:
                found.problems.append(problem)
        for path in self.arrays:
            self._add_plan(found, self.arrays[path], np.frombuffer(chunks.pop(path), np.uint64))
            while path:
                path = path.rpartition("/")[0]
                with_others.add(path)
        self._only_chunks, self._plans = self.arrays.keys() - with_others, found.plans
        return found

    def _add_plan(self, found: SourceSurvey, array: PackedArray, numbers: U64) -> None:
        missing = math.prod(array.source.layers[0].format.grid) - len(numbers)
        if array.source.filler is not None and missing:
            why = f"{missing} chunks are missing, and the format of the target cannot express their fill value"
            raise UnsupportedError(f"nothing was packed: {array.path}: {why}")
        bad = array.incomplete(numbers)
        found.problems += [Problem(join(array.path, str(n)), ONLY_ONE, damaged=True) for n in bad.tolist()]
        found.plans.append(ArrayPlan.of(array, numbers[~np.isin(numbers, bad)] if len(bad) else numbers))

    def other_files(self) -> Iterator[str]:
        """Yield the paths of all files that are neither documents of datasets nor chunks of packed arrays."""
        for array, name, key in self._walk("", None, self._names(""), self._only_chunks):
            is_chunk = array is not None and array.number(name) is not None
            if not is_chunk and not key.endswith("/") and self._problem_of(array, name, key) is None:
                yield key

    def _problem_of(self, array: PackedArray | None, name: str, key: str) -> Problem | None:
        """The problem of another file, which has the name of a chunk or a shard; None for all other names."""
        if array is not None and (problem := stray(array, name, key)) is not None:
            return problem
        home = key
        while home:
            home = home.rpartition("/")[0]
            below = key.removeprefix(home).lstrip("/")
            if any(a.target.layers[0].format.shard_of(below) is not None for a in self._homes.get(home, ())):
                why = "is no chunk of the array, but has the name of a shard; rename it, or move it out of the source"
                return Problem(key, why, damaged=True)
        return None

    def _walk(
        self,
        path: str,
        array: PackedArray | None,
        names: Iterable[tuple[str, bool]],
        skipped: Set[str] = frozenset(),
    ) -> Iterator[tuple[PackedArray | None, str, str]]:
        """Yield all files but documents: the array of whose directory it is, the path in this directory, the path.

        Also yield directories with the names of chunks, whose paths end in a slash.
        """
        if path in skipped:
            return
        if array is None and isinstance(self.store, LocalStore):
            require_settled(self.store.root, path)
        array = self.arrays.get(path, array)
        inside = path if array is None else path.removeprefix(array.path).lstrip("/")
        above, name_above = (f"{part}/" if part else "" for part in (path, inside))
        directories = []
        for name, directory in names:
            key = above + name
            if not directory:
                if key not in self.documents and key not in self._hidden:
                    yield array, name_above + name, key
            elif array is not None and array.number(name_above + name) is not None:
                yield array, name_above + name, f"{key}/"
            elif array is None and key in self._hidden and not any(is_in(path, key) for path in self.arrays):
                continue
            elif self.store.remote:
                directories.append(key)
            else:
                yield from self._walk(key, array, self._names(key), skipped)
        for key, found in load_ahead(self.store.read_ahead, self._names, directories):
            yield from self._walk(key, array, found, skipped)

    def _names(self, path: str) -> Iterable[tuple[str, bool]]:
        """The names in a directory, and whether each is a directory itself. Links of a local source are files."""
        if isinstance(self.store, LocalStore):
            return self.store.names(path)
        return [(entry.name, entry.directory) for entry in self.store.scan(path)]

    def blob(self, key: str) -> Blob:
        """Open a file of the source. It does not stay open in the store."""
        return self.store.open_once(key) if isinstance(self.store, LocalStore) else self.store.open(key)

    def finish(self) -> None:
        """Write all documents, and end the job."""
        documents = ((key, partial(self.documents.__getitem__, key)) for key in self.documents)
        notes = (note_of(plan.array.path, shard) for plan in self._plans for shard in plan.shards.tolist())
        self.target.finish(documents, notes)


def note_of(array: str, shard: int) -> str:
    """The key of the note in the target that a shard is finished: see `JobTarget.note_task`."""
    return join(NOTES, join(array, f"{OWN}-shards-{shard}"))


def _has_zarr2(store: Store, path: str) -> bool:
    """Whether a directory has documents of Zarr v2."""
    return ZARR2.open(path, store.documents(path, ZARR2.documents, MAX_DOCUMENT_BYTES)) is not None
