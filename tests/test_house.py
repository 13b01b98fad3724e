"""The rules of the house that no linter knows: which module may import which, under which name, and what is packaged.

Modules live on floors and import only from floors below. `strategies` and `runtime` are one module each in this: inside
them, files may import each other. A new file in `autopar/` needs a floor here.
"""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

FLOORS = (
    ("errors", "cutting"),
    (
        "mesh",
        "layout",
        "sizes",
        "text",
        "annotation",
        "folding",
        "progress",
        "collector",
        "medians",
        "microbatches",
        "schedules",
    ),
    ("launch", "plain_models", "ranking", "measurement", "peer_plans", "schedule_simulation", "stages"),
    (
        "program",
        "rule",
        "hardware",
        "models",
        "symbols",
        "expressions",
        "repriced",
        "schedule_choice",
        "cut_refinement",
    ),
    ("subjects", "contest_tables", "contest_plots", "peers"),
    ("operation", "optimizers", "plan", "equations", "collective_cost", "fit", "sharing"),
    ("pipeline_plan",),
    ("strategies", "reshard", "saved", "size_rules", "repricing", "draft", "guards"),
    ("cost", "segments", "casts", "functionalize", "identities", "pieces", "views"),
    ("inline", "projections", "blocks"),
    ("normalize",),
    ("capture", "splitting"),
    ("candidates", "problem"),
    ("space", "eliminate", "ilp", "reduction", "pruning"),
    ("tensor_bytes",),
    ("accumulation", "moved_weights"),
    ("build", "memory", "runtime", "repetition", "hidden_bytes", "marginals", "multiplier", "conflict"),
    ("hubs", "fixing"),
    ("counts", "wide", "peak", "symbolic_shapes", "shortage"),
    ("solve", "certificate"),
    ("local_sizes", "step_parts"),
    ("memory_formulas", "block_costs"),
    ("formulas", "statement"),
    ("within",),
    ("planner",),
    ("pipeline_report", "report", "compare", "breakdown", "search", "verify"),
    ("matching", "explanation", "page", "trace"),
    ("gantt",),
    ("offers", "stage_pins"),
    ("pins", "foreign_plans", "naming"),
    ("annotate", "explain", "pipeline_request"),
    ("pipeline_blocks",),
    ("pipeline",),
    ("recommendation",),
    ("compile_pipeline",),
    ("api", "what_if"),
    ("attach", "meters", "measure"),
    ("contestants",),
    ("race", "calibrate"),
    ("contest",),
    ("__init__",),
    ("demo", "contest_command"),
    ("cli",),
)
FLOOR_OF = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}
UPWARD = {
    ("pipeline_plan", "pipeline_report"),
    ("pipeline_plan", "gantt"),
    ("pipeline_plan", "formulas"),
} | {
    ("plan", each)
    for each in (
        "report",
        "formulas",
        "repricing",
        "explain",
        "compare",
        "what_if",
        "verify",
        "attach",
        "page",
        "trace",
    )
}
"""Inside functions: a plan prints and re-prices itself, and answers questions about itself."""
WITHOUT_TORCH = ("problem", "solve")
PACKAGES = ("strategies", "runtime")

FILES = sorted((ROOT / "autopar").glob("*.py")) + [
    file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))
]
NAMES = [str(file.relative_to(ROOT)) for file in FILES]
MACHINE_PATH = re.compile(r"(?<![\w./~:$}-])/(home|root|Users|work|mnt)/\w+")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".html", ".txt", ""}


def _module_of(file: Path) -> str:
    """The module of the house that `file` belongs to: `strategies` for everything in strategies/."""
    folder = file.relative_to(ROOT).parts[0]
    return folder if folder in PACKAGES else file.stem


def _imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, module and name of every import below `tree`; a relative import begins with dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, module, alias.name) for alias in node.names)


def _imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and module of the house of every import from autopar, wherever it stands in the file."""
    for line, module, name in _imports(tree):
        package, _, rest = module.partition(".")
        if package == "autopar" and rest:
            yield line, rest.split(".")[0]
        elif package == "autopar":
            is_module = name in PACKAGES or (ROOT / "autopar" / f"{name}.py").exists()
            yield line, name if is_module else "__init__"


def _without_type_checking(tree: ast.Module) -> ast.Module:
    """The module as it runs: without what only type checkers see."""
    runs = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))]
    return ast.Module(body=runs, type_ignores=[])


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_imports_point_down(file: Path) -> None:
    module = _module_of(file)
    assert module in FLOOR_OF, f"{file.name} has no floor; give it one in FLOORS of {Path(__file__).name}."
    tree = _without_type_checking(ast.parse(file.read_text()))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    deferred = {node.lineno for function in functions for node in ast.walk(function) if isinstance(node, ast.stmt)}
    for line, imported in _imported_modules(tree):
        if (module, imported) in UPWARD and line in deferred:
            continue
        assert imported in FLOOR_OF, f"{file.name}:{line} imports autopar.{imported}, which has no floor."
        assert imported == module or FLOOR_OF[imported] < FLOOR_OF[module], (
            f"{file.name}:{line} is on floor {FLOOR_OF[module]} and imports autopar.{imported} from floor "
            f"{FLOOR_OF[imported]}; imports point down. Move the code, or the module in FLOORS."
        )


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_imports_are_absolute_and_use_the_one_name(file: Path) -> None:
    for line, module, _ in _imports(ast.parse(file.read_text())):
        assert not module.startswith("."), f"{file.name}:{line}: relative import {module!r}; write autopar.… in full."
        assert module.split(".")[0] not in PACKAGES, f"{file.name}:{line}: import autopar.{module} instead."


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_the_solver_knows_nothing_of_torch(module: str) -> None:
    reached, left = {module}, [module]
    while left:
        file = ROOT / "autopar" / f"{left.pop()}.py"
        tree = _without_type_checking(ast.parse(file.read_text()))
        for line, imported, _ in _imports(tree):
            assert imported.split(".")[0] != "torch", f"autopar.{module} reaches torch through {file.name}:{line}."
        new = {imported for _, imported in _imported_modules(tree)} - reached
        reached, left = reached | new, [*left, *new]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_beside_autopar_has_one_name_only(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    assert importlib.import_module(f"autopar.{package}").__name__ == f"autopar.{package}"
    with pytest.raises(ImportError, match=f"autopar.{package}"):
        importlib.import_module(package)


def test_every_package_is_packaged() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {file.parent.relative_to(ROOT).as_posix().replace("/", ".") for file in FILES}
    assert sorted(listed) == sorted(f if f == "autopar" else f"autopar.{f}" for f in folders)


def test_no_file_names_a_path_of_one_machine() -> None:
    top = [path for path in ROOT.iterdir() if path.name not in {".git", ".venv", ".hypothesis", "build", "dist"}]
    files = [file for path in top for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    texts = [file for file in files if file.suffix in TEXT_SUFFIXES and "_cache" not in str(file)]
    assert Path(__file__) in texts
    found = [(str(file.relative_to(ROOT)), hit.group()) for file in texts for hit in MACHINE_PATH.finditer(_text(file))]
    assert not found, f"paths that exist on one machine only: {found}"


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")
