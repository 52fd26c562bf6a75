"""Superblocks: what a device says about itself and its volume, and how a volume is put together from its devices.

A device carries its superblock twice, in its first block and in its last. Either copy will do; mkfs writes them
last of all, so a device with a valid superblock has everything else that belongs to it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import xxhash

from ckptfs import layout
from ckptfs.device import Device
from ckptfs.errors import (
    CkptfsError,
    IncompleteSet,
    MixedVolumes,
    NotAVolume,
    Problem,
    ProblemCode,
    UnsupportedFormat,
    VolumeDamaged,
)
from ckptfs.layout import BLOCK_BYTES, Region


@dataclass(frozen=True)
class Superblock:
    """The fields of a superblock, as docs/format.md has them."""

    volume_uuid: uuid.UUID
    device_uuid: uuid.UUID
    device_index: int
    device_count: int
    label: str
    size_bytes: int
    segment_bytes: int
    created_ns: int
    regions: tuple[Region, ...]
    block_bytes: int = BLOCK_BYTES
    format_version: int = layout.FORMAT_VERSION
    compat: int = 0
    ro_compat: int = 0
    incompat: int = 0

    @property
    def data(self) -> Region:
        """Where extents may lie."""
        return next(region for region in self.regions if region.kind == layout.REGION_DATA)

    def metadata(self, kind: int) -> list[Region]:
        """The copies of a metadata region that this device carries."""
        return [region for region in self.regions if region.kind == kind]

    def encode(self) -> bytes:
        """The block as it is on the device."""
        fields = layout.SUPERBLOCK.pack(
            layout.SUPERBLOCK_MAGIC,
            self.format_version,
            self.block_bytes,
            self.compat,
            self.ro_compat,
            self.incompat,
            self.volume_uuid.bytes,
            self.device_uuid.bytes,
            self.device_index,
            self.device_count,
            len(self.regions),
            self.size_bytes,
            self.segment_bytes,
            self.created_ns,
            self.label.encode(),
        )
        table = b"".join(layout.REGION.pack(r.kind, r.copy, 0, r.offset_bytes, r.length_bytes) for r in self.regions)
        return seal_block(fields + table)

    @classmethod
    def decode(cls, block: bytes) -> Superblock:
        """Reads a block.

        Raises:
            NotAVolume: This is no ckptfs superblock.
            VolumeDamaged: It was one.
            UnsupportedFormat: It is one of a newer ckptfs.
        """
        magic, version, block_bytes, *rest = layout.SUPERBLOCK.unpack_from(block)
        if magic != layout.SUPERBLOCK_MAGIC:
            raise NotAVolume("no ckptfs superblock")
        if not is_sealed_block(block):
            raise VolumeDamaged("the checksum does not match")
        if version != layout.FORMAT_VERSION:
            raise UnsupportedFormat(f"format version {version}; this ckptfs knows version {layout.FORMAT_VERSION}")
        compat, ro_compat, incompat, volume, device, index, count, region_count, size, segment, created, label = rest
        if incompat & ~layout.INCOMPAT_KNOWN:
            raise UnsupportedFormat(f"incompatible features {incompat:#x}; use a newer ckptfs")
        if region_count > layout.MAX_REGIONS or index >= count:
            raise VolumeDamaged(f"device {index} of {count} with {region_count} regions")
        regions = tuple(
            Region(kind, copy, offset, length)
            for kind, copy, _, offset, length in (
                layout.REGION.unpack_from(block, layout.SUPERBLOCK.size + i * layout.REGION.size)
                for i in range(region_count)
            )
        )
        return cls(
            volume_uuid=uuid.UUID(bytes=volume),
            device_uuid=uuid.UUID(bytes=device),
            device_index=index,
            device_count=count,
            label=label.rstrip(b"\0").decode(errors="replace"),
            size_bytes=size,
            segment_bytes=segment,
            created_ns=created,
            regions=regions,
            block_bytes=block_bytes,
            format_version=version,
            compat=compat,
            ro_compat=ro_compat,
            incompat=incompat,
        )


def seal_block(content: bytes) -> bytes:
    """Makes a block of it: zeros to the end, and the checksum in the last 8 bytes."""
    body = content.ljust(layout.BLOCK_CHECKSUM_OFFSET, b"\0")
    return body + layout.BLOCK_CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def is_sealed_block(block: bytes) -> bool:
    """True when the block's checksum matches."""
    (checksum,) = layout.BLOCK_CHECKSUM.unpack_from(block, layout.BLOCK_CHECKSUM_OFFSET)
    return bool(checksum == xxhash.xxh3_64_intdigest(block[: layout.BLOCK_CHECKSUM_OFFSET]))


def write_superblocks(device: Device, superblock: Superblock) -> None:
    """Writes both copies, each behind a barrier."""
    block = superblock.encode()
    assert Superblock.decode(block) == superblock
    for offset in (layout.end_superblock_offset(superblock.size_bytes), 0):
        device.write(offset, block)
        device.barrier()


def wipe_superblocks(device: Device) -> None:
    """Makes the device one without a volume."""
    for offset in (0, layout.end_superblock_offset(device.size_bytes)):
        device.zero(offset, BLOCK_BYTES)
    device.barrier()


def read_superblock(device: Device) -> tuple[Superblock, list[Problem]]:
    """Reads a device's superblock from whichever copy is good.

    Returns:
        It, and what is wrong with the other copy.

    Raises:
        NotAVolume: There is none.
        UnsupportedFormat: It is of a newer ckptfs.
        VolumeDamaged: There was one, but neither copy is good, or the device is smaller than it says.
    """
    if device.size_bytes < 2 * BLOCK_BYTES:
        raise NotAVolume(
            f"{device.path} is no ckptfs device: it has {device.size_bytes} bytes; make one with ckptfs mkfs"
        )
    first = _read_copy(device, 0)
    end_offset = layout.end_superblock_offset(first.size_bytes if isinstance(first, Superblock) else device.size_bytes)
    if end_offset + BLOCK_BYTES > device.size_bytes:
        raise VolumeDamaged(
            f"{device.path} has {device.size_bytes} bytes but was made with {end_offset + BLOCK_BYTES}:"
            " it was cut off; restore its size"
        )
    last = _read_copy(device, end_offset)
    copies = {"first copy": (0, first), "last copy": (end_offset, last)}
    good = [copy for _, copy in copies.values() if isinstance(copy, Superblock)]
    if not good:
        raise _no_superblock(device, first, last)
    problems = [
        Problem(
            ProblemCode.SUPERBLOCK_DAMAGED if isinstance(copy, CkptfsError) else ProblemCode.SUPERBLOCK_STALE,
            f"{device.path}, {name} of the superblock (offset {offset})",
            str(copy) if isinstance(copy, CkptfsError) else "another superblock than the first copy",
            "the same superblock at both ends of the device",
        )
        for name, (offset, copy) in copies.items()
        if copy != good[0]
    ]
    return good[0], problems


def _read_copy(device: Device, offset_bytes: int) -> Superblock | CkptfsError:
    try:
        return Superblock.decode(device.read(offset_bytes, BLOCK_BYTES))
    except CkptfsError as error:
        return error


def _no_superblock(device: Device, first: Superblock | CkptfsError, last: Superblock | CkptfsError) -> CkptfsError:
    for error in (first, last):
        if isinstance(error, UnsupportedFormat):
            return UnsupportedFormat(f"{device.path}: {error}")
    if isinstance(first, NotAVolume) and isinstance(last, NotAVolume):
        return NotAVolume(f"{device.path} holds no ckptfs volume; make one with ckptfs mkfs")
    return VolumeDamaged(f"{device.path}: both superblocks are unreadable ({first}; {last}); restore the device")


@dataclass
class VolumeDevices:
    """The open devices of a volume, in index order."""

    devices: list[Device]
    superblocks: list[Superblock]
    problems: list[Problem] = field(default_factory=list)

    @property
    def volume_uuid(self) -> uuid.UUID:
        """Which volume this is."""
        return self.superblocks[0].volume_uuid

    @property
    def label(self) -> str:
        """Its name, maybe empty."""
        return self.superblocks[0].label

    @property
    def segment_bytes(self) -> int:
        """Length of a segment."""
        return self.superblocks[0].segment_bytes

    @property
    def data_regions(self) -> list[tuple[int, int]]:
        """[start, end) of each device's data region."""
        return [(superblock.data.offset_bytes, superblock.data.end_bytes) for superblock in self.superblocks]

    def __enter__(self) -> VolumeDevices:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes all devices."""
        for device in self.devices:
            device.close()


def assemble(paths: Sequence[str], *, writable: bool, exclusive: bool) -> VolumeDevices:
    """Opens the devices of one volume, in whatever order they are named.

    Raises:
        NotAVolume, IncompleteSet, MixedVolumes, UnsupportedFormat, VolumeDamaged: as the names say.
        DeviceError: as Device.open().
    """
    with contextlib.ExitStack() as stack:
        devices: list[Device] = []
        for path in paths:
            _refuse_twice(devices, path)
            devices.append(stack.enter_context(Device.open(path, writable=writable, exclusive=exclusive)))
        found = [(device, *read_superblock(device)) for device in devices]
        _check_set([(device, superblock) for device, superblock, _ in found])
        found.sort(key=lambda item: item[1].device_index)
        _check_features([superblock for _, superblock, _ in found], writable=writable)
        stack.pop_all()
    return VolumeDevices(
        [device for device, _, _ in found],
        [superblock for _, superblock, _ in found],
        [problem for _, _, problems in found for problem in problems],
    )


def _refuse_twice(devices: Iterable[Device], path: str) -> None:
    for device in devices:
        if device.is_same(path):
            raise MixedVolumes(f"{path} and {device.path} are the same device; name each device once")


def _check_set(found: list[tuple[Device, Superblock]]) -> None:
    first_device, first = found[0]
    by_index: dict[int, Device] = {}
    for device, superblock in found:
        if superblock.volume_uuid != first.volume_uuid:
            raise MixedVolumes(
                f"{device.path} belongs to volume {superblock.volume_uuid}, {first_device.path} to volume"
                f" {first.volume_uuid}; name the devices of one volume"
            )
        twin = by_index.setdefault(superblock.device_index, device)
        if twin is not device:
            raise MixedVolumes(
                f"{device.path} and {twin.path} both say they are device {superblock.device_index} of volume"
                f" {first.volume_uuid}: one is a copy; name only one of them"
            )
    missing = sorted(set(range(first.device_count)) - by_index.keys())
    if missing:
        names = ", ".join(map(str, missing))
        raise IncompleteSet(
            f"volume {first.volume_uuid} has {first.device_count} devices, but device {names} (counted from 0)"
            f" {'is' if len(missing) == 1 else 'are'} missing; name all of them"
        )


def _check_features(superblocks: list[Superblock], *, writable: bool) -> None:
    for superblock in superblocks:
        unknown = superblock.ro_compat & ~layout.RO_COMPAT_KNOWN
        if unknown and writable:
            raise UnsupportedFormat(f"the volume may only be read (features {unknown:#x}); use a newer ckptfs")
        if superblock.segment_bytes != superblocks[0].segment_bytes:
            raise VolumeDamaged(
                "the superblocks of the devices contradict each other (segment length); run ckptfs fsck"
            )
