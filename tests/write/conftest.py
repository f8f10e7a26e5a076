"""What takes hours is left out unless it is asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked `torture` unless `SHARDFS_TORTURE` is set, as scripts/torture does."""
    if "SHARDFS_TORTURE" in os.environ:
        return
    left = [item for item in items if item.get_closest_marker("torture")]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("torture")]
