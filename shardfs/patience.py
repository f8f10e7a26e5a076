"""How long a store is waited for, and what is tried again.

A call of a client may never return. It is made in a place that can be left: as a task of fsspec's event loop, which is
cancelled, or if the client blocks, in a thread of its own, which is left to itself.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
import queue
import random
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from time import monotonic as clock
from typing import TYPE_CHECKING, Any

from shardfs.counting import StoreCounters
from shardfs.errors import errno_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIMEOUT_S, RETRIES = 30.0, 4
"""What is not said otherwise."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
"""Before the first retry, and three times as long before each further one."""

MOST_THREADS = 64
"""Calls that block at the same time. If all of them hang, further ones run out of time before they begin."""


class NoAnswer(TimeoutError):
    """The store said nothing in time."""


class Patience:
    """Makes the calls of one store. Thread-safe.

    A call that gets no answer in `timeout_s` seconds is given up; an operation ends after twice that at the latest,
    with all its retries. While a store says nothing at all, it is asked one thing at a time, and whatever else is
    wanted of it fails at once: the threads of a mount must not all wait for it.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S, retries: int = RETRIES) -> None:
        self.timeout_s, self.retries = timeout_s, retries
        self.counters = StoreCounters()
        self._threads = _Threads()
        self._silent = False
        self._probing = threading.Lock()

    @property
    def silent(self) -> bool:
        """Whether the last operations got no answer."""
        return self._silent

    def run(self, kind: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `method`, a method of an fsspec file system, returns or raises; NoAnswer if it does neither in time.
        It may be a coroutine method of an object with the event loop `loop`.

        A list that is returned may have exceptions in it, and is asked for again if one of them is an accident.
        """
        began, failure = clock(), None
        self.counters.begin(kind)
        try:
            with self._admitted() as retries:
                return self._attempts(retries, began, method, args, kwargs)
        except Exception as e:
            failure = errno_of(e)
            raise
        finally:
            self.counters.end(clock() - began, failure)

    @contextmanager
    def _admitted(self) -> Iterator[int]:
        """How often the operation may be tried again."""
        if not self._silent:
            yield self.retries
        elif self._probing.acquire(blocking=False):
            try:
                yield 0
            finally:
                self._probing.release()
        else:
            raise NoAnswer(errno.ETIMEDOUT, "the store does not answer")

    def _attempts(self, retries: int, began: float, method: Any, args: Any, kwargs: Any) -> Any:
        end = began + self.timeout_s * (2 if retries else 1)
        for number in range(retries + 1):
            result, failure = self._attempt(min(self.timeout_s, end - clock()), method, args, kwargs)
            timeout = isinstance(failure, NoAnswer)
            self.counters.attempt(again=number > 0, timeout=timeout)
            if not timeout:
                self._silent = False
            pause = min(FIRST_PAUSE_S * 3**number, LONGEST_PAUSE_S) * random.uniform(0.5, 1)
            accident = failure or _first_accident(result)
            if accident is None or not is_accident(accident) or number == retries or clock() + pause >= end:
                break
            time.sleep(pause)
        if failure is not None:
            self._silent = timeout
            raise failure
        return result

    def _attempt(self, seconds: float, method: Any, args: Any, kwargs: Any) -> tuple[Any, Exception | None]:
        future = self._begun(method, args, kwargs)
        if not wait([future], seconds).done:
            future.cancel()
            return None, NoAnswer(errno.ETIMEDOUT, f"the store does not answer within {self.timeout_s:g} s")
        try:
            return future.result(), None
        except Exception as e:  # noqa: BLE001 - raised by the caller, if it is not tried again
            return None, e

    def _begun(self, method: Any, args: Any, kwargs: Any) -> Future[Any]:
        # A coroutine can be cancelled. The blocking methods that fsspec makes from coroutines say which.
        coroutine = getattr(method, "__wrapped__", method)
        loop = getattr(getattr(coroutine, "__self__", None), "loop", None)
        if loop is not None and inspect.iscoroutinefunction(coroutine):
            return asyncio.run_coroutine_threadsafe(coroutine(*args, **kwargs), loop)
        return self._threads.submit(lambda: method(*args, **kwargs))


class _Threads:
    """Daemons, unlike those of the standard library's executor: the end of the program does not wait for them."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._count = self._free = 0

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        if self._pid != os.getpid():  # no thread survives a fork
            self._reset()
        future: Future[Any] = Future()
        with self._lock:
            # Those without a call, less the calls that wait for one: negative if there are more of these. Kept here and
            # at the end of a call alone, as a thread that has just taken one may be long in saying so.
            self._free -= 1
            if self._free < 0 and self._count < MOST_THREADS:
                self._count += 1
                self._free += 1
                threading.Thread(target=self._work, name=f"shardfs-store-{self._count}", daemon=True).start()
            self._jobs.put((future, call))
        return future

    def _work(self) -> None:
        while True:
            future, call = self._jobs.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as e:  # noqa: BLE001 - it is raised where the result is waited for
                    future.set_exception(e)
            del future, call
            with self._lock:
                self._free += 1


# ---- what went wrong


def is_accident(error: BaseException) -> bool:
    """Whether the same call may well succeed a moment later: connections, time-outs, throttling, faults of a server."""
    if _error_code(error) in _THROTTLED:
        return True
    status = http_status(error)
    if status is not None:
        return status in (408, 425, 429) or (status >= 500 and status not in (501, 505))
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:  # `info` of fsspec's HTTP
        return is_accident(error.__cause__)
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    if names & _FINAL:
        return False
    if isinstance(error, ConnectionError | TimeoutError) or names & _PASSING:
        return True
    return isinstance(error, OSError) and error.errno in _PASSING_ERRNOS


def _first_accident(result: Any) -> BaseException | None:
    parts = result if isinstance(result, list) else ()
    return next((part for part in parts if isinstance(part, BaseException) and is_accident(part)), None)


_PASSING = {
    "aiohttp.ClientConnectionError", "aiohttp.ClientPayloadError", "botocore.ConnectionError",
    "botocore.HTTPClientError", "botocore.ResponseStreamingError", "azure.ServiceRequestError",
    "azure.ServiceResponseError", "google.TransportError", "requests.ConnectionError", "requests.Timeout",
    "requests.ChunkedEncodingError", "urllib3.HTTPError", "http.IncompleteRead",
}  # fmt: skip
"""Exceptions of clients, which are not imported for this; subclasses count."""

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
    """What a store of the kind of S3 calls it; as the cause, since s3fs translates to OSErrors."""
    response = getattr(error.__cause__ or error, "response", None)
    told = response.get("Error") if isinstance(response, Mapping) else None
    return told.get("Code") if isinstance(told, Mapping) else None


def http_status(error: BaseException) -> int | None:
    """The status behind an exception of aiohttp, gcsfs or Azure (an attribute) or botocore (in its response)."""
    for name in ("status", "status_code", "code"):
        status = getattr(error, name, None)
        if isinstance(status, int) and 100 <= status < 600:
            return status
    response = getattr(error.__cause__ or error, "response", None)
    if isinstance(response, Mapping):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return found if isinstance(found, int) else None
    return None
