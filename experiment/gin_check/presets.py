"""Finding config files: a path, or the bare name of a preset that is installed with the library."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from .errors import ConfigError, did_you_mean, near_matches

PRESET_PACKAGE = "loxodon.gin_configs"


def preset_root() -> Path:
    """The folder of the installed presets."""
    return Path(str(resources.files(PRESET_PACKAGE)))


def preset_names() -> list[str]:
    """Names of all presets without their suffix, such as `tmaze` or `ppo/cartpole`, sorted."""
    root = preset_root()
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.gin"))


def runnable_names() -> list[str]:
    """Those of `preset_names` that name a run; the others are parts, to be included or put on top of one."""
    texts = {name: (preset_root() / f"{name}.gin").read_text(encoding="utf-8") for name in preset_names()}
    return [name for name, text in texts.items() if "\nExperiment.run_name" in text]


def find_config(name: str) -> Path:
    """The file that `--config name` means: an existing path first, then a preset.

    Raises: ConfigError naming near matches and all presets.
    """
    candidates = [Path(name), Path(f"{name}.gin")]
    bare = name.removeprefix("./").removeprefix("gin_configs/")
    candidates += [preset_root() / bare, preset_root() / f"{bare}.gin"]
    for path in candidates:
        if path.is_file():
            return path
    near = near_matches(bare.removesuffix(".gin"), preset_names())
    mend = f"write --config {near[0]}" if near else "give the path of a .gin file, or the name of a preset"
    raise ConfigError(
        f"command line, `--config {name}`: there is no such file or preset.{_meant(bare)} "
        f"Presets: {', '.join(preset_names()) or 'none installed'}. Fix: {mend}."
    )


def find_include(name: str, included_from: Path, where: str) -> Path:
    """The file an `include` means: seen from the including file, the presets, or the working folder.

    Raises: ConfigError naming the line of the include, where was searched, and near matches.
    """
    searched = [included_from.parent, preset_root(), Path.cwd()]
    for folder in searched:
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(
        f"{where}: include '{name}' names no file.{_meant(name)} Searched in: "
        f"{', '.join(dict.fromkeys(str(folder) for folder in searched))}. Fix: correct the path."
    )


def _meant(name: str) -> str:
    """Near matches among the presets, also by the last part of the name."""
    bare, names = name.removesuffix(".gin"), preset_names()
    by_tail = {preset.rsplit("/", 1)[-1]: preset for preset in names}
    if meant := did_you_mean(bare, names):
        return meant
    near = near_matches(bare.rsplit("/", 1)[-1], by_tail)
    return f" Did you mean {' or '.join(repr(by_tail[m]) for m in near)}?" if near else ""
