"""Put the tables of `shardfs.formats` into docs/formats.md and docs/layouts.md: `python scripts/formats_table.py`."""

from __future__ import annotations

from pathlib import Path

from shardfs.formats.registry import as_markdown, layouts_as_markdown

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- made by scripts/formats_table.py -->\n", "<!-- end of what is made -->\n"

for name, table in (("formats.md", as_markdown()), ("layouts.md", layouts_as_markdown())):
    text = (DOCS / name).read_text()
    before, _, rest = text.partition(BEGIN)
    (DOCS / name).write_text(before + BEGIN + table + END + rest.partition(END)[2])
