"""Calls in sandbox processes: what they return and raise, what happens when a process ends, and what it cannot do."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.codecs import sandbox, sandbox_process
from shardfs.codecs.sandbox import REPLY, Crash, Sandbox
from tests.codecs import hostile
from tests.datasets import ROOT
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST = 1 << 20


@pytest.fixture
def worker() -> Iterator[Sandbox]:
    sandbox = Sandbox((hostile.__name__,))
    yield sandbox
    sandbox.kill()


def call(worker: Sandbox, function: Callable[..., Any], payload: bytes = b"", **arguments: Any) -> bytes:
    return bytes(worker.call(function, payload, arguments, MOST))


def pids(worker: Sandbox) -> list[int]:
    return [process.pid for process in (w._process for w in worker._workers) if process is not None]


def test_calls(worker: Sandbox) -> None:
    first = call(worker, hostile.process)
    assert first != hostile.process(bytearray())
    assert json.loads(call(worker, hostile.echo, b"abc", a=[1, None], b="é")) == {
        "payload": "abc", "a": [1, None], "b": "é",
    }  # fmt: skip
    for kind in (ValueError, ImportError, MemoryError):
        with pytest.raises(kind, match="the reason"):
            call(worker, hostile.fail, b"the reason", kind=kind.__name__)
    assert call(worker, hostile.print_much) == b"answer"
    assert call(worker, hostile.process) == first


@pytest.mark.parametrize("size", [0, 1, 3 << 20])
def test_payloads_and_answers_of_any_size_pass(size: int, worker: Sandbox) -> None:
    assert worker.call(hostile.allocate, bytes(size), {"nbytes": size}, size) == bytes(size)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(hostile.end, {"status": 3}), (hostile.end, {"status": 0}), (hostile.fail, {"kind": "KeyError"})],
)
def test_a_crash_is_reported_and_the_next_call_works(
    function: Callable[..., bytes], arguments: dict[str, Any], worker: Sandbox
) -> None:
    for _ in range(2):
        with pytest.raises(Crash):
            call(worker, function, **arguments)
        assert json.loads(call(worker, hostile.echo))["payload"] == ""


def test_a_crash_of_a_used_process_does_not_fail_the_call(worker: Sandbox) -> None:
    first, second = (call(worker, hostile.crash_at_the_second_call) for _ in range(2))
    assert first != second


def test_a_call_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch, worker: Sandbox) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    with pytest.raises(Crash, match=r"no answer within 0\.5 s"):
        call(worker, hostile.hang)


def test_memory_is_bounded(worker: Sandbox) -> None:
    with pytest.raises(MemoryError):
        call(worker, hostile.allocate, nbytes=sandbox_process.MEMORY)


def test_threads_get_their_own_answers(worker: Sandbox) -> None:
    answers: dict[int, bytes] = {}

    def ask(n: int) -> None:
        for _ in range(50):
            answers[n] = call(worker, hostile.echo, b"%d" % n)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(2 * sandbox.PROCESSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: json.loads(answer)["payload"] for n, answer in answers.items()} == {n: str(n) for n in answers}
    assert len(pids(worker)) <= sandbox.PROCESSES


def test_calls_that_hang_do_not_delay_another_one(worker: Sandbox) -> None:
    crashes = []

    def ask() -> None:
        with pytest.raises(Crash):
            call(worker, hostile.hang)
        crashes.append(0)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(pids(worker)) == 3)
    assert json.loads(call(worker, hostile.echo))["payload"] == ""
    assert not crashes
    worker.kill()
    for thread in threads:
        thread.join()


def test_a_forked_process_has_its_own_sandbox(worker: Sandbox) -> None:
    first = call(worker, hostile.process)
    child = os.fork()
    if not child:
        worker.abandon()
        os._exit(call(worker, hostile.process) == first)
    assert os.waitpid(child, 0)[1] == 0
    assert call(worker, hostile.process) == first


# ---- hostile processes


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self._path),)


def test_an_answer_is_never_unpickled(worker: Sandbox, tmp_path: Path) -> None:
    trap = pickle.dumps((True, Trap(tmp_path / "made")))
    with pytest.raises(Crash, match="answered with status"):
        call(worker, hostile.send, trap)
    assert call(worker, hostile.send, REPLY.pack(0, len(trap)) + trap) == trap
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("status", "size"), [(0, MOST + 1), (0, 2**64 - 1), (1, 4097), (4, 1), (255, 0)])
def test_an_answer_is_bounded(status: int, size: int, worker: Sandbox) -> None:
    with pytest.raises(Crash, match=f"answered with status {status} and {size} bytes"):
        call(worker, hostile.send, REPLY.pack(status, size))
    assert json.loads(call(worker, hostile.echo))["payload"] == ""


def attempt(worker: Sandbox, path: Path) -> list[str]:
    """What a hostile process succeeds in; `path` is a file of this user."""
    path.write_bytes(b"precious")
    os.chmod(path.parent, 0o777)
    os.chmod(path, 0o666)
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = {"path": str(path), "parent": os.getpid(), "port": server.getsockname()[1]}
        succeeded: list[str] = json.loads(call(worker, hostile.attempt, **words))
    assert path.read_bytes() == b"precious"
    return succeeded


@pytest.mark.parametrize("threads", [False, True])
def test_a_process_has_no_files_network_environment_or_privileges(threads: bool, tmp_path: Path) -> None:
    worker = Sandbox((hostile.__name__,), threads=threads)
    succeeded = attempt(worker, tmp_path / "file")
    (outer,) = pids(worker)
    inner = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
    process = inner[0] if inner else outer  # without the right to make a namespace of processes
    status = dict(line.split(":\t") for line in Path(f"/proc/{process}/status").read_text().splitlines())
    assert Path(f"/proc/{process}/environ").read_bytes() == b""
    worker.kill()
    assert [name for name in succeeded if name != "fork" or not threads] == []
    assert status["NoNewPrivs"] == "1"
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
    assert "0" not in (*status["Uid"].split("\t"), *status["Groups"].split())


@pytest.mark.skipif(os.geteuid() != 0, reason="the test above does the same")
def test_a_process_of_an_ordinary_user_has_no_files_network_environment_or_privileges(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from tests.codecs import hostile, test_sandbox as t; "
    code += "print(t.attempt(t.Sandbox((hostile.__name__,)), Path(sys.argv[1])))"
    as_user = ["unshare", "--user", "--map-user=1000", "--map-group=1000", sys.executable, "-c", code]
    completed = subprocess.run([*as_user, str(tmp_path / "file")], cwd=ROOT, capture_output=True, text=True)
    if "unshare failed" in completed.stderr:
        pytest.skip(completed.stderr)
    # Outside of this namespace, the user is root, who may fork.
    assert (completed.stdout, completed.stderr) == ("['fork']\n", "")
