"""Every variant of every writer, read through mounts by every library that reads the unsharded form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest

from tests import datasets
from tests.datasets import same
from tests.mount.programs import dealt, link_tree, read_many

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.datasets import Array, Client, Dataset

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.slow]

Kind = Literal["zarr3", "precomputed"]


@pytest.fixture(scope="module")
def farm(
    dataset: Callable[[str, str], Dataset], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Kind], tuple[Path, Mapping[str, Dataset]]]:
    """`farm("zarr3")`: a directory with all variants of a kind, each under its name, and what they are."""
    planted: dict[Kind, tuple[Path, dict[str, Dataset]]] = {}

    def get(kind: Kind) -> tuple[Path, Mapping[str, Dataset]]:
        if kind not in planted:
            root = tmp_path_factory.mktemp(f"farm-{kind}")
            planted[kind] = root, {}
            for name in {"zarr3": datasets.ZARR3, "precomputed": datasets.PRECOMPUTED}[kind]:
                try:
                    variant = dataset(kind, name)
                except pytest.skip.Exception:  # its writer is not installed
                    continue
                link_tree(variant.path, root / name)
                planted[kind][1][name] = variant
        return planted[kind]

    return get


def differences(outcome: Array | str, wanted: Array | str) -> str:
    """What is wrong with what a client read; nothing if nothing is."""
    if isinstance(outcome, str) or isinstance(wanted, str):
        return f"mount: {_told(outcome)}; expected: {_told(wanted)}"
    if same(outcome, wanted):
        return ""
    if outcome.shape != wanted.shape or outcome.dtype != wanted.dtype:
        return f"{outcome.dtype}{outcome.shape} instead of {wanted.dtype}{wanted.shape}"
    return f"{np.count_nonzero(outcome != wanted)} of {wanted.size} elements differ"


def _told(outcome: Array | str) -> str:
    return outcome if isinstance(outcome, str) else f"{outcome.dtype}{outcome.shape}"


CLIENTS: dict[Kind, list[Client]] = {
    "zarr3": ["tensorstore", "zarr3", "dask", "z5"],
    "precomputed": ["tensorstore", "cloudvolume"],
}


@pytest.mark.parametrize(("kind", "client"), [(kind, client) for kind in CLIENTS for client in CLIENTS[kind]])
def test_client_reads_every_variant(
    kind: Kind,
    client: Client,
    farm: Callable[[Kind], tuple[Path, Mapping[str, Dataset]]],
    mounted: Mounted,
    tmp_path: Path,
) -> None:
    root, variants = farm(kind)
    wanted = [(d, member) for d in variants.values() if client in d.readers for member in d.arrays]
    assert len(wanted) > 25
    wanted = dealt(wanted, client, CLIENTS[kind])
    with mounted(root) as mount:
        through_mount = [(d, member, mount / d.name) for d, member in wanted]
        # A decoder that loses something: only the same one can tell what is right.
        from_twin = [(d, member, d.twin) for d, member in wanted if d.lossy]
        read = read_many(client, [*through_mount, *from_twin], tmp_path)
    twins = iter(read[len(wanted) :])
    failures = {}
    for (variant, member), outcome in zip(wanted, read, strict=False):
        right = next(twins) if variant.lossy else variant.arrays[member]
        if difference := differences(outcome, right):
            failures[f"{variant.name} {member}"] = difference
    assert failures == {}


def test_one_array_is_mounted_by_itself(
    dataset: Callable[[str, str], Dataset], mounted: Mounted, tmp_path: Path
) -> None:
    """Not in a directory of others: metadata is at the root of the mount."""
    variant, volume = dataset("zarr3", "zarr_python"), dataset("precomputed", "both_scales_sharded")
    with mounted(variant.path) as array, mounted(volume.path) as scales:
        jobs = [(variant, "", array), (volume, "0", scales), (volume, "1", scales)]
        outcomes = read_many("tensorstore", jobs, tmp_path)
    wanted = [variant.arrays[""], volume.arrays["0"], volume.arrays["1"]]
    assert [differences(*pair) for pair in zip(outcomes, wanted, strict=True)] == ["", "", ""]
