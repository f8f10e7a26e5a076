"""Two directories that play source and mount, as far as documents are concerned: no tool needs more of one for this."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardfs.formats.create_rules import parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from shardfs.formats.format import Format


class Mount:
    """The directory `shown` has the documents that a mount of `source` shows, and those that tools put there."""

    def __init__(self, root: Path, format: Format, rules: str = "") -> None:
        self.source, self.shown, self.format, self.rules = root / "source", root / "shown", format, parse(rules)
        self.source.mkdir()
        self.shown.mkdir()

    def _stored(self, directory: Path) -> dict[str, bytes]:
        files = ((name, directory / name) for name in self.format.documents)
        return {name: file.read_bytes() for name, file in files if file.exists()}

    def _described(self, top: Path) -> Iterator[Path]:
        """Deepest first, as tools write them."""
        array_directories = {
            path.parent for name in self.format.documents for path in top.rglob(name.rpartition("/")[2])
        }
        directories = {p.parent if p.name == "meta" else p for p in array_directories}
        return iter(sorted(directories, key=lambda p: (-len(p.parts), p)))

    def show(self) -> None:
        for directory in self._described(self.source):
            at, source_bytes = directory.relative_to(self.source), self._stored(directory)
            dataset = self.format.open("", source_bytes)
            assert dataset is not None
            assert not dataset.problems
            self._write(self.shown / at, {**source_bytes, **dataset.documents})

    def take(self) -> None:
        """What tools have left becomes the source's."""
        for directory in self._described(self.shown):
            at = directory.relative_to(self.shown)
            documents, path = self._stored(self.source / at), at.as_posix()
            rule = self.rules.match(path, self.format.dataset_formats[0])
            for name, new in self._stored(directory).items():
                all_documents = dict(documents)
                for other in self.format.references(path, name, new):
                    if (self.source / at / other).exists():
                        all_documents[other] = (self.source / at / other).read_bytes()
                new_documents = (
                    self.format.shard(path, name, new, rule) if rule is not None and name not in documents else None
                )
                self._write(self.source / at, new_documents or self.format.edit(path, all_documents, name, new, rule))

    @staticmethod
    def _write(directory: Path, documents: Mapping[str, bytes]) -> None:
        for name, raw in documents.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(raw)
