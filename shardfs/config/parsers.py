"""Parsers of option values. Each raises OptionError, which quotes the text, if the user's text is invalid."""

from __future__ import annotations

import difflib
import math
import os
import re
from typing import TYPE_CHECKING

from shardfs.model.errors import OptionError
from shardfs.model.redact import is_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LONGEST_S = 10**9
"""The longest finite time of an option in seconds, within the limits of the system's timers."""


def size(text: str) -> int:
    """A number of bytes from 65536, 64K, 1.5M or 1GiB. K, KB and KiB are 1024; fractions of a byte are cut off."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise OptionError(f"{text!r} is not a size such as 64K, 256M or 1GiB")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def seconds(text: str) -> float:
    """Seconds from a number, with or without a unit: 90, 0.5, 10m, 2h, 1d. `forever` is infinite."""
    if text == "forever":
        return math.inf
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{0,9})?|\.\d{1,9})([smhd]?)", text)
    if match is None:
        raise OptionError(f"{text!r} is not a time such as 90, 0.5, 10m, 2h or forever")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def finite_seconds(text: str) -> float:
    """Seconds from 0 to `LONGEST_S`, in the notation of `seconds`."""
    value = seconds(text)
    if value == math.inf:
        raise OptionError("'forever' is not possible here; give a number of seconds")
    if value > LONGEST_S:
        raise OptionError(f"{text!r} is too long; the limit is {LONGEST_S} seconds")
    return value


def positive_seconds(text: str) -> float:
    """Seconds above 0 and up to `LONGEST_S`, in the notation of `seconds`."""
    value = finite_seconds(text)
    if value == 0:
        raise OptionError("must be more than 0")
    return value


def octal(text: str) -> int:
    """Permission bits from octal digits, with or without 0o, at most 0777."""
    if not re.fullmatch(r"(0o)?[0-7]{1,4}", text):
        raise OptionError(f"{text!r} is not an octal mode such as 022 or 0444")
    mode = int(text, 8)
    if mode > 0o777:
        raise OptionError(f"{text!r} is more than nine permission bits (0777)")
    return mode


def natural(text: str) -> int:
    """A number from 0 to 2**32 - 2, the largest user number."""
    if not re.fullmatch(r"\d{1,10}", text) or int(text) >= 2**32 - 1:
        raise OptionError(f"{text!r} is not a number from 0 to {2**32 - 2}")
    return int(text)


def positive(text: str) -> int:
    """A number from 1 to 2**32 - 2."""
    if natural(text) == 0:
        raise OptionError("must be at least 1")
    return int(text)


def switch(text: str) -> bool:
    """True for 1, true, yes and on; False for 0, false, no and off, in any case. An empty text is True: `-o name`."""
    if text.lower() in ("", "1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise OptionError(f"{text!r} is neither true nor false")


def one_of(*words: str) -> Callable[[str], str]:
    """A parser that accepts only these words, and returns them unchanged."""

    def parse(text: str) -> str:
        if text not in words:
            raise OptionError(f"{text!r} is not one of {', '.join(words)}{suggestion(text, words)}")
        return text

    return parse


def file_path(text: str) -> str:
    """The absolute path, with `~` expanded, because the daemon changes its current directory."""
    if not text:
        raise OptionError("needs a path")
    return os.path.abspath(os.path.expanduser(text))


def absolute(source: str) -> str:
    """The absolute path of a local source, because daemons change the directory; a URL unchanged. `~` is not expanded.

    Raise OptionError for an empty source.
    """
    if not source:  # probably an unset shell variable; do not use the current directory
        raise OptionError("the source is empty: give a path or a URL")
    return os.path.abspath(source) if is_path(source) else source


def cache_directory(text: str) -> str:
    """The absolute path of a directory; "auto" unchanged; "" for "none", which means no cache."""
    return "" if text == "none" else text if text == "auto" else file_path(text)


def address(text: str) -> str:
    """HOST:PORT unchanged, with an IPv6 address in brackets. PORT is from 0, for any free port, to 65535."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 65536) or (":" in host and host[0] != "["):
        raise OptionError(f"{text!r} is not of the form HOST:PORT, such as localhost:9100 or [::1]:9100")
    return text


def suggestion(word: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown word: `; did you mean ...` if a known word is similar, else ""."""
    near = difflib.get_close_matches(word, list(names), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
