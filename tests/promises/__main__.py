"""Tries the matrix of promises, and prints each cell with its result: `python -m tests.promises [--all] [--page]`.

By default, the cells of the quick run; `--all`: all of them, which takes hours. `--page` writes the tables of
docs/promises.md anew. Ends with 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from tests.datasets import ROOT
from tests.promises.axes import PARTIES, RULES, STORES, Cell
from tests.promises.forms import NATIVE
from tests.promises.scenarios import PROMISES

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE = ROOT / "docs/promises.md"


class Outcomes:
    """Collects what pytest reports: "holds", "broken", or "not tried" where a program is missing."""

    def __init__(self) -> None:
        self.by_cell: dict[Cell, str] = {}

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        cell = getattr(item, "callspec", None) and item.callspec.params.get("cell")  # type: ignore[attr-defined]
        if cell is None:
            return
        if call.excinfo is not None:
            self.by_cell[cell] = "not tried" if call.excinfo.errisinstance(pytest.skip.Exception) else "broken"
        elif call.when == "call":
            self.by_cell[cell] = "holds"


def _row(name: str, outcomes: Mapping[Cell, str]) -> str:
    cells = [cell for cell in outcomes if cell.promise == name]
    counts = Counter(outcomes[cell] for cell in cells)
    sentences = (" ".join(sentence.replace("|", "\\|").split()) for sentence in PROMISES[name].sentences)
    columns = [
        f"`{name}`",
        "<br>".join(sentences),
        ", ".join(value for value in STORES if any(cell.store == value for cell in cells)),
        ", ".join(value for value in PARTIES if any(cell.party == value for cell in cells)),
        ", ".join(f"{word} in {number}" for word, number in sorted(counts.items())),
    ]
    return f"| {' | '.join(columns)} |"


def page(outcomes: Mapping[Cell, str], day: str) -> str:
    """Return the text of the page."""
    text = PAGE.read_text()
    table = text.index("| promise |")
    return "\n".join(
        [
            text[:table].rstrip("\n"),
            "",
            f"| promise | sentences | stores | other programs | {len(outcomes)} cells, {day} |",
            "|---|---|---|---|---|",
            *(_row(name, outcomes) for name in PROMISES),
            "",
            "| store | |",
            "|---|---|",
            *(f"| `{store}` | {meaning} |" for store, meaning in STORES.items()),
            "",
            "| other program | |",
            "|---|---|",
            *(f"| `{party}` | {meaning} |" for party, meaning in PARTIES.items()),
            "",
            f"Stored forms: {', '.join(f'`{name}`' for name in NATIVE)}.",
            "",
            "Combinations that are left out:",
            "",
            *(f"- {reason}" for reason in RULES),
            "",
        ]
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="try all combinations")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    if options.all:
        os.environ["SHARDFS_TORTURE"] = "1"
    outcomes = Outcomes()
    options_of_pytest = ["-q", "--no-header", "--tb=short", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    status = pytest.main([*options_of_pytest, str(ROOT / "tests/promises")], plugins=[outcomes])
    for cell, outcome in sorted(outcomes.by_cell.items()):
        print(f"{outcome:10}", *(f"{value:{width}}" for value, width in zip(cell, (31, 7, 17, 12, 0), strict=True)))
    print(dict(Counter(outcomes.by_cell.values())))
    if options.page:
        PAGE.write_text(page(outcomes.by_cell, f"{datetime.now(UTC):%d %B %Y}"))
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
