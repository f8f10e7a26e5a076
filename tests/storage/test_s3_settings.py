"""How to connect to S3 is found as botocore finds it, or left to botocore."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.storage.s3_settings import s3_settings

if TYPE_CHECKING:
    from pathlib import Path

s3fs = pytest.importorskip("s3fs")

KEYS = {"AWS_ACCESS_KEY_ID": "k-env", "AWS_SECRET_ACCESS_KEY": "s-env"}
ONE = {"key": "k", "secret": "s"}

PLAIN: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "key": (ONE, {}),
    "username": ({"username": "k", "password": "s"}, {}),
    "token": ({**ONE, "token": "t"}, KEYS),
    "key, not the variables": (ONE, {**KEYS, "AWS_SESSION_TOKEN": "t"}),
    "client_kwargs": ({"client_kwargs": {"aws_access_key_id": "k", "aws_secret_access_key": "s"}}, KEYS),
    "anon": ({"anon": True}, KEYS),
    "variables": ({}, {**KEYS, "AWS_SESSION_TOKEN": "t"}),
    "region": ({**ONE, "client_kwargs": {"region_name": "eu-central-1"}}, {"AWS_DEFAULT_REGION": "us-west-2"}),
    "region of the environment": (ONE, {"AWS_DEFAULT_REGION": "us-west-2"}),
    "endpoint": ({**ONE, "endpoint_url": "http://a:1"}, {"AWS_ENDPOINT_URL": "http://b:1"}),
    "endpoint of S3": (ONE, {"AWS_ENDPOINT_URL": "http://a:1", "AWS_ENDPOINT_URL_S3": "http://b:1"}),
    "bundle": (ONE, {"AWS_CA_BUNDLE": "/a", "REQUESTS_CA_BUNDLE": "/b"}),
    "bundle of requests": (ONE, {"REQUESTS_CA_BUNDLE": "/b"}),
    "verify": ({**ONE, "client_kwargs": {"verify": False}}, {"AWS_CA_BUNDLE": "/a"}),
}

LEFT: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "virtual addressing": ({**ONE, "config_kwargs": {"s3": {"addressing_style": "virtual"}}}, {}),
    "no credentials": ({}, {}),
    "key without secret": ({"key": "k"}, KEYS),
    "profile": ({**ONE, "profile": "lab"}, {}),
    "AWS_PROFILE": ({}, {**KEYS, "AWS_PROFILE": "lab"}),
    "configuration": (ONE, {"AWS_CONFIG_FILE": "{folder}/aws"}),
    "credentials": (ONE, {"AWS_SHARED_CREDENTIALS_FILE": "~/aws", "HOME": "{folder}"}),
    "unknown variable": (ONE, {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}),
    "FIPS": (ONE, {"AWS_USE_FIPS_ENDPOINT": "true"}),
    "empty variable": (ONE, {"AWS_DEFAULT_REGION": ""}),
    "no file": (ONE, {"AWS_CONFIG_FILE": ""}),
    "path with a variable": (ONE, {"AWS_CONFIG_FILE": "$HOME/aws", "HOME": "{folder}"}),
    "China": (ONE, {"AWS_DEFAULT_REGION": "cn-north-1"}),
    "no TLS": ({**ONE, "use_ssl": False}, {}),
}


def place(case: tuple[dict[str, Any], dict[str, str]], folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """Set the variables of a case; return its options. The file `aws` is in the folder."""
    options, variables = case
    for name in [n for n in os.environ if n.startswith("AWS_") or n == "REQUESTS_CA_BUNDLE"]:
        patch.delenv(name)
    (folder / "aws").write_text("[default]\nregion = eu-west-1")
    patch.setenv("AWS_CONFIG_FILE", str(folder / "none"))
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))
    for name, value in variables.items():
        patch.setenv(name, value.format(folder=folder))
    return options


@pytest.mark.every_case
@pytest.mark.parametrize("name", PLAIN)
def test_plain_settings_are_those_of_botocore(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = place(PLAIN[name], tmp_path, monkeypatch)
    settings = s3_settings(options)
    assert settings is not None
    fs = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    boto = fs.s3
    assert settings.endpoint == boto.meta.endpoint_url
    assert settings.region == {"aws-global": "us-east-1"}.get(boto.meta.region_name, boto.meta.region_name)
    verify = boto._endpoint.http_session._verify
    assert settings.verify == (None if verify is True else verify)
    if settings.provide is None:
        assert options == {"anon": True}
        return
    credentials = boto._request_signer._credentials
    keys = settings.provide()
    assert (keys["access_key_id"], keys["secret_access_key"], keys["token"]) == (
        credentials.access_key,
        credentials.secret_key,
        credentials.token,
    )


@pytest.mark.every_case
@pytest.mark.parametrize("name", LEFT)
def test_all_else_is_left_to_botocore(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert s3_settings(place(LEFT[name], tmp_path, monkeypatch)) is None
