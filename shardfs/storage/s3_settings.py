"""How to connect to S3, found without botocore, whose import and set-up take a second of CPU time.

The options and variables and their order are those of botocore. Whatever else may count is left to botocore.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CREDENTIALS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")

FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}
"""Variable -> where a file of AWS is without it. Only botocore reads these files."""

VARIABLES = frozenset((
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE", *FILES,
))  # fmt: skip

IRRELEVANT = frozenset(("AWS_EC2_METADATA_DISABLED", "AWS_PAGER"))
"""Variables without which botocore connects to S3 in the same way."""

COMMERCIAL = re.compile(r"(af|ap|ca|eu|il|me|mx|sa|us)-[a-z]+-\d")
"""Regions whose endpoints are below amazonaws.com."""


class S3Settings(NamedTuple):
    """How obstore connects to S3.

    Attributes:
        endpoint: the URL of the service.
        provide: returns the credentials, as obstore wants them; None if requests are not signed.
        verify: False, True or None for the usual check of certificates, or the path of a bundle.
    """

    endpoint: str
    region: str
    provide: Callable[[], Any] | None
    verify: Any


def s3_settings(options: Mapping[str, Any]) -> S3Settings | None:
    """Return how to connect with the storage options of s3fs; None if botocore must find that out."""
    environ = {name: v for name, v in os.environ.items() if name.startswith("AWS_") and name not in IRRELEVANT}
    if options.get("profile") or not environ.keys() <= VARIABLES or "" in environ.values():
        return None
    if any(
        os.path.isfile(os.path.expanduser(os.path.expandvars(environ.get(name, path)))) for name, path in FILES.items()
    ):
        return None
    if ((options.get("config_kwargs") or {}).get("s3") or {}).get("addressing_style") == "virtual":
        return None
    client = options.get("client_kwargs") or {}
    region = client.get("region_name") or environ.get("AWS_DEFAULT_REGION")
    endpoint = options.get("endpoint_url") or client.get("endpoint_url")
    endpoint = endpoint or environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    if endpoint is None and options.get("use_ssl", True) and client.get("use_ssl", True):
        if region is None:
            endpoint = "https://s3.amazonaws.com"
        elif COMMERCIAL.fullmatch(region):
            endpoint = f"https://s3.{region}.amazonaws.com"
    if endpoint is None or not endpoint.startswith(("http://", "https://")):
        return None
    credentials = None if options.get("anon") else _credentials(options, client)
    if credentials is None and not options.get("anon"):
        return None
    verify = client.get("verify")
    if verify is None:
        verify = environ.get("AWS_CA_BUNDLE") or os.environ.get("REQUESTS_CA_BUNDLE") or None
    return S3Settings(endpoint, region or "us-east-1", None if credentials is None else lambda: credentials, verify)


def _credentials(options: Mapping[str, Any], client: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the credentials of the first source that has a key; None if it has no secret, or no source has a key."""
    sources = (
        (options.get("key") or options.get("username"), options.get("secret") or options.get("password"),
         options.get("token")),
        [client.get(name) for name in CREDENTIALS],
        [os.environ.get(name.upper()) for name in CREDENTIALS],
    )  # fmt: skip
    key, secret, token = next(filter(any, sources), (None, None, None))
    if not (key and secret):
        return None
    return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": None}
