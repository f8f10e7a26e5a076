"""Put the table of `shardfs.formats.as_markdown` into docs/formats.md: `python scripts/formats_table.py`."""

from __future__ import annotations

from pathlib import Path

from shardfs.formats import as_markdown

DOCUMENT = Path(__file__).parent.parent / "docs" / "formats.md"
BEGIN, END = "<!-- made by scripts/formats_table.py -->\n", "<!-- end of what is made -->\n"

text = DOCUMENT.read_text()
before, _, rest = text.partition(BEGIN)
DOCUMENT.write_text(before + BEGIN + as_markdown() + END + rest.partition(END)[2])
