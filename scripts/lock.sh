#!/bin/sh
# Write scripts/lock/image.txt: the version and the hashes of every Python package of the container images, with the
# packages that build shardfs.
#
#     sh scripts/lock.sh             # follows pyproject.toml, and keeps all other versions
#     sh scripts/lock.sh --upgrade   # the newest versions of everything
#
# The file holds for every Python from 3.11 on and every machine: where versions must differ, a marker says so, and the
# hashes are those of all files of a version. Arguments go to `uv pip compile`.
set -eu
cd "$(dirname "$0")/.."
. scripts/setup.sh

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
make_venv "$scratch/venv" uv
python3 -c 'import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["build-system"]["requires"], sep="\n")' >"$scratch/build.txt"

UV_CUSTOM_COMPILE_COMMAND='sh scripts/lock.sh'
export UV_CUSTOM_COMPILE_COMMAND
"$scratch/venv/bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes \
    --no-annotate --no-emit-index-url --output-file scripts/lock/image.txt \
    --extra s3 --extra gcs --extra azure --extra http --extra fast "$@" pyproject.toml "$scratch/build.txt"
