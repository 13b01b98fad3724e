"""The rules of the house that no linter knows: which package may import which, under which name, and what is packaged.

A package imports from packages below it only, no files import each other in a circle, and neither do the parts of a
package. All hold for imports inside functions and for those that only type checkers see, too. A new package needs a
place in ORDER.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import io
import itertools
import re
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[1]

ORDER = (
    ("errors",),
    ("console", "files", "ir", "models"),
    ("capture", "optim", "solver", "strategies"),
    ("costs",),
    ("planning",),
    ("runtime", "views"),
    ("compiler",),
    ("api",),
    ("integrations", "tools"),
    ("",),
    ("cli",),
)
"""Packages from the bottom up; "" is `autopar/__init__.py`. Packages in one row do not import each other."""
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
MOST_PACKAGES, MOST_ARROWS = 20, 100
WITHOUT_TORCH = ("files", "solver", "costs.plans", "costs.hardware", "costs.timeline")
KERNELS = {"autopar.solver.elimination.min_plus"}
"""Modules of these that take arrays of numbers to PyTorch and bring some back."""
MAX_LINES, MAX_FILES = 400, 12
PACKAGES = ("strategies", "runtime")
"""Folders next to `autopar/` that are installed inside it."""

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
    """Return the first name of a module below `autopar`, as ORDER has it."""
    name = module.removeprefix("autopar").removeprefix(".").partition(".")[0]
    assert name in RANK, f"{module} has no place; give its package one in ORDER of {Path(__file__).name}."
    return name


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below a node, and those below them."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        below = getattr(node, field, ())
        for each in below if isinstance(below, list) else ():
            yield each
            yield from _statements(each)


@functools.cache
def _imports(file: Path, as_it_runs: bool = False) -> tuple[tuple[int, str, str], ...]:
    """Return line, module and name of every import of a file; a relative import begins with dots.

    `as_it_runs` leaves out what only type checkers see.
    """
    return tuple(_imports_below(_as_it_runs(_tree(file)) if as_it_runs else _tree(file)))


def _imports_below(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, module, alias.name) for alias in node.names)


def _imported(file: Path) -> dict[str, int]:
    """The modules of the house that a file imports, wherever in it, with the line."""
    found: dict[str, int] = {}
    for line, module, name in _imports(file):
        target = f"{module}.{name}" if f"{module}.{name}" in MODULES else module
        if target in MODULES and target != _module_of(file):
            found.setdefault(target, line)
    return found


@functools.cache
def _arrows() -> Mapping[str, dict[str, int]]:
    """Return what each module of the house imports."""
    return {module: _imported(file) for module, file in MODULES.items()}


def test_imports_point_down() -> None:
    upward = []
    for module, imports in _arrows().items():
        package = _package_of(module)
        for imported, line in imports.items():
            other = _package_of(imported)
            if other != package and RANK[other] >= RANK[package]:
                upward.append(f"{MODULES[module].name}:{line} in {package or 'autopar'} imports {imported}")
    assert not upward, f"{upward}: imports point down. Move the code, or the package in ORDER."


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        tuple(graphlib.TopologicalSorter(_arrows()).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"files in a circle: {' → '.join(error.args[1])}")


def _children(package: str) -> dict[str, dict[str, tuple[str, str]]]:
    """Map each file and package directly in a package to those that it imports, with one import of each."""
    depth = package.count(".") + 1
    inside = [module for module in MODULES if module.startswith(f"{package}.")]
    found: dict[str, dict[str, tuple[str, str]]] = {module.split(".")[depth]: {} for module in inside}
    for module in inside:
        for imported in _arrows()[module]:
            if imported.startswith(f"{package}."):
                own, other = (each.split(".")[depth] for each in (module, imported))
                if own != other:
                    found[own].setdefault(other, (module, imported))
    return found


@pytest.mark.parametrize("package", sorted(_module_of(file) for file in FILES if file.name == "__init__.py"))
def test_parts_of_a_package_import_each_other_in_one_direction(package: str) -> None:
    children = _children(package)
    try:
        tuple(graphlib.TopologicalSorter(children).static_order())
    except graphlib.CycleError as error:
        circle = error.args[1]
        imports = [children[b][a] for a, b in itertools.pairwise(circle) if a in children.get(b, {})]
        pytest.fail(f"{' → '.join(circle)} in {package}: {imports}. Move a file to the part that it belongs to.")


def test_the_graph_of_packages_is_small() -> None:
    arrows = {(_package_of(a), _package_of(b)) for a, imports in _arrows().items() for b in imports}
    between = {(a, b) for a, b in arrows if a != b}
    assert len(RANK) <= MOST_PACKAGES
    assert len(between) <= MOST_ARROWS


def test_a_file_has_one_idea() -> None:
    long = [name for name, file in zip(NAMES, FILES, strict=True) if len(file.read_text().splitlines()) > MAX_LINES]
    assert not long, f"{long}: two ideas; make it two files."


def test_a_package_is_taken_in_at_a_glance() -> None:
    counts = Counter(file.parent for file in FILES if file.name != "__init__.py")
    crowded = {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > MAX_FILES}
    assert not crowded, f"folders with more than {MAX_FILES} files: {crowded}; find the packages in them."


def _numbers(text: str) -> Iterator[str]:
    """Yield the names of a file's constants whose value is a number that is written down."""
    for each in ast.parse(text).body:
        if isinstance(each, ast.Assign) and not any(isinstance(part, ast.Name) for part in ast.walk(each.value)):
            (target,) = each.targets
            names = target.elts if isinstance(target, ast.Tuple) else [target] * (not isinstance(each.value, ast.Tuple))
            yield from (name.id for name in names if isinstance(name, ast.Name) and name.id.isupper())


def test_the_search_has_few_constants_and_each_is_explained() -> None:
    """`benchmarks/results/ablation.txt` has what justifies each of them."""
    results = (ROOT / "benchmarks/results/ablation.txt").read_text()
    explained = re.findall(r"^   (\w+\.[A-Z_]+) ", results, re.MULTILINE)
    files = [file for part in SEARCH for file in (ROOT / "autopar" / part).rglob("*.py")]
    found = [(file.stem, name) for file in files for name in _numbers(file.read_text())]
    assert len(found) <= 50
    assert {f"{file}.{name}" for file, name in found} == set(explained)
    assert [*_numbers("A, B = 1, 2.0\nC = 1 << 20\nD = 3 * C\ne = 4\nF = math.inf\nG = (1, 2)")] == ["A", "B", "C"]


SEARCH = ("solver", "planning/memory_limit")


def test_every_package_says_what_it_decides() -> None:
    files = [file for file in FILES if file.name == "__init__.py"]
    silent = [str(file.relative_to(ROOT)) for file in files if not ast.get_docstring(_tree(file))]
    assert not silent


def test_imports_are_absolute_and_use_the_one_name() -> None:
    for file in FILES:
        for line, module, _ in _imports(file):
            assert not module.startswith("."), f"{file.name}:{line}: relative import {module!r}; write it in full."
            assert module.split(".")[0] not in PACKAGES, f"{file.name}:{line}: import autopar.{module} instead."


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_solvers_plans_and_profiles_know_nothing_of_torch(package: str) -> None:
    left = [module for module in MODULES if f"{module}.".startswith(f"autopar.{package}.")]
    reached = set(left)
    while left:
        module = left.pop()
        for line, imported, _ in _imports(MODULES[module], as_it_runs=True):
            is_torch = imported.split(".")[0] == "torch" and module not in KERNELS
            assert not is_torch, f"{package} reaches torch through {module}:{line}."
        new = {each for each in _arrows()[module] if each not in reached and _runs(module, each)}
        reached, left = reached | new, [*left, *new]


def _as_it_runs(tree: ast.Module) -> ast.Module:
    """The module without what only type checkers see."""
    runs = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))]
    return ast.Module(body=runs, type_ignores=[])


def _runs(module: str, imported: str) -> bool:
    """Return whether the module imports `imported` at run time, not only for type checkers."""
    found = _imports(MODULES[module], as_it_runs=True)
    return any(imported in (name, f"{name}.{each}") for _, name, each in found)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_next_to_autopar_has_one_name_only(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    assert importlib.import_module(f"autopar.{package}").__name__ == f"autopar.{package}"
    with pytest.raises(ImportError, match=f"autopar.{package}"):
        importlib.import_module(package)


def test_every_package_is_packaged() -> None:
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    found = setuptools.find_packages(str(ROOT), include=find["include"])
    assert sorted(found) == sorted(_module_of(file) for file in FILES if file.name == "__init__.py")


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


FRONTED = {"What", "Whether", "Which", "Those", "Of", "How", "Where"}
"""First words of docstrings that do not name their subject."""
PEOPLE_READ = [*FILES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]


def _docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield docstrings, those of attributes included."""
    for statement in _statements(tree):
        value = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value.strip():
            yield value


def test_docstrings_name_their_subject() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{each.lineno}"
        for file in PEOPLE_READ
        for each in _docstrings(_tree(file))
        if _first_word(str(each.value)) in FRONTED
    ]
    assert not found, f"{found}: begin with a verb (Return, Build …) or with a noun; see CONTRIBUTING.md."


def test_comments_name_their_subject() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in FILES
        for line, comment in _comments(file.read_text())
        if _first_word(comment.strip("# ")).capitalize() in FRONTED
    ]
    assert not found, f"{found}: say what it is, with its unit (seconds per …, share of …); see CONTRIBUTING.md."


ARTICLES = {"A", "All", "An", "Each", "Every", "Its", "Nothing", "One", "Such", "The", "This"}
"""First words of noun phrases."""
NAMED_FOR_USERS = ("strategies/rules/", "strategies/presets/")
"""Packages whose functions are rules and presets: their docstrings describe an operator or a strategy."""


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{each.lineno}"
        for file in FILES
        if not str(file.relative_to(ROOT)).startswith(NAMED_FOR_USERS)
        for each in ast.walk(_tree(file))
        if isinstance(each, ast.FunctionDef) and not _is_property(each)
        if _first_word(ast.get_docstring(each) or "") in ARTICLES
    ]
    assert not found, f"{found}: begin with a verb (Return, Yield, Build …); see CONTRIBUTING.md."


def _is_property(function: ast.FunctionDef) -> bool:
    return any("property" in ast.unparse(each) for each in function.decorator_list)


def _first_word(text: str) -> str:
    return text.split()[0].strip(",.;:") if text.strip() else ""


TERMS: Mapping[str, str] = {
    r"asked": "requested",
    r"beside": "overlapped with, next to, together with or compared with",
    r"deal(s|t|ing)": "zigzag-sharded, or assigned",
    r"dear(er|est)?": "expensive",
    r"excess": "reduced cost",
    r"hubs?": "shared reshard",
    r"menus?": "candidate strategies",
    r"met": "visited",
    r"rooms": "per-rank memory budgets",
    r"said": "user-specified, or annotations",
    r"wires?": "edge",
}
"""Private words, as patterns → the field's term for them."""
PRIVATE = re.compile(rf"\b({'|'.join(TERMS)})\b")
NOT_PROSE = re.compile(r"``.*?``|`[^`]*`|\"[^\"\n]*\"|--\w+|^ *\w+:", re.MULTILINE)
"""Names in docstrings and comments: code, strings, flags, arguments."""


def _comments(text: str) -> Iterator[tuple[int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    yield from ((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)


def _private_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of docstrings and comments with words of TERMS, and the words."""
    if PRIVATE.search(text):
        prose = [(each.lineno, str(each.value)) for each in _docstrings(ast.parse(text))]
        for line, each in [*prose, *_comments(text)]:
            yield from ((line, hit.group()) for hit in PRIVATE.finditer(NOT_PROSE.sub("", each)))


NOT_OURS = {"push_to_hub", "test_docstrings_and_comments_use_the_terms_of_the_field"}
"""Names of other libraries that have a word of TERMS."""


def _private_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield the names, and their lines, that have a word of TERMS."""
    wrong = {name for name in set(re.findall(r"[A-Za-z_]\w*", text)) - NOT_OURS if _is_private(name)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline) if wrong else ():
        if token.type == tokenize.NAME and token.string in wrong:
            yield token.start[0], token.string


def _is_private(name: str) -> bool:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
    return any(map(PRIVATE.fullmatch, words))


def test_names_use_the_terms_of_the_field() -> None:
    texts = {file.relative_to(ROOT): file.read_text() for file in PEOPLE_READ}
    found = [f"{name}:{line}: {word}" for name, text in texts.items() for line, word in _private_names(text)]
    assert not found, f"{found}: use the terms of TERMS in {Path(__file__).name}."
    assert [*_private_names("menu_of(HUB).WireParts, method = 0, 'menu'")] == [
        (1, "menu_of"),
        (1, "HUB"),
        (1, "WireParts"),
    ]


def test_docstrings_and_comments_use_the_terms_of_the_field() -> None:
    texts = {file.relative_to(ROOT): file.read_text() for file in PEOPLE_READ}
    found = [f"{name}:{line}: {word}" for name, text in texts.items() for line, word in _private_words(text)]
    assert not found, f"{found}: use the terms of TERMS in {Path(__file__).name}."
    mistakes = '"""Price a hub."""\nwidth = 1  # of the wires, `menu` excepted\n'
    assert [*_private_words(mistakes)] == [(1, "hub"), (2, "wires")]
