#!/bin/sh
# Show shardfs at work: write a sharded dataset, mount it, read it with tools that cannot read shards, compare.
#
# SHARDFS_DEMO_VENV  the virtualenv, created if missing (default .venv-demo)
set -eu
cd "$(dirname "$0")/.."
. scripts/setup.sh

show() { # print a command, then run it
    printf '\n$ %s\n' "$*"
    "$@"
}

say "== 1. Install"
debian_packages python3:python3 venv:python3-venv fusermount3:fuse3 gzip:gzip
need_python
need_fuse
venv=${SHARDFS_DEMO_VENV:-$PWD/.venv-demo}
make_venv "$venv" . tensorstore z5py nibabel
# The demo uses only an image in nilearn's wheel, the MNI152 brain, so nilearn's own requirements are not installed.
make_venv "$venv" --no-deps nilearn
PATH=$venv/bin:$PATH
export PATH
say "shardfs and, for this demo only, tensorstore, z5py, nibabel and nilearn are in $venv."

work=$(mktemp -d)
src=$work/brain.zarr
mnt=$work/mnt
mkdir "$mnt"
clean_up() {
    if mountpoint -q "$mnt"; then
        fusermount3 -u -z "$mnt" || as_root umount -l "$mnt" || true
    fi
    # Never delete through a mount.
    mountpoint -q "$mnt" || rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM HUP

say
say "== 2. A sharded dataset: the MNI152 brain, 8 shards with up to 64 chunks of 32 x 32 x 32 voxels in each"
python scripts/demo.py write "$src"
show find "$src" -type f

say
say "== 3. Mount it"
show shardfs info "$src"
show shardfs mount "$src" "$mnt"
show ls -l "$mnt" "$mnt/t1" "$mnt/t1/c/3/3"

say
say "== 4. Read it with tools that cannot read these shards"
python scripts/demo.py read "$src" "$mnt"
say
say "A chunk is a gzip file now, of 32 x 32 x 32 bytes:"
chunk=t1/c/3/3/3
say "\$ gzip --decompress --stdout $mnt/$chunk > $work/voxels"
gzip --decompress --stdout "$mnt/$chunk" >"$work/voxels"
show wc -c "$work/voxels"
[ "$(wc -c <"$work/voxels")" -eq 32768 ] || die "the chunk $chunk should hold 32768 bytes"

say
say "== 5. Copy chunks out and compare them with the bytes in the shards"
show shardfs locate "$src" "$chunk"
show cp -r "$mnt/t1/c" "$work/copies"
python scripts/demo.py compare "$src" "$work/copies"

say
say "== 6. Unmount"
show shardfs umount "$mnt"
if mountpoint -q "$mnt"; then
    die "$mnt is still mounted"
fi

say
say "Done. A brain image was written as 8 shard files and mounted with shardfs; the mount showed one plain file per"
say "chunk. z5py, which fails on the shards themselves, read the whole image through the mount, gzip unpacked a chunk,"
say "and the chunks that cp copied out are byte for byte those in the shards. The mount is gone again, and so are the"
say "files in $work."
