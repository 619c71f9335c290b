"""Where the time of an epoch goes: seconds per stage."""

from __future__ import annotations

import time

STEP_STAGES = ("policy", "env", "store")


class StageTimer:
    """Adds up the seconds of the stages of an epoch; a lap costs well below a microsecond.

    Stages: "policy" (acting, until the actions are on the CPU), "env" (the environments' step, or the wait
    for it), "store" (handing the step to the sink), "update" (the learner's work on this
    thread; on a GPU most of it goes on in the background).
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*STEP_STAGES, "update"), 0.0)
        self.num_env_steps = self.num_updates = 0

    def lap(self, stage: str, since_s: float) -> float:
        """Add the time since `since_s` (of time.perf_counter) to a stage; returns the time now."""
        now_s = time.perf_counter()
        self.seconds[stage] += now_s - since_s
        return now_s

    def step_figures(self, num_envs: int) -> dict[str, float]:
        """Milliseconds per vector step of each stage of collecting since the last call.

        num_envs: of this process, which all step together.
        """
        num_steps, self.num_env_steps = self.num_env_steps / num_envs, 0
        taken = {stage: self._take(stage) for stage in STEP_STAGES}
        if not num_steps:
            return {}
        return {f"time/{stage}_ms_per_step": 1e3 * s / num_steps for stage, s in taken.items()}

    def update_figures(self) -> dict[str, float]:
        """Milliseconds per update since the last call."""
        num_updates, self.num_updates = self.num_updates, 0
        taken = self._take("update")
        return {"time/update_ms": 1e3 * taken / num_updates} if num_updates else {}

    def _take(self, stage: str) -> float:
        seconds, self.seconds[stage] = self.seconds[stage], 0.0
        return seconds
