"""The control socket's server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import trio

from ckptfs.control import Control
from ckptfs.volume import Volume
from tests.volume_harness import trio_test


@trio_test
async def test_a_client_counts_until_it_has_the_last_word(tmp_path: Path) -> None:
    """The daemon ends when no client is left; an answer that is ready but not sent must not be lost then."""
    left = trio.Event()

    async def leave() -> dict[str, Any]:
        left.set()
        return {"done": True, "lost": []}

    class Idle:
        def progress(self) -> dict[str, int]:
            return {"unwritten_bytes": 0, "log_entries": 0}

    control = Control(cast(Volume, Idle()), "/nowhere", dict, leave)
    socket_path = str(tmp_path / "socket")
    listener = await control.listen(socket_path)
    answers: list[bytes] = []

    async def ask() -> None:
        async with await trio.open_unix_socket(socket_path) as stream:
            await stream.send_all(b'{"command": "umount"}\n')
            answers.extend([bytes(chunk) async for chunk in stream])

    async with trio.open_nursery() as client:
        client.start_soon(ask)
        async with trio.open_nursery() as daemon:
            daemon.start_soon(control.serve, listener)
            await left.wait()
            while control.clients:
                await trio.lowlevel.checkpoint()
            daemon.cancel_scope.cancel()
    assert json.loads(b"".join(answers).splitlines()[-1])["done"]
