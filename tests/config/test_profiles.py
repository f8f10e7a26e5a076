"""Configuration files: profiles, what is wrong with them, what wins, and that secrets stay where they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from shardfs import cli
from shardfs.cli.source_options import CommandOptions, warn
from shardfs.config import layers, loading, options, profiles
from shardfs.model import redact
from shardfs.model.errors import OptionError
from tests.datasets import ROOT

if TYPE_CHECKING:
    from shardfs.config.profiles import Configuration

LAB = """
[mount.brain]
source = "s3://bucket/brain.zarr"
mountpoint = "/mnt/brain"
allow_other = true
default-permissions = true
index_cache = "1G"
attr_timeout = 10
umask = "022"
nodev = true
noexec = false
storage_options.anon = false
storage_options.secret = "hunter22"
storage_options.client_kwargs.endpoint_url = "http://me:hunter22@minio:9000"
env.AWS_PROFILE = "lab"
env.TOKEN = "hunter23"
"""


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's directory; `system` beside it stands for /etc/shardfs."""
    for name in [n for n in os.environ if n.startswith(("SHARDFS_", "AWS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(profiles, "SYSTEM", str(tmp_path / "system"))
    monkeypatch.setattr(redact, "_known", set())
    (tmp_path / "system").mkdir()
    (tmp_path / "shardfs").mkdir()
    return tmp_path


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def faults(configuration: Configuration) -> list[str]:
    return [str(fault) for fault in configuration.faults]


def test_a_profile_has_what_the_option_table_knows(places: Path) -> None:
    file = write(places / "shardfs/lab.toml", LAB)
    configuration = profiles.read()
    assert faults(configuration) == []
    profile = configuration.profile("brain")
    assert (profile.file, profile.source, profile.mountpoint) == (str(file), "s3://bucket/brain.zarr", "/mnt/brain")
    brain = loading.merged(profile.values)
    assert (brain.allow_other, brain.default_permissions, brain.index_cache) == (True, True, 1 << 30)
    assert (brain.attr_timeout, brain.umask, brain.kernel) == (10, 0o22, ("nodev",))
    assert brain.storage_options == {
        "anon": False,
        "secret": "hunter22",
        "client_kwargs": {"endpoint_url": "http://me:hunter22@minio:9000"},
    }
    assert brain.env == {"AWS_PROFILE": "lab", "TOKEN": "hunter23"}


def test_every_option_can_stand_in_a_profile() -> None:
    samples: list[Any] = ["native", "fail", "inside", "debug", "022", True, 5, "64K", "/var/log/x", "json", "host:80"]
    samples += ["warn", "journal", "limit", "store", "wrap", "uint64", "raw", "refuse"]
    for setting in options.settings():
        if setting.scope != options.FILES:
            assert any(takes(setting.name, sample) for sample in samples), setting


def takes(key: str, value: Any) -> bool:
    try:
        return list(loading.from_profile(key, value)) == [key]
    except OptionError:
        return False


def test_storage_options_reach_fsspec_untouched(places: Path) -> None:
    write(
        places / "shardfs/x.toml",
        '[mount.x]\nsource = "/x"\nmountpoint = "/y"\n'
        "storage_options = {a-b = '1', list = [1, {c = 2.5}], yes = true, deep.er = '$HOME'}",
    )
    assert profiles.read().profile("x").values["storage_options"] == {
        "a-b": "1",
        "list": [1, {"c": 2.5}],
        "yes": True,
        "deep": {"er": "$HOME"},
    }


def test_the_users_profile_replaces_the_systems(places: Path) -> None:
    line = '[mount.{}]\nsource = "{}"\nmountpoint = "/{}"\n'
    write(places / "system/a.toml", line.format("one", "s1", "m1") + line.format("two", "s2", "m2") + "umsk = 0\n")
    write(places / "shardfs/a.toml", line.format("two", "u2", "m2"))
    write(places / "shardfs/b.toml", line.format("three", "u3", "m3"))
    write(places / "shardfs/b.toml.orig", "not TOML")
    configuration = profiles.read()
    assert {name: p.source for name, p in configuration.profiles.items()} == {"one": "s1", "two": "u2", "three": "u3"}
    assert faults(configuration) == []  # the system's faulty profile is not used


def test_a_profile_that_is_broken_is_not_taken_from_elsewhere(places: Path) -> None:
    write(places / "system/a.toml", '[mount.x]\nsource = "s"\nmountpoint = "/m"')
    write(places / "shardfs/a.toml", '[mount.x]\nsource = "s"')
    with pytest.raises(OptionError, match=r"shardfs/a.toml: \[mount.x\]: mountpoint is missing"):
        profiles.read().profile("x")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("umsk = '022'", "[mount.x]: unknown key 'umsk'; did you mean 'umask'?"),
        ("sorce = 'y'", "unknown key 'sorce'; did you mean 'source'?"),
        ("storage_option = {}", "unknown key 'storage_option'; did you mean 'storage_options'?"),
        ("profile = 'y'", "unknown key 'profile'"),
        ("zzzzzz = 1", "unknown key 'zzzzzz'"),
        ("umask = 22", 'umask: write the octal mode as a string, such as "0444"'),
        ("uid = 'me'", "uid: 'me' is not a number"),
        ("uid = -1", "uid: '-1' is not a number"),
        ("threads = [1]", "threads: must be a string, a number, true or false"),
        ("storage_options = 'anon=true'", "storage_options: must be a table"),
        ("env.'A=B' = 'x'", "env: 'A=B' is not a valid variable name"),
        ('env.A = "x\\u0000"', "env.A: must not contain the character NUL"),
        ('fsname = "x\\u0000"', "fsname: must not contain the character NUL"),
        ('[mount.y]\nsource = "x\\u0000"\nmountpoint = "/y"', "source: must not contain the character NUL"),
        ("env.X = [1]", "env.X: must be a string"),
        ("ro = 3", "neither true nor false"),
        ("rw = true\nro = true", "'ro' contradicts an earlier option"),
        ("writable = false\nrw = true", "'rw' contradicts an earlier option"),
        ("umask = '022'\nindex-cache = '1G'\nindex_cache = '2G'", "'index_cache' contradicts an earlier option"),
        ("[mount.y]\nsource = 'x'\nmountpoint = 'relative'", "[mount.y]: mountpoint: 'relative' is not an absolute"),
        ("[mount.y]\nsource = ''\nmountpoint = '/y'", "source: must be a string"),
        ("[mount.'a/b']\nsource = 'x'\nmountpoint = '/y'", "a name consists of letters"),
        ("[mount.y]\nsource = 'x'\nmountpoint = '/x'", "has the mountpoint of 'x', /x"),
        ("[mout.y]", "unknown key 'mout'; did you mean 'mount'?"),
    ],
)
def test_what_is_wrong_is_said(text: str, told: str, places: Path) -> None:
    file = write(places / "shardfs/x.toml", f'[mount.x]\nsource = "/x"\nmountpoint = "/x"\n{text}\n')
    messages = faults(profiles.read())
    assert any(line.startswith(str(file)) and told in line for line in messages), messages


def test_a_key_may_be_said_twice_if_it_says_the_same(places: Path) -> None:
    write(places / "shardfs/x.toml", '[mount.x]\nsource = "/x"\nmountpoint = "/x"\nro = true\nrw = false\n')
    assert profiles.read().profile("x").values == {"rw": False}


def test_files_that_cannot_be_read(places: Path) -> None:
    write(places / "shardfs/a.toml", "[mount")
    (places / "shardfs/b.toml").write_bytes(b"\xff")
    (places / "shardfs/c.toml").mkdir()
    write(places / "shardfs/d.toml", "mount = 3")
    write(places / "shardfs/e.toml", '[mount.e]\nsource = "x"\nmountpoint = "/x"')
    configuration = profiles.read()
    assert [Path(f.file).name for f in configuration.faults] == ["a.toml", "b.toml", "c.toml", "d.toml"]
    assert configuration.profile("e").source == "x"
    with pytest.raises(OptionError, match=r"no profile 'ee'; did you mean 'e'\?.*a.toml"):
        configuration.profile("ee")
    assert "No such file" in faults(profiles.read(str(places / "none")))[0]


def test_a_name_twice_in_one_directory(places: Path) -> None:
    text = '[mount.x]\nsource = "x"\nmountpoint = "/x"'
    write(places / "shardfs/a.toml", text)
    write(places / "shardfs/b.toml", text)
    with pytest.raises(OptionError, match=r"b.toml: \[mount.x\]: is also in .*a.toml"):
        profiles.read().profile("x")


@pytest.mark.parametrize("line", ["storage_options.key = 'AKIA'", "env.TOKEN = 'x'", ""])
def test_secrets_for_everybody_to_read_are_warned_of(line: str, places: Path) -> None:
    source = "/x" if line else "https://me:pw@host/x"
    text = f'[mount.x]\nsource = "{source}"\nmountpoint = "/x"\n{line}\n'
    write(places / "shardfs/x.toml", text)
    assert faults(profiles.read()) == []
    write(places / "shardfs/x.toml", text, 0o644)
    (fault,) = profiles.read().faults
    assert (fault.warning, "chmod o-r" in str(fault)) == (True, True)
    write(places / "shardfs/x.toml", '[mount.x]\nsource = "/x"\nmountpoint = "/x"\nstorage_options.anon = true', 0o644)
    assert faults(profiles.read()) == []


# ---- what wins


def given(*words: str, **flags: str) -> options.Options:
    return CommandOptions(words, (), ()).merged({"profile": "x", **flags})[0]


def test_files_that_other_users_can_change_are_warned_of(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They could name a command that this user runs."""
    file = write(places / "shardfs/lab.toml", LAB)
    assert faults(profiles.read()) == []
    for path, name in ((file, f"{file}: "), (file.parent, f"{file}: its directory {file.parent} ")):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        assert faults(profiles.read()) == [f"{name}can be changed by all users: chmod o-w"]
        path.chmod(mode)
    file.chmod(0o660)
    if os.geteuid() == 0:
        os.chown(file, 0, 54321)
        assert faults(profiles.read()) == [f"{file}: can be changed by the group number 54321: chmod g-w"]
        os.chown(file, 54321, 0)
        (told,) = faults(profiles.read())
        assert told.startswith(f"{file}: belongs to another user (number 54321), who can change it")
        os.chown(file, 0, 0)
    assert faults(profiles.read()) == []
    (places / "elsewhere").mkdir()
    link = places / "shardfs/link.toml"
    link.symlink_to(file.rename(places / "elsewhere/lab.toml"))
    (places / "elsewhere").chmod(0o777)
    assert faults(profiles.read()) == [
        f"{link}: its directory {places}/elsewhere can be changed by all users: chmod o-w"
    ]
    (places / "elsewhere").chmod(0o1777)
    assert faults(profiles.read()) == []
    (places / "elsewhere/lab.toml").chmod(0o666)
    invocation = CliRunner().invoke(cli.commands, ["config", "check"], standalone_mode=False)
    assert (invocation.return_value, "can be changed by all users" in invocation.output) == (0, True)
    layers.configuration(None, "brain", warn)
    assert "can be changed by all users" in capsys.readouterr().err


def test_flags_win_over_the_environment_over_the_profile(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        places / "shardfs/x.toml",
        '[mount.x]\nsource = "x"\nmountpoint = "/x"\nuid = 1\ngid = 1\numask = "01"\nthreads = 1\nnodev = true\n'
        "storage_options = {a = 1, b = 1, c = 1}\nenv = {SHARDFS_TEST_A = '1', SHARDFS_TEST_B = '1'}",
    )
    for name in ("GID", "UMASK", "THREADS", "TEST_A", "TEST_B"):
        monkeypatch.setenv(f"SHARDFS_{name}", "2")
    monkeypatch.delenv("SHARDFS_TEST_B")
    monkeypatch.setenv("SHARDFS_STORAGE_OPTIONS", '{"b": 2, "c": 2}')
    merged = given("umask=03,threads=3,storage_option.c=3,nosuid", threads="4")
    assert (merged.uid, merged.gid, merged.umask, merged.threads) == (1, 2, 3, 4)
    assert merged.storage_options == {"a": 1, "b": 2, "c": 3}
    assert merged.kernel == ("nodev", "nosuid")
    assert (os.environ["SHARDFS_TEST_A"], os.environ["SHARDFS_TEST_B"]) == ("2", "1")


def test_a_profile_can_be_named_by_variable_or_word(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(places / "only.toml", '[mount.y]\nsource = "x"\nmountpoint = "/x"\nuid = 7')
    assert CommandOptions((f"profile=y,config={file}",), (), ()).options().uid == 7
    monkeypatch.setenv("SHARDFS_PROFILE", "y")
    monkeypatch.setenv("SHARDFS_CONFIG", str(file))
    assert CommandOptions((), (), ()).options().uid == 7


# ---- the verb


def shardfs(*args: str) -> tuple[int, str]:
    invocation = CliRunner().invoke(cli.commands, args, standalone_mode=False)
    if invocation.exception:
        raise invocation.exception
    return int(invocation.return_value or 0), invocation.output


def test_check(places: Path) -> None:
    assert shardfs("config", "check") == (0, "0 profiles in 0 files, nothing wrong\n")
    file = write(places / "shardfs/lab.toml", LAB, 0o644)
    assert shardfs("config", "check") == (
        0,
        f"warning: {file}: contains secrets, but all users can read it: chmod o-r\n",
    )
    write(file, LAB + "atr_timeout = 3")
    code, told = shardfs("config", "check", "--config", str(file))
    assert (code, told.count("\n"), "did you mean 'attr_timeout'" in told) == (2, 1, True)
    write(file, LAB.replace("default-permissions", "noatime"))
    code, told = shardfs("config", "check")
    assert (code, "[mount.brain]: allow_other needs default_permissions" in told) == (2, True)


def test_a_mount_is_not_told_of_other_profiles(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(places / "shardfs/x.toml", "".join(f'[mount.{n}]\nsource = "/x"\nmountpoint = "/x"\n' for n in "abc"))
    for name, told in (("a", 0), ("b", 1)):
        CommandOptions((f"profile={name}",), (), ()).options()
        assert capsys.readouterr().err.count("has the mountpoint of 'a'") == told


def test_show_masks_secrets(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(places / "shardfs/lab.toml", LAB)
    monkeypatch.setenv("SHARDFS_ATTR_TIMEOUT", "20")
    _, told = shardfs("config", "show")
    assert told.splitlines() == [
        f"[mount.brain]  # {file}",
        'source = "s3://bucket/brain.zarr"',
        'mountpoint = "/mnt/brain"',
        "allow_other = true",
        "default_permissions = true",
        'umask = "0022"',
        "attr_timeout = 20.0  # SHARDFS_ATTR_TIMEOUT",
        "index_cache = 1073741824",
        "nodev = true",
        "storage_options.anon = false",
        'storage_options.secret = "***"',
        'storage_options.client_kwargs = {"endpoint_url": "http://minio:9000"}',
        'env.AWS_PROFILE = "lab"',
        'env.TOKEN = "***"',
        "",
    ]
    _, told = shardfs("config", "show", "brain", "--json")
    assert json.loads(told)["storage_options"]["secret"] == "***"
    with pytest.raises(OptionError, match="no profile 'brian'; did you mean 'brain'"):
        shardfs("config", "show", "brian")


# ---- secrets


def test_messages_are_scrubbed(places: Path) -> None:
    write(
        places / "shardfs/x.toml",
        '[mount.x]\nsource = "nope://me:hunter21@h/x"\nmountpoint = "/x"\nstorage_options.secret = "hunter22"',
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SHARDFS_CONFIG": str(places / "shardfs/x.toml")}
    command = [sys.executable, "-m", "shardfs", "mount", "-f", "--profile", "x"]
    completed = subprocess.run([*command, "nope://me:hunter21@h/x?sig=hunter23", places], capture_output=True, env=env)
    assert completed.returncode == 3
    assert b"nope://h/x: cannot be opened" in completed.stderr
    assert b"hunter" not in completed.stderr


def test_what_a_store_says_of_its_credentials_is_masked() -> None:
    redact.add_secrets("https://me:pa%20ss@host/x?sig=abcd", {"key": "AKIA1", "deep": {"list": ["s3cret"]}, "n": 12345})
    for text in ("AKIA1", "s3cret", "pa%20ss", "pa ss", "sig=abcd"):
        assert redact.redacted(f"cannot use {text}!") == "cannot use ***!"
    assert redact.redacted("host 12345") == "host 12345"


def test_secrets_on_a_command_line_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    words = "storage_option.secret=hunter22,storage_option.anon=true,storage_option.profile=lab,env.TOKEN=hunter22"
    CommandOptions((words,), (), ()).options()
    told = capsys.readouterr().err
    assert [name in told for name in ("'secret'", "'TOKEN'", "anon", "profile 'lab'", "hunter")] == [
        True,
        True,
        False,
        False,
        False,
    ]
