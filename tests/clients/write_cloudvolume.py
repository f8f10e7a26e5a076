"""Have cloud-volume write ROOT/data.npy to ROOT/sharded and ROOT/plain: `write_cloudvolume ROOT SHARDING ENCODING`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def volume_info(data: npt.NDArray[Any], encoding: str) -> dict[str, Any]:
    from cloudvolume import CloudVolume

    info: dict[str, Any] = CloudVolume.create_new_info(
        num_channels=data.shape[3],
        layer_type="segmentation",
        data_type=data.dtype.name,
        encoding=encoding,
        resolution=[4, 4, 40],
        voxel_offset=[-8, 16, 0],
        chunk_size=[8, 8, 8],
        volume_size=list(data.shape[:3]),
    )
    return info


def write(root: Path, sharding: dict[str, Any], encoding: str) -> None:
    from cloudvolume import CloudVolume
    from cloudvolume.datasource.precomputed.sharding import ShardingSpecification

    data = np.load(root / "data.npy")
    info = volume_info(data, encoding)
    # Uncompressed, else every chunk would be a file `name.gz`, which only cloud-volume reads.
    plain = CloudVolume(f"file://{root}/plain", info=info, compress=False, progress=False)
    plain.commit_info()
    plain[:] = data

    info["scales"][0]["sharding"] = sharding
    sharded = CloudVolume(f"file://{root}/sharded", info=info, compress=False, progress=False)
    sharded.commit_info()
    # It encodes the chunks of one shard at a time. Codes do not depend on shard bits: encode all as if there were one.
    single = ShardingSpecification.from_dict({**sharding, "shard_bits": 0})
    chunks = sharded.image.make_shard_chunks(data, sharded.bounds, spec=single)
    spec = ShardingSpecification.from_dict(sharding)
    target = root / "sharded" / sharded.key
    target.mkdir(parents=True, exist_ok=True)
    for name, content in spec.synthesize_shards(chunks).items():
        (target / name).write_bytes(content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("sharding", type=json.loads)
    parser.add_argument("encoding")
    args = parser.parse_args()
    write(args.root, args.sharding, args.encoding)
