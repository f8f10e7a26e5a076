"""Time-outs and retries of requests to a store.

A call of a client library may never return. So the call runs as a task of fsspec's event loop, which a time-out
cancels; if the client blocks, the call runs in a thread of its own, which a time-out abandons. Only a client that is
known to end within the time-out is called directly.
"""

from __future__ import annotations

import errno
import inspect
import random
import threading
import time
from collections.abc import Mapping
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from time import monotonic as clock
from typing import TYPE_CHECKING, Any, TypeVar

from shardfs.model.errors import errno_of
from shardfs.storage.counters import StoreCounters
from shardfs.storage.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    Method = TypeVar("Method", bound=Callable[..., Any])

TIMEOUT_S, RETRIES = 30.0, 4
"""Defaults of `RetryPolicy`."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
"""The pause before the first retry, and the longest one. Each pause is three times the one before."""

BOUND = 0.95
"""The share of the time-out within which a `bounded` method ends, so that a second attempt fits in."""

MOST_THREADS = 64
"""Most blocking calls at a time. If all of them hang, further calls time out before they start."""


class StoreTimeout(TimeoutError):
    """The store did not answer in time."""


class UnsuitedError(Exception):
    """The client cannot answer the request; another one may.

    `status`: the HTTP status; None if there was no answer.
    """

    status: int | None = None


def bounded(method: Method) -> Method:
    """Mark a method that ends within `BOUND` of the time-out by itself. The caller's thread calls it directly."""
    method.bounded = True  # type: ignore[attr-defined]
    return method


def timeout_error(seconds: float) -> StoreTimeout:
    """Return the error to raise for a request that the store has not answered within `seconds`."""
    why = f"the store does not answer within {seconds:g} s; check the network, or raise -o store_timeout"
    return StoreTimeout(errno.ETIMEDOUT, why)


class RetryPolicy:
    """Time-outs and repetitions of the requests to one store. Thread-safe.

    An attempt times out after `timeout_s` seconds; an operation with all its retries ends after at most twice that. An
    error is retried if it `is_transient`. While a store does not answer at all, only one operation at a time is sent to
    it. All others fail at once, so that not all threads of a mount wait for the store.

    Args:
        retries: the most attempts after the first.

    Attributes:
        counters: counts what `run` does.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S, retries: int = RETRIES) -> None:
        self.timeout_s = timeout_s
        self.retries = retries
        self.counters = StoreCounters()
        self._threads = DaemonThreads("shardfs-store", MOST_THREADS)
        self._silent = False
        self._probing = threading.Lock()
        self._thread = threading.local()

    @property
    def silent(self) -> bool:
        """Whether the last operation got no answer in time."""
        return self._silent

    @contextmanager
    def optional(self) -> Iterator[None]:
        """Within this block, the thread's operations are not retried, and their time-outs do not make others fail."""
        self._thread.optional = True
        try:
            yield
        finally:
            self._thread.optional = False

    def _is_optional(self) -> bool:
        return getattr(self._thread, "optional", False)

    def run(self, kind: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what `method` returns. Raise what it raises at last, or StoreTimeout if it does not return in time.

        Args:
            kind: the name under which `counters` count the operation.
            method: a method of an fsspec file system, which is called with the other arguments. It may be a coroutine
                method of an object with the event loop `loop`, or be `bounded`. It may return a list that contains
                exceptions: then the call is retried if one of them is transient, and the last list is returned.
        """
        start, failure = clock(), None
        self.counters.count_start(kind)
        try:
            with self._admitted() as retries:
                return self._attempts(retries, start, method, args, kwargs)
        except UnsuitedError:  # the store has not failed
            raise
        except Exception as e:
            failure = errno_of(e)
            raise
        finally:
            self.counters.count_end(clock() - start, failure)

    @contextmanager
    def _admitted(self) -> Iterator[int]:
        """Yield the number of retries for an operation. Raise StoreTimeout if the store is silent and being probed."""
        if not self._silent:
            yield 0 if self._is_optional() else self.retries
            return
        if self._is_optional() or not self._probing.acquire(blocking=False):
            why = "the store does not answer, and another request already tests it; try again later"
            raise StoreTimeout(errno.ETIMEDOUT, why)
        try:
            yield 0
        finally:
            self._probing.release()

    def _attempts(self, retries: int, start: float, method: Any, args: Any, kwargs: Any) -> Any:
        end = start + self.timeout_s * (2 if retries else 1)
        for number in range(retries + 1):
            answer, failure = self._attempt(min(self.timeout_s, end - clock()), method, args, kwargs)
            timeout = isinstance(failure, StoreTimeout)
            self.counters.add(retries=number > 0, timeouts=timeout)
            if not timeout:
                self._silent = False
            pause = min(FIRST_PAUSE_S * 3**number, LONGEST_PAUSE_S) * random.uniform(0.5, 1)
            parts = [failure] if failure else answer if isinstance(answer, list) else ()
            transient = [part for part in parts if isinstance(part, BaseException) and is_transient(part)]
            requested = max(map(_retry_after, transient), default=0.0)
            pause = max(pause, min(requested, end - clock() - BOUND * self.timeout_s))
            last = end - BOUND * self.timeout_s if hasattr(method, "bounded") else end - pause
            if not transient or number == retries or clock() >= last:
                break
            time.sleep(pause)
        if failure is not None:
            self._silent |= timeout and not self._is_optional()
            raise failure
        return answer

    def _attempt(self, seconds: float, method: Any, args: Any, kwargs: Any) -> tuple[Any, Exception | None]:
        try:
            if hasattr(method, "bounded"):
                return method(*args, **kwargs), None
            future = self._begun(method, args, kwargs)
            if not wait([future], seconds).done:
                future.cancel()
                return None, timeout_error(self.timeout_s)
            return future.result(), None
        except Exception as e:  # noqa: BLE001 - the caller raises it after the last attempt
            return None, e

    def _begun(self, method: Any, args: Any, kwargs: Any) -> Future[Any]:
        # A coroutine can be cancelled. The blocking methods that fsspec makes from coroutines have it as an attribute.
        coroutine = getattr(method, "__wrapped__", method)
        loop = getattr(getattr(coroutine, "__self__", None), "loop", None)
        if loop is not None and inspect.iscoroutinefunction(coroutine):
            import asyncio

            return asyncio.run_coroutine_threadsafe(coroutine(*args, **kwargs), loop)
        return self._threads.submit(lambda: method(*args, **kwargs), may_wait=False)


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed: after a lost connection, a time-out, throttling or a server error."""
    if isinstance(error, UnsuitedError):
        return False
    if _error_code(error) in _THROTTLED:
        return True
    status = http_status(error)
    if status is not None:
        return status in (408, 425, 429) or (status >= 500 and status not in (501, 505))
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:  # `info` of fsspec's HTTP
        return is_transient(error.__cause__)
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    if names & _FINAL:
        return False
    if isinstance(error, ConnectionError | TimeoutError) or names & _PASSING:
        return True
    return isinstance(error, OSError) and error.errno in _PASSING_ERRNOS


_PASSING = {
    "aiohttp.ClientConnectionError", "aiohttp.ClientPayloadError", "botocore.ConnectionError",
    "botocore.HTTPClientError", "botocore.ResponseStreamingError", "azure.ServiceRequestError",
    "azure.ServiceResponseError", "google.TransportError", "requests.ConnectionError", "requests.Timeout",
    "requests.ChunkedEncodingError", "urllib3.HTTPError", "http.IncompleteRead",
}  # fmt: skip
"""Transient exceptions of client libraries, by name because these are not imported here. Subclasses count."""

_FINAL = {
    "aiohttp.ClientSSLError", "aiohttp.ClientConnectorCertificateError", "aiohttp.InvalidURL", "botocore.SSLError",
    "ssl.SSLCertVerificationError",
}  # fmt: skip

_PASSING_ERRNOS = {
    errno.EAGAIN, errno.EBUSY, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH,
    errno.ETIMEDOUT,
}  # fmt: skip

_THROTTLED = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestTimeout", "ServerBusy",
              "InternalError", "ServiceUnavailable", "TooManyRequests"}  # fmt: skip


def _error_code(error: BaseException) -> str | None:
    """Return the S3 error code. It is usually in the cause, as s3fs raises OSErrors from botocore's exceptions."""
    response = getattr(error.__cause__ or error, "response", None)
    details = response.get("Error") if isinstance(response, Mapping) else None
    return details.get("Code") if isinstance(details, Mapping) else None


def _retry_after(error: BaseException) -> float:
    """Return the seconds that the server asks to wait, in an exception of aiohttp or botocore; 0 if unknown.

    The header Retry-After has seconds or a date (RFC 9110, section 10.2.3).
    """
    cause = error.__cause__ or error
    response = getattr(cause, "response", None)
    if isinstance(response, Mapping):
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders")
    else:
        headers = getattr(cause, "headers", None)
    value = headers.get("retry-after", "") if isinstance(headers, Mapping) else ""
    if not value or value.isdecimal():
        return float(value or 0)
    from email.utils import parsedate_to_datetime  # this import is slow

    with suppress(ValueError):
        return parsedate_to_datetime(value).timestamp() - time.time()
    return 0.0


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status of an exception of aiohttp, gcsfs, Azure (an attribute) or botocore (in its response).

    None if it has none.
    """
    for name in ("status", "status_code", "code"):
        status = getattr(error, name, None)
        if isinstance(status, int) and 100 <= status < 600:
            return status
    response = getattr(error.__cause__ or error, "response", None)
    if isinstance(response, Mapping):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    return None
