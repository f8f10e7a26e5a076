"""The loaders of `Options`, and the document printed from the table."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.codecs import zlib_streams
from shardfs.config import loading, options, parsers
from shardfs.config.loading import from_environment, from_flags, from_mount_options, merged
from shardfs.config.options import Options
from shardfs.formats import documents, zarr3, zarr_arrays
from shardfs.formats.precomputed import parts
from shardfs.model.bounded_json import MAX_CONTAINERS, MAX_ITEMS
from shardfs.model.errors import OptionError
from shardfs.shards.byte_layouts import single_page
from shardfs.vfs import chunk_trees


def test_defaults_are_those_of_the_table() -> None:
    assert merged() == Options()
    assert Options().index_cache == 256 << 20
    assert Options().index_ttl == math.inf
    assert (Options().file_mode, Options().rw) == (None, False)


def test_flags_win_over_mount_options_and_those_over_the_environment() -> None:
    environ = {"SHARDFS_UID": "1", "SHARDFS_GID": "1", "SHARDFS_UMASK": "077"}
    words = from_mount_options(["uid=2,gid=2"])
    options = merged(from_environment(environ), words, from_flags({"uid": "3", "gid": None}))
    assert (options.uid, options.gid, options.umask) == (3, 2, 0o077)


def test_a_switch_can_be_taken_back_by_a_stronger_layer() -> None:
    assert from_mount_options(["allow_other"]) == {"allow_other": True}
    assert from_mount_options(["allow_other=no"]) == {"allow_other": False}
    assert not merged(from_mount_options(["allow_other"]), from_flags({"allow_other": False})).allow_other


def test_every_option_can_be_given_in_all_three_ways() -> None:
    samples = {
        "0",
        "1",
        "022",
        "64K",
        "5",
        "native",
        "fail",
        "warn",
        "inside",
        "debug",
        "true",
        "/var/log/x",
        "json",
        "host:80",
        "journal",
        "limit",
        "store",
        "wrap",
        "never",
        "raw",
        "refuse",
    }
    for s in options.settings():
        text = next(t for t in sorted(samples) if _parses(s, t))
        wanted = {s.name: s.parse(text)}
        assert from_environment({s.variable: text}) == wanted
        assert from_mount_options([f"{s.name}={text}"]) == wanted
        assert from_mount_options([f"{s.name.replace('_', '-')}={text}"]) == wanted
        assert from_flags({s.name: text}) == wanted


def _parses(setting: options.Setting, text: str) -> bool:
    try:
        setting.parse(text)
    except OptionError:
        return False
    return True


def test_every_field_is_in_the_table_or_filled_by_a_rule_of_its_own() -> None:
    assert {f.name for f in fields(Options)} == {s.name for s in options.settings()} | {
        "storage_options",
        "env",
        "kernel",
        "bare_rw",
    }


def test_other_variables_of_the_environment_are_none_of_ours() -> None:
    assert from_environment({"SHARDFS_VENV": "x", "SHARDFS_DEBUG": "1", "SHARDFS_UID": "", "UID": "7"}) == {}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("atr_timeout=3", "unknown option 'atr_timeout'; did you mean 'attr_timeout'?"),
        ("alow-other", "did you mean 'allow_other'?"),
        ("noatme", "did you mean 'noatime'?"),
        ("zzzzzz", "unknown option 'zzzzzz'"),
        ("uid", "option 'uid' needs a value"),
        ("uid=me", "uid: 'me' is not a number"),
        ("ro,writable", "'writable' contradicts an earlier option"),
        ("rw=true,ro", "'ro' contradicts an earlier option"),
        ("writabel", "did you mean 'writable'?"),
        ("commit=0", "must be more than 0"),
        ("layout=natve", "; did you mean 'native'?"),
        ("index_cache=1X", "is not a size"),
        ("attr_timeout=nan", "is not a time"),
        ("attr_timeout=forever", "'forever' is not possible here"),
        ("ready_timeout=99999999d", "ready_timeout: '99999999d' is too long; the limit is 1000000000 seconds"),
        ("umask=9", "is not an octal mode"),
        ("file_mode=4755", "more than nine permission bits"),
        ("threads=0", "must be at least 1"),
        ("allow_other=perhaps", "neither true nor false"),
        ("storage_option.key", "not of the form KEY=VALUE"),
        ("env.=x", "not of the form NAME=VALUE"),
    ],
)
def test_what_is_wrong_is_refused_and_said(word: str, told: str) -> None:
    with pytest.raises(OptionError) as failure:
        from_mount_options([word])
    assert told in str(failure.value)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("chunk_codec=raw", "the layout native shows chunks only as they are stored: give a layout such as zarr2"),
        ("layout=bcolz,chunk_codec=raw", "the layout bcolz shows chunks only in blosc"),
        ("layout=zarr3,chunk_codec=zlib", "the layout zarr3 shows chunks only in raw, gzip, zstd, blosc"),
        ("layout=precomputed,chunk_codec=gzip", "the layout precomputed shows chunks only in raw"),
    ],
)
def test_a_codec_that_a_layout_lacks_is_refused(words: str, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        loading.check(merged(from_mount_options([words])))


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(OptionError, match="SHARDFS_THREADS: must be at least 1"):
        from_environment({"SHARDFS_THREADS": "0"})
    with pytest.raises(OptionError, match="not a JSON object"):
        from_environment({"SHARDFS_STORAGE_OPTIONS": "[1]"})


def test_words_of_fstab_and_mount_are_accepted() -> None:
    line = "ro,_netdev,nofail,noauto,user,x-systemd.automount,X-mount.mkdir,defaults,dev,suid,exec,relatime,async"
    assert from_mount_options([line]) == {"rw": False}
    assert from_mount_options(["ro,nodev,nosuid", "noexec,noatime"])["kernel"] == (
        "nodev",
        "nosuid",
        "noexec",
        "noatime",
    )


@pytest.mark.parametrize(
    ("words", "writable"),
    [
        ("ro", False),
        ("", False),
        ("writable", True),
        ("rw,writable,dev,suid", True),
        ("rw=true", True),
        ("ro=no", True),
    ],
)
def test_a_mount_is_writable_only_if_somebody_says_so(words: str, writable: bool) -> None:
    options = merged(from_mount_options([words]))
    loading.check(options)
    assert options.rw is writable


@pytest.mark.parametrize("words", ["rw", "rw,dev,suid", "defaults,rw"])
def test_rw_by_itself_may_be_mount_8_speaking(words: str) -> None:
    with pytest.raises(OptionError, match="use -o writable or -o ro"):
        loading.check(merged(from_mount_options([words])))
    loading.check(merged({"rw": True}, from_mount_options([words])))  # a profile says it


def test_the_last_layer_says_whether_a_mount_is_writable() -> None:
    profile = loading.from_profile("writable", True)
    assert merged(profile).rw
    assert not merged(profile, from_mount_options(["ro"])).rw
    assert merged(loading.from_profile("ro", True), from_flags({"rw": True})).rw


def test_what_only_makes_sense_together_is_asked_for_together() -> None:
    for word in ("create=zarr3", "commit=1", "idle=1h", "on_error=true", "conflict=ours"):
        for words in ([word], [f"writable,{word}", "ro"]):
            layers = [from_mount_options([word]) for word in words]
            with pytest.raises(OptionError, match=f"{word.partition('=')[0]}: no effect on a read-only mount"):
                loading.check(merged(*layers))
        loading.check(merged(from_mount_options([f"writable,{word}"])))
    loading.check(merged(from_mount_options(["journal=/x"])))  # a read-only mount looks into it
    loading.check(merged(from_mount_options(["writable,layout=n5"])))


def test_storage_options_keep_their_names_and_make_objects() -> None:
    words = (
        "storage_option.anon=true,storage_option.key=AKIA,storage-option.client_kwargs.endpoint_url=http://h:1,"
        "storage_option.client_kwargs.verify=false,storage_option.a-b=3,storage_option.text=a\\,b"
    )
    assert from_mount_options([words])["storage_options"] == {
        "anon": True,
        "key": "AKIA",
        "client_kwargs": {"endpoint_url": "http://h:1", "verify": False},
        "a-b": 3,
        "text": "a,b",
    }


def test_storage_options_are_joined_key_by_key() -> None:
    options = merged(
        from_environment({"SHARDFS_STORAGE_OPTIONS": '{"anon": true, "client_kwargs": {"a": 1}}'}),
        from_mount_options(["storage_option.client_kwargs.b=2"]),
        from_flags({}, ["anon=false"], ["AWS_PROFILE=lab"]),
    )
    assert options.storage_options == {"anon": False, "client_kwargs": {"a": 1, "b": 2}}
    assert options.env == {"AWS_PROFILE": "lab"}


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1)))
def test_escaped_commas_and_backslashes_survive(words: list[str]) -> None:
    line = ",".join(word.replace("\\", "\\\\").replace(",", "\\,") for word in words)
    assert loading.split_words(line) == words


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("65536", 65536), ("64K", 65536), ("1.5M", 3 << 19), ("1GiB", 1 << 30), ("2g", 2 << 30), ("3B", 3)],
)
def test_sizes(text: str, value: int) -> None:
    assert parsers.size(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("90", 90), (".5", 0.5), ("10m", 600), ("2h", 7200), ("1d", 86400), ("forever", math.inf)]
)
def test_times(text: str, value: float) -> None:
    assert parsers.seconds(text) == value


def test_a_log_file_does_not_depend_on_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_flags({"log_file": "a.log"}) == {"log_file": str(tmp_path / "a.log")}


def test_the_limits_in_the_documents_are_those_of_the_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    for told in (
        f"{documents.MAX_DOCUMENT_BYTES >> 20} MiB, {MAX_ITEMS} members, {MAX_CONTAINERS} objects",
        f"decoded | {single_page.MAX_INDEX_BYTES >> 20} MiB",
        f"must be decoded | {zlib_streams.MAX_DECODED >> 20} MiB",
        f"of one array | 2^{chunk_trees.MAX_NODES.bit_length() - 1} ",
        f"rectilinear grid | {zarr3.MAX_EDGES} ",
        f"to a depth of {zarr_arrays.MAX_NESTING} ",
        f"scales of a volume | {parts.MAX_PARTS} ",
    ):
        assert told in text


@pytest.mark.parametrize("text", ["9100", ":9100", "host", "host:", "host:x", "host:70000", "::1:80", "host:-1"])
def test_addresses_have_a_host_and_a_port(text: str) -> None:
    with pytest.raises(OptionError, match="HOST:PORT"):
        parsers.address(text)


def test_no_time_at_all_is_no_time_out() -> None:
    assert parsers.address("[::1]:80") == "[::1]:80"
    with pytest.raises(OptionError, match="more than 0"):
        parsers.positive_seconds("0")
