#!/bin/sh
# The entry point of a container that mounts a source for one command. The mount is gone again when the command has
# ended, and on SIGTERM, which `docker stop` and Kubernetes send: the command gets it first.
#
#     entrypoint.sh SOURCE MOUNTPOINT COMMAND [ARGUMENT]...
#
# Options of the mount come from variables: SHARDFS_LAYOUT, SHARDFS_STORAGE_OPTIONS and so on. The exit code is that of
# the command, or of the mount if that failed, or of `shardfs umount` if something that was written is not published. With
# SHARDFS_RW let SHARDFS_JOURNAL be on a volume, or what is not published goes with the container. A container that only shows a mount to others needs no script:
# `shardfs mount -f SOURCE MOUNTPOINT` unmounts on SIGTERM by itself.
set -eu

if [ "$#" -lt 3 ]; then
    echo "usage: $0 SOURCE MOUNTPOINT COMMAND [ARGUMENT]..." >&2
    exit 2
fi
source=$1 mountpoint=$2
shift 2

# Before it is mounted: a first process does not even get signals that it does not ask for.
command='' signalled='' status=0
trap 'signalled=1; [ -z "$command" ] || kill -TERM "$command" 2>/dev/null || true' TERM INT HUP
shardfs mount "$source" "$mountpoint"
if [ -n "$signalled" ]; then
    status=143 signalled='' # as of a command that the signal has ended
else
    "$@" &
    command=$!
    wait "$command" || status=$?
fi

# A signal that is trapped ends `wait`, and the command may take its time. Whether it still runs says nothing: a shell
# may have reaped it on the way here, and then knows its status until it is asked.
while [ -n "$signalled" ]; do
    signalled=''
    last=0
    wait "$command" 2>/dev/null || last=$?
    [ "$last" -eq 127 ] || status=$last # 127: the `wait` before was told already
done
left=0
shardfs umount --patient --timeout 5 "$mountpoint" || left=$?
case $left in
0) ;;
3 | 5) [ "$status" -ne 0 ] || status=$left ;; # something that was written is not in the source
*) shardfs umount --lazy --if-mounted "$mountpoint" ;;
esac
exit "$status"
