"""The datasets of a source as the mount shows them: converted by the view of a layout, or unchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardfs.formats.layouts import PACKED, images_of
from shardfs.formats.registry import creating_view
from shardfs.formats.translate import Translation
from shardfs.model.arrays import Multiscale
from shardfs.model.dataset import Dataset, Problem, Surroundings
from shardfs.model.errors import UnsupportedError
from shardfs.model.kinds import is_in
from shardfs.vfs.directory_content import NOTHING_SHOWN, CollectionAt, ShownDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardfs.formats.format import View
    from shardfs.vfs.nodes import DirectoryNode
    from shardfs.vfs.source_datasets import SourceDatasets


class ShownDatasets:
    """Shows the datasets of a source in a layout. Thread-safe.

    Args:
        view: the view of the layout; None for the native one.
        omitted: called with what the view cannot express, and why; None: this is an error.
    """

    def __init__(
        self, source: SourceDatasets, view: View | None, omitted: Callable[[Problem], None] | None = None
    ) -> None:
        self._source = source
        self.view = view
        self._omitted = omitted

    def open(self, directory: DirectoryNode) -> ShownDataset:
        """Return what a directory shows of its own dataset, apart from what it inherits from its parents.

        In a layout, a directory with a scope shows the scope's data directory from then on. Raise UnsupportedError if
        the view cannot express the dataset, unless it may be omitted, and the errors of `SourceDatasets.dataset`.
        """
        is_array = any(not parts and isinstance(item, CollectionAt) for parts, item in directory.inherited.below)
        if directory.inherited.closed or (is_array and self.view is None):
            return NOTHING_SHOWN  # documents here would change nothing
        dataset = directory.file or self._stored(directory)
        if self.view is None:
            return ShownDataset(dataset)
        if dataset is not None and is_array:
            return ShownDataset(Dataset(self.view.name, hidden=dataset.format_names, closed=True))
        if dataset is not None and dataset.scope is not None:
            directory.set_scope(dataset.scope)
            dataset = self._stored(directory)
        if dataset is None and (
            directory.inherited.below or not self._source.may_lead_on(directory.inside, directory.inherited)
        ):
            return NOTHING_SHOWN
        return self._viewed(directory, self.view, dataset)

    def _stored(self, directory: DirectoryNode) -> Dataset | None:
        return self._source.dataset(directory.inside, directory.inherited)

    def _viewed(self, directory: DirectoryNode, view: View, source_dataset: Dataset | None) -> ShownDataset:
        """Return what the view shows of the stored dataset; None stands for a directory above datasets."""
        path = directory.shown
        dataset = None if source_dataset is None else self._with_image(directory, source_dataset)
        around = Surroundings() if dataset is None else self._around(directory, view, dataset)
        try:
            if dataset is not None:
                self._require_codec(view, dataset)
            viewed = view.show(path, dataset, around)
        except UnsupportedError as e:
            why = f"cannot be shown as {view.name}: {e}"
            if self._omitted is None:
                hint = "; -o unsupported=skip omits it" if path else ""
                raise UnsupportedError(f"{path or '/'}: {why}{hint}") from e
            self._omitted(Problem(path, why, skipped=True))
            return ShownDataset(Dataset("unsupported", closed=True), is_omitted=True)
        images = images_of(dataset, around.below) if dataset is not None else {}
        images = {at: image for at, image in images.items() if at not in viewed.hidden}
        return ShownDataset(viewed, images, None if viewed.closed else view.consolidation)

    def _with_image(self, directory: DirectoryNode, dataset: Dataset) -> Dataset:
        """Return the dataset of a group with the image that only its levels describe, if there is one."""
        if dataset.levels is None:
            return dataset
        image = dataset.levels.image(self._source.levels(directory.inside, dataset.levels, directory.inherited))
        return dataset if image is None else replace(dataset, multiscales=(*dataset.multiscales, image))

    def _around(self, directory: DirectoryNode, view: View, dataset: Dataset) -> Surroundings:
        names = self._names(directory, view, dataset)
        children = self._source.children(directory.inside, view.children(dataset, names), directory.inherited)
        images = (item for parts, item in directory.inherited.below if not parts and isinstance(item, Multiscale))
        below = {name: child for name, child in children if child is not None}
        return Surroundings(below, names, None if dataset.multiscales and view.renames else next(images, None))

    def _names(self, directory: DirectoryNode, view: View, dataset: Dataset) -> frozenset[str]:
        """Return all names in the directory of an image, if the view renames images."""
        if not (dataset.multiscales and view.renames):
            return frozenset()
        names = frozenset(entry.name for entry in self._source.listed(directory.inside))
        return names.union(self._source.members(directory.inside, directory.inherited.scope))

    def _require_codec(self, view: View, dataset: Dataset) -> None:
        """Raise UnsupportedError if a chunk codec is requested but the view would show the stored chunks unchanged."""
        codec = self._source.codec
        if codec in (None, PACKED) or dataset.format != view.name:
            return
        if dataset.all_collections or dataset.closed:
            why = f"{dataset.format} is shown in its own layout as it is stored"
            raise UnsupportedError(f"{why}: choose another layout, or leave out chunk_codec={codec}")

    # ---- for documents that clients write ----

    def translation(self, directory: DirectoryNode, viewed: Dataset | None) -> Translation | None:
        """Return how the documents that the view shows for a directory become documents of the source.

        None if the view shows the stored documents unchanged. `viewed` is the dataset that the view shows, None without
        one.
        """
        view, dataset = self.view, self._stored(directory)
        if view is None or (dataset is not None and dataset.format == view.name):
            return None
        below = () if dataset is None else tuple(view.children(dataset, self._names(directory, view, dataset)))

        def show(drafts: Mapping[str, bytes]) -> Mapping[str, bytes]:
            source = self._source.with_drafts(directory.inside, below, drafts)
            dataset = ShownDatasets(source, view).open(directory).dataset
            return {} if dataset is None else dataset.documents

        layout = self._source.format_of(view.name)
        source = layout if dataset is None else self._source.format_of(dataset.format)
        homes = dict(_homes(dataset, viewed, below))
        return Translation(layout, source, creating_view(dataset.format if dataset else ""), homes, below, show)


def _homes(dataset: Dataset | None, viewed: Dataset | None, below: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield where a dataset shows its arrays, and the directories whose stored documents describe them.

    `dataset` is the stored one, and `below` are the directories of arrays with documents of their own.
    """
    places = set() if dataset is None else {c.stored_at for c in dataset.all_collections}
    for c in () if viewed is None else viewed.collections:
        levels = (level for level in below if is_in(c.stored_at, level))
        yield c.path, "" if c.stored_at in places else next(levels, "")
