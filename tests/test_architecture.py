"""Automatic checks of the code base: layers, import circles, gin names, errors, stray names."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED: dict[str, set[str]] = {
    "data": set(),
    "nets": set(),
    "gin_configs": set(),
    "envs": {"data"},
    "agents": {"data", "nets"},
    "experiment": {"data", "nets", "envs", "agents", "gin_configs"},
    "tools": {"data", "nets", "envs", "agents", "experiment", "gin_configs"},
}
SKIPPED_FOLDERS = {".git", ".venv", ".types", "build", "dist", "runs", "__pycache__"}
USER_FACING = {"ValueError", "TypeError", "RuntimeError", "ImportError", "FileNotFoundError"}


@functools.cache  # several tests look at every file
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


def text_files(*suffixes: str) -> list[Path]:
    """Files of the repository with one of these suffixes, except the output of tools and runs."""
    found = []
    for folder, subfolders, files in os.walk(ROOT):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS and "cache" not in name]
        found += [Path(folder, name) for name in files if name.endswith(suffixes)]
    return sorted(found)


PYTHON_FILES = text_files(".py")
CODE_FILES = [path for path in PYTHON_FILES if path.relative_to(ROOT).parts[0] in ALLOWED]
FUNCTION_TYPES = (ast.FunctionDef, ast.AsyncFunctionDef)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def last_name(node: ast.AST) -> str:
    """The name of `node` without its owner: `c` for `a.b.c`, the name of a definition, otherwise empty."""
    for field in ("attr", "id", "name"):
        if isinstance(name := getattr(node, field, None), str):
            return name
    return ""


def test_the_files_of_every_layer_are_found() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in CODE_FILES} == set(ALLOWED)


# --- layers --------------------------------------------------------------------------------------------


def imported_names(source: str, package: list[str]) -> Iterator[str]:
    """Absolute dotted names of everything that `source`, a module inside `package`, imports at any depth."""
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module or "").split(".")] if node.module else base
            yield from (".".join([*module, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and last_name(node.func) in {"import_module", "__import__"}:
            name = str(getattr(node.args[0], "value", "")) if node.args else ""
            level = len(name) - len(name.lstrip("."))
            base = package[: len(package) - level + 1] if level else []
            yield ".".join([*base, name.lstrip(".")])


def forbidden_imports(source: str, package: list[str]) -> list[str]:
    """Imports that a module inside `package`, such as ["loxodon", "envs", "builtin"], must not make."""
    layer, found = package[1], []
    for name in imported_names(source, package):
        top, *rest = name.split(".")
        outside = top == "loxodon" and (not rest or rest[0] not in ALLOWED[layer] | {layer})
        if outside or top in ALLOWED or top == "gym":
            found.append(name)
    return found


@pytest.mark.parametrize(
    ("source", "package", "found"),
    [
        ("from loxodon.data.batch import Batch", "loxodon.nets", ["loxodon.data.batch.Batch"]),
        ("from loxodon import data", "loxodon.nets", ["loxodon.data"]),
        ("import loxodon.data.batch", "loxodon.envs", []),
        ("from ..data import Batch", "loxodon.nets", ["loxodon.data.Batch"]),
        ("from ..data import Batch", "loxodon.agents", []),
        ("from .. import experiment", "loxodon.agents", ["loxodon.experiment"]),
        ("from ...tools import run", "loxodon.envs.builtin", ["loxodon.tools.run"]),
        ("from ..vector import make", "loxodon.envs.builtin", []),
        ("from . import files", "loxodon.data", []),
        ("def f():\n    from ..agents import Agent", "loxodon.nets", ["loxodon.agents.Agent"]),
        ("importlib.import_module('..envs', __package__)", "loxodon.data", ["loxodon.envs"]),
        ("import data", "loxodon.envs", ["data"]),
        ("import gym\nimport gymnasium", "loxodon.envs", ["gym"]),
    ],
)
def test_the_layer_check_sees_every_form_of_import(source: str, package: str, found: list[str]) -> None:
    assert forbidden_imports(source, package.split(".")) == found


def test_imports_follow_the_layers() -> None:
    found = {}
    for path in CODE_FILES:
        package = ["loxodon", *path.parent.relative_to(ROOT).parts]
        found[named(path)] = forbidden_imports(path.read_text(encoding="utf-8"), package)
    assert {name: imports for name, imports in found.items() if imports} == {}


def test_scripts_and_tests_use_the_installed_names_and_no_legacy_gym() -> None:
    """A bare `import data` would load a second copy of the code; `gym` is the predecessor of gymnasium."""
    found = []
    for path in PYTHON_FILES:
        names = imported_names(path.read_text(encoding="utf-8"), ["x"] * 9)
        found += [f"{named(path)}: {n}" for n in names if n.split(".")[0] in {*ALLOWED, "gym"}]
    assert found == []


def test_no_folder_has_the_name_of_the_namespace() -> None:
    assert not (ROOT / "loxodon").exists()


# --- import circles ------------------------------------------------------------------------------------


def files_in_circles(sources: dict[str, str]) -> set[str]:
    """Files that import themselves through others, by imports of any kind at any depth.

    Imports for type checking and imports inside functions count. The `__init__.py` of a package, which runs
    when one of its modules is imported, does not count as an import.

    sources: by path, such as "envs/builtin/tmaze.py".
    """
    files = {}
    for name in sources:
        parts = ["loxodon", *Path(name).with_suffix("").parts]
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = name
    imports: dict[str, set[str]] = {}
    for name, source in sources.items():
        found = imported_names(source, ["loxodon", *Path(name).parent.parts])
        modules = (full if full in files else full.rpartition(".")[0] for full in found)
        imports[name] = {files[module] for module in modules if module in files}
    reached = {name: set(others) for name, others in imports.items()}
    for middle in sources:
        for others in reached.values():
            if middle in others:
                others.update(reached[middle])
    return {name for name, others in reached.items() if name in others}


def test_the_circle_check_sees_every_form_of_import() -> None:
    sources = {
        "data/__init__.py": "from .a import A",
        "data/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import B",
        "data/b.py": "def f():\n    from . import c",
        "data/c.py": "from ..data.a import A",
        "data/d.py": "from .e import E\nfrom . import a",
        "data/e.py": "import os",
        "envs/__init__.py": "from .f import F",
        "envs/f.py": "import importlib\nimportlib.import_module('..g', __package__)",
        "envs/sub/__init__.py": "",
        "g.py": "",
        "nets/__init__.py": "from .h import H",
        "nets/h.py": "from ..nets import other",
    }
    circle = {"data/a.py", "data/b.py", "data/c.py", "nets/__init__.py", "nets/h.py"}
    assert files_in_circles(sources) == circle


def test_no_file_imports_itself_through_others() -> None:
    found = files_in_circles({named(path): path.read_text(encoding="utf-8") for path in CODE_FILES})
    assert sorted(found) == []


def test_folders_and_files_of_experiment_form_no_circle() -> None:
    """No folder or file of `experiment/` is imported by one that it imports, directly or through others."""
    imports: dict[str, set[str]] = {}
    for path in CODE_FILES:
        parts = Path(named(path)).parts
        if parts[0] == "experiment" and parts[1] != "__init__.py":
            found = imported_names(path.read_text(encoding="utf-8"), ["loxodon", *parts[:-1]])
            others = {full.split(".")[2] for full in found if full.startswith("loxodon.experiment.")}
            imports.setdefault(Path(parts[1]).stem, set()).update(others)
    inside = {part: others & imports.keys() - {part} for part, others in imports.items()}
    order = list(graphlib.TopologicalSorter(inside).static_order())  # raises for a circle
    assert order.index("contracts") < order.index("learn") < order.index("experiment")


def test_the_architecture_page_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = re.findall(r"`([\w/]+\.py)`", page)
    assert len(names) > 30
    loose = {"contracts.py", "settings.py", "experiment.py", "callbacks.py", "evaluation.py"}
    assert {path.name for path in (ROOT / "experiment").glob("*.py")} == loose | {"__init__.py"}
    assert [name for name in names if not (ROOT / name).exists() and name not in loose] == []


# --- gin names -----------------------------------------------------------------------------------------


def gin_names(source: str) -> list[str]:
    """Names of the classes and functions of `source` in gin."""
    found = []
    for node in nodes_of(source):
        for decorator in getattr(node, "decorator_list", []):
            called, given = decorator, []
            if isinstance(decorator, ast.Call):
                called = decorator.func
                given = decorator.args[:1] + [k.value for k in decorator.keywords if k.arg == "name"]
            if last_name(called) in {"configurable", "register"}:
                constants = [str(value.value) for value in given if isinstance(value, ast.Constant)]
                found += constants or [last_name(node)]
    return found


def test_the_gin_check_reads_every_form_of_decorator() -> None:
    source = (
        "@gin.configurable\nclass A: ...\n"
        "@gin.configurable(denylist=['x'])\nclass B: ...\n"
        "@gin.configurable('C')\ndef c(): ...\n"
        "@gin.register(name='D', module='m')\ndef d(): ...\n"
        "@dataclass\nclass E: ...\n"
    )
    assert gin_names(source) == ["A", "B", "C", "D"]


def test_gin_names_are_unique() -> None:
    """`ClassName.argument` in a gin file never needs a module prefix."""
    names = Counter(n for path in CODE_FILES for n in gin_names(path.read_text(encoding="utf-8")))
    assert [name for name, count in names.items() if count > 1] == []
    assert names["Experiment"] == 1


# --- error texts ---------------------------------------------------------------------------------------


def error_classes(sources: list[str]) -> set[str]:
    """The user-facing exceptions: the builtin ones above and every class of ours that derives from one."""
    bases = {
        node.name: {last_name(base) for base in node.bases}
        for source in sources
        for node in nodes_of(source)
        if isinstance(node, ast.ClassDef)
    }
    found = set(USER_FACING)
    while new := {name for name, parents in bases.items() if parents & found} - found:
        found |= new
    return found


def definitions(source: str) -> dict[str, list[ast.AST]]:
    """Functions of a module and assignments to its variables, by name."""
    found: dict[str, list[ast.AST]] = {}
    for node in nodes_of(source):
        if isinstance(node, FUNCTION_TYPES):
            found.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                found.setdefault(last_name(target), []).append(node)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            found.setdefault(last_name(node.target), []).append(node)
    return found


def says_fix(node: ast.AST, named: dict[str, list[ast.AST]], depth: int = 2) -> bool:
    """True if a text in `node`, or in a name it refers to (at most `depth` steps away), contains `Fix:`."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and "Fix:" in part.value:
            return True
        follow = depth > 0 and isinstance(part, (ast.Name, ast.Attribute))
        others = named.get(last_name(part), []) if follow else []
        if any(says_fix(other, named, depth - 1) for other in others):
            return True
    return False


def raises_without_fix(source: str, errors: set[str]) -> list[int]:
    """Lines that raise one of `errors` with a text that never says `Fix:`.

    The text may be in the raise itself, or in a variable or function of the same module that it refers to.
    """
    named, found = definitions(source), []
    for node in nodes_of(source):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if last_name(raised) in errors and not says_fix(node.exc, named):
                found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("raise ValueError(f'{x} is bad. ' f'Fix: use {y}.')", []),
        ("raise ValueError(f'{x} is bad.')", [1]),
        ("raise ValueError", [1]),
        ("raise NotImplementedError", []),
        ("text = 'Fix: a'\nraise TypeError(text)", []),
        ("def text(): return 'Fix: a'\nraise TypeError(text())", []),
        ("def text(): return 'a'\nraise TypeError(text())", [2]),
        ("def end(): return 'Fix: a'\ntext = 'a' + end()\nraise TypeError(text)", []),
        ("try: f()\nexcept ValueError: raise", []),
        ("raise Unknown('b')", [1]),
    ],
)
def test_the_error_check_follows_names(source: str, lines: list[int]) -> None:
    classes = error_classes(["class Wrong(ValueError): ...\nclass Other: ...", "class Unknown(m.Wrong): ..."])
    assert classes == {*USER_FACING, "Wrong", "Unknown"}
    assert raises_without_fix(source, classes) == lines


def test_errors_say_how_to_fix_the_cause() -> None:
    sources = {named(path): path.read_text(encoding="utf-8") for path in CODE_FILES}
    errors = error_classes(list(sources.values()))
    found = {name: raises_without_fix(source, errors) for name, source in sources.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


# --- stray names ---------------------------------------------------------------------------------------


def test_nothing_names_a_path_outside_the_repository() -> None:
    """Notes and paths of one machine mean nothing to a reader. The words are split to not match here."""
    notes = ["STYLE" + ".md", "DESIGN" + ".md", "TARGETS" + ".md"]
    stray = [*notes, "/shared" + "/", "/work" + "/", "/root" + "/", "/home" + "/"]
    suffixes = (".py", ".gin", ".md", ".toml", ".txt", ".json", ".yaml", ".yml", ".sh", "Makefile", "run")
    found = [
        f"{named(path)}: {name}"
        for path in text_files(*suffixes)
        for name in stray
        if name in path.read_text(encoding="utf-8")
    ]
    assert found == []
