"""Numbers that more than one module needs and that no device knows (those are in ckptfs.layout)."""

from __future__ import annotations

ROOT_INO = 1
LOST_AND_FOUND_INO = 2
FIRST_FREE_INO = 3
LOST_AND_FOUND_NAME = b"lost+found"

MAX_NAME_BYTES = 255
MAX_TARGET_BYTES = 4095
MAX_XATTR_VALUE_BYTES = 64 * 1024
MAX_XATTRS_BYTES = 256 * 1024
"""Of one inode, names and values together."""
MAX_LINKS = (1 << 31) - 1
MAX_FILE_BYTES = (1 << 63) - 1

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
