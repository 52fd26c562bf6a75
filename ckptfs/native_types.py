"""What the data plane tells about a file. Times are nanoseconds since 1970."""

from typing import NamedTuple


class FileAttributes(NamedTuple):
    """The attributes of a registered file that the data plane owns."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    allocated_bytes: int
    """Bytes that the file's map holds, staged or on a device, block-rounded: st_blocks * 512."""


class FileState(NamedTuple):
    """How far a registered file is from being durable."""

    modified: bool
    """There is an open version: something came in since the last seal."""
    killed: bool
    """A FLUSH by a dying writer was seen since the last seal (never with killed=keep, nor when it only grew a log)."""
    log: bool
    """Opened with O_APPEND, or never had one write above 64 KiB."""
    unsealed_bytes: int
    unwritten_bytes: int
    """Staged bytes that no device has yet."""
    error: int
    """errno of the first device failure that lost bytes of this file, or 0."""


class Seal(NamedTuple):
    """An open version that has become the next version to commit."""

    seal_id: int
    """Its extents follow in a ("sealed", ...) event."""
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    truncate_to_bytes: int
    """The smallest size the file had since its last seal: apply cuts the old map there before it adds the rows."""
    metadata_bytes: int
    """What its rows have reserved in the metadata region; the control plane gives back what they do not take."""
