"""`python -m ckptfs` is the command `ckptfs`."""

from __future__ import annotations

from ckptfs.cli import main

if __name__ == "__main__":
    main()
