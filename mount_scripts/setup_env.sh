#!/usr/bin/env bash
# Makes .venv in the source tree, with ckptfs and one set of extras in it. Does nothing when that is there and up to date.
#   mount_scripts/setup_env.sh EXTRA[,EXTRA] [TOOL...]
# TOOL: commands that the caller needs besides, out of clang-format, fio, findmnt.
# On Debian and Ubuntu, as root, it installs the system packages that are missing; elsewhere it names them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\033[1;36m==>\033[0m %s\n' "$*"; }
fail() { printf 'ckptfs: %s\n' "$*" >&2; exit 1; }

[ $# -ge 1 ] || fail "usage: mount_scripts/setup_env.sh EXTRA[,EXTRA] [TOOL...]"
extras=$1
shift

# What is needed is looked for itself, not by its package's name, so that any distribution will do.
missing=()
need() { local package=$1; shift; "$@" >/dev/null 2>&1 || missing+=("$package"); }
need_command() { need "$1" command -v "$2"; }

find_missing() {
    missing=()
    need_command g++ g++
    need_command cmake cmake
    need_command ninja-build ninja
    need_command pkg-config pkg-config
    need_command fuse3 fusermount3
    need libfuse3-dev pkg-config --exists fuse3
    need liburing-dev pkg-config --exists liburing
    need libxxhash-dev pkg-config --exists libxxhash
    need_command python3 python3
    need python3-venv python3 -c 'import ensurepip, venv'
    need python3-dev python3 -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")'
    local tool
    for tool in "$@"; do
        case $tool in
            findmnt) need_command util-linux findmnt ;;
            doctest-dev) need doctest-dev test -e /usr/include/doctest/doctest.h ;;
            *) need_command "$tool" "$tool" ;;
        esac
    done
}

find_missing "$@"
if [ ${#missing[@]} -gt 0 ]; then
    command -v apt-get >/dev/null || fail "please install what Debian calls: ${missing[*]}"
    [ "$(id -u)" = 0 ] || fail "please install as root: apt-get install ${missing[*]}"
    say "Installing system packages: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    find_missing "$@"
    [ ${#missing[@]} = 0 ] || fail "still missing after apt-get install: ${missing[*]}"
fi
python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "Python 3.10 or newer is needed: $(python3 --version)"

# The package is installed in place (editable): only what follows makes an installation stale.
fingerprint=$(cat pyproject.toml CMakeLists.txt ckptfs/__init__.py native/src/* | sha256sum)
stamp=.venv/.ckptfs-${extras//,/-}
if [ "$(cat "$stamp" 2>/dev/null)" = "$fingerprint" ] && .venv/bin/python -c 'import ckptfs._native' 2>/dev/null; then
    exit 0
fi

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    say "Making the Python environment .venv"
    rm -rf .venv
    python3 -m venv .venv
fi
say "Building ckptfs and installing it with extras [$extras] (the first time takes minutes: torch is large)"
.venv/bin/python -m pip install -qq --disable-pip-version-check --editable ".[$extras]"
.venv/bin/python -c 'import ckptfs._native'
printf '%s\n' "$fingerprint" >"$stamp"
