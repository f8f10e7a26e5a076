"""The options with which a source is read also apply to jobs on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from click.testing import CliRunner

from shardfs.cli import commands
from shardfs.jobs import shared_work
from shardfs.vfs import tree
from tests.mount.distant import serving

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = {"store_timeout_s": 300.0, "store_retries": 7, "offline": False, "cache_size": 2 << 30}
OPTIONS |= {"connections": 3, "prefetch_bytes": 0, "index_cache_bytes": 2 << 20, "chunk_cache_bytes": 64 << 20}


def run(*command: object) -> Any:
    """Run a command of shardfs; `return_value` of the result is its exit code."""
    return CliRunner().invoke(commands, list(map(str, command)), standalone_mode=False)


@pytest.mark.parametrize("command", ["verify", "unpack", "pack"])
def test_all_options_reach_the_workers(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, worker_options = tmp_path / "source", list[dict[str, Any]]()
    how: Any = {} if command == "pack" else {"shards": (10,)}
    zarr.create_array(source, shape=(20,), chunks=(5,), dtype="u1", **how)[:] = np.arange(20)

    def open_tree(url: str, **options: Any) -> Any:
        worker_options.append(options)
        return tree.open_tree(url, **options)

    monkeypatch.setattr(shared_work, "open_tree", open_tree)
    option_text = (
        f"store_timeout=300,store_retries=7,cache_dir={tmp_path / 'cache'},cache_size=2G,connections=3,prefetch=0"
    )
    option_text += ",index_cache=2M,chunk_cache=1G"
    places = [source, tmp_path / "target"] if command != "verify" else [source]
    assert run(command, *places, "-o", option_text).return_value == 0
    for options in worker_options:
        assert options.items() >= {**OPTIONS, "cache_dir": str(tmp_path / "cache")}.items()
    assert worker_options


def test_verify_offline_sends_no_request(tmp_path: Path) -> None:
    source, cache = tmp_path / "source", tmp_path / "cache"
    zarr.create_array(source / "a", shape=(20,), chunks=(5,), shards=(10,), dtype="u1")[:] = np.arange(1, 21)
    with serving(source) as server:
        url = f"{server.url}/a"
        assert run("verify", "--deep", url, "-o", f"cache_dir={cache}").return_value == 0
        assert server.requests()
        assert run("verify", "--deep", url, "-o", f"offline,cache_dir={cache}").return_value == 0
        assert server.requests() == []
