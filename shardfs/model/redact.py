"""Redaction of secrets in sources, storage options and variables, for messages, logs and lists of mounts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

MASK = "***"

# fmt: off
HARMLESS = frozenset((
    "access", "account_name", "anon", "aws_ca_bundle", "aws_config_file", "aws_default_region", "aws_endpoint_url",
    "aws_endpoint_url_s3", "aws_profile", "aws_region", "aws_shared_credentials_file", "cache_type", "compression",
    "default_cache_type", "encoding", "endpoint_url", "fo", "google_application_credentials", "google_cloud_project",
    "host", "https_proxy", "http_proxy", "location", "mode", "no_proxy", "path", "profile", "project", "protocol",
    "region", "region_name", "remote_protocol", "signature_version", "target_protocol", "user", "username", "verify",
))
# fmt: on
"""Names of storage options and variables whose values are shown. All other texts are masked, since no list of the
secret options of all stores exists."""

LONG = 8
"""Shorter values in the query of a URL are not secret: no password or signature is so short."""

LEAST = 4
"""Shorter secrets are not replaced in messages: they would match parts of ordinary words."""

_known: set[str] = set()


def is_path(source: str) -> bool:
    """Whether a source is a local path rather than a URL. An existing path may contain `::`, but not `://`."""
    return "://" not in source and ("::" not in source or os.path.lexists(source))


def public_name(source: str) -> str:
    """The source without user names, passwords, queries and fragments, which may be secret."""
    return "::".join(_public_part(part) for part in source.split("::"))


def _public_part(part: str) -> str:
    if "://" not in part:
        return part
    url = urlsplit(part)
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"


def redacted_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with `MASK` in place of each text that may be secret."""
    return {name: _masked_value(name, value) for name, value in values.items()}


def _masked_value(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return redacted_values(value)
    if isinstance(value, list | tuple):
        return [_masked_value(name, element) for element in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return public_name(str(value)) if name.lower() in HARMLESS else MASK


def secrets_of(source: str, *groups: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts that `public_name` and `redacted_values` hide in a source and in groups of options."""
    for part in source.split("::"):
        url = urlsplit(part) if "://" in part else None
        if url is not None:
            yield from filter(None, (url.netloc.rpartition("@")[0], url.password, url.query, url.fragment))
            # Clients send the members of a query in another order, and name them in errors.
            yield from (value for _, value in parse_qsl(url.query) if len(value) >= LONG)
    for group in groups:
        for name, value in group.items():
            yield from _secrets_in(name, value)


def _secrets_in(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from secrets_of("", value)
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _secrets_in(name, element)
    elif _masked_value(name, value) == MASK:
        yield str(value)
    elif isinstance(value, str):
        yield from secrets_of(value)


def has_password(source: str) -> bool:
    """Whether a URL contains a password."""
    return any("://" in part and urlsplit(part).password for part in source.split("::"))


def add_secrets(source: str, *groups: Mapping[str, Any]) -> None:
    """Make `redacted` mask these secrets from now on, since stores include their arguments in error messages."""
    for secret in secrets_of(source, *groups):
        forms = secret, unquote(secret), quote(secret, safe="")
        _known.update(text for text in forms if len(text) >= LEAST)


def redacted(text: str) -> str:
    """The message with remembered secrets masked."""
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text
