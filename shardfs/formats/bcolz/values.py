"""Parses bcolz documents, which are JSON or YAML, and checks the values in them."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.formats import documents
from shardfs.formats.documents import parse_json
from shardfs.model.errors import CorruptShardError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardfs.model.values import Coords

MAX_YAML_BYTES, MAX_YAML_DEPTH = 256 << 10, 50
"""The limits of a YAML document. Real documents have a few lines, and parsing YAML is slow."""

MAX_PLAIN = 4096
"""The longest plain YAML scalar, because converting a long one to a number can be slow."""

MAX_ITEM = 2**31 - 1


def parsed(documents: Mapping[str, bytes], name: str) -> Any:
    """The parsed document, which is JSON or YAML. Raise ValueError, with its name and the reason, if it is invalid."""
    raw = documents[name]
    if raw.lstrip().startswith(b"{"):
        try:
            return parse_json("", name, raw)
        except CorruptShardError:
            pass  # a document in braces may also be YAML
    try:
        return parse_yaml(raw)
    except ValueError as e:
        raise ValueError(f"{name}: {e}") from e


def parse_yaml(raw: bytes) -> Any:
    """The parsed YAML document. Raise ValueError, with the reason, for aliases, or a document beyond the limits."""
    if len(raw) > MAX_YAML_BYTES:
        raise ValueError(f"{len(raw)} bytes of YAML; {MAX_YAML_BYTES} is the limit")
    try:
        import yaml
    except ImportError:
        raise ValueError("is YAML, for which PyYAML must be installed: pip install pyyaml") from None
    try:
        depth = 0
        for event in yaml.parse(raw, yaml.SafeLoader):  # stops at the first violation of a limit
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("has aliases, which no such document needs")
            if depth > MAX_YAML_DEPTH:
                raise ValueError("nested too deeply")
            if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and len(event.value) > MAX_PLAIN:
                raise ValueError(f"a plain value of {len(event.value)} characters; {MAX_PLAIN} is the limit")
        return yaml.safe_load(raw)
    except yaml.YAMLError as e:
        raise ValueError(f"cannot be read: {' '.join(str(e).split())}") from e


def integers(value: Any, name: str, minimum: int) -> Coords:
    """The integers in a list, a single integer, or text such as `(30, 20)`, which YAML makes of a Python tuple.

    Raise ValueError, with the reason, for anything else, and for integers below `minimum`.
    """
    if isinstance(value, str) and re.fullmatch(r"\(\s*\d{1,20}\s*(,\s*\d{1,20}\s*)*,?\s*\)", value):
        value = [int(n) for n in re.findall(r"\d+", value)]
    if isinstance(value, int):
        value = [value]
    if not isinstance(value, list) or len(value) > 32:
        raise ValueError(f"{name} should be a list of integers, not {value!r:.80}")
    return documents.integers(value, name, minimum)


def numpy_dtype(value: Any, endianness: str) -> np.dtype[Any]:
    """The numpy type with this name or list of fields, or of the text of such a list.

    `endianness` is "little" or "big": the byte order of a name that says none; fields ignore it. Raise ValueError for
    unknown types and types with objects.
    """
    if isinstance(value, str) and value.startswith("["):
        value = literal(value)
    if isinstance(value, str) and not re.fullmatch(r"[<>|=]?[A-Za-z]\w{0,30}(\[\w{1,10}\])?", value):
        raise ValueError(f"dtype {value!r:.80} is unknown")
    try:
        dtype = np.dtype(_fields(value) if isinstance(value, list) else str(value))
    except (TypeError, ValueError, SyntaxError, OverflowError) as e:
        raise ValueError(f"dtype {value!r:.80} is unknown: {e}") from e
    if dtype.hasobject or not 0 < dtype.itemsize <= MAX_ITEM:
        raise ValueError(f"dtype {value!r:.80} cannot be stored: it holds Python objects, or no bytes")
    explicit = isinstance(value, list) or str(value)[0] in "<>|="
    return dtype if explicit or endianness == "little" else dtype.newbyteorder(">")


def _fields(value: list[Any]) -> list[tuple[Any, ...]]:
    """The fields as the tuples that numpy requires; JSON has lists."""
    out = []
    for field in value:
        if not isinstance(field, list | tuple) or not 2 <= len(field) <= 3 or not isinstance(field[0], str):
            raise ValueError(f"field {field!r:.80} of a dtype")
        inner = _fields(field[1]) if isinstance(field[1], list) else str(field[1])
        shape = [tuple(n) if isinstance(n, list) else n for n in field[2:]]
        out.append((field[0], inner, *shape))
    return out


def literal(text: Any) -> Any:
    """The value of a Python literal. Raise ValueError, with the reason, for anything else."""
    if not isinstance(text, str) or len(text) > MAX_YAML_BYTES:
        raise ValueError(f"{text!r:.80} is no Python literal")
    try:
        return ast.literal_eval(text)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as e:
        raise ValueError(f"{text!r:.80} is no Python literal") from e
