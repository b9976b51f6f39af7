"""The repository keeps its own rules: what a reviewer would otherwise have to look for in every change."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).parents[2]
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS: Final = {one["id"]: one for one in PROJECT["tool"]["importlinter"]["contracts"]}
PACKAGES: Final = ("sarp_cluster", "coordinator", "router", "shard", "bench")
LINES_MAX: Final = 500
"""Past some 400, a module has a second purpose that wants out."""
VAGUE_NAMES: Final = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}

# `import x`, `from x import y`, and the same with cimport, at any indentation.
IMPORT: Final = re.compile(r"^\s*(?:from\s+([\w.]+)\s+c?import\s+\(?([\w, ]*)|c?import\s+([\w., ]+))")


def sources(*suffixes: str) -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in suffixes)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(source: str, *, compiled: bool) -> Iterator[str]:
    """Modules, and for `from package import name` also package.name, which may be one."""
    if not compiled:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        return
    for line in source.splitlines():
        if found := IMPORT.match(line):
            module, names, modules = found.groups()
            if module:
                yield from (f"{module}.{name.split()[0]}" for name in names.split(",") if name.strip())
                yield module
            else:
                yield from (name.split()[0] for name in modules.split(",") if name.strip())


class Layers:
    """The layers contract of pyproject.toml, read as import-linter reads it."""

    def __init__(self, layers: list[str]) -> None:
        self._place: dict[str, tuple[int, bool]] = {}
        for depth, layer in enumerate(layers):
            for name in re.split(r"[|:]", layer):
                self._place[name.strip().strip("()")] = (depth, ":" in layer)

    def of(self, module: str) -> str | None:
        """The layer's member that a module belongs to."""
        parts = module.split(".")
        prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((prefix for prefix in prefixes if prefix in self._place), None)

    def allows(self, importer: str, imported: str) -> bool:
        above, below = self.of(importer), self.of(imported)
        if above is None or below is None or above == below:
            return True
        depth_above, siblings = self._place[above]
        depth_below, _ = self._place[below]
        return depth_above < depth_below or (depth_above == depth_below and siblings)


LAYERS: Final = Layers(CONTRACTS["layers"]["layers"])


class Import(NamedTuple):
    importer: str
    imported: str


def all_imports() -> list[Import]:
    return [
        Import(module_name(path), imported)
        for path in sources(".py", ".pyx", ".pxd", ".pyi")
        for imported in imported_by(path.read_text(), compiled=path.suffix in (".pyx", ".pxd"))
    ]


def within(module: str, packages: list[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_imports_point_down_in_compiled_modules_too() -> None:
    """import-linter sees neither .pyx nor .pxd files, nor what a .py file imports from one."""
    wrong = [one for one in all_imports() if not LAYERS.allows(*one)]
    assert not wrong


@pytest.mark.parametrize("contract", ["core-is-pure", "replay-measures-any-index", "testing-is-for-tests"])
def test_forbidden_imports_are_absent_from_compiled_modules_too(contract: str) -> None:
    sealed, forbidden = CONTRACTS[contract]["source_modules"], CONTRACTS[contract]["forbidden_modules"]
    wrong = [one for one in all_imports() if within(one.importer, sealed) and within(one.imported, forbidden)]
    assert not wrong


@pytest.mark.parametrize(
    ("line", "importer", "imported"),
    [
        ("from sarp_cluster.storage.record cimport check_frame", "sarp_cluster.core.x", "sarp_cluster.storage.record"),
        ("    from shard import index", "sarp_cluster.core.x", "shard.index"),
        ("cimport sarp_cluster.core.segment, shard.state", "sarp_cluster.storage.x", "shard.state"),
        ("from sarp_cluster import config", "sarp_cluster.limits", "sarp_cluster.config"),
        ("from sarp_cluster.cluster cimport (", "sarp_cluster.storage.x", "sarp_cluster.cluster"),
    ],
)
def test_an_upward_import_would_be_seen(line: str, importer: str, imported: str) -> None:
    found = list(imported_by(line, compiled=True))
    assert imported in found
    assert not LAYERS.allows(importer, imported)


def test_every_module_of_the_library_has_a_layer() -> None:
    unplaced = {
        module_name(path)
        for path in (ROOT / "sarp_cluster").rglob("*.py*")
        if path.suffix in (".py", ".pyx", ".pxd") and LAYERS.of(module_name(path)) is None
    }
    # The root has no code, and the test tools stand outside: nothing but tests and benchmarks may import them.
    assert {name for name in unplaced if not within(name, ["sarp_cluster.testing"])} == {"sarp_cluster"}


def test_nothing_that_ships_may_import_the_test_tools() -> None:
    shipped = {LAYERS.of(module_name(path)) for path in sources(".py")} - {None, "bench"}
    assert set(CONTRACTS["testing-is-for-tests"]["source_modules"]) == shipped


def test_every_package_is_declared() -> None:
    found = {module_name(path) for path in sources(".py") if path.name == "__init__.py"}
    shipped = {name for name in found if not within(name, ["bench"])}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == shipped


def test_every_compiled_module_is_built() -> None:
    declared = {one["name"]: one["sources"] for one in PROJECT["tool"]["setuptools"]["ext-modules"]}
    assert declared == {module_name(path): [str(path.relative_to(ROOT))] for path in sources(".pyx")}


def test_every_compiled_module_that_python_imports_has_types() -> None:
    """A .pyx whose functions only other compiled code calls needs none: nobody who checks types sees it."""
    compiled = {module_name(path): path for path in sources(".pyx")}
    python = [*sources(".py"), *sorted((ROOT / "tests").rglob("*.py"))]
    names = {name for path in python for name in imported_by(path.read_text(), compiled=False)}
    imported = names | {name.rpartition(".")[0] for name in names}
    untyped = {name for name, path in compiled.items() if name in imported and not path.with_suffix(".pyi").exists()}
    assert not untyped


def test_stubs_describe_a_module_that_exists() -> None:
    assert not [path for path in sources(".pyi") if not path.with_suffix(".pyx").exists()]


def test_no_module_is_too_long_to_read_at_once() -> None:
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in sources(".py", ".pyx", ".pxd")}
    assert {name: length for name, length in lengths.items() if length > LINES_MAX} == {}


def test_modules_are_named_for_what_they_do() -> None:
    assert not [path for path in sources(".py", ".pyx", ".pxd") if path.stem in VAGUE_NAMES]
