"""Build metadata: maps the repository's code folders into the import namespace `loxodon`.

There is no folder named `loxodon`; `loxodon.data` is `data/`, `loxodon.envs` is `envs/`, and so on, so that
nothing called `data` or `envs` is ever installed on a user's machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import find_packages, setup

LAYERS = ("data", "envs", "nets", "agents", "experiment", "tools", "gin_configs")
CODE_LAYERS = tuple(top for top in LAYERS if top != "gin_configs")

ENVS = ["minigrid>=3.0", "popgym>=1.0.7"]
ATARI = ["ale-py>=0.10", "opencv-python-headless"]
BOX2D = ["gymnasium[box2d]"]
MUJOCO = ["gymnasium[mujoco]", "mujoco<4"]  # 4.0 cannot be imported without packages that it does not ask for
DM_CONTROL = ["shimmy[dm-control]>=2"]
PLOTS = ["matplotlib>=3.8"]
TENSORBOARD = ["tensorboard"]
DOCS = ["mkdocs-material>=9.7"]
MINARI = ["minari[hdf5]>=0.5.3", "pillow>=10"]  # minari reads images with pillow, but does not ask for it
VIDEO = ["moviepy>=1"]  # what gymnasium records with
SLURM = ["submitit>=1.5"]
RAY = ["ray>=2.30"]
SWEEP = ["optuna>=4"]
WANDB = ["wandb>=0.17"]
DEV = [
    "build",
    "hypothesis>=6.100",
    "mypy>=1.10",
    "pytest>=8",
    "pytest-timeout>=2.4",
    "pytest-xdist>=3.6",
    "ruff>=0.6",
    "setuptools>=77",
    *TENSORBOARD,
    *WANDB,
]

# Subpackages are looked up per folder: a wheel would otherwise silently lack `envs/builtin` and its like.
PACKAGES = [f"loxodon.{p}" for top in LAYERS for p in (top, *(f"{top}.{s}" for s in find_packages(top)))]
PACKAGE_DIR = {f"loxodon.{top}": top for top in LAYERS}
if "editable_wheel" in sys.argv:
    # The mapping would become an import hook, which mypy, pyright and editors cannot follow. `.types` holds a
    # link, loxodon -> .., so this installs a plain path.
    PACKAGES, PACKAGE_DIR = ["loxodon"], {"": ".types"}

setup(
    name="loxodon",
    version="0.1.0",
    description="Gin-configured experiments in reinforcement learning with long-context sequence models.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The Loxodon developers",
    license="MIT",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    install_requires=[
        "accelerate>=1.0",
        "einops>=0.7",
        "gin-config>=0.5",
        "gymnasium>=1.1",
        "numpy>=1.26",
        "psutil>=5.9",
        "rich>=13",
        "safetensors>=0.4",
        "torch>=2.5",
    ],
    extras_require={
        "envs": ENVS,
        "atari": ATARI,
        "kernels": ["fla-core[cuda]>=0.6,<0.7"],
        "box2d": BOX2D,
        "mujoco": MUJOCO,
        "dm_control": DM_CONTROL,
        "envpool": ["envpool>=1.0"],
        "jax": ["gymnax>=1.0", "six", "xminigrid>=0.9"],  # gymnax imports six without requiring it
        "metaworld": ["metaworld>=3.0", "mujoco<3.17"],  # Meta-World 3.0 writes a shorter eq_data
        "minari": MINARI,
        "plots": PLOTS,
        "ray": RAY,
        "slurm": SLURM,
        "sweep": SWEEP,
        "tensorboard": TENSORBOARD,
        "video": VIDEO,
        "wandb": WANDB,
        "docs": DOCS,
        "dev": DEV,
    },
    packages=PACKAGES,
    entry_points={"console_scripts": ["loxodon = loxodon.tools.main:main"]},
    package_dir=PACKAGE_DIR,
    package_data={
        **{f"loxodon.{top}": ["py.typed"] for top in CODE_LAYERS},
        "loxodon.gin_configs": ["*.gin", "**/*.gin"],
        "loxodon.tools.benchmark": ["*.json"],
    },
    zip_safe=False,
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
