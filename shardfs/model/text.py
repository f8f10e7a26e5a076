"""Words for messages and output."""

from __future__ import annotations


def printable(text: str) -> str:
    """Replace control characters, line breaks and undecodable bytes by Python escapes.

    All text for terminals and logs passes here: names and errors of a source may contain any characters.
    """
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    if "\udc80" <= character <= "\udcff":  # surrogateescape: an undecodable byte
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def counted(n: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: "1 shard", "2 shards". `plural` is for nouns that do not just take an s."""
    return f"{n} {noun if n == 1 else plural or noun + 's'}"


def human_bytes(n: float) -> str:
    """Text of a number of bytes with a binary unit."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while n >= 1024 and len(units) > 1:
        n /= 1024
        units.pop(0)
    return f"{n:.0f} B" if units[0] == "B" else f"{n:.1f} {units[0]}"
