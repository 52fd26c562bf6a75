"""Sizes as people write and read them."""

from __future__ import annotations

import re

from ckptfs.errors import UsageError

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """The bytes of a size like 4G, 512M, 1.5T or 65536; units are powers of 1024.

    Raises:
        UsageError: It is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"{text!r} is no size; say for example 4G, 512M or 1.5T")
    return int(float(match[1]) * 1024 ** _UNITS[match[2].upper()])


def format_size(size_bytes: float) -> str:
    """A size in the unit that gives it one to four digits before the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
