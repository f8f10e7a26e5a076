"""All formats and layouts, in order of detection."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardfs.formats.format import Format, View


@cache
def formats() -> Sequence[Format]:
    """All formats that the native layout detects, in order of detection."""
    from shardfs.formats.bcolz import BCOLZ
    from shardfs.formats.blosc2 import BLOSC2
    from shardfs.formats.n5 import N5
    from shardfs.formats.precomputed import PRECOMPUTED
    from shardfs.formats.zarr3 import ZARR3
    from shardfs.formats.zarr_transformer import ZARR_TRANSFORMER

    return (ZARR3, ZARR_TRANSFORMER, PRECOMPUTED, N5, BCOLZ, BLOSC2)


def format_of(name: str) -> Format:
    """The format with this `Dataset.format`. Raise KeyError if there is none."""
    return {dataset_format: f for f in formats() for dataset_format in f.dataset_formats}[name]


@cache
def sources() -> Sequence[Format]:
    """All formats that other layouts detect: `formats`, and unsharded formats that the native layout ignores."""
    from shardfs.formats.bcolz import BCOLZ, BCOLZ_SOURCE
    from shardfs.formats.zarr2 import ZARR2

    return (*(BCOLZ_SOURCE if f is BCOLZ else f for f in formats()), ZARR2)


@cache
def views() -> Mapping[str, View]:
    """All layouts but the native one, by name."""
    from shardfs.formats.bcolz import BCOLZ
    from shardfs.formats.n5 import N5
    from shardfs.formats.precomputed import PRECOMPUTED
    from shardfs.formats.zarr2 import ZARR2
    from shardfs.formats.zarr3_view import ZARR3_VIEW

    all_views: Sequence[View] = (ZARR2, ZARR3_VIEW, N5, PRECOMPUTED, BCOLZ)
    return {view.name: view for view in all_views}


def creating_view(format: str) -> View | None:
    """The view that prints the documents of new datasets of this `Dataset.format`; None if there is none."""
    from shardfs.formats.zarr3_view import ZARR3_CREATION

    return ZARR3_CREATION if format == ZARR3_CREATION.name else views().get(format)
