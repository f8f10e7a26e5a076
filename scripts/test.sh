#!/bin/sh
# Install the test environment and run the whole test suite. Arguments go to pytest: sh scripts/test.sh -k zarr3
#
# SHARDFS_VENV       the virtualenv, made if it is not there (default .venv)
# SHARDFS_CV_PYTHON  a Python that has cloud-volume, made if it is not there (default .venv-cloudvolume/bin/python)
set -eu
cd "$(dirname "$0")/.."
. scripts/setup.sh

debian_packages python3:python3 venv:python3-venv fusermount3:fuse3 rsync:rsync nginx:nginx-light \
    getfattr:attr tar:tar find:findutils
need_python
need_fuse

venv=${SHARDFS_VENV:-$PWD/.venv}
make_venv "$venv" --editable '.[test]'

# cloud-volume brings zfpy, beside which the numcodecs of Python 3.11 cannot be imported: hence a virtualenv apart.
SHARDFS_CV_PYTHON=${SHARDFS_CV_PYTHON:-$PWD/.venv-cloudvolume/bin/python}
export SHARDFS_CV_PYTHON
if ! "$SHARDFS_CV_PYTHON" -c 'import importlib.metadata as m; m.version("cloud-volume")' 2>/dev/null; then
    make_venv "${SHARDFS_CV_PYTHON%/bin/*}" 'cloud-volume>=12'
fi

PATH=$venv/bin:$PATH:/usr/sbin:/sbin
export PATH
exec "$venv/bin/python" -m pytest "$@"
