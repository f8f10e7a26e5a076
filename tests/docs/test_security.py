"""The page with the threat model names tests that exist."""

from __future__ import annotations

import re

import pytest

from tests.datasets import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text()


@pytest.mark.every_case
@pytest.mark.parametrize("row", [line for line in PAGE.splitlines() if line.startswith("| ") and "`tests/" in line])
def test_named_tests_exist(row: str) -> None:
    names = re.findall(r"`((?:tests/[\w/]+(?:\.py)?)?(?:::\w+)?)`", row.split(" | ")[-1])
    assert names
    file = ""
    for name in names:
        path, _, test = name.partition("::")
        file = path.rstrip("/") or file
        assert (ROOT / file).exists(), file
        assert not test or re.search(rf"def {test}\(", (ROOT / file).read_text()), name
