"""`shardfs install` and `uninstall`, the manual pages and the completions that they place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from shardfs import cli
from shardfs.config.options import LAYOUTS
from shardfs.daemon.install import HELPERS, shipped
from tests.datasets import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SYSTEM = [
    "sbin/mount.shardfs",
    "sbin/mount.fuse.shardfs",
    "etc/systemd/system/shardfs@.service",
    "usr/local/share/man/man1/shardfs.1",
    "usr/local/share/man/man8/mount.shardfs.8",
    "usr/local/share/bash-completion/completions/shardfs",
    "usr/local/share/zsh/site-functions/_shardfs",
    "usr/local/share/fish/vendor_completions.d/shardfs.fish",
]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    path = tmp_path / "bin"
    path.mkdir()
    for name in ("shardfs", *HELPERS):
        (path / name).write_text("#!/bin/sh\n")
        (path / name).chmod(0o755)
    return path


def shardfs(*args: str | Path) -> tuple[int, str]:
    invocation = CliRunner().invoke(cli.commands, list(map(str, args)), standalone_mode=False)
    if invocation.exception:
        raise invocation.exception
    return int(invocation.return_value or 0), invocation.output


def placed(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_symlink() or p.is_file())


def test_what_is_placed_is_told_found_again_and_removed(programs: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    install = ("install", "--root", root, "--programs", programs)
    code, told = shardfs(*install, "--dry-run")
    assert (code, told.count(": would be installed\n"), placed(root)) == (0, len(SYSTEM), [])
    code, told = shardfs(*install)
    assert (code, told.count(": installed\n"), placed(root)) == (0, len(SYSTEM), sorted(SYSTEM))
    assert [os.readlink(root / "sbin" / name) for name in HELPERS] == [str(programs / name) for name in HELPERS]
    unit = (root / "etc/systemd/system/shardfs@.service").read_text()
    assert f"ExecStart={programs}/shardfs mount" in unit
    assert "/usr/bin/shardfs" not in unit
    code, told = shardfs(*install)
    assert (code, told.count(": is up to date\n")) == (0, len(SYSTEM))
    code, told = shardfs("uninstall", "--root", root, "--dry-run")
    assert (told.count(": would be removed\n"), placed(root)) == (len(SYSTEM), sorted(SYSTEM))
    shardfs("uninstall", "--root", root)
    assert placed(root) == []
    assert shardfs("uninstall", "--root", root) == (0, "")


def test_what_others_have_placed_stays(programs: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sbin").mkdir(parents=True)
    (root / "sbin/mount.shardfs").write_text("#!/bin/sh\n")
    (root / "etc/systemd/system").mkdir(parents=True)
    (root / "etc/systemd/system/shardfs@.service").write_text("[Service]\n")
    install = ("install", "--root", root, "--programs", programs)
    code, told = shardfs(*install)
    assert (code, told.count("was not installed by shardfs"), len(placed(root))) == (1, 2, 2)
    _, told = shardfs("uninstall", "--root", root)
    assert (told.count("stays"), len(placed(root))) == (2, 2)
    assert shardfs(*install, "--force")[0] == 0
    assert placed(root) == sorted(SYSTEM)


def test_an_old_version_of_ours_is_replaced(programs: Path, tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    shutil.copytree(programs, other)
    shardfs("install", "--root", root, "--programs", other)
    code, told = shardfs("install", "--root", root, "--programs", programs)
    assert (code, told.count(": installed\n")) == (0, 3)  # the links and the unit
    shutil.rmtree(programs)  # links that lead nowhere are removed as well
    shardfs("uninstall", "--root", root)
    assert placed(root) == []


def test_a_program_that_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--programs"):
        shardfs("install", "--root", tmp_path, "--programs", tmp_path)
    assert placed(tmp_path) == []


def test_who_may_not_write_is_told_the_file_and_the_way(programs: Path) -> None:
    """Nobody can make files in sysfs, not even root."""
    with pytest.raises(OSError, match="run this as root, or use --user") as refused:
        shardfs("install", "--root", "/sys/none", "--programs", programs)
    assert refused.value.filename == "/sys/none/sbin/mount.shardfs"


def test_a_user_gets_no_helpers(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "conf"))
    monkeypatch.setattr("shardfs.daemon.install.reload_manager", lambda **_: None)
    assert shardfs("install", "--user", "--programs", programs)[0] == 0
    share = [f".local/{path[len('usr/local/') :]}" for path in SYSTEM if "share" in path]
    shutil.rmtree(programs)
    assert placed(tmp_path) == sorted([*share, "conf/systemd/user/shardfs@.service"])
    assert "default.target" in (tmp_path / "conf/systemd/user/shardfs@.service").read_text()


def test_the_generated_pages_are_current(tmp_path: Path) -> None:
    """If not: python scripts/make_man.py"""
    subprocess.run([sys.executable, ROOT / "scripts/make_man.py", tmp_path], check=True, timeout=250)
    for page in ("man/shardfs.1", "man/mount.shardfs.8", "cli.md", "options.md"):
        assert shipped(f"docs/{page}") == (tmp_path / page.removeprefix("man/")).read_text()


def test_the_manual_pages_are_sound_roff() -> None:
    if shutil.which("man") is None:
        pytest.skip("no man")
    for page in ("shardfs.1", "mount.shardfs.8"):
        command = ["man", "--warnings", "--local-file", str(ROOT / "docs/man" / page)]
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=250, env={**os.environ, "MANWIDTH": "80"}
        )
        assert (completed.returncode, completed.stderr) == (0, "")
        assert "SEE ALSO" in completed.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_are_scripts_of_their_shell(shell: str, programs: Path, tmp_path: Path) -> None:
    shardfs("install", "--root", tmp_path, "--programs", programs)
    endings = {"bash": "completions/shardfs", "zsh": "/_shardfs", "fish": ".fish"}
    (script,) = [tmp_path / path for path in SYSTEM if path.endswith(endings[shell])]
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    assert subprocess.run([shell, "-n", script], timeout=250, check=False).returncode == 0


def complete(words: str, cwd: Path) -> list[str]:
    """What bash would be offered for the last word."""
    number = len(words.split(" ")) - 1
    env = {**os.environ, "_SHARDFS_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(number)}
    env["PYTHONPATH"] = str(ROOT)
    program = "import sys; from shardfs import cli; sys.argv[0] = 'shardfs'; cli.main()"
    completed = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=cwd, capture_output=True, text=True, timeout=250
    )
    assert completed.stderr == ""
    return completed.stdout.split()


def test_verbs_options_and_profiles_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shardfs").mkdir()
    (tmp_path / "shardfs/x.toml").write_text('[mount.brain]\nsource = "/x"\nmountpoint = "/y"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert "plain,uninstall" in complete("shardfs un", tmp_path)
    assert "plain,--index-ttl" in complete("shardfs mount --index", tmp_path)
    assert complete("shardfs mount br", tmp_path) == ["plain,brain", "file,br"]
    assert complete("shardfs mount x /m", tmp_path) == ["dir,/m"]
    assert complete("shardfs config sh", tmp_path) == ["plain,show"]
    assert complete("shardfs config show br", tmp_path) == ["plain,brain"]
    assert complete("shardfs status br", tmp_path) == ["plain,brain", "file,br"]
    assert complete("shardfs mount --profile br", tmp_path) == ["plain,brain"]
    assert complete("shardfs help inf", tmp_path) == ["plain,info"]


def test_values_of_options_are_completed(tmp_path: Path) -> None:
    assert complete("shardfs mount --layout z", tmp_path) == ["plain,zarr2", "plain,zarr3"]
    assert complete("shardfs mount --log-level w", tmp_path) == ["plain,warning"]
    assert complete("shardfs mount --journal /v", tmp_path) == ["dir,/v"]
    assert complete("shardfs mount --log-file /v", tmp_path) == ["file,/v"]
    assert complete("shardfs ls -o ro,lay", tmp_path)[0] == "plain,ro,layout=native"
    assert complete("shardfs /x -o attr", tmp_path) == ["plain,attr_timeout="]
    assert complete("shardfs mount -o wri", tmp_path) == ["plain,writable"]


# What a person sees: bash splits words at `=`, and zsh and fish do not.
SHELLS = {
    "bash": (
        "shopt -s expand_aliases; source {script}; "
        "COMP_WORDS=(shardfs mount -o ro,layout = z); COMP_CWORD=5; _shardfs_completion shardfs; "
        'printf "%s\\n" "${{COMPREPLY[@]}}"; '
        "COMP_WORDS=(shardfs mount -o ro,layou); COMP_CWORD=3; COMPREPLY=(); _shardfs_completion shardfs; "
        'printf "%s\\n" "${{COMPREPLY[@]}}"',
        ["zarr2", "zarr3", *(f"ro,layout={name}" for name in LAYOUTS)],
    ),
    "fish": (
        'source {script}; complete --do-complete "shardfs mount -o ro,layout=z"',
        ["ro,layout=zarr2", "ro,layout=zarr3"],
    ),
}


@pytest.mark.parametrize("shell", sorted(SHELLS))
def test_shells_complete_a_list_of_options(shell: str, programs: Path, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    program = f"#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m shardfs\n"
    (programs / "shardfs").write_text(program)
    shardfs("install", "--root", tmp_path, "--programs", programs)
    (script,) = [tmp_path / path for path in SYSTEM if path.endswith({"bash": "ions/shardfs", "fish": ".fish"}[shell])]
    words, wanted = SHELLS[shell]
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path), "XDG_CONFIG_HOME": "/none"}
    command = [shell, "-c", words.format(script=script)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env, check=False)
    assert (completed.stdout.split(), completed.stderr) == (wanted, "")
