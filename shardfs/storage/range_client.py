"""Reads byte ranges through obstore, with a half or a fifth of the CPU time that the clients of fsspec need.

fsspec's file system stays the interface: its options decide how obstore connects, and it answers every request that
obstore cannot. `RangeClient` raises `UnsuitedError` for those.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import re
import threading
from concurrent.futures import wait
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from shardfs.model.blobs import ByteRange, Suffix
from shardfs.model.errors import StaleShardError
from shardfs.storage.daemon_threads import DaemonThreads
from shardfs.storage.retry import BOUND, MOST_THREADS, StoreTimeout, UnsuitedError, bounded, is_transient, timeout_error
from shardfs.storage.s3_settings import S3Settings, s3_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardfs.model.blobs import ByteRequest

log = logging.getLogger(__name__)

PLAIN = re.compile(r"[\w.~-]+(/[\w.~-]+)*", re.ASCII)
"""Keys that no client changes or encodes. Keys of shards are almost always among them."""

# Options that obstore heeds, that are read from the connected client, or that do not concern the reading of objects.
_FSSPEC = {"skip_instance_cache", "use_listings_cache", "listings_expiry_time", "max_paths",
           "default_block_size", "default_fill_cache", "default_cache_type", "block_size", "cache_type",
           "cache_options"}  # fmt: skip
_S3 = {"anon", "key", "secret", "token", "username", "password", "profile", "endpoint_url", "use_ssl",
       "requester_pays", "client_kwargs", "config_kwargs", "max_concurrency", "fixed_upload_size", "version_aware",
       "s3_additional_kwargs", *_FSSPEC}  # fmt: skip
_S3_INNER = {
    "client_kwargs": {"endpoint_url", "region_name", "verify", "use_ssl", "aws_access_key_id", "aws_secret_access_key",
                      "aws_session_token"},
    "config_kwargs": {"max_pool_connections", "connect_timeout", "read_timeout", "retries", "s3"},
    "config_kwargs.s3": {"addressing_style"},
    "s3_additional_kwargs": {"ACL", "BucketKeyEnabled", "SSEKMSEncryptionContext", "SSEKMSKeyId",
                             "ServerSideEncryption", "StorageClass", "Tagging"},
}  # fmt: skip
_GCS = {"project", "access", "token", "endpoint_url", "cache_timeout", "secure_serialize", "check_connection",
        "requests_timeout", "timeout", "default_location", "requester_pays", "version_aware", *_FSSPEC}  # fmt: skip
_AZURE = {"account_name", "account_key", "connection_string", "credential", "sas_token", "client_id", "client_secret",
          "tenant_id", "anon", "account_host", "assume_container_exists", "max_concurrency", "blocksize", "timeout",
          "connection_timeout", "read_timeout", "version_aware", *_FSSPEC}  # fmt: skip
_HTTP = {"headers", "ssl", "client_kwargs", "simple_links", "same_scheme", "size_policy", *_FSSPEC}
_HTTP_INNER = {"client_kwargs": {"headers", "trust_env"}}

THROTTLED = (429, 503)
"""Statuses of answers in which web servers say how long to wait. obstore does not report that, but aiohttp does."""

NO_OBJECT = ("NoSuchKey", "BlobNotFound")
"""What S3 and Azure say of a missing object. Otherwise, the bucket may be missing."""

GOOGLE = "https://storage.googleapis.com"

AZURE_SCOPE = "https://storage.azure.com/.default"

END_S = 2.0
"""Seconds for which the end of the program waits for requests that are under way."""

_under_way: set[object] = set()
"""One object for each request that obstore works on."""

ENDED = 0

_runtime_pid: int | None = None
"""The process that started the threads of obstore. Its children have none of them, so they use fsspec.

`ENDED` when the program ends.
"""


class ServerError(ConnectionError):
    """The server, or the connection to it, failed. `status`: the HTTP status, if there was an answer."""

    status: int | None = None


class Answer(NamedTuple):
    """The bytes of a range, fewer where the object ends.

    Attributes:
        info: describes the whole object, with the field names of fsspec's `info`; {} if the client says nothing of it.
        encoded: the bytes are those of a compressed form (`Content-Encoding`), which fsspec's client would decompress.
    """

    data: bytes | memoryview
    info: Mapping[str, Any]
    encoded: bool = False


def replaced(path: str) -> StaleShardError:
    """Return the error for an object of which the version is gone that was read before."""
    return StaleShardError(f"{path}: was replaced while it was read; read it again")


def range_client(fs: Any, root: str, timeout_s: float) -> RangeClient | None:
    """Return a client for the objects below `root` of a file system; None if obstore does not know its protocol.

    Connects at the first request. Raise ValueError for a storage option that obstore does not know; ImportError without
    obstore.

    Args:
        fs: a file system of fsspec. Its options, and its client if need be, say how to connect.
    """
    protocol = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    name = next((name for name in protocol if name in _CLIENTS), None)
    if name is None:
        return None
    if find_spec("obstore") is None:
        raise ImportError("obstore is not installed")
    connect, options, inner = _CLIENTS[name]
    unknown = [option for option in fs.storage_options if option not in options]
    for outer, keys in inner.items():
        members: Any = fs.storage_options
        for word in outer.split("."):
            members = members.get(word) or {}
        unknown += [f"{outer}.{key}" for key in members if key not in keys]
    if unknown:
        raise ValueError(f"unknown storage option {unknown[0]!r} for {name}; docs/stores.md lists the options")
    return RangeClient(fs, root, connect, timeout_s)


class RangeClient:
    """Reads byte ranges of one store. Thread-safe. Its methods raise these errors, for which `RetryPolicy` has rules:

    - FileNotFoundError: there is no such object.
    - StaleShardError: it has another version than the one asked for.
    - ServerError: the server or the connection failed.
    - StoreTimeout: no answer came in time.
    - UnsuitedError: obstore cannot tell; ask fsspec's file system.

    Attributes:
        proven: a request has succeeded.
    """

    def __init__(self, fs: Any, root: str, connect: Callable[..., tuple[str, Any]], timeout_s: float) -> None:
        self._fs = fs
        self._root = root
        self._threads = DaemonThreads("shardfs-store", MOST_THREADS)
        self._connect = connect
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._prefix = ""
        self._store: Any = None
        self._usable = True
        self.proven = False

    def suits(self, path: str) -> bool:
        """Return whether obstore may be asked for an object; its path is that in fsspec's file system.

        The first call connects, in the process that will send the requests: obstore does not survive a fork.
        """
        if _runtime_pid == ENDED and threading.current_thread().daemon:
            threading.Event().wait()  # the interpreter is about to stop this thread; fsspec could not be imported now
        if self._usable and self._store is None:
            self._open()
        return self._usable and _runtime_pid == os.getpid() and PLAIN.fullmatch(self._key(path)) is not None

    def _open(self) -> None:
        global _runtime_pid
        with self._lock:
            if self._store is not None or not self._usable or _runtime_pid not in (None, os.getpid()):
                return
            if _runtime_pid is None:
                atexit.register(_end)
            _runtime_pid = os.getpid()
            client = dict.fromkeys(("timeout", "connect_timeout"), timedelta(seconds=BOUND * self._timeout_s))
            try:
                retry_config = {"max_retries": 0}  # `RetryPolicy` repeats requests
                prefix, store = self._connect(self._fs, self._root, {**client, "allow_http": True}, retry_config)
                self._prefix = prefix
                self._store = store
            except Exception as e:  # noqa: BLE001 - the reason is logged, and fsspec serves instead
                self.give_up(e)

    def give_up(self, why: Exception) -> None:
        """From now on, `suits` no object. `why` goes to the log."""
        if self._usable:
            log.info("%s: fsspec reads all bytes, because obstore cannot: %s", self._root, why)
        self._usable = False

    @bounded
    def get(self, path: str, request: ByteRequest, tag: str | None) -> Answer:
        """Return a byte range of an object that `suits`. Ends within the time-out.

        Args:
            request: not empty.
            tag: the ETag of the version to read; None for any.
        """
        import obstore

        with self._asking(path, tag):
            if isinstance(request, Suffix) and self._connect is _azure:  # Azure knows no ranges from the end
                meta = obstore.head(self._store, self._key(path))
                request, tag = ByteRange(max(meta["size"] - request.size, 0), meta["size"]), tag or meta["e_tag"]
                if not meta["size"]:
                    return Answer(b"", self._info(meta))
            reply = obstore.get(self._store, self._key(path), options=self._options(request, tag))
            return self._answer(reply, memoryview(reply.bytes()))

    @bounded
    def head(self, path: str) -> Mapping[str, Any]:
        """Return the `info` of an object that `suits`, or of what a server shows in its place.

        Raise UnsuitedError if the answer has no ETag.
        """
        import obstore

        with self._asking(path, None):
            meta = obstore.head(self._store, self._key(path))
            if meta["e_tag"] is None:
                raise UnsuitedError("the answer may describe the listing of a directory")
            return self._info(meta)

    def get_many(self, calls: Sequence[tuple[str, ByteRequest, str | None]]) -> list[Answer | BaseException]:
        """Return the answers of `get`, or its errors, for requests that are sent at the same time.

        `calls`: the arguments of `get`. Raise StoreTimeout if no request was answered in time.
        """
        futures = [self._threads.submit(partial(self.get, *call), may_wait=False) for call in calls]
        wait(futures)
        answers = [future.exception() or future.result() for future in futures]
        if answers and all(isinstance(answer, StoreTimeout) for answer in answers):
            raise timeout_error(self._timeout_s)
        return answers

    @contextmanager
    def _asking(self, path: str, tag: str | None) -> Iterator[None]:
        """Note that a request is under way, and convert its exceptions."""
        _under_way.add(mark := object())
        try:
            yield
        except Exception as e:
            raise self._error(e, path, tag) from e
        finally:
            _under_way.discard(mark)

    def _options(self, request: ByteRequest, tag: str | None) -> Any:
        where = {"suffix": request.size} if isinstance(request, Suffix) else tuple(request)
        if tag is None:
            return {"range": where}
        return {"range": where, **({"version": tag.strip('"')} if self._connect is _gcs else {"if_match": tag})}

    def _key(self, path: str) -> str:
        return path.removeprefix(self._prefix)

    def _answer(self, reply: Any, data: memoryview) -> Answer:
        """Return the answer, unless it may be a web server's page or an encoded form of the object."""
        kind, encoding = reply.attributes.get("Content-Type", ""), reply.attributes.get("Content-Encoding", "")
        encoded = encoding not in ("", "identity") and self._connect is not _s3  # s3fs returns the bytes as they are
        if self._connect is _http and ("html" in kind or encoded):
            raise UnsuitedError(f"the answer has the type {kind!r} and the encoding {encoding!r}")
        self.proven = True
        return Answer(data, self._info(reply.meta), encoded)

    def _info(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        info = {"size": meta["size"], "ETag": meta["e_tag"], "LastModified": meta["last_modified"]}
        return info | ({"generation": meta["version"]} if self._connect is _gcs else {})

    def _error(self, error: Exception, path: str, tag: str | None) -> Exception:
        """Return the exception that says what an exception of obstore means, which has the reason only as text."""
        if isinstance(error, UnsuitedError):
            return error
        text, _, details = str(error).partition("\n\nDebug source")
        text = re.sub(r" in [\d.]+[nµu]?m?s\b", "", text)  # equal failures have equal texts
        status, failure = re.search(r"status code: (\d+)", text), re.search(r"HttpError \{\s+kind: (\w+)", details)
        # To obstore, an answer 405 means a missing object as well, but some servers give it to each HEAD.
        missing = isinstance(error, FileNotFoundError) and not (status and status[1] == "405")
        if type(error).__name__ == "PreconditionError" or (missing and tag is not None):
            return replaced(path)
        if missing and (self.proven or any(f"<Code>{code}</Code>" in text for code in NO_OBJECT)):
            return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if failure is not None and failure[1] == "Timeout":
            return timeout_error(self._timeout_s)
        failed, unsuited = ServerError(errno.EIO, text, path), UnsuitedError(text)
        failed.status = unsuited.status = int(status[1]) if status is not None else None
        # A connection that never succeeded may need a proxy or a certificate that only the other client knows.
        lost = failure is not None and (self.proven or failure[1] == "Interrupted")
        if self._connect is _http and unsuited.status in THROTTLED:
            return unsuited
        return failed if lost or (failed.status is not None and is_transient(failed)) else unsuited


def _end() -> None:
    """Let requests end before the interpreter does: an answer that reaches it later crashes the process."""
    global _runtime_pid
    if _runtime_pid == os.getpid():
        _runtime_pid = ENDED
        end = monotonic() + END_S
        while _under_way and monotonic() < end:
            sleep(0.005)


# ---- connecting ----


HARMLESS_HEADERS = frozenset(
    (
        "accept", "accept-encoding", "accept-language", "if-match", "if-modified-since", "if-none-match", "if-range",
        "if-unmodified-since", "range", "user-agent",
    )
)  # fmt: skip
"""Headers that are sent to every host. All others may be secret, such as X-Api-Key, and are for the host of the URL."""


def _http(fs: Any, root: str, client: dict[str, Any], retry_config: Any) -> tuple[str, Any]:
    """Return the prefix of all URLs of a web server, and obstore's store for it."""
    from obstore.store import HTTPStore

    parts = urlsplit(root)
    if "@" in parts.netloc:
        raise UnsuitedError("the URL contains a password")
    inner = fs.storage_options.get("client_kwargs") or {}
    if not inner.get("trust_env") and any(n.lower().endswith("_proxy") and value for n, value in os.environ.items()):
        raise UnsuitedError("the environment names proxies, which are not used without client_kwargs.trust_env")
    headers = {**inner.get("headers", {}), **fs.storage_options.get("headers", {})}
    if not HARMLESS_HEADERS.issuperset(map(str.lower, headers)):
        raise UnsuitedError("it would send the headers to other hosts, too, if the server redirects to them")
    client["default_headers"] = {**headers, "Accept-Encoding": "identity"}
    _verify(client, fs.storage_options.get("ssl", True))
    url = f"{parts.scheme}://{parts.netloc}"
    return f"{url}/", HTTPStore(url, client_options=client, retry_config=retry_config)  # type: ignore[arg-type]


def _s3(fs: Any, root: str, client: dict[str, Any], retry_config: Any) -> tuple[str, Any]:
    """Return the bucket and a slash, and obstore's store for it, connected as s3fs is."""
    from obstore.store import S3Store

    settings = s3_settings(fs.storage_options) or _asked_of_botocore(fs, client["timeout"].total_seconds())
    bucket = root.partition("/")[0]
    if PLAIN.fullmatch(bucket) is None:
        raise UnsuitedError("the source is not in a bucket")
    options: dict[str, Any] = {"request_payer": True} if fs.storage_options.get("requester_pays") else {}
    options |= {"credential_provider": settings.provide} if settings.provide else {"skip_signature": True}
    options |= {"region": settings.region, "endpoint": settings.endpoint}
    _verify(client, settings.verify)
    return f"{bucket}/", S3Store(bucket, client_options=client, retry_config=retry_config, **options)  # type: ignore[arg-type]


def _asked_of_botocore(fs: Any, seconds: float) -> S3Settings:
    """Return how s3fs connects. It knows best which options, variables, files and services apply."""
    import botocore

    boto = _wait_for(fs.set_session(), fs.loop, seconds)
    config = boto.meta.config
    credentials = boto._request_signer._credentials
    provide = None
    if (config.s3 or {}).get("addressing_style") == "virtual":
        raise UnsuitedError("the storage options or the AWS configuration name the virtual addressing style")
    if config.signature_version is not botocore.UNSIGNED:
        if config.signature_version != "s3v4" or credentials is None:
            raise UnsuitedError(f"requests are signed with {config.signature_version}, or there are no credentials")
        provide = _credentials(credentials, fs.loop, seconds)
    region = boto.meta.region_name
    region = "us-east-1" if region in (None, "aws-global") else region
    return S3Settings(boto.meta.endpoint_url, region, provide, boto._endpoint.http_session._verify)


def gcs_is_open(options: Mapping[str, Any]) -> bool:
    """Return whether gcsfs sends no credentials, to a known endpoint."""
    variables = {"STORAGE_EMULATOR_HOST", "GOOGLE_API_USE_MTLS_ENDPOINT"}
    return options.get("token") == "anon" and ("endpoint_url" in options or variables.isdisjoint(os.environ))


def _gcs(fs: Any, root: str, client: dict[str, Any], retry_config: Any) -> tuple[str, Any]:
    """Return the bucket and a slash, and obstore's store for it, connected as gcsfs is."""
    from obstore.store import GCSStore

    bucket, options, seconds = root.partition("/")[0], fs.storage_options, client["timeout"].total_seconds()

    def provide() -> Any:
        headers: dict[str, str] = {}
        import asyncio

        # gcsfs may refresh the token, with blocking calls.
        _wait_for(asyncio.to_thread(fs.credentials.apply, headers), fs.loop, seconds)
        name = next(name for name in headers if name.lower() == "authorization")
        expiry = fs.credentials.credentials.expiry
        return {"token": headers[name].removeprefix("Bearer "), "expires_at": expiry and expiry.replace(tzinfo=UTC)}

    if not bucket:
        raise UnsuitedError("the source is not in a bucket")
    is_open = gcs_is_open(options)
    signing: dict[str, Any] = {"skip_signature": True}
    if not is_open and fs.credentials.credentials:
        signing = {"credential_provider": provide}
    if (payer := options.get("requester_pays")) is not None and payer is not False:
        client["default_headers"] = {"x-goog-user-project": payer if isinstance(payer, str) else fs.project}
    url = (options.get("endpoint_url") or GOOGLE) if is_open else fs._location
    return f"{bucket}/", GCSStore(bucket, base_url=url, client_options=client, retry_config=retry_config, **signing)  # type: ignore[arg-type]


def _azure(fs: Any, root: str, client: dict[str, Any], retry_config: Any) -> tuple[str, Any]:
    """Return the container and a slash, and obstore's store for it, connected as adlfs is."""
    from obstore.store import AzureStore

    container, service, seconds = root.partition("/")[0], fs.service_client, client["timeout"].total_seconds()
    url, credential = urlsplit(service.url), service.credential

    def provide() -> Any:
        token = _wait_for(credential.get_token(AZURE_SCOPE), fs.loop, seconds)
        return {"token": token.token, "expires_at": datetime.fromtimestamp(token.expires_on, UTC)}

    if not container:
        raise UnsuitedError("the source is not in a container")
    options: dict[str, Any] = {"account_name": service.account_name}
    if (key := getattr(credential, "account_key", None)) is not None:
        options |= {"account_key": key, "credential_type": "access_key"}
    elif "sig=" in url.query:
        options |= {"sas_key": url.query, "credential_type": "sas_token"}
    elif hasattr(credential, "get_token"):
        options["credential_provider"] = provide
    elif credential is None:
        options["skip_signature"] = True
    else:
        raise UnsuitedError(f"it does not know credentials of the type {type(credential).__name__}")
    options["endpoint"] = f"{url.scheme}://{url.netloc}{url.path.rstrip('/')}"
    return f"{container}/", AzureStore(container, client_options=client, retry_config=retry_config, **options)  # type: ignore[arg-type]


def _credentials(credentials: Any, loop: Any, seconds: float) -> Callable[[], Any]:
    """Return what obstore calls for credentials, which botocore may have to refresh."""

    def provide() -> Any:
        frozen = _wait_for(credentials.get_frozen_credentials(), loop, seconds)
        expires_at = getattr(credentials, "_expiry_time", None)
        names = {"access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key, "token": frozen.token}
        return {**names, "expires_at": expires_at and expires_at.astimezone(UTC)}

    return provide


def _wait_for(coroutine: Any, loop: Any, seconds: float) -> Any:
    import asyncio

    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(seconds)


def _verify(client: dict[str, Any], verify: Any) -> None:
    """Set how certificates are checked. `verify` is False, True or None for the usual way, or the path of a bundle."""
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(verify, str):
        client["root_certificate"] = Path(verify).read_text()
    elif verify not in (True, None):
        raise UnsuitedError("the option ssl is an object of Python")


_CLIENTS: dict[str, tuple[Callable[..., tuple[str, Any]], set[str], dict[str, set[str]]]] = {
    "s3": (_s3, _S3, _S3_INNER),
    "gs": (_gcs, _GCS, {}),
    "abfs": (_azure, _AZURE, {}),
    "http": (_http, _HTTP, _HTTP_INNER),
}
"""Protocol of the file system -> how to connect, and the options that it may have, also inside of others."""
