"""The house rules that a parser can check: floors, cycles, sizes (design section 5)."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE_FOLDER = Path(__file__).parents[1] / "ckptfs"
MAX_MODULE_LINES = 650

FLOORS: dict[str, int] = {
    module: floor
    for floor, modules in enumerate(
        [
            "constants errors layout native_types sizes",
            "allocator extents frames namespace records",
            "device _native",
            "journal recovery snapshot superblock",
            "commit dataplane",
            "checks client control files fusemount kernel_settings names offline operations read_path requests"
            " runtime volume",
            "bench cli daemon export fsck inspect mkfs mount mount_options problems progress status umount wait",
            "__init__ __main__",
        ]
    )
    for module in modules.split()
}
"""Module to floor. What is at the front door (7) is imported by nobody, but for the version."""
SUBPACKAGES = {"benchmark": 6}

MODULES = {
    ".".join(path.relative_to(PACKAGE_FOLDER).with_suffix("").parts): path
    for path in sorted([*PACKAGE_FOLDER.rglob("*.py"), PACKAGE_FOLDER / "_native.pyi"])
}


def _floor(module: str) -> int:
    head, dot, _ = module.partition(".")
    return SUBPACKAGES[head] if dot or head in SUBPACKAGES else FLOORS[module]


def _imports(module: str) -> set[str]:
    """The modules of the package that this one imports, at its top or late, for running or for types only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: relative import"
            base = node.module or ""
            found |= {base} if base != "ckptfs" else {f"ckptfs.{alias.name}" for alias in node.names}
            found |= {f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}"[7:] in MODULES}
    names = {name.removeprefix("ckptfs.") for name in found if name.startswith("ckptfs.")} - {"__version__"}
    return names - {module}


@pytest.mark.parametrize("module", list(MODULES))
def test_every_module_has_a_floor(module: str) -> None:
    assert module.partition(".")[0] in FLOORS.keys() | SUBPACKAGES.keys(), "give it a floor in tests/test_floors.py"


@pytest.mark.parametrize("module", list(MODULES))
def test_imports_go_only_downwards(module: str) -> None:
    upwards = {name for name in _imports(module) if _floor(name) > _floor(module)}
    assert not upwards, f"{module} is on floor {_floor(module)} and imports from above"


def test_imports_have_no_cycles() -> None:
    list(TopologicalSorter({module: _imports(module) for module in MODULES}).static_order())


@pytest.mark.parametrize("module", list(MODULES))
def test_modules_stay_small(module: str) -> None:
    lines = len(MODULES[module].read_text().splitlines())
    assert lines <= MAX_MODULE_LINES, "two jobs in one room?"


@pytest.mark.parametrize("module", [name for name in MODULES if FLOORS.get(name) == 1])
def test_the_memory_floor_does_no_io_and_never_wait(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not imported & {"io", "os", "socket", "subprocess", "threading", "trio"}
    assert not any(isinstance(node, (ast.Await, ast.AsyncFunctionDef)) for node in ast.walk(tree))


def test_only_the_commit_appends_to_the_journal() -> None:
    callers = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "append" and _ends_in_journal(node.value)
    }
    assert callers <= {"commit"}


def _ends_in_journal(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.lstrip("_") == "journal"
