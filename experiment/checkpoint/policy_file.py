"""Policy files: weights in safetensors, replaced atomically, with a descriptive header."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ...data.errors import FormatError, visible
from ..process.files import atomic_write, parse_json
from ..process.versions import version_of
from .spaces import EnvSpaces

POLICY_FORMAT = 3  # increased when weights would no longer fit, or mean something else
_SHOWN = 5


@dataclass(frozen=True)
class PolicyInfo:
    """Header of a policy file. Two with the same version, epoch and time are the same policy.

    version: counts publications; 0 for a file that was not published. epoch: the running epoch;
    in policy_epoch_N, the one that has ended.
    is_final: the learner is done. published_s: unix time of writing.
    format: format of the file; None if missing. loxodon: the version that wrote it.
    spaces: spaces of the environment, as JSON text. gin: the operative configuration.
    types: JSON, see record.py. max_seq_len: longest training sequence in transitions.
    env_steps: env steps of the whole run when the file was written.
    """

    version: int
    epoch: int
    is_final: bool
    published_s: float | None = None
    format: int | None = field(default=None, compare=False)
    loxodon: str | None = field(default=None, compare=False)
    spaces: str | None = field(default=None, compare=False, repr=False)
    gin: str | None = field(default=None, compare=False, repr=False)
    types: str | None = field(default=None, compare=False, repr=False)
    max_seq_len: int | None = field(default=None, compare=False)
    env_steps: int | None = field(default=None, compare=False)

    def env_spaces(self) -> EnvSpaces | None:
        """The environment's spaces, or None if the header has none."""
        return None if self.spaces is None else EnvSpaces.from_json(read_json(self.spaces))


def read_json(text: str) -> Any:
    """The value of a header entry; None if it is not JSON."""
    try:
        return parse_json(text)
    except ValueError:
        return None


def policy_header(info: PolicyInfo, facts: Mapping[str, str]) -> dict[str, str]:
    """The header of a new policy file: version, epoch, is_final, env_steps, and more.

    facts: entries that are the same for all files of the process (loxodon, spaces, gin, types, max_seq_len).
    """
    count = {} if info.env_steps is None else {"env_steps": str(info.env_steps)}
    return {
        "format": "pt",
        "loxodon_format": str(POLICY_FORMAT),
        "version": str(info.version),
        "epoch": str(info.epoch),
        "is_final": str(int(info.is_final)),
        "published_s": repr(time.time()),
        **count,
        **facts,
    }


def write_policy(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Replace a weights file atomically.

    Raises: OSError if it cannot be written; an existing file then stays as it was.
    """
    try:
        with atomic_write(path) as temp:
            save_file(tensors, temp, metadata=header)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"The policy could not be written to {path}: {error}. The previous file is untouched. Fix: free "
            "space on that disk, or restore the folder and its permissions."
        ) from error


def read_info(path: Path) -> PolicyInfo:
    """Header of a policy file. Raises: FileNotFoundError; ValueError if it is not one of this format."""
    with _opened(path) as (_, info):
        return info


def read_policy(path: Path) -> tuple[PolicyInfo, dict[str, Tensor]]:
    """Header and weights of one and the same file, even if it is being replaced meanwhile.

    Raises: FileNotFoundError; ValueError if it is not one of this format. Nothing is ever unpickled.
    """
    try:
        with _opened(path) as (file, info):
            return info, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise FileNotFoundError(
            f"There are no weights at {path}. Fix: check the epoch, run_name and ckpt_base_dir."
        ) from None


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a safetensors file into the model. Raises: FileNotFoundError; ValueError as in check_fit."""
    _, weights = read_policy(path)
    fit_weights(model, weights, path)


def fit_weights(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Put weights into the model; `path` is their source. Raises: ValueError as in check_fit."""
    check_fit(model, weights, path)
    model.load_state_dict(weights)


def check_fit(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Raise ValueError naming tensors that are missing, unknown or have another shape; change nothing."""
    own = model.state_dict()
    problems = [f"{name} is missing in the file" for name in own.keys() - weights.keys()]
    problems += [f"{name} is unknown to the agent" for name in weights.keys() - own.keys()]
    problems += [
        f"{name} is {tuple(weights[name].shape)} in the file and {tuple(own[name].shape)} in the agent"
        for name in own.keys() & weights.keys()
        if weights[name].shape != own[name].shape
    ]
    if problems:
        shown, num_more = "; ".join(sorted(problems)[:_SHOWN]), len(problems) - _SHOWN
        more = f"; and {num_more} more" if num_more > 0 else ""
        raise ValueError(
            f"The weights in {path} do not fit this agent: {shown}{more}. Fix: use the gin config the run "
            "was trained with (ckpts/config.txt of its folder), or another run_name for a new run."
        )


def plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state of a module as separate tensors: safetensors refuses tensors that share memory."""
    return {name: value.detach().cpu().clone().contiguous() for name, value in model.state_dict().items()}


# ---- partial loading ----


def load_what_fits(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> str:
    """Copy the tensors whose names and shapes fit into the model; returns a line that lists both groups.

    source: name of their source, for the error.

    Raises: ValueError naming both sets if nothing fits.
    """
    own = model.state_dict()
    fits = [name for name in own if name in weights and own[name].shape == weights[name].shape]
    left = [name for name in own if name not in fits]
    unused = [name for name in weights if name not in fits]
    if not fits:
        raise ValueError(
            f"No tensor of {source} fits this agent by name and shape: the source has "
            f"{_by_module(weights)}, and the agent has {_by_module(own)}. Fix: use the encoders and sizes "
            "that it was trained with."
        )
    with torch.no_grad():
        for name in fits:
            own[name].copy_(weights[name])
    return (
        f"{len(fits)} of {len(own)} tensors: {_by_module(fits)}; left unchanged: {_by_module(left)}; unused "
        f"from the source: {_by_module(unused)}"
    )


def _by_module(names: Iterable[str]) -> str:
    """`tstep_encoder (6), traj_encoder (20)`."""
    counts = Counter(name.partition(".")[0] for name in names)
    return ", ".join(f"{module} ({count})" for module, count in counts.items()) or "none"


# ---- the file itself ----


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, PolicyInfo]]:
    """The file as safetensors opens it, and its header; every fault of its form is one error.

    A file without a format, by another program, may hold fitting weights.
    """
    try:
        with safe_open(path, framework="pt") as file:
            info = _info(file.metadata() or {})
            if info.format not in (None, POLICY_FORMAT):
                raise FormatError(
                    f"its policy format is {info.format}, by Loxodon {info.loxodon}; this is Loxodon "
                    f"{version_of('loxodon')}, which reads format {POLICY_FORMAT}"
                )
            yield file, info
    except (SafetensorError, FormatError, ValueError) as error:
        raise ValueError(
            f"{path} is not a readable safetensors file ({error}). Fix: use another file, or the version of "
            "Loxodon that wrote it."
        ) from error


def _info(header: Mapping[str, str]) -> PolicyInfo:
    texts = {**header, "format": header.get("loxodon_format"), "loxodon": visible(header.get("loxodon", ""))}
    kinds: dict[str, Any] = {"published_s": float, "is_final": lambda text: text == "1"}
    kinds |= dict.fromkeys(("version", "epoch", "format", "max_seq_len", "env_steps"), int)
    known = {one.name: texts.get(one.name) for one in fields(PolicyInfo)}
    found = {name: kinds.get(name, str)(text) for name, text in known.items() if text}
    return PolicyInfo(**{"version": 0, "epoch": 0, "is_final": False, **found})
