#!/bin/sh
# Build what is installed: sh scripts/packaging/build.sh wheel|deb DIRECTORY
#
# wheel  a wheel and an sdist, checked as the package index would
# deb    a package for the Debian or Ubuntu of this machine
set -eu
cd "$(dirname "$0")/../.."
. scripts/setup.sh

[ $# -eq 2 ] || die "give what to build and a directory: wheel|deb DIRECTORY"
mkdir -p "$2"
out=$(cd "$2" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' shardfs/model/version.py)

case $1 in
wheel)
    need_python
    make_venv "$scratch/venv" build hatchling twine # hatchling is what builds: see pyproject.toml
    "$scratch/venv/bin/python" -m build --quiet --no-isolation --outdir "$out" .
    "$scratch/venv/bin/python" -m twine check --strict "$out"/shardfs-"$version"*
    ;;
deb)
    debian_packages dpkg-buildpackage:dpkg-dev dh:debhelper make:make venv:python3-venv
    mkdir "$scratch/shardfs"
    cp -r pyproject.toml README.md LICENSE shardfs docs scripts systemd "$scratch/shardfs"
    cp -r scripts/packaging/debian "$scratch/shardfs"
    printf 'shardfs (%s) unstable; urgency=medium\n\n  * See CHANGELOG.md.\n\n -- %s  %s\n' "$version" \
        "the shardfs developers <shardfs@users.noreply.github.com>" "$(date -R)" >"$scratch/shardfs/debian/changelog"
    (cd "$scratch/shardfs" && chmod +x debian/rules && dpkg-buildpackage --build=binary --no-sign)
    cp "$scratch"/shardfs_*.deb "$out"
    ;;
*) die "cannot build $1: wheel or deb" ;;
esac
