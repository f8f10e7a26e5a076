"""The bugs that are seeded can still be put into the sources."""

from __future__ import annotations

import pytest

from tests.datasets import ROOT
from tests.write.bugs import BUGS, Bug


@pytest.mark.torture  # not quick: whoever changes the sources has other worries
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_seeded_bug_fits_the_sources(bug: Bug) -> None:
    for name, old, new in bug.edits:
        text = (ROOT / name).read_text()
        assert text.count(old) == 1
        compile(text.replace(old, new), name, "exec")
