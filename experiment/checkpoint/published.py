"""The policy that a learner publishes for actors: how it is written, found and loaded."""

from __future__ import annotations

import time

from ...agents import BaseAgent
from ..contracts import RunContext
from ..process.files import WatchedFile
from .policy_file import PolicyInfo, fit_weights, read_info, read_policy
from .spaces import EnvSpaces, check_spaces
from .store import CheckpointManager


class PublishedPolicy:
    """The file `ckpts/latest/policy.safetensors`: the learner replaces it, and actors follow it.

    Attributes:
        loaded: header of the policy that this process has loaded; None if none was.
    """

    def __init__(
        self, ctx: RunContext, agent: BaseAgent, env_spaces: EnvSpaces, files: CheckpointManager
    ) -> None:
        self.loaded: PolicyInfo | None = None
        self._ctx, self._agent, self._spaces, self._files = ctx, agent, env_spaces, files
        self._file = WatchedFile(files.latest_path, read_info)

    def write(self, agent: BaseAgent, *, is_final: bool = False) -> None:
        """Publish the weights of `agent` under the next version number; is_final: no others follow."""
        progress = self._ctx.progress
        progress.policy_version += 1
        if self._ctx.is_main:
            info = PolicyInfo(progress.policy_version, progress.epoch, is_final, env_steps=progress.env_steps)
            self._files.save_policy(self._files.latest_path, agent, info)
        self._ctx.status.put(policy_version=progress.policy_version)

    def header(self) -> PolicyInfo | None:
        """Header of the file; None if there is none, or a learner will soon replace an unreadable one."""
        try:
            return self._file.poll()
        except (ValueError, OSError):
            return None

    def load_newest(self) -> PolicyInfo | None:
        """Load the weights if they are newer than the loaded ones; returns their header, None without a file.

        Raises: ValueError if they are for another environment or have another format.
        """
        info, path = self._file.poll(), self._files.latest_path
        if info is not None and info != self.loaded:
            check_spaces(
                info.env_spaces(),
                self._spaces,
                what=f"The policy in {path}",
                fix="start actors and learner with the same config, or another run_name.",
            )
            info, weights = read_policy(path)
            fit_weights(self._agent, weights, path)
            self._agent.on_checkpoint_loaded(is_resume=False)
            self.loaded = info
        return info

    def has_unread_final(self) -> bool:
        """True when the learner has published its last policy and it is not loaded yet."""
        info = self._file.poll()
        return info is not None and info.is_final and info != self.loaded

    def metrics(self) -> dict[str, float]:
        """Version and age of the loaded policy; empty if none was loaded."""
        if self.loaded is None:
            return {}
        newest = self._file.poll() or self.loaded
        published_s = self.loaded.published_s or self._file.modified_s
        return {
            "policy/version": float(self.loaded.version),
            "policy/age_s": max(0.0, time.time() - published_s),
            "policy/versions_behind": float(max(0, newest.version - self.loaded.version)),
        }
