"""The table of options as the text of docs/options.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardfs.config.loading import ACCEPTED, FORWARDED
from shardfs.config.options import SCOPES, Setting, settings

if TYPE_CHECKING:
    from collections.abc import Iterable

_INTRODUCTION = """\
# Options

<!-- Written by scripts/make_man.py. Change the table in shardfs/config/options.py instead. -->

You can give every option in four ways. If two of them disagree, the later one in this list wins.

1. A profile in a configuration file: `attr_timeout = 10`; see [service.md](service.md).
2. An environment variable: `SHARDFS_ATTR_TIMEOUT=10`. Other variables that begin with `SHARDFS_` are ignored.
3. A mount option: `-o attr_timeout=10,direct_io`. `-` and `_` are the same. Write a comma in a value as
   `\\,` and a backslash as `\\\\`.
4. A flag: `--attr-timeout 10 --direct-io`. Each switch also has a `--no-` form.

Sizes are bytes, or 64K, 256M, 1GiB, where K is 1024. Times are seconds, or 10m, 2h, 1d. Modes are octal.
An unknown option is an error, and the message names the most similar option.
"""

_REST = """\
## The source

`-o storage_option.KEY=VALUE` or `--storage-option KEY=VALUE` goes to the fsspec file system of the source.
A value that is valid JSON is parsed as JSON (`true`, `3`, `{"a": 1}`), any other value is a string. Write `"3"` for
a string of digits. Dots in a key make nested objects:
`storage_option.client_kwargs.endpoint_url=http://localhost:9000`. One variable can hold all storage options:
`SHARDFS_STORAGE_OPTIONS='{"anon": true}'`.

`-o env.NAME=VALUE` or `--env NAME=VALUE` sets an environment variable before the source is opened,
for instance `env.AWS_PROFILE=lab`. All users of the machine can read the command line of a process. So keep secrets
in the files and variables that the store's client library reads, or in a profile in a file of mode 0600.

## Words of mount(8) and fstab

- A mount is read-only (`ro`) unless `writable` is given. mount(8) adds `rw` automatically when `ro` is missing, also
  for `defaults`. `rw` alone is therefore refused, so that no mount becomes writable by accident. A line in fstab needs
  either `ro` or `writable`.
- Passed to the kernel: {forwarded}.
- Accepted without effect: {accepted}, and all words that begin with `x-`.
"""


def as_markdown() -> str:
    """The text of docs/options.md."""
    parts = [_INTRODUCTION]
    for scope in SCOPES:
        rows = "".join(_row(s) for s in settings() if s.scope == scope)
        parts.append(f"## {scope}\n\n| `-o` | value | default | |\n|---|---|---|---|\n{rows}")
    rest = _REST.replace("{forwarded}", _quoted(FORWARDED)).replace("{accepted}", _quoted(sorted(ACCEPTED)))
    return "\n".join([*parts, rest])


def _row(s: Setting) -> str:
    return f"| `{s.name}` | {s.value.replace('|', ' or ') or 'switch'} | {s.default} | {s.help} |\n"


def _quoted(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)
