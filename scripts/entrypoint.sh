#!/bin/sh
# Entry point of a container that mounts a source for one command. When the command ends, the script unmounts. On
# SIGTERM, which `docker stop` and Kubernetes send, the script forwards the signal to the command first.
#
#     entrypoint.sh SOURCE MOUNTPOINT COMMAND [ARGUMENT]...
#
# Options of the mount come from variables: SHARDFS_LAYOUT, SHARDFS_STORAGE_OPTIONS and so on. The exit code is that of
# the command, or of the mount if the mount failed, or of `shardfs umount` if some written data is not published. With
# SHARDFS_RW, set SHARDFS_JOURNAL to a directory on a volume; otherwise unpublished data is lost with the container. A
# container that only shows a mount to other containers needs no script: `shardfs mount -f SOURCE MOUNTPOINT` unmounts on
# SIGTERM.
set -eu

if [ "$#" -lt 3 ]; then
    echo "usage: $0 SOURCE MOUNTPOINT COMMAND [ARGUMENT]..." >&2
    exit 2
fi
source=$1 mountpoint=$2
shift 2

# Set the trap before the mount: the kernel delivers no signals to process 1 of a container without a handler.
command='' signalled='' status=0
trap 'signalled=1; [ -z "$command" ] || kill -TERM "$command" 2>/dev/null || true' TERM INT HUP
shardfs mount "$source" "$mountpoint"
if [ -n "$signalled" ]; then
    status=143 signalled='' # the status of a command that SIGTERM has ended
else
    "$@" &
    command=$!
    wait "$command" || status=$?
fi

# A trapped signal ends `wait`, but the command may still run. Do not check whether the process exists: the shell may
# have reaped the process already, and then keeps its status for the next `wait`.
while [ -n "$signalled" ]; do
    signalled=''
    last=0
    wait "$command" 2>/dev/null || last=$?
    [ "$last" -eq 127 ] || status=$last # 127: an earlier `wait` has returned the status
done
left=0
shardfs umount --patient --timeout 5 "$mountpoint" || left=$?
case $left in
0) ;;
3 | 5) [ "$status" -ne 0 ] || status=$left ;; # some written data is not in the source
*) shardfs umount --lazy --if-mounted "$mountpoint" ;;
esac
exit "$status"
