"""Settings of the running kernel that make ckptfs faster, changed where one may. All are for the whole machine.

None is needed: where one is refused, `ckptfs status` says so, and things are slower. None is put back at the end, for
another mount may rely on it by then.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

log = logging.getLogger(__name__)

SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
"""Linux, admin-guide/mm/transhuge: huge pages for shared memory, and so for a memfd."""


def allow_huge_pages() -> str:
    """Lets programs ask for huge pages of shared memory (madvise(2)), as the staging does.

    In huge pages a 1 MiB transfer is one or two segments to a device instead of 256, and memory is warm much sooner.

    Returns:
        The setting in force: "advise", "always", ... or "never" and why it is not changed.
    """
    try:
        setting = _chosen(SHMEM_HUGE_PAGES.read_text())
        if setting == "never":
            SHMEM_HUGE_PAGES.write_text("advise")
            setting = _chosen(SHMEM_HUGE_PAGES.read_text())
    except OSError as error:
        log.info("the staging gets no huge pages: %s", error)
        return f"never ({error.strerror})"
    return setting


def _chosen(text: str) -> str:
    """The word in brackets, as in "always [advise] never"."""
    found = re.search(r"\[(\w+)\]", text)
    return found.group(1) if found else text.strip()
