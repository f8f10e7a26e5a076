"""An executor on a Dask cluster, for `shared_work`."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKERS_S = 60
"""Seconds to wait for the first worker."""

WATCH_S = 0.5
"""Seconds between looks at the connection."""


@contextmanager
def dask_executor(address: str) -> Iterator[tuple[Executor, int]]:
    """Context manager that yields an executor on a cluster, and the number of threads of the cluster, at least 1.

    Leaving it closes the connection; unfinished tasks are released.

    Args:
        address: the address of the scheduler, or the path of its scheduler file.

    Raise ImportError without the package distributed; OSError if no scheduler answers or it gets no workers.
    """
    from distributed import Client

    where = {"scheduler_file": address} if os.path.isfile(address) else {"address": address}
    try:
        client = Client(**where)
    except (OSError, ValueError) as e:
        raise OSError(errno.EHOSTUNREACH, f"no Dask scheduler can be reached: {e}", address) from e
    with client:
        try:
            client.wait_for_workers(1, timeout=WORKERS_S)
        except TimeoutError as e:
            raise OSError(errno.ETIMEDOUT, f"the Dask scheduler has no workers after {WORKERS_S} s", address) from e
        executor = _DaskExecutor(client)
        try:
            yield executor, max(1, sum(client.nthreads().values()))
        finally:
            executor.shutdown()


class _DaskExecutor(Executor):
    """Dask's executor, but its futures are cancelled when the scheduler is lost. Some would never end otherwise."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._connection = client.scheduler_comm
        self._executor = client.get_executor(retries=2)
        self._submitted: WeakSet[Future[Any]] = WeakSet()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = self._executor.submit(fn, *args, **kwargs)
        self._submitted.add(future)
        return future

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_S):
            if self._client.status != "running" or self._client.scheduler_comm is not self._connection:
                for future in list(self._submitted):
                    future.cancel()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the watch. The client releases unfinished tasks when it is closed."""
        self._ended.set()
