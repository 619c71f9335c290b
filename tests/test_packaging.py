"""Installation: import guards, light imports, and a wheel that works outside the repository."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("data", "envs", "nets", "agents", "experiment", "tools", "gin_configs")


def run_python(
    code: str, *words: str, python: str = sys.executable, cwd: Path, env: dict[str, str] | None = None
) -> str:
    """Standard output of `code`, run by a new interpreter in `cwd` with these arguments."""
    done = subprocess.run(
        [python, "-c", code, *words],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("layer", LAYERS)
def test_importing_a_folder_by_its_bare_name_says_how_to_import_it(layer: str) -> None:
    spec = importlib.util.spec_from_file_location(layer, ROOT / layer / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.raises(ImportError, match=rf"'loxodon\.{layer}', not '{layer}'.*Fix: .*pip install -e \."):
        spec.loader.exec_module(module)


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer != "gin_configs"])
def test_every_code_folder_declares_its_types(layer: str) -> None:
    assert (ROOT / layer / "py.typed").is_file()


@pytest.mark.slow
def test_imports_of_environment_workers_are_free_of_torch(tmp_path: Path) -> None:
    code = "import sys, json, loxodon.envs, loxodon.data; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(run_python(code, cwd=tmp_path)))
    assert loaded.isdisjoint({"torch", "accelerate", "wandb", "popgym"})


# --- the wheel -----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def repository_files() -> list[str]:
    """Files that git tracks or would track, relative to the root."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("the list of files comes from git, and this is not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted({name for name in listing.split("\0") if (ROOT / name).is_file()})


@pytest.fixture(scope="session")
def source(repository_files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, so that building does not change it."""
    source = tmp_path_factory.mktemp("source")
    for name in [*repository_files, ".types/loxodon"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    return source


@pytest.fixture(scope="session")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the copy."""
    target = tmp_path_factory.mktemp("dist")
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(target),
        str(source),
    ]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(target.glob("*.whl"))


@pytest.fixture(scope="session")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """An interpreter with the wheel as its only own package, and the environment to run it in.

    Third-party packages are found through PYTHONPATH. Python reads `.pth` files only in its own site folder,
    so the link of an editable install, which lies next to these packages, has no effect.
    """
    folder = tmp_path_factory.mktemp("clean")
    python = install_into_a_new_venv([str(wheel)], folder)
    return python, {"PYTHONPATH": sysconfig.get_paths()["purelib"], "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_the_wheel_contains_the_code_folders_and_nothing_else(
    wheel: Path, repository_files: list[str]
) -> None:
    expected = {f"loxodon/{name}" for name in repository_files if name.split("/")[0] in LAYERS}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {name for name in expected if not name.endswith(".md")}
    assert {"loxodon/data/py.typed", "loxodon/gin_configs/tmaze.gin"} <= packed


def install_into_a_new_venv(what: Sequence[str], folder: Path) -> str:
    """The interpreter of a new environment that contains `what` and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-qq", "--no-deps", "--no-index"]
    env = {
        **os.environ,
        "PYTHONPATH": sysconfig.get_paths()["purelib"],
    }  # PYTHONPATH gives access to setuptools
    done = subprocess.run(
        [*install, "--no-build-isolation", *what], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return python


IMPORT_EVERYTHING = """
import importlib, importlib.resources, pkgutil, runpy, sys
import loxodon
names = sorted(module.name for module in pkgutil.walk_packages(loxodon.__path__, "loxodon."))
files = [importlib.import_module(name).__file__ for name in names]
assert all(file.startswith(sys.prefix) for file in files), files
presets = {preset.name for preset in importlib.resources.files("loxodon.gin_configs").iterdir()}
assert "tmaze.gin" in presets, presets
print(len(names))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_an_editable_install_is_seen_by_python_and_by_type_checkers(source: Path, tmp_path: Path) -> None:
    python = install_into_a_new_venv(["-e", str(source)], tmp_path / "venv")
    where = "import importlib.util; print(importlib.util.find_spec('loxodon.data').origin)"
    origin = run_python(where, python=python, cwd=tmp_path, env={"PYTHONPATH": ""}).strip()
    assert Path(origin).samefile(source / "data/__init__.py")
    packages = ", ".join(f"loxodon.{layer}" for layer in LAYERS if layer != "gin_configs")
    mypy = [sys.executable, "-m", "mypy", "--python-executable", python, "--follow-imports=skip"]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        [*mypy, "-c", f"import {packages}"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "venv/bin/loxodon").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_module_of_the_wheel_imports_and_a_run_trains_outside_the_repository(
    clean_python: tuple[str, dict[str, str]], repository_files: list[str], tmp_path: Path
) -> None:
    python, env = clean_python
    script = shutil.copy(ROOT / "examples" / "run.py", tmp_path)
    overrides = {
        "ckpt_base_dir": tmp_path,
        "epochs": 1,
        "parallel_actors": 2,
        "env_mode": "sync",
        "train_timesteps_per_epoch": 60,
        "val_timesteps_per_epoch": 60,
        "train_batches_per_epoch": 2,
        "start_learning_at_epoch": 0,
        "batch_size": 2,
        "dloader_workers": 0,
        "verbose": False,
    }
    given = [f"Experiment.{name}={value}" for name, value in overrides.items()]
    words = [script, "--config", "tmaze", "--run-name", "wheel", "--seed", "0", *given]
    printed = run_python(IMPORT_EVERYTHING, *words, python=python, cwd=tmp_path, env=env)
    in_layers = [n for n in repository_files if n.split("/")[0] in LAYERS and n.endswith(".py")]
    assert int(printed.split("\n")[0]) == len(in_layers)
    logged = (tmp_path / "wheel" / "logs" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert max(json.loads(line)["gradient_steps"] for line in logged) > 0


def test_make_docs_installs_only_the_packages_that_build_the_site(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    for name in ("Makefile", "setup.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(
        ["make", "--dry-run", "docs"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    installs = [line for line in done.stdout.splitlines() if "pip install" in line]
    assert [line.split()[-1] for line in installs] == ["mkdocs-material"]
    assert "mkdocs build --strict" in done.stdout
