"""Each promise about written data holds in each store, form and layout, whatever another program does."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.datasets import ROOT
from tests.promises.axes import Cell, chosen_cells, covering, every_cell
from tests.promises.place import Place
from tests.promises.scenarios import PROMISES
from tests.promises.stores import Servers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.s3, pytest.mark.interop, pytest.mark.every_case]


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """The stores that need a server, which starts with the first cell that asks for it."""
    with ExitStack() as stack:
        yield Servers(stack)


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed` codec")
@pytest.mark.parametrize("cell", chosen_cells(), ids="-".join)
def test_a_promise_holds(cell: Cell, servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    PROMISES[cell.promise].run(Place(cell, servers.store(cell.store, tmp_path), tmp_path, caplog))


def test_each_pair_of_values_that_can_exist_is_tried() -> None:
    cells = every_cell()
    tried = covering(cells)
    for one, other in ((0, 3), (0, 4), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4)):
        assert {(c[one], c[other]) for c in tried} == {(c[one], c[other]) for c in cells}
    assert len(tried) < len(cells) / 5


def test_the_documentation_has_each_promise() -> None:
    pages = " ".join((ROOT / "docs" / name).read_text() for name in ("durability.md", "semantics.md", "layouts.md"))
    text = re.sub(r"\s+", " ", pages)
    sentences = [re.sub(r"\s+", " ", sentence) for one in PROMISES.values() for sentence in one.sentences]
    assert [sentence for sentence in sentences if sentence not in text] == []
