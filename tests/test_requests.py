"""FLUSH, FSYNC and O_SYNC writes as the switch gives them to Python: who waits, what interrupts, what is answered."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import trio
import trio.testing

from ckptfs._native import Switch
from ckptfs.requests import Requests
from tests.volume_harness import Images, Mounted, make_images, trio_test

DATA = bytes(200_000)


class FakeSwitch:
    def __init__(self) -> None:
        self.replies: list[tuple[int, int]] = []
        self.written: list[tuple[int, int]] = []

    def reply(self, unique: int, error: int) -> None:
        self.replies.append((unique, error))

    def reply_write(self, unique: int, length_bytes: int) -> None:
        self.written.append((unique, length_bytes))


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return make_images(tmp_path)


@asynccontextmanager
async def serving(images: Images, *, clean: bool = True) -> AsyncIterator[tuple[Mounted, FakeSwitch, Requests]]:
    async with images.mount(clean=clean) as mount, trio.open_nursery() as nursery:
        switch = FakeSwitch()
        yield mount, switch, Requests(mount.volume, cast(Switch, switch), nursery)
        nursery.cancel_scope.cancel()


def seal_late(mount: Mounted) -> int:
    """A file whose data takes until finish_seals() to reach its device."""
    mount.plane.hold_writes = True
    ino = mount.create("/a")
    mount.write(ino, DATA)
    return ino


def finish_seals(mount: Mounted) -> None:
    for seal_id in list(mount.plane.held_seals):
        mount.plane.finish_seal(seal_id)


@trio_test
async def test_a_flush_is_answered_at_once_and_seals(images: Images) -> None:
    async with serving(images) as (mount, switch, requests):
        ino = seal_late(mount)
        requests.handlers["flush"](7, ino, 1, 1)
        assert switch.replies == [(7, 0)]
        assert not mount.volume.files.is_modified(ino) and not mount.volume.is_durable(ino)
        finish_seals(mount)
        mount.volume.close(ino, writable=True)


@trio_test
async def test_an_fsync_waits_and_does_not_hold_up_another_request(images: Images) -> None:
    async with serving(images) as (mount, switch, requests):
        ino = seal_late(mount)
        requests.handlers["fsync"](7, ino, 1, 1)
        await trio.sleep(0.1)
        requests.handlers["flush"](9, ino, 1, 1)
        assert switch.replies == [(9, 0)]
        finish_seals(mount)
        await mount.volume.sync()
        await trio.testing.wait_all_tasks_blocked()
        assert switch.replies == [(9, 0), (7, 0)]
        mount.volume.close(ino, writable=True)


@pytest.mark.parametrize("early", [False, True])
def test_an_interrupted_fsync_answers_eintr_once(images: Images, early: bool) -> None:
    @trio_test
    async def test() -> None:
        async with serving(images) as (mount, switch, requests):
            ino = seal_late(mount)
            if early:
                requests.handlers["interrupt"](7)
            requests.handlers["fsync"](7, ino, 1, 1)
            if not early:
                await trio.sleep(0.05)
                assert switch.replies == []
                requests.handlers["interrupt"](7)
            await trio.sleep(0.05)
            assert switch.replies == [(7, errno.EINTR)]
            finish_seals(mount)
            await mount.volume.sync()
            assert switch.replies == [(7, errno.EINTR)]
            mount.volume.close(ino, writable=True)

    test()


@trio_test
async def test_an_interrupted_sync_write_tells_what_is_in_the_file(images: Images) -> None:
    async with serving(images) as (mount, switch, requests):
        ino = seal_late(mount)
        requests.handlers["sync_write"](7, ino, len(DATA))
        await trio.sleep(0.05)
        requests.handlers["interrupt"](7)
        await trio.sleep(0.05)
        assert switch.written == [(7, len(DATA))] and switch.replies == []
        finish_seals(mount)
        mount.volume.close(ino, writable=True)


@trio_test
async def test_lost_data_is_told_by_fsync_and_by_close(images: Images) -> None:
    async with serving(images, clean=False) as (mount, switch, requests):
        ino = seal_late(mount)
        requests.handlers["fsync"](7, ino, 1, 1)
        await trio.sleep(0.05)
        (seal_id,) = mount.plane.held_seals
        mount.plane.finish_seal(seal_id, errno.EIO)
        await trio.sleep(0.05)
        requests.handlers["flush"](9, ino, 1, 1)
        assert switch.replies == [(7, errno.EIO), (9, errno.EIO)]
        assert mount.plane.write(ino, 0, b"x") != 0
