"""bloscpack: `read_bloscpack PATH OUT.npy`; the decoded bytes of a file, whatever its metadata say."""

from __future__ import annotations

import argparse
import collections
import collections.abc
import io
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report


def read(path: str) -> npt.NDArray[Any]:
    collections.MutableMapping = collections.abc.MutableMapping  # type: ignore[attr-defined] # gone since 3.10
    from bloscpack.abstract_io import unpack
    from bloscpack.file_io import CompressedFPSource, PlainFPSink

    out = io.BytesIO()
    with open(path, "rb") as file:
        unpack(CompressedFPSource(file), PlainFPSink(out))
    return np.frombuffer(out.getvalue(), np.uint8)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("out")
    args = parser.parse_args()
    report(lambda: read(args.path), args.out)
