"""OME-Zarr metadata, read and written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.formats import ome
from shardfs.model.arrays import Axis, Level, Multiscale, finest_first

NAMES = st.text("abcxyz019 µ", min_size=1, max_size=5)
NUMBERS = st.floats(-1e6, 1e6).map(lambda x: round(x, 3))


@st.composite
def images(draw: st.DrawFn) -> Multiscale:
    rank = draw(st.integers(1, 5))
    kinds = st.sampled_from((None, "space", "time", "channel"))
    axes = tuple(Axis(draw(NAMES), draw(kinds), draw(st.none() | NAMES)) for _ in range(rank))

    def numbers() -> tuple[float, ...]:
        return tuple(draw(NUMBERS) for _ in range(rank))

    levels = tuple(Level(f"s{i}", numbers(), numbers()) for i in range(draw(st.integers(1, 3))))
    return Multiscale(draw(st.just("") | NAMES), axes, finest_first(levels))


@given(st.lists(images(), min_size=1, max_size=3), st.booleans())
def test_what_is_written_is_read(written: list[Multiscale], segmentation: bool) -> None:
    wanted = tuple(Multiscale(i.name, i.axes, i.levels, segmentation) for i in written)
    for attributes in (ome.attributes_04(wanted), ome.attributes_05(wanted)):
        assert ome.multiscales(attributes) == wanted


@given(st.lists(images(), min_size=1, max_size=2))
def test_one_version_is_the_other(written: list[Multiscale]) -> None:
    old, new = ome.attributes_04(written), ome.attributes_05(written)
    assert ome.as_04({"mine": 1, **new}) == {"mine": 1, **old}
    assert ome.as_05({"mine": 1, **old}) == {"mine": 1, **new}
    assert ome.as_05(new) == new
    assert ome.as_04(old) == old


def test_transformations_of_the_image_follow_those_of_its_levels() -> None:
    steps = [{"type": "scale", "scale": [2, 3]}, {"type": "translation", "translation": [1, 1]}]
    common = [{"type": "scale", "scale": [10, 100]}, {"type": "translation", "translation": [5, 0]}]
    image = {
        "axes": [{"name": "y"}, {"name": "x"}],
        "datasets": [{"path": "0", "coordinateTransformations": steps}, {"path": "a/1"}],
        "coordinateTransformations": common,
    }
    (multiscale,) = ome.multiscales({"multiscales": [image]})
    assert multiscale.levels == (Level("a/1", (10, 100), (5, 0)), Level("0", (20, 300), (15, 100)))  # finest first


@pytest.mark.parametrize(
    "image",
    [
        3,
        {},
        {"axes": [], "datasets": []},
        {"axes": ["x"], "datasets": [{"path": "../0"}]},
        {"axes": ["x"], "datasets": [{"path": 0}]},
        {"axes": ["x"], "datasets": [{"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1, 2]}]}]},
        {"axes": ["x"], "datasets": [{"path": "0", "coordinateTransformations": [{"type": "rotation"}]}]},
        {"axes": ["x"], "datasets": [{"path": "0", "coordinateTransformations": [{"type": "scale", "scale": ["1"]}]}]},
        *(
            {"axes": ["x"], "datasets": [{"path": "0", "coordinateTransformations": [scale]}]}
            for scale in ({"type": "scale", "scale": [by]} for by in (10**400, -(10**400), float("nan"), float("inf")))
        ),
        {
            "axes": ["x"],
            "datasets": [{"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1e200]}]}],
            "coordinateTransformations": [{"type": "scale", "scale": [1e200]}],
        },
        {"axes": ["x"], "datasets": 7},
        {"axes": [{"type": "space"}], "datasets": []},
    ],
)
def test_images_that_make_no_sense_are_left_out(image: Any) -> None:
    good = {"axes": ["x"], "datasets": [{"path": "0"}]}
    (multiscale,) = ome.multiscales({"multiscales": [image, good]})
    assert multiscale == Multiscale("", (Axis("x", "space"),), (Level("0", (1.0,), (0.0,)),))
    assert ome.multiscales({"multiscales": image}) == ()


MEMBERS = ("ome", "multiscales", "axes", "datasets", "plate", "name", "path", "version", "labels")
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(MEMBERS), inner),
)


@given(JSON)
def test_any_attributes(value: Any) -> None:
    attributes = value if isinstance(value, dict) else {"ome": value}
    ome.multiscales(attributes)
    ome.as_04(attributes)
    ome.as_05(attributes)
