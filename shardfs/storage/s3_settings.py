"""How to connect to S3, found without botocore, whose import and set-up take a second of CPU time.

The sources and their order are those of botocore. Whatever is not plain is left to botocore.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

VARIABLES = frozenset(
    (
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_PROFILE", "AWS_CA_BUNDLE",
    )
)  # fmt: skip

IRRELEVANT = frozenset(("AWS_EC2_METADATA_DISABLED", "AWS_PAGER"))
"""Variables without which botocore connects to S3 in the same way."""

CREDENTIALS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")

FIELDS = frozenset((*CREDENTIALS, "region", "endpoint_url", "ca_bundle", "output", "cli_pager"))
"""Fields of a profile in the files of AWS."""

PLAIN_PROFILE = re.compile(r"profile (?!default$)[\w.-]+", re.ASCII)
"""Sections of the file `config` that are profiles. Those in quotes and `[profile default]` are not plain."""

COMMERCIAL = re.compile(r"(af|ap|ca|eu|il|me|mx|sa|us)-[a-z]+-\d")
"""Regions whose endpoints are below amazonaws.com."""


class S3Settings(NamedTuple):
    """`provide` returns the credentials, as obstore wants them; None if requests are not signed.

    `verify`: False, True or None for the usual check of certificates, or the path of a bundle.
    """

    endpoint: str
    region: str
    provide: Callable[[], Any] | None
    verify: Any


def s3_settings(options: Mapping[str, Any]) -> S3Settings | None:
    """Return how to connect with the storage options of s3fs; None if botocore must find that out."""
    client = options.get("client_kwargs") or {}
    profile = _profile(options.get("profile") or os.environ.get("AWS_PROFILE"))
    variables = {name: v for name, v in os.environ.items() if name.startswith("AWS_") and name not in IRRELEVANT}
    if profile is None or not variables.keys() <= VARIABLES or "" in variables.values():
        return None
    fields = {**profile[1], **profile[0]}
    region = client.get("region_name") or os.environ.get("AWS_DEFAULT_REGION") or fields.get("region")
    endpoint = options.get("endpoint_url") or client.get("endpoint_url")
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    endpoint = endpoint or fields.get("endpoint_url")
    if endpoint is None and options.get("use_ssl", True) and client.get("use_ssl", True):
        if region is None:
            endpoint = "https://s3.amazonaws.com"
        elif COMMERCIAL.fullmatch(region):
            endpoint = f"https://s3.{region}.amazonaws.com"
    if endpoint is None or not endpoint.startswith(("http://", "https://")):
        return None
    provide = None
    if not options.get("anon"):
        credentials = _credentials(options, client, profile)
        if credentials is None:
            return None
        provide = _provider(credentials)
    verify = client.get("verify")
    if verify is None:
        bundles = (os.environ.get("AWS_CA_BUNDLE"), fields.get("ca_bundle"), os.environ.get("REQUESTS_CA_BUNDLE"))
        verify = next(filter(None, bundles), None)
    return S3Settings(endpoint, region or "us-east-1", provide, verify)


def _provider(credentials: tuple[str, str, str | None]) -> Callable[[], Any]:
    key, secret, token = credentials
    return lambda: {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": None}


def _credentials(
    options: Mapping[str, Any], client: Mapping[str, Any], profile: tuple[Mapping[str, str], Mapping[str, str]]
) -> tuple[str, str, str | None] | None:
    """Return key, secret and token of the first source that has a key; None if no source has one with a secret."""
    given = (options.get("key") or options.get("username"), options.get("secret") or options.get("password"))
    sources: list[tuple[Any, ...]] = [
        (*given, options.get("token")),
        tuple(client.get(name) for name in CREDENTIALS),
    ]
    if not options.get("profile"):  # otherwise botocore disregards the variables
        sources.append(tuple(os.environ.get(name.upper()) for name in CREDENTIALS))
    sources += [tuple(fields.get(name) for name in CREDENTIALS) for fields in profile]
    key, secret, token = next((source for source in sources if any(source)), (None, None, None))
    return (key, secret, token) if key and secret else None


def _profile(name: str | None) -> tuple[Mapping[str, str], Mapping[str, str]] | None:
    """Return the fields of a profile in the files `credentials` and `config`; None if they are not plain."""
    parts = (
        _section("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name or "default"),
        _section("AWS_CONFIG_FILE", "~/.aws/config", "default" if name in (None, "default") else f"profile {name}"),
    )
    if None in parts or (name is not None and not any(parts)):
        return None
    return parts  # type: ignore[return-value]


def _section(variable: str, default: str, name: str) -> Mapping[str, str] | None:
    """Return a section of a configuration file, which may be absent; None if it is not plain."""
    path = os.path.expanduser(os.path.expandvars(os.environ.get(variable) or default))
    if not os.path.isfile(path):
        return {}
    from configparser import Error, RawConfigParser

    parser = RawConfigParser()
    try:
        parser.read(path)
    except (Error, UnicodeDecodeError, OSError):
        return None
    if any(title.startswith("profile") and not PLAIN_PROFILE.fullmatch(title) for title in parser.sections()):
        return None
    fields = dict(parser[name]) if parser.has_section(name) else {}
    return fields if fields.keys() <= FIELDS and all(map(_is_plain, fields.values())) else None


def _is_plain(value: str) -> bool:
    return value != "" and "\n" not in value
