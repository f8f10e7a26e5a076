"""The rules of `--create`, which shard new arrays that programs create without shards, and the sizes of shards."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardfs.model.values import Coords

NONE = "none"
"""Used in a rule instead of a format: matching arrays stay unsharded."""

MAX_CHUNKS, MAX_BYTES = 1000, 1 << 30
"""The limits of a shard whose rule has no `chunks_per_shard`. `MAX_BYTES` applies before compression."""

MOST_CHUNKS = 1 << 20
"""The limit of a shard whose rule has `shard_bytes`. The index of a larger one would be refused."""

_LOCATION = {"index_location": ("end", "start")}
_ENCODING = ("gzip", "raw")

PARAMETERS: Mapping[str, Mapping[str, Sequence[str] | int]] = {
    "zarr3": _LOCATION,
    "zarr3-draft": {},
    "n5": _LOCATION,
    "precomputed": {
        "hash": ("identity", "murmurhash3_x86_128"),
        "minishard_index_encoding": _ENCODING,
        "data_encoding": _ENCODING,
        "preshift_bits": 64,
        "minishard_bits": 21,  # `uint64_spec.MAX_MINISHARD_BITS`, whose module would import numpy for `--help`
        "shard_bits": 64,
    },
}
"""The formats that rules can create, and their sharding parameters: the allowed words, or the largest number."""


class Sharding(NamedTuple):
    """The stored documents of a sharded dataset whose document was deleted, in the form that `Format.open` takes."""

    format: str
    documents: Mapping[str, bytes]


@dataclass(frozen=True)
class Rule:
    """How new arrays of one format are sharded.

    Args:
        format: a format of `PARAMETERS`, or `NONE`.
        pattern: the paths that the rule applies to. `*` matches anything but a slash, `**` matches anything.
        chunks_per_shard: in the axis order of shapes in the format's documents; () for `automatic`.
        words: the parameters with text values.
        numbers: the parameters with integer values.
        shard_bytes: the limit of an automatic shard before compression, instead of `MAX_CHUNKS` and `MAX_BYTES`.
    """

    format: str
    pattern: str = "**"
    chunks_per_shard: Coords = ()
    words: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    shard_bytes: int | None = None

    def matches(self, path: str) -> bool:
        """Whether the pattern matches the whole path of a directory, relative to the source.

        The rule's format, and rules before this one, do not count; see `Rules.match`.
        """
        parts = re.split(r"(\*\*/|\*\*|\*|\?)", self.pattern)
        wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        return re.fullmatch("".join(wild.get(part, re.escape(part)) for part in parts), path, re.DOTALL) is not None

    def per_shard(self, grid: Coords, chunk_bytes: int, *, last_is_fastest: bool = True) -> Coords:
        """The number of chunks per shard along each axis, for an array with this grid of chunks.

        `chunks_per_shard` applies to the fastest-varying axes. For arrays of lower rank, the numbers of the slowest
        axes are ignored. For arrays of higher rank, shards are one chunk long along the slowest axes.
        """
        numbers, rank = self.chunks_per_shard, len(grid)
        if not numbers:
            return automatic(grid, self.most(chunk_bytes), last_is_fastest=last_is_fastest)
        ones = (1,) * (rank - len(numbers))
        return (*ones, *numbers[max(len(numbers) - rank, 0) :]) if last_is_fastest else (*numbers[:rank], *ones)

    def most(self, chunk_bytes: int) -> int:
        """The largest number of chunks in an automatic shard, given the bytes of a chunk without compression."""
        if self.shard_bytes is not None:
            return min(max(self.shard_bytes // max(chunk_bytes, 1), 1), MOST_CHUNKS)
        return max(min(MAX_CHUNKS, MAX_BYTES // max(chunk_bytes, 1)), 1)


def automatic(grid: Coords, limit: int, *, last_is_fastest: bool = True) -> Coords:
    """The number of chunks per shard along each axis: powers of two, within the array, and `limit` in all.

    The shortest axis of the shard, in chunks, is doubled until a limit is reached; of equal axes the fastest is first.
    An axis without elements is assumed to grow, so the array does not limit it.
    """
    per = [1] * len(grid)
    axes = range(len(grid))
    while True:
        free = [a for a in axes if not grid[a] or per[a] * 2 <= grid[a]]
        if not free or math.prod(per) * 2 > limit:
            return tuple(per)
        per[min(free, key=lambda a: (per[a], -a if last_is_fastest else a))] *= 2


# ---- as text ----


class Rules(NamedTuple):
    """The rules of `--create`. The first rule that matches an array applies."""

    rules: Sequence[Rule] = ()

    def match(self, path: str, format: str) -> Rule | None:
        """The first rule for a new dataset of `format` in this directory; None if the dataset stays unsharded."""
        rule = next((r for r in self.rules if r.format in (format, NONE) and r.matches(path)), None)
        return None if rule is None or rule.format == NONE else rule


def parse(text: str) -> Rules:
    """Rules `[PATTERN=]FORMAT[:NAME=VALUE,...]`, separated by semicolons. Raise ValueError if the text is invalid."""
    return Rules(tuple(_rule(part.strip()) for part in text.split(";") if part.strip()))


def _rule(text: str) -> Rule:
    formats = (*PARAMETERS, NONE)
    match = re.fullmatch(rf"(?:(.*?)=)?({'|'.join(map(re.escape, formats))})(?::(.*))?", text, re.DOTALL)
    if match is None:
        raise ValueError(f"{text!r} is no rule such as zarr3:chunks_per_shard=8,8,8 (formats: {', '.join(formats)})")
    pattern, format, parameters = match[1], match[2], match[3] or ""
    chunks: Coords = ()
    words: dict[str, str] = {}
    numbers: dict[str, int] = {}
    # Commas separate parameters, and also the numbers of one parameter.
    for part in filter(None, re.split(r",(?=[^,]*=)", parameters)):
        name, _, value = part.partition("=")
        allowed = PARAMETERS.get(format, {}).get(name, ())
        if name == "chunks_per_shard" and format != NONE:
            chunks = parse_chunks_per_shard(value)
        elif isinstance(allowed, int) and value.isascii() and value.isdecimal() and int(value) <= allowed:
            numbers[name] = int(value)
        elif not isinstance(allowed, int) and value in allowed:
            words[name] = value
        else:
            raise ValueError(f"{part!r} is no parameter of a {format} rule; {_help(format)}")
    return Rule(format, "**" if pattern is None else pattern.strip("/"), chunks, words, numbers)


def parse_chunks_per_shard(value: str) -> Coords:
    """Numbers separated by commas or by `x`; () for `auto`. Raise ValueError for anything else.

    Unlike a comma, `x` needs no backslash in the mount options after `-o`.
    """
    numbers = re.split("[,x]", value)
    if value == "auto":
        return ()
    if not all(n.isascii() and n.isdecimal() and 0 < int(n) < 2**31 for n in numbers):
        raise ValueError(f"chunks_per_shard should be numbers such as 8,8,8 or 8x8x8, or auto, not {value!r}")
    return tuple(map(int, numbers))


def _help(format: str) -> str:
    if format == NONE:
        return "none takes no parameters"
    values = {name: f"0..{v}" if isinstance(v, int) else "|".join(v) for name, v in PARAMETERS[format].items()}
    return ", ".join(["known are chunks_per_shard=8,8,8", *(f"{name}={allowed}" for name, allowed in values.items())])
