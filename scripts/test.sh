#!/bin/sh
# Install the test environment and run the whole test suite, in as many processes as there are processors.
# Arguments go to pytest: sh scripts/test.sh -k zarr3
#
# SHARDFS_VENV           the virtualenv, made if it is not there (default .venv)
# SHARDFS_<NAME>_PYTHON  a Python that has the libraries <NAME> of the list below, made if it is not there
#                        (default .venv-<name>/bin/python)
set -eu
cd "$(dirname "$0")/.."
. scripts/setup.sh

debian_packages python3:python3 venv:python3-venv fusermount3:fuse3 rsync:rsync nginx:nginx-light chromium:chromium \
    getfattr:attr tar:tar find:findutils systemctl:systemd zsh:zsh fish:fish
need_python
need_fuse

venv=${SHARDFS_VENV:-$PWD/.venv}
make_venv "$venv" --editable '.[test]'

# Libraries that tests start as programs of their own. Each list has a virtualenv apart: cloud-volume brings zfpy, beside
# which the numcodecs of Python 3.11 cannot be imported; zarr 2 is another zarr; bloscpack must not decide on a blosc.
while read -r name requirements; do
    variable=SHARDFS_$(printf %s "$name" | tr a-z A-Z)_PYTHON
    eval "python=\${$variable:-\$PWD/.venv-$name/bin/python}"
    # shellcheck disable=SC2086  # a list of words
    has_packages "$python" $requirements || make_venv "${python%/bin/*}" $requirements </dev/null
    export "$variable=$python"
done <<END
cv cloud-volume>=12 igneous-pipeline neuroglancer tensorstore
zarr2 zarr~=2.18.0 numcodecs<0.14 pytest
bcolz bcolz-zipline bloscpack
blosc2 blosc2
gdal rasterio
netcdf netCDF4
ome ome-zarr<0.11 xarray<2025
END

PATH=$venv/bin:$PATH:/usr/sbin:/sbin
export PATH
exec "$venv/bin/python" -m pytest --numprocesses auto --dist worksteal "$@"
