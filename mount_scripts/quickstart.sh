#!/usr/bin/env bash
# From a clean clone to a training run on ckptfs, on a machine with nothing prepared: installs what is missing, builds,
# makes a volume, mounts it, trains a small model with a torch.save at every step, shows what the saves cost there and
# on local disk, unmounts, checks the volume. Removes all it made, but for the Python environment .venv.
#   sudo mount_scripts/quickstart.sh [--force] [DEVICE...]
# Without DEVICE it uses image files. With --force, DEVICEs that hold something are overwritten.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

IMAGES=2
IMAGE_BYTES=$((1536 << 20))

say() { printf '\n\033[1;36m==>\033[0m %s\n' "$*"; }
fail() { printf 'ckptfs: %s\n' "$*" >&2; exit 1; }

mkfs_options=()
if [ "${1-}" = --force ]; then
    mkfs_options=(--force)
    shift
fi

[ "$(uname -s)" = Linux ] || fail "the quickstart needs Linux"
[ "$(id -u)" = 0 ] || fail "the quickstart mounts a file system: run it as root (sudo $0)"
[ -e /dev/fuse ] || modprobe fuse 2>/dev/null || true
[ -c /dev/fuse ] || fail "there is no /dev/fuse: load the kernel module fuse, or start the container with --device /dev/fuse --cap-add SYS_ADMIN"

mount_scripts/setup_env.sh bench
export PATH="$PWD/.venv/bin:$PATH"

work=$(mktemp -d "${TMPDIR:-/var/tmp}/ckptfs-quickstart-XXXXXX")
mountpoint=$work/mnt
clean_up() {
    mountpoint -q "$mountpoint" && { ckptfs umount "$mountpoint" || umount --lazy "$mountpoint" || true; }
    rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
mkdir "$mountpoint" "$work/plain"

devices=("$@")
if [ ${#devices[@]} = 0 ]; then
    needed_bytes=$((IMAGES * IMAGE_BYTES + (1 << 30)))
    free_bytes=$(df --output=avail -B1 "$work" | tail -n 1)
    [ "$free_bytes" -gt $needed_bytes ] || fail "$work needs $((needed_bytes >> 20)) MiB of free space: set TMPDIR to another disk"
    mkfs_options+=(--size "$((IMAGE_BYTES >> 20))M")
    for ((i = 0; i < IMAGES; i++)); do devices+=("$work/image$i"); done
fi

say "ckptfs mkfs ${mkfs_options[*]} ${devices[*]}"
ckptfs mkfs "${mkfs_options[@]}" "${devices[@]}"

say "ckptfs mount ${devices[*]} $mountpoint"
ckptfs mount "${devices[@]}" "$mountpoint"
mkdir "$mountpoint/checkpoints"

say "Training, with torch.save into $mountpoint/checkpoints"
python mount_scripts/quickstart_train.py --ckptfs "$mountpoint/checkpoints" --plain "$work/plain"

say "ckptfs status $mountpoint"
ckptfs status "$mountpoint"

say "ckptfs umount $mountpoint"
ckptfs umount "$mountpoint"

say "ckptfs fsck --data ${devices[*]}"
ckptfs fsck --data "${devices[@]}"

say "Done. On devices of your own:
    .venv/bin/ckptfs mkfs /dev/nvme1n1 /dev/nvme2n1
    .venv/bin/ckptfs mount /dev/nvme1n1 /dev/nvme2n1 /mnt/checkpoints"
