#!/bin/sh
# Draw docs/map.png, the picture in the README: the brain of the demo in small chunks, and `shardfs info --png`.
#
# SHARDFS_DEMO_VENV  the virtualenv, created if missing (default .venv-demo)
set -eu
cd "$(dirname "$0")/.."
. scripts/setup.sh

need_python
venv=${SHARDFS_DEMO_VENV:-$PWD/.venv-demo}
make_venv "$venv" '.[plot]' tensorstore nibabel
make_venv "$venv" --no-deps nilearn # only for an image in its wheel

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$venv/bin/python" scripts/demo.py write "$work/brain.zarr" 8
"$venv/bin/shardfs" info --png docs/map.png "$work/brain.zarr"
