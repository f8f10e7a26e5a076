#!/bin/sh
# Draw docs/neuroglancer.png: mount the brain of the demo, a sharded OME-Zarr image, with --layout precomputed, serve it
# with nginx, and take a screenshot of Neuroglancer in a headless browser. Run scripts/test.sh first to install all tools.
#
# SHARDFS_DEMO_VENV  the virtualenv, created if missing (default .venv-demo)
# SHARDFS_CV_PYTHON  a Python with Neuroglancer (default .venv-cv/bin/python)
set -eu
cd "$(dirname "$0")/.."
. scripts/setup.sh

debian_packages fusermount3:fuse3 nginx:nginx-light chromium:chromium
need_python
need_fuse
venv=${SHARDFS_DEMO_VENV:-$PWD/.venv-demo}
make_venv "$venv" . tensorstore nibabel
make_venv "$venv" --no-deps nilearn # only for an image in its wheel

work=$(mktemp -d)
trap 'fusermount3 -qu "$work/mount" || :; rm -rf "$work"' EXIT
mkdir "$work/source" "$work/source/brain" "$work/mount" "$work/nginx"
PYTHONPATH=$PWD "$venv/bin/python" scripts/neuroglancer.py write "$work/source/brain"
"$venv/bin/shardfs" mount "$work/source" "$work/mount" --layout precomputed
PYTHONPATH=$PWD "$venv/bin/python" scripts/neuroglancer.py look "$work/mount" "$work" \
    "${SHARDFS_CV_PYTHON:-$PWD/.venv-cv/bin/python}" docs/neuroglancer.png
