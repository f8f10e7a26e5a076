#!/bin/sh
# Install the test environment and run the whole test suite, with one process more than there are CPUs, because tests
# wait for other processes a third of the time.
# Arguments go to pytest: sh scripts/test.sh -k zarr3
#
# SHARDFS_VENV           the virtualenv, created if missing (default .venv)
# SHARDFS_<NAME>_PYTHON  a Python with the libraries <NAME> of the list below, created if missing
#                        (default .venv-<name>/bin/python)
# SHARDFS_AZURITE        the program azurite-blob, installed if missing
#                        (default .venv-azurite/node_modules/.bin/azurite-blob)
set -eu
cd "$(dirname "$0")/.."
. scripts/setup.sh

debian_packages python3:python3 venv:python3-venv fusermount3:fuse3 rsync:rsync rclone:rclone chromium:chromium \
    nginx:nginx-light apache2:apache2-bin lighttpd:lighttpd caddy:caddy \
    getfattr:attr tar:tar find:findutils systemctl:systemd zsh:zsh fish:fish \
    dpkg-buildpackage:dpkg-dev dh:debhelper \
    fio:fio stress-ng:stress-ng ncdump:netcdf-bin gdal_translate:gdal-bin npm:npm
need_python
need_fuse

venv=${SHARDFS_VENV:-$PWD/.venv}

# Libraries that tests run in separate programs. Each list has its own virtualenv: cloud-volume installs zfpy, which
# breaks the import of numcodecs on Python 3.11; libraries for Zarr v2 need an older zarr; bloscpack must not choose the
# version of blosc. The virtualenvs are installed in parallel, which takes half the time.
clients='
cv cloud-volume>=12 igneous-pipeline neuroglancer tensorstore
zarr2 zarr~=2.18.0 numcodecs<0.14 pytest rasterio netCDF4 ome-zarr<0.11 xarray<2025 pandas<3
bcolz bcolz-zipline bloscpack
blosc2 blosc2
'
python_of() { # NAME
    eval "printf %s \"\${SHARDFS_$(printf %s "$1" | tr a-z A-Z)_PYTHON:-\$PWD/.venv-$1/bin/python}\""
}
installs=
while read -r name requirements; do
    [ -n "$name" ] || continue
    python=$(python_of "$name")
    export "SHARDFS_$(printf %s "$name" | tr a-z A-Z)_PYTHON=$python"
    # shellcheck disable=SC2086  # a list of words
    has_packages "$python" $requirements || {
        make_venv "${python%/bin/*}" $requirements </dev/null &
        installs="$installs $!"
    }
done <<END
$clients
END

# Azurite, Microsoft's emulator of Azure Blob Storage.
SHARDFS_AZURITE=${SHARDFS_AZURITE:-$PWD/.venv-azurite/node_modules/.bin/azurite-blob}
export SHARDFS_AZURITE
[ -x "$SHARDFS_AZURITE" ] || {
    npm install --silent --no-audit --no-fund --prefix "${SHARDFS_AZURITE%/node_modules/*}" azurite@3 </dev/null &
    installs="$installs $!"
}

make_venv "$venv" --editable '.[test]'
for install in $installs; do
    wait "$install"
done

# Tests start thousands of processes. With PYTHONDONTWRITEBYTECODE, each of them would compile all modules again.
"$venv/bin/python" -m compileall -q shardfs tests

PATH=$venv/bin:$PATH:/usr/sbin:/sbin
export PATH
exec "$venv/bin/python" -m pytest --numprocesses "$(($(nproc) + 1))" --dist worksteal "$@"
