# Shell functions for the other scripts, which source this file: install and check requirements. Plain sh, no bashisms.

say() { printf '%s\n' "$*"; }

die() {
    printf '%s: %s\n' "$0" "$*" >&2
    exit 1
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        die "this needs root (or sudo): $*"
    fi
}

# debian_packages TEST:PACKAGE...  Install the packages whose test fails. A TEST is the name of a program, or `venv`.
debian_packages() {
    missing=
    for pair; do
        if [ "${pair%%:*}" = venv ]; then
            python3 -c 'import ensurepip, venv' 2>/dev/null || missing="$missing ${pair#*:}"
        else
            # Programs for administrators are in directories that are not on every user's PATH.
            (PATH=$PATH:/usr/sbin:/sbin && command -v "${pair%%:*}" >/dev/null) || missing="$missing ${pair#*:}"
        fi
    done
    [ -n "$missing" ] || return 0
    say "Installing with apt:$missing"
    command -v apt-get >/dev/null || die "this machine has no apt-get: install these packages with its own tool:$missing"
    as_root apt-get -qq update
    # shellcheck disable=SC2086  # a list of words
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install $missing </dev/null
    # The tests start their own web servers, so stop the services that the packages have just started.
    for service in nginx lighttpd caddy; do
        case $missing in
        *" $service"*)
            as_root service "$service" stop >/dev/null 2>&1 || true
            ! command -v systemctl >/dev/null || as_root systemctl --quiet disable "$service" >/dev/null 2>&1 || true
            ;;
        esac
    done
}

# need_fuse  End the script with the reason unless FUSE file systems can be mounted.
need_fuse() {
    [ -c /dev/fuse ] || as_root modprobe fuse 2>/dev/null || true
    [ -c /dev/fuse ] || die "/dev/fuse is missing, so nothing can be mounted here.
In a container, start it with: --device /dev/fuse --cap-add SYS_ADMIN --security-opt apparmor=unconfined
On a machine of your own, load the kernel module: modprobe fuse"
    (exec 3<>/dev/fuse) 2>/dev/null || die "/dev/fuse cannot be opened by $(id -un). Run as root, or change its
mode to 0666; in a container, start it with: --device /dev/fuse --cap-add SYS_ADMIN"
}

# new_venv DIR  Make the virtualenv DIR, unless it is there.
new_venv() {
    # In a virtualenv that was moved or is incomplete, python does not start.
    if ! "$1/bin/python" -m pip --version >/dev/null 2>&1; then
        say "Making the virtualenv $1"
        python3 -m venv --clear "$1"
    fi
}

# install_in DIR ARGUMENT...  Run `pip install` with these arguments in the virtualenv DIR. Bytecode would take half the
# time, and most of it is never used.
install_in() {
    venv_dir=$1
    shift
    PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv_dir/bin/python" -m pip install --quiet --no-compile "$@"
}

# make_venv DIR REQUIREMENT...  Install the requirements in the virtualenv DIR. Creates DIR if missing.
make_venv() {
    new_venv "$1"
    install_in "$@"
}

# make_locked_venv DIR NAME  Install the packages of scripts/lock/NAME.txt in the virtualenv DIR. Creates DIR if missing.
make_locked_venv() {
    new_venv "$1"
    # A copy of the lock file says what is installed. pip needs 10 s to find out.
    cmp -s "scripts/lock/$2.txt" "$1/lock.txt" && return
    # The lock file is complete, so pip has nothing to resolve.
    install_in "$1" --require-hashes --no-deps --requirement "scripts/lock/$2.txt"
    cp "scripts/lock/$2.txt" "$1/lock.txt"
}

# make_test_venv DIR  Install the test environment in the virtualenv DIR: shardfs, editable, and scripts/lock/test.txt.
make_test_venv() {
    make_locked_venv "$1" test
    install_in "$1" --no-deps --no-build-isolation --editable .
    # In tests, a warning is an error, also one of the compiler about a package.
    "$1/bin/python" -W ignore -m compileall -qq -j 0 -x '/(tests|debugpy|fontTools|graphql|mypyc?|pip|sympy)/' "$1/lib" || true
}

need_python() {
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "python3 is $(python3 --version 2>&1), but shardfs needs Python 3.11 or newer: install a newer one"
}
