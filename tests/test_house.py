"""The rules of the house that no linter knows: which package may import which, under which name, and what is packaged.

A package imports from packages below it only, and no files import each other in a circle. Both hold for imports inside
functions and for those that only type checkers see, too. A new package needs a place in ORDER.
"""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

ORDER = (
    ("errors", "names", "warned"),
    ("runtime.face",),
    ("units", "files", "torch_state"),
    ("tables",),
    ("progress", "timeline"),
    ("program.operators",),
    ("program.operators.attention",),
    ("program",),
    ("capture.passes", "capture.python", "sharding", "models", "optim"),
    ("capture.inlining", "capture.static", "strategies.rules.products"),
    (
        "capture.derivatives",
        "capture.experts",
        "capture.layers",
        "capture.masks",
        "capture.numbers",
        "hardware",
        "lengths",
        "solver",
        "timeline",
        "strategies.rules",
        "strategies.rules.layers",
    ),
    ("capture.rows",),
    ("capture.tiles",),
    ("capture",),
    ("strategies",),
    ("strategies.presets", "plans", "cost", "validation"),
    ("space",),
    ("memory", "annotations"),
    ("steps",),
    ("planning.limit", "planning.meshes"),
    ("planning", "pipeline.schedules"),
    ("formulas", "pipeline.stages"),
    ("inspection", "translation", "pipeline", "runtime.collectives"),
    ("arranging", "runtime.implementations", "runtime.ranks"),
    ("runtime.recompute", "runtime.checkpoints"),
    ("runtime.rewrite",),
    ("runtime.outputs", "runtime.numbers"),
    ("runtime.module",),
    ("runtime.pipeline",),
    ("runtime", "report"),
    ("compiler", "calibration"),
    ("inference",),
    ("option_types",),
    ("api",),
    ("loading", "sizing"),
    ("benchmarking", "demo", "integrations"),
    ("",),
    ("cli",),
)
"""Packages and single modules from the bottom up; "" is `autopar/__init__.py`. What stands in one row is strangers."""
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
BELOW_THEIR_TABLES = {"autopar.strategies.notation", "autopar.planning.formulation"}
"""Modules of a package that the packages inside it may import."""
WITHOUT_TORCH = ("files", "solver", "plans", "hardware", "timeline")
KERNELS = {"autopar.solver.elimination.min_plus"}
"""Modules of these that take arrays of numbers to PyTorch and bring some back."""
MAX_LINES, MAX_FILES = 400, 12
PACKAGES = ("strategies", "runtime")
"""Folders beside `autopar/` that are installed inside it."""

FILES = [
    file
    for folder in ("autopar", *PACKAGES)
    for file in sorted((ROOT / folder).rglob("*.py"))
    if not any(ROOT / "autopar" / package in file.parents for package in PACKAGES)
]
NAMES = [str(file.relative_to(ROOT)) for file in FILES]
MACHINE_PATH = re.compile(r"(?<![\w./~:$}-])/(home|root|Users|work|mnt)/\w+")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".html", ".txt", ""}


def _module_of(file: Path) -> str:
    """The name under which a file is imported."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join((("autopar",) if parts[0] != "autopar" else ()) + parts).removesuffix(".__init__")


MODULES = {_module_of(file): file for file in FILES}


def _package_of(module: str) -> str:
    """The package of a module, as ORDER calls it: the longest name that it has; of a single module its own."""
    name = module.removeprefix("autopar").removeprefix(".")
    while name and name not in RANK:
        name = name.rpartition(".")[0]
    assert name or module == "autopar", (
        f"{module} has no place; give its package one in ORDER of {Path(__file__).name}."
    )
    return name


def _imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, module and name of every import below `tree`; a relative import begins with dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, module, alias.name) for alias in node.names)


def _imported(file: Path) -> dict[str, int]:
    """The modules of the house that a file imports, wherever in it, with the line."""
    found: dict[str, int] = {}
    for line, module, name in _imports(ast.parse(file.read_text())):
        target = f"{module}.{name}" if f"{module}.{name}" in MODULES else module
        if target in MODULES and target != _module_of(file):
            found.setdefault(target, line)
    return found


ARROWS: Mapping[str, dict[str, int]] = {module: _imported(file) for module, file in MODULES.items()}


def test_imports_point_down() -> None:
    upward = []
    for module, imports in ARROWS.items():
        package = _package_of(module)
        for imported, line in imports.items():
            other = _package_of(imported)
            below = RANK[other] < RANK[package] or imported in BELOW_THEIR_TABLES
            if other != package and not below:
                upward.append(f"{MODULES[module].name}:{line} in {package or 'autopar'} imports {imported}")
    assert not upward, f"{upward}: imports point down. Move the code, or the package in ORDER."


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        tuple(graphlib.TopologicalSorter(ARROWS).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"files in a circle: {' → '.join(error.args[1])}")


def test_a_file_has_one_idea() -> None:
    long = [name for name, file in zip(NAMES, FILES, strict=True) if len(file.read_text().splitlines()) > MAX_LINES]
    assert not long, f"{long}: two ideas; make it two files."


def test_a_package_is_taken_in_at_a_glance() -> None:
    counts = Counter(file.parent for file in FILES if file.name != "__init__.py")
    crowded = {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > MAX_FILES}
    assert not crowded, f"folders with more than {MAX_FILES} files: {crowded}; find the packages in them."


def test_every_package_says_what_it_decides() -> None:
    files = [file for file in FILES if file.name == "__init__.py"]
    silent = [str(file.relative_to(ROOT)) for file in files if not ast.get_docstring(ast.parse(file.read_text()))]
    assert not silent


def test_imports_are_absolute_and_use_the_one_name() -> None:
    for file in FILES:
        for line, module, _ in _imports(ast.parse(file.read_text())):
            assert not module.startswith("."), f"{file.name}:{line}: relative import {module!r}; write it in full."
            assert module.split(".")[0] not in PACKAGES, f"{file.name}:{line}: import autopar.{module} instead."


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_solvers_plans_and_profiles_know_nothing_of_torch(package: str) -> None:
    left = [module for module in MODULES if _package_of(module) == package]
    reached = set(left)
    while left:
        module = left.pop()
        for line, imported, _ in _imports(_as_it_runs(ast.parse(MODULES[module].read_text()))):
            is_torch = imported.split(".")[0] == "torch" and module not in KERNELS
            assert not is_torch, f"{package} reaches torch through {module}:{line}."
        new = {each for each in ARROWS[module] if each not in reached and _runs(module, each)}
        reached, left = reached | new, [*left, *new]


def _as_it_runs(tree: ast.Module) -> ast.Module:
    """The module without what only type checkers see."""
    runs = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))]
    return ast.Module(body=runs, type_ignores=[])


def _runs(module: str, imported: str) -> bool:
    """Return whether the module imports `imported` at run time, not only for type checkers."""
    found = _imports(_as_it_runs(ast.parse(MODULES[module].read_text())))
    return any(imported in (name, f"{name}.{each}") for _, name, each in found)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_beside_autopar_has_one_name_only(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    assert importlib.import_module(f"autopar.{package}").__name__ == f"autopar.{package}"
    with pytest.raises(ImportError, match=f"autopar.{package}"):
        importlib.import_module(package)


def test_every_package_is_packaged() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(_module_of(file) for file in FILES if file.name == "__init__.py")


def test_no_file_names_a_path_of_one_machine() -> None:
    top = [
        path
        for path in ROOT.iterdir()
        if path.name not in {".git", ".venv", ".venv-cuda", ".hypothesis", "build", "dist"}
    ]
    files = [file for path in top for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    texts = [file for file in files if file.suffix in TEXT_SUFFIXES and "_cache" not in str(file)]
    assert Path(__file__) in texts
    found = [(str(file.relative_to(ROOT)), hit.group()) for file in texts for hit in MACHINE_PATH.finditer(_text(file))]
    assert not found, f"paths that exist on one machine only: {found}"


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")
