"""A source behind a web server.

HTTP has no requests for some properties of a source, so this module derives them from the server's answers: whether
byte ranges are honoured, whether a name is a directory, and what a directory contains.
"""

from __future__ import annotations

import codecs
import errno
import itertools
import logging
import os
import re
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast
from urllib.parse import quote

from shardfs.model.blobs import ByteRange, Suffix, absolute
from shardfs.model.errors import NOT_FOUND
from shardfs.model.kinds import OWN_PREFIX
from shardfs.storage.range_client import Answer, replaced
from shardfs.storage.remote import FsspecStore, answer_or_raise, range_header, stat_of_info, store_errors
from shardfs.storage.retry import UnsuitedError
from shardfs.storage.store import MAX_MERGED, DirEntry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence

    from shardfs.model.blobs import ByteRequest, Stat
    from shardfs.storage.range_client import RangeClient

log = logging.getLogger(__name__)

TRIED = 16
"""Shards requested at the same time to find one that exists."""

DRAINED = 1 << 16
"""Most bytes of an unneeded answer that are read and discarded.

If the answer ends within them, its connection is reused.
"""

ADVICE = "serve the source with a server that supports Range requests, such as nginx, or mount a copy of it"

Page: TypeAlias = tuple[str | None, str | None, int | None]
"""Identifies an HTML page by its ETag, Last-Modified and length."""


class IgnoredRangeError(ConnectionError):
    """The server did not answer with the requested byte range. A retry may reach another server, which honours ranges.

    Args:
        answer: the status and reason of the answer, for the message.
    """

    def __init__(self, answer: str, url: str) -> None:
        super().__init__(errno.EIO, f"the web server does not send byte ranges (it answers {answer}); {ADVICE}", url)


class _Document(NamedTuple):
    """The beginning of an object. `page` is set only if the object is an HTML page, and so not a metadata document."""

    data: bytes
    page: Page | None


class HttpStore(FsspecStore):
    """A store on a web server; arguments as of `FsspecStore`. fsspec's HTTP file system makes the connections.

    This class sends its own requests, as coroutines in the event loop of that file system. Its methods may raise
    IgnoredRangeError, and PermissionError for pages in place of objects or listings, such as a login page.
    """

    blind = True
    client_retries = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lists = False
        self._ignored = False  # whether the server ignored the byte range of a document
        self._missing_page: Page | None = None  # the page that the server sends in place of 404 Not Found

    @property
    def loop(self) -> Any:
        """The event loop of the requests of this class. The first use imports aiohttp."""
        return self.fs.loop

    def path(self, key: str) -> str:
        """The URL of a key, in which `?` and `#` do not end the path."""
        return super().path(quote(key, errors="surrogateescape"))

    # ---- the store's methods ----

    def reopen(self, key: str) -> None:
        """Do nothing: no listing is cached."""

    def reopen_below(self, key: str) -> None:
        """Do nothing: no listing is cached."""

    def _client(self, path: str) -> RangeClient | None:
        # Where a page stands for missing names, each answer must be compared with that page.
        return super()._client(path) if self._missing_page is None else None

    def stat(self, key: str) -> Stat:
        url = self.path(key)
        if (client := self._client(url)) is not None:
            self._waiting()
            with store_errors(url), suppress(UnsuitedError):
                return stat_of_info(self.retry.run("stat", client.head, url))
        return super().stat(key)

    def _info(self, key: str) -> Mapping[str, Any]:
        self._waiting()
        url = self.path(key)
        return cast("Mapping[str, Any]", self.ask("stat", url, self._head, url))

    def entry(self, key: str) -> DirEntry:
        """Look up one name. An HTML page may be the listing of a directory; its size may be unknown."""
        info = self._info(key)
        directory = info["type"] == "directory"
        unknown = directory or (info["page"] and info["size"] is None)
        return DirEntry(key.rsplit("/", 1)[-1], directory, None if unknown else stat_of_info(info), info["page"])

    def _ask_for(self, path: str, requests: Sequence[ByteRequest], tag: str | None) -> list[Answer]:
        if len(requests) == 1:
            return [self.retry.run("read", self._part, path, requests[0], tag)]
        return [answer_or_raise(a) for a in self._each("read", self._part, [(path, r, tag) for r in requests])]

    def _ask_for_documents(self, directory: str, paths: Sequence[str], limit: int) -> list[bytes | Exception]:
        simple = self._read_documents(paths, limit)
        if simple is not None and not any(_looks_like_a_page(data) for data in simple if isinstance(data, bytes)):
            return simple
        answers = self._each("documents", self._document, [(path, limit) for path in paths])
        documents = [answer for answer in answers if isinstance(answer, _Document)]
        pages = [document.page for document in documents if document.page is not None]
        proven = len(pages) < len(documents)
        if proven and pages:  # pages beside documents stand for missing names; they are not login pages
            self._missing_page = pages[0]
        elif pages and directory != self.root:  # some servers ignore the rest of a path after the name of a file
            proven = self.retry.run("stat", self._head, directory).get("identity") in pages
        out: list[bytes | Exception] = []
        for url, answer in zip(paths, answers, strict=True):
            if isinstance(answer, Exception) or answer.page is None:
                out.append(answer if isinstance(answer, Exception) else answer.data)
            elif proven:
                out.append(_missing(url))
            else:
                why = "the web server sends an HTML page instead of a metadata document or 404 Not Found"
                out.append(OSError(errno.EIO, f"{why}; look at the URL in a browser: must you log in?", url))
        return out

    def scan(self, key: str) -> Iterator[DirEntry]:
        """Yield the entries of a directory, in the server's order, without attributes. The order of the page is kept.

        Raise PermissionError if the server does not list directories.
        """
        self._waiting()
        url = self.path(key).rstrip("/") + "/"
        names: dict[str, bool] = {}
        with suppress(*NOT_FOUND):
            names = self.ask("list", url, self._listing, url)
        entries = [
            DirEntry(name, directory, None) for name, directory in names.items() if not name.startswith(OWN_PREFIX)
        ]
        self._lists |= bool(entries)
        yield from entries
        if not self._lists and not (key and any(True for _ in self.scan(""))):
            # The source has at least one document, so an empty listing is wrong. Servers that do not list directories
            # may answer 404 or a page of their own instead of 403. The content is unknown then, and must not look
            # empty.
            why = "the web server does not list directories; enable directory listings there, or mount a copy"
            raise PermissionError(errno.EACCES, why, self.path(key))

    def require_ranges(self, keys: Iterable[str]) -> None:
        """Raise OSError (EOPNOTSUPP) if the server sends shards only as a whole.

        No request if it honoured ranges for documents. A program that ignores ranges may generate the documents, so
        requests for shards decide. Without any shard the source is accepted, with a warning in the log that large
        objects may be unreadable.
        """
        shards = iter(keys)
        while self._ignored and (some := [self.path(key) for key in itertools.islice(shards, TRIED)]):
            with store_errors(some[0]):
                answers = self._each("probe", self._probe, [(url,) for url in some])
            for url, answer in zip(some, answers, strict=True):
                if isinstance(answer, str):
                    why = f"does not send byte ranges (it answers {answer}), and chunks in shards are byte ranges"
                    raise OSError(errno.EOPNOTSUPP, f"the web server {why}; {ADVICE}", url)
                if answer is None:
                    return
        if self._ignored:
            why = f"so objects of more than {MAX_MERGED >> 20} MiB may be unreadable"
            log.warning("%s: the web server does not send byte ranges, %s; %s", self.root, why, ADVICE)

    # ---- requests ----

    def _each(self, kind: str, method: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send requests at the same time; return the result or the exception of each."""
        return cast("list[Any]", self.retry.run(kind, self._gathered, method, calls))

    async def _gathered(self, method: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        import asyncio

        return await asyncio.gather(*(method(*call) for call in calls), return_exceptions=True)

    @asynccontextmanager
    async def _asked(self, method: str, url: str, **headers: str) -> AsyncIterator[Any]:
        """Send a request and yield the answer, whose body is not read yet.

        Raise FileNotFoundError if the object is missing, IsADirectoryError if the server redirects to the URL with a
        slash.
        """
        session, encoded = await self.fs.set_session(), self.fs.encode_url(url)
        options = {"allow_redirects": True, **self.fs.kwargs}
        # Request no compression: a range of the compressed form is not a range of the object.
        options["headers"] = {**options.get("headers", {}), "Accept-Encoding": "identity", **headers}
        async with session.request(method, encoded, **options) as answer:
            if (failure := self._failure(answer, encoded, url)) is None:
                yield answer
            await _body(answer, 0, DRAINED)
            if failure is not None:
                raise failure

    def _failure(self, answer: Any, encoded: Any, url: str) -> OSError | None:
        """Return the error for an answer that contains nothing of the object; None for any other answer."""
        if answer.status in (404, 410) or (self._missing_page and _page_of(answer) == self._missing_page):
            return _missing(url)
        if not answer.history or not (answer.ok or answer.status in (401, 403)):
            return None
        name = encoded.path.rstrip("/").rpartition("/")[2]
        if answer.url.parent.name == name:  # redirected to the same URL with a slash, or to a page below it
            return (
                None if encoded.path.endswith("/") else IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), url)
            )
        if answer.ok and _is_html(answer) and answer.url.name != name:
            why = f"the web server redirects to the page {answer.url.with_query(None)}"
            return PermissionError(errno.EACCES, f"{why}; look at the URL in a browser: must you log in?", url)
        return None

    async def _head(self, url: str) -> Mapping[str, Any]:
        """Return the metadata of an object with fsspec's field names, without reading the object."""
        try:
            async with self._asked("HEAD", url) as answer:
                if answer.ok and _total(answer) is not None:
                    return _info_of(url, answer)
                if answer.status not in (400, 401, 403, 405, 501):
                    answer.raise_for_status()
            # HEAD is refused, or its answer lacks the size.
            async with self._asked("GET", url, Range="bytes=0-0") as answer:
                if answer.status in (401, 403):
                    raise _missing(url)  # some servers also answer this for missing names
                if answer.status != 416:
                    answer.raise_for_status()
                return _info_of(url, answer)
        except IsADirectoryError:
            return {"name": url, "type": "directory", "size": None, "page": False}

    async def _part(self, url: str, request: ByteRequest, tag: str | None) -> Answer:
        """Return a byte range, shorter at the end of the object. Holds no more than the range in memory.

        If the server sends the whole object, the range is cut out, provided that it is near the beginning.
        """
        condition = {} if tag is None else {"If-Match": tag}
        async with self._asked("GET", url, Range=range_header(request), **condition) as answer:
            if answer.status == 412 and tag is not None:
                raise replaced(url)
            if answer.status == 416:
                total = _total(answer)
                total = (await self._head(url))["size"] if total is None else total
                if total is not None and absolute(request, total).start == total:
                    return Answer(b"", {})
            if answer.status in (416, 501):
                raise IgnoredRangeError(f"{answer.status} {answer.reason}", url)
            answer.raise_for_status()
            skip, size = _range_sent(answer, request, url)
            data = await _body(answer, skip, size)
            if answer.status == 206 and len(data) < size:
                raise ConnectionError(errno.EIO, f"the answer ends after {len(data)} of {size} bytes", url)
            return Answer(data, _info_of(url, answer))

    async def _document(self, url: str, limit: int) -> _Document:
        """Return the beginning of a document.

        It is requested as a range, which also shows whether the server honours ranges.
        """
        async with self._asked("GET", url, Range=range_header(ByteRange(0, limit + 1))) as answer:
            if answer.ok:
                document = await _document_of(answer, limit)
                self._ignored |= answer.status != 206 and document.page is None and bool(document.data)
                return document
            if answer.status not in (416, 501):
                answer.raise_for_status()
            if answer.status == 416 and _total(answer) == 0:
                return _Document(b"", None)
        self._ignored = True
        async with self._asked("GET", url) as answer:
            answer.raise_for_status()
            return await _document_of(answer, limit)

    async def _probe(self, url: str) -> str | None:
        """Return the server's answer to a range request if it is not the range; None if the server sends the range.

        Raise if the object is missing, or too short for the test.
        """
        async with self._asked("GET", url, Range="bytes=0-0") as answer:
            total = _total(answer)
            if answer.status == 206:
                return None
            if total is not None and total <= 1:
                raise _missing(url)
            if answer.status not in (416, 501):
                answer.raise_for_status()
            return f"{answer.status} {answer.reason}" + (" with the whole object" if answer.ok else "")

    async def _listing(self, url: str) -> dict[str, bool]:
        """Return the names in a directory, in the server's order, each with whether it is a directory."""
        from shardfs.storage.html_links import PageLinks, names_in

        async with self._asked("GET", url) as answer:
            answer.raise_for_status()
            links, decoder = PageLinks(), codecs.getincrementaldecoder("utf-8")("surrogateescape")
            if _is_html(answer):
                async for piece in answer.content.iter_any():
                    links.feed(decoder.decode(piece))
            return names_in(links.targets, str(answer.url))


# ---- answers ----


def _missing(url: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)


def _content_range(answer: Any) -> re.Match[str] | None:
    return re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", answer.headers.get("Content-Range", "").strip())


def _is_encoded(answer: Any) -> bool:
    return answer.headers.get("Content-Encoding", "identity").strip() not in ("", "identity")


def _total(answer: Any) -> int | None:
    """Return the size of the object; None if the answer does not contain it."""
    if answer.status in (206, 416):
        match = _content_range(answer)
        return int(match[3]) if match is not None and match[3] != "*" else None
    length = answer.headers.get("Content-Length", "")
    return int(length) if answer.ok and length.isdecimal() and not _is_encoded(answer) else None


def _range_sent(answer: Any, request: ByteRequest, url: str) -> tuple[int, int]:
    """Return the position of the requested range in the body, and its size.

    Raise IgnoredRangeError if the answer has another range, or if too many bytes of the object precede the range.
    """
    total, status = _total(answer), f"{answer.status} {answer.reason}"
    if answer.status != 206:
        if total is None and isinstance(request, Suffix):
            raise IgnoredRangeError(f"{status} with the whole object, of unknown size", url)
        start, stop = absolute(request, request.stop if total is None else total)  # type: ignore[union-attr]
        if start > MAX_MERGED:
            raise IgnoredRangeError(f"{status} with the whole object", url)
        return start, stop - start
    match = _content_range(answer)
    sent = None if match is None or match[1] is None else ByteRange(int(match[1]), int(match[2]) + 1)
    if sent is None or absolute(request, sent.stop if total is None else total) != sent:
        header = answer.headers.get("Content-Range")
        raise IgnoredRangeError(f"206 and the Content-Range {header!r} for {range_header(request)!r}", url)
    if _is_encoded(answer) and sent != (0, total):
        raise IgnoredRangeError(f"a part of an object in the encoding {answer.headers['Content-Encoding']!r}", url)
    return 0, sent.stop - sent.start


async def _body(answer: Any, skip: int, size: int) -> bytes:
    """Return `size` bytes after the first `skip`, fewer at the end. The connection is closed if the body is longer."""
    data, position = bytearray(), 0
    async for piece in answer.content.iter_any():
        data += piece[max(skip - position, 0) :][: size - len(data)]
        position += len(piece)
        if len(data) >= size:
            break
    return bytes(data)


async def _document_of(answer: Any, limit: int) -> _Document:
    data = await _body(answer, 0, limit + 1)
    return _Document(data, _page_of(answer) if _is_html(answer) and _looks_like_a_page(data) else None)


def _looks_like_a_page(data: bytes) -> bool:
    return data.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"<")


def _is_html(answer: Any) -> bool:
    kind = answer.headers.get("Content-Type", "text/html").partition(";")[0].strip().lower()
    return kind in ("text/html", "application/xhtml+xml")


def _page_of(answer: Any) -> Page | None:
    """Return the identity of the HTML page in an answer; None if the answer is not HTML."""
    if not answer.ok or not _is_html(answer):
        return None
    return answer.headers.get("ETag"), answer.headers.get("Last-Modified"), _total(answer)


def _info_of(url: str, answer: Any) -> dict[str, Any]:
    validators = {name: answer.headers[name] for name in ("ETag", "Last-Modified") if name in answer.headers}
    # Listings are HTML or generated for each request, so servers send no validators with them.
    page, identity = _is_html(answer) or not validators, _page_of(answer)
    return {"name": url, "type": "file", "size": _total(answer), "page": page, "identity": identity, **validators}
