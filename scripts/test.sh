#!/bin/sh
# Install the test environment and run the whole test suite, with one process more than there are CPUs, because tests
# wait for other processes a third of the time.
# Arguments go to pytest: sh scripts/test.sh -k zarr3
#
# All packages have the versions and hashes of scripts/lock.
#
# SHARDFS_VENV           the virtualenv, created if missing (default .venv)
# SHARDFS_<NAME>_PYTHON  the Python of a virtualenv for scripts/lock/<name>.txt, created if missing
#                        (default .venv-<name>/bin/python)
# SHARDFS_AZURITE        azurite-blob in a directory for scripts/lock/azurite, installed if missing
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

# Libraries that tests run in separate programs (scripts/lock/NAME.in). The virtualenvs are installed in parallel, which
# takes half the time.
installs=
for list in scripts/lock/*.in; do
    name=$(basename "$list" .in)
    variable=SHARDFS_$(printf %s "$name" | tr a-z A-Z)_PYTHON
    eval "python=\${$variable:-\$PWD/.venv-$name/bin/python}"
    export "$variable=$python"
    make_locked_venv "${python%/bin/*}" "$name" </dev/null &
    installs="$installs $!"
done

# Azurite, Microsoft's emulator of Azure Blob Storage.
SHARDFS_AZURITE=${SHARDFS_AZURITE:-$PWD/.venv-azurite/node_modules/.bin/azurite-blob}
export SHARDFS_AZURITE
azurite=${SHARDFS_AZURITE%/node_modules/*}
cmp -s scripts/lock/azurite/package-lock.json "$azurite/package-lock.json" && [ -x "$SHARDFS_AZURITE" ] || {
    mkdir -p "$azurite"
    cp scripts/lock/azurite/*.json "$azurite"
    npm ci --loglevel error --no-audit --no-fund --ignore-scripts --prefix "$azurite" </dev/null >/dev/null &
    installs="$installs $!"
}

make_test_venv "$venv"
for install in $installs; do
    wait "$install"
done

# Tests start thousands of processes. With PYTHONDONTWRITEBYTECODE, each of them would compile all modules again.
unset PYTHONDONTWRITEBYTECODE
"$venv/bin/python" -m compileall -q shardfs tests

PATH=$venv/bin:$PATH:/usr/sbin:/sbin
export PATH
exec "$venv/bin/python" -m pytest --numprocesses "$(($(nproc) + 1))" --dist worksteal "$@"
