"""Other users must not be able to replace what shardfs keeps in a directory."""

from __future__ import annotations

import grp
import os
import pwd
from typing import TYPE_CHECKING

import pytest

from shardfs.model.own_places import is_private, require_own_place
from shardfs.storage.disk_cache import DiskCache
from shardfs.write.journal import places

if TYPE_CHECKING:
    from pathlib import Path

OTHER = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.mark.parametrize(
    ("mode", "fits"), [(0o700, True), (0o755, True), (0o1777, True), (0o777, False), (0o702, False)]
)
def test_modes(mode: int, fits: bool, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(mode)
    if fits:
        DiskCache(str(place), 1 << 30)
        places.prepare(place / "journal", "", "")
        return
    for use in (lambda: DiskCache(str(place), 1 << 30), lambda: places.prepare(place / "journal", "", "")):
        with pytest.raises(PermissionError, match="other users"):
            use()
    assert os.listdir(place) == []


@as_root
@pytest.mark.parametrize(("group", "fits"), [(0, True), (OTHER, False)])
def test_a_group_of_other_users(group: int, fits: bool, tmp_path: Path) -> None:
    os.chown(tmp_path, 0, group)
    tmp_path.chmod(0o770)
    if fits:
        require_own_place(str(tmp_path), "")
    else:
        with pytest.raises(PermissionError, match="other users"):
            require_own_place(str(tmp_path), "")
    tmp_path.chmod(0o700)


def test_only_the_group_of_the_users_name_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group `users` lists no members, although it is the primary group of all users."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    users = {1000: pwd.struct_passwd(("ann", "x", 1000, 100, "", "/", "/bin/sh"))}
    groups = {100: ("users", []), 1000: ("ann", []), 1001: ("ann", ["ann", "bob"])}
    monkeypatch.setattr("pwd.getpwuid", users.__getitem__)
    monkeypatch.setattr("grp.getgrgid", lambda gid: grp.struct_group((groups[gid][0], "x", gid, groups[gid][1])))
    assert [is_private(gid) for gid in (0, 100, 1000, 1001, 7)] == [True, False, True, False, False]


@as_root
def test_a_directory_of_another_user(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir(0o755)
    os.chown(place, OTHER, OTHER)
    for use in (lambda: DiskCache(str(place), 1 << 30), lambda: places.prepare(place / "journal", "", "")):
        with pytest.raises(PermissionError, match=f"belongs to user {OTHER}"):
            use()


def test_entries_that_were_there_before(tmp_path: Path) -> None:
    """A cache that was made when its directory was closed is refused when others may write to the directory."""
    DiskCache(str(tmp_path / "cache"), 1 << 30)
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(PermissionError, match="other users"):
        DiskCache(str(tmp_path / "cache"), 1 << 30)
