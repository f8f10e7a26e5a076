#!/bin/sh
# Write the lock files of scripts/lock: the version and the hashes of every package that is installed.
#
#     sh scripts/lock.sh             # follows the requirements, and keeps all other versions
#     sh scripts/lock.sh --upgrade   # the newest versions of everything
#
# image.txt   the container images: pyproject.toml with the extras for stores, and what builds shardfs
# test.txt    the test environment: pyproject.toml with the extra `dev`, and what installs shardfs editable
# NAME.txt    libraries that tests run in separate programs: NAME.in, with overrides.txt
# azurite/    the npm packages of azurite/package.json
#
# The Python files hold for every Python from 3.11 on and every machine: where versions must differ, a marker says so, and
# the hashes are those of all files of a version. The argument goes to `uv pip compile`.
set -eu
cd "$(dirname "$0")/.."
. scripts/setup.sh

debian_packages npm:npm
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
make_venv "$scratch/venv" uv
python3 -c 'import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["build-system"]["requires"], sep="\n")' >"$scratch/build.txt"
echo editables >"$scratch/editable.txt" # hatchling needs it, and declares it only while it builds

UV_CUSTOM_COMPILE_COMMAND='sh scripts/lock.sh'
export UV_CUSTOM_COMPILE_COMMAND
lock() { # NAME ARGUMENT...
    name=$1
    shift
    say "Locking $name"
    "$scratch/venv/bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes \
        --no-annotate --no-emit-index-url --output-file "scripts/lock/$name.txt" "$@"
}
lock image --extra s3 --extra gcs --extra azure --extra http --extra fast "$@" pyproject.toml "$scratch/build.txt"
lock test --extra dev "$@" pyproject.toml "$scratch/build.txt" "$scratch/editable.txt"
for list in scripts/lock/*.in; do
    lock "$(basename "$list" .in)" --override scripts/lock/overrides.txt "$@" "$list"
done

say "Locking azurite"
[ "${1-}" != --upgrade ] || rm -f scripts/lock/azurite/package-lock.json
npm install --loglevel error --no-audit --no-fund --package-lock-only --ignore-scripts --omit-lockfile-registry-resolved \
    --prefix scripts/lock/azurite
