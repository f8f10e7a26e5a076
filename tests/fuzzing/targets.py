"""What is fuzzed: by name, functions that draw their input with Hypothesis and raise if something is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests import strategies
from tests.formats import test_blosc2, test_n5, test_zarr_transformer
from tests.fuzzing import datasets, documents, indices, journals, rewrites
from tests.shards import test_superchunk

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fuzzing.inputs import Draw

TARGETS: dict[str, Callable[[Draw], None]] = {
    "journals": journals.damaged,
    "documents": documents.written,
    "rewrites-zarr": rewrites.zarr_shards,
    "rewrites-ids": rewrites.id_shards,
    "index-zarr": indices.damaged(strategies.sharding_indexed_samples() | test_zarr_transformer.samples()),
    "index-ids": indices.damaged(strategies.uint64_sharded_samples() | strategies.uint64_sharded_id_samples()),
    "index-n5": indices.damaged(test_n5.n5_samples()),
    "index-blosc": indices.damaged(
        test_superchunk.samples() | test_superchunk.samples(packs=True) | test_blosc2.samples()
    ),
    **{f"dataset-{name}": datasets.damaged(name) for name in datasets.SAMPLES},
}


def as_hypothesis(target: Callable[[Draw], None], examples: int) -> Callable[[], None]:
    """The target as a test of so many examples; `.hypothesis.fuzz_one_input` calls it with one made of bytes."""
    how = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    return how(given(st.data())(target))
