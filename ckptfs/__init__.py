"""ckptfs: a checkpoint file system that acknowledges writes at memory speed and makes them durable behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptfs.client import wait_durable

__version__ = "0.1.0"
__all__ = ["__version__", "wait_durable"]


def __getattr__(name: str) -> Any:
    # Late, so that `import ckptfs` costs a trainer nothing.
    if name == "wait_durable":
        from ckptfs.client import wait_durable

        return wait_durable
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
