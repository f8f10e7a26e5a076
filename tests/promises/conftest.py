"""Assertions of scenarios say which values differ."""

import pytest

pytest.register_assert_rewrite("tests.promises.place", "tests.promises.scenarios")
