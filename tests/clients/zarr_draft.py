"""zarr-python 2.18 as it must be started to know the draft of 2022."""

from __future__ import annotations

import importlib
import os
import warnings
from types import SimpleNamespace


def zarr_of_the_draft(sharding: bool) -> SimpleNamespace:
    """The parts of the library that tests use. When it is first imported it decides whether it knows shards."""
    os.environ.update(ZARR_V3_EXPERIMENTAL_API="1", ZARR_V3_SHARDING="1" if sharding else "0")
    warnings.simplefilter("ignore", FutureWarning)  # it was an experiment, and says so
    transformers = importlib.import_module("zarr._storage.v3_storage_transformers")
    return SimpleNamespace(
        api=importlib.import_module("zarr"),
        codecs=importlib.import_module("numcodecs"),
        Store=importlib.import_module("zarr._storage.v3").DirectoryStoreV3,
        Sharding=transformers.ShardingStorageTransformer,
        # The only other transformer there is; it does nothing, and the library itself knows it from its own tests.
        Dummy=importlib.import_module("zarr.tests.test_storage_v3").DummyStorageTransfomer,
    )
