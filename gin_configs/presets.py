"""The presets: their files and their descriptions.

A preset begins with comments of this form; the file that it includes from `encoders/` is its encoder:

    # A sentence about the task.
    #   python examples/run.py --config <its name>
    # Measured: a sentence about its result and duration. More about it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

RECOMMENDED = ("base_offpolicy", "ppo/ppo", "amago")
"""Presets with complete settings of the algorithm; a run with other settings reports that."""
INCLUDE = re.compile(r"^include '(.+)'", re.MULTILINE)
_OVERRIDE = re.compile(r"(\w+/)*[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class Preset:
    """Description of a preset in its file. encoder: the file in `encoders/` that it uses; "" for none."""

    name: str
    task: str
    encoder: str
    measured: str


def preset_root() -> Path:
    """The folder of the installed presets; in a development install, Python found it through a link."""
    return Path(__file__).resolve().parent


def preset_names() -> list[str]:
    """Names of all presets without their suffix, such as `tmaze` or `ppo/cartpole`, sorted."""
    root = preset_root()
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.gin"))


def runnable_names() -> list[str]:
    """Names of presets that can be run; the others are parts, to be included or added to one of these."""
    return [name for name in preset_names() if "\nExperiment.run_name" in text_of(name)]


def find_preset(name: str) -> Path | None:
    """The file that `--config name` means: an existing path first, then a preset; None without either."""
    bare = name.removeprefix("./").removeprefix("gin_configs/").removesuffix(".gin")
    places = (Path(name), Path(f"{name}.gin"), preset_root() / f"{bare}.gin")
    return next((path for path in places if path.is_file()), None)


def no_such_config(name: str) -> str:
    """An error for a name that is neither a file nor a preset, with similar names or all names."""
    bare = name.removeprefix("./").removeprefix("gin_configs/").removesuffix(".gin")
    hint = did_you_mean(bare, preset_names()) or f" Presets: {', '.join(preset_names())}."
    return f"there is no such file or preset.{hint}"


def about(name: str) -> Preset:
    """Read the header of a preset; missing parts are empty."""
    text = text_of(name)
    header = re.match(r"(#.*\n)*", text)
    words = " ".join(line.strip("# ") for line in header[0].splitlines()) if header else ""
    measured = re.search(r"Measured: (.+?)\.(?: |$)", words)
    task = text.partition("\n")[0].strip("# .")
    return Preset(name, task, _encoder_in(text), measured[1] if measured else "")


def override_problem(text: str) -> str | None:
    """Describe a malformed `Name.param=value` and its fix; None if it is well-formed."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if equals and value and _OVERRIDE.fullmatch(key):
        return None
    fix = f"write {key}=value" if _OVERRIDE.fullmatch(key) and not equals else "write Name.param=value"
    if equals and value and _OVERRIDE.fullmatch(key.replace("-", "_")):
        fix = f"write {key.replace('-', '_')}={value}"
    if text.endswith(".gin"):
        fix = f"for a config file write --config {text}"
    return f"an override must look like Name.param=value. Fix: {fix}."


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The sentence ` Did you mean 'a' or 'b'?` with a leading space; empty if no name is similar.

    Names that differ only in capitals come first.
    """
    known = sorted(candidates)
    near = [one for one in known if one.lower() == name.lower()] or difflib.get_close_matches(name, known)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def text_of(name: str) -> str:
    """The gin text of a preset."""
    return (preset_root() / f"{name}.gin").read_text(encoding="utf-8")


def _encoder_in(text: str) -> str:
    """The last encoder that a file includes, directly or through another file."""
    for part in reversed(INCLUDE.findall(text)):
        folder, _, name = part.removesuffix(".gin").rpartition("/")
        if found := name if folder == "encoders" else _encoder_in(text_of(part.removesuffix(".gin"))):
            return found
    return ""
