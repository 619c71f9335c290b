"""A request to stop, at every place where a run can be: everything is saved and the process ends at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loxodon.data import DiskTrajDataset, load_trajectory
from loxodon.envs import EnvSpec
from loxodon.experiment import Experiment
from loxodon.experiment.checkpoint.policy_file import read_info
from loxodon.experiment.checkpoint.store import read_values

from .fakes import CountingEnv, make_experiment, run
from .test_resume import finish, metrics, wait_for

FOREVER, LIMIT_S = 10**6, 120.0  # a busy machine is slow, too
NEVER: dict[str, Any] = {"val_timesteps_per_epoch": 0, "val_interval": None, "evaluate_at_end": False}


class SlowEnv(CountingEnv):
    """Takes its time, and asks a process to stop in its fifth step of all."""

    num_steps = 0

    def __init__(self, pid: int) -> None:
        super().__init__(length=3)
        self.pid = pid

    def step(self, action: int) -> Any:
        time.sleep(0.002)
        SlowEnv.num_steps += 1
        if SlowEnv.num_steps == 5:
            ask(self.pid)
        return super().step(action)


asked_s = 0.0


def ask(pid: int) -> None:
    """Send SIGTERM, as a preempted machine does."""
    global asked_s  # noqa: PLW0603 - the clock of the test that runs
    asked_s = time.monotonic()
    os.kill(pid, signal.SIGTERM)


def slow_envs() -> dict[str, Any]:
    SlowEnv.num_steps = 0
    spec = EnvSpec(SlowEnv, {"pid": os.getpid()})
    return {"make_train_env": spec, "make_val_env": spec}


class NeverReady(DiskTrajDataset):
    """Waited for in vain; asks to stop when it has been asked for its data twice."""

    num_asked = 0

    @property
    def ready_for_training(self) -> bool:
        self.num_asked += 1
        if self.num_asked == 2:
            ask(os.getpid())
        return False


def slow_updates(exp: Experiment) -> None:
    update = exp.learner.update

    def slow(*args: Any) -> Any:
        time.sleep(0.01)
        if exp.learner.gradient_steps == 5:
            ask(os.getpid())
        return update(*args)

    exp.learner.update = slow  # type: ignore[method-assign]


PLACES: dict[str, tuple[dict[str, Any], Callable[[Experiment], None] | None]] = {
    "collection": ({**slow_envs(), **NEVER, "train_timesteps_per_epoch": FOREVER}, None),
    "evaluation": ({**slow_envs(), "val_timesteps_per_epoch": FOREVER}, None),
    "final evaluation": (
        {**slow_envs(), "val_timesteps_per_epoch": FOREVER, "val_interval": None, "epochs": 0},
        None,
    ),
    "update": ({**NEVER, "train_batches_per_epoch": FOREVER}, slow_updates),
    "waiting for data": ({**NEVER, "mode": "learn", "dataset": NeverReady()}, None),
}


def stopped(folder: Path, place: str) -> Experiment:
    """A run that is asked to stop at that place, and has stopped."""
    settings, prepare = PLACES[place]
    SlowEnv.num_steps = 0
    exp = make_experiment(folder, **{"epochs": 3, **settings})
    exp.start()
    if prepare is not None:
        prepare(exp)
    with pytest.raises(SystemExit) as caught:
        exp.learn()
    assert caught.value.code == 0
    assert time.monotonic() - asked_s < LIMIT_S
    return exp


@pytest.mark.parametrize("place", list(PLACES))
def test_sigterm_saves_at_once_and_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    exp = stopped(tmp_path, place)
    said = " ".join(capsys.readouterr().out.split())
    where = "the final evaluation" if place == "final evaluation" else "epoch 0"
    assert f"Stopped by SIGTERM in {where}: saved " in said
    assert "To go on: the same command with --resume." in said
    assert exp.checkpoints.newest_intact_epoch()[1] == []
    lengths = [len(load_trajectory(path)) for path in (exp.run_dir / "buffer" / "fifo").glob("*.npz")]
    assert sum(lengths) == exp.env_steps
    again = make_experiment(tmp_path, **{**NEVER, "epochs": 1, "mode": exp.mode})
    again.start()
    assert again.load_checkpoint() == 0
    assert again.learner.gradient_steps == exp.learner.gradient_steps
    again.close()


def test_a_final_evaluation_that_was_interrupted_is_made_up_for(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, epochs=2, val_interval=None)
    exp.start()
    evaluate = exp.evaluator.evaluate

    def asked_meanwhile(*args: Any, **kwargs: Any) -> Any:
        ask(os.getpid())
        return evaluate(*args, **kwargs)

    exp.evaluator.evaluate = asked_meanwhile  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        exp.learn()
    info = read_info(exp.checkpoints.latest_path)
    assert info is not None
    assert not info.is_final
    assert not any("val/return" in record for record in metrics(exp.run_dir))
    again = run(make_experiment(tmp_path, epochs=2, val_interval=None), lambda e: e.load_checkpoint())
    info = read_info(again.checkpoints.latest_path)
    assert info is not None
    assert info.is_final
    assert "val/return" in again.last_val_metrics
    assert again.learner.gradient_steps == exp.learner.gradient_steps == 8
    once_more = run(make_experiment(tmp_path, epochs=2, val_interval=None), lambda e: e.load_checkpoint())
    assert once_more.last_val_metrics == {}  # all is done


def test_a_collecting_process_that_is_stopped_keeps_what_it_has(tmp_path: Path) -> None:
    settings = {**slow_envs(), **NEVER, "mode": "collect", "train_timesteps_per_epoch": FOREVER}
    exp = make_experiment(tmp_path, **settings)
    exp.start()
    with pytest.raises(SystemExit) as caught:
        exp.learn()
    assert caught.value.code == 0
    assert time.monotonic() - asked_s < LIMIT_S
    lengths = [len(load_trajectory(path)) for path in (exp.run_dir / "buffer" / "fifo").glob("*.npz")]
    assert sum(lengths) == exp.env_steps > 0


def test_a_stop_does_not_begin_new_episodes(tmp_path: Path) -> None:
    exp = make_experiment(tmp_path, **{**slow_envs(), **NEVER, "train_timesteps_per_epoch": FOREVER})
    exp.start()
    restarts: list[int] = []
    restart = exp.restart_train_envs
    exp.restart_train_envs = lambda epoch: (restarts.append(epoch), restart(epoch))[1]  # type: ignore[method-assign,func-returns-value]
    with pytest.raises(SystemExit):
        exp.learn()
    assert restarts == [0]


GROUP_SCRIPT = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("fakes", {fakes!r})
fakes = module_from_spec(spec)
sys.modules["fakes"] = fakes
spec.loader.exec_module(fakes)
exp = fakes.make_experiment({folder!r}, **{changes!r})
exp.start()
if {slow_s} > 0:
    import time
    update = exp.learner.update
    exp.learner.update = lambda *args: (time.sleep({slow_s}), update(*args))[1]
exp.learn()
print("done", flush=True)
"""


def script(folder: Path, slow_s: float, **changes: Any) -> str:
    fakes = str(Path(__file__).with_name("fakes.py"))
    return GROUP_SCRIPT.format(fakes=fakes, folder=str(folder), changes=changes, slow_s=slow_s)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_signal_to_all_processes_of_the_machine_is_no_failure(tmp_path: Path, context: str) -> None:
    changes = {
        **NEVER,
        "epochs": FOREVER,
        "env_mode": "async",
        "dloader_workers": 2,
        "AsyncVectorEnv.num_workers": 2,
    }
    places = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    python_path = os.pathsep.join(place for place in places if place)  # spawned workers import the fakes
    code = script(tmp_path, 0.0, async_env_mp_context=context, ckpt_interval=None, **changes)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path},
        start_new_session=True,
    )
    wait_for((tmp_path / "tiny" / "ckpts" / "latest" / "policy.safetensors").exists, process)
    time.sleep(0.2)
    start_s = time.monotonic()
    os.killpg(process.pid, signal.SIGTERM)
    text = finish(process)
    assert process.returncode == 0, text
    assert "Stopped by SIGTERM" in text
    assert time.monotonic() - start_s < LIMIT_S
    deadline_s = time.monotonic() + 25.0
    while _is_anybody_left(process.pid):  # such as a worker that lives on for its grace, 30 s
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.slow
def test_a_program_that_forgets_to_close_its_envs_ends_at_once(tmp_path: Path) -> None:
    code = script(tmp_path, 0.0, epochs=1, env_mode="async", dloader_workers=1, **NEVER)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    process.communicate(timeout=25)  # the workers' grace alone is 30 s
    assert process.returncode == 0


@pytest.mark.slow
def test_processes_that_train_together_stop_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(script(tmp_path, 0.05, train_batches_per_epoch=FOREVER, **NEVER))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    process = subprocess.Popen(
        [*command, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )
    log = tmp_path / "tiny" / "logs" / "metrics.jsonl"
    wait_for(lambda: log.exists() and "train-update" in log.read_text(), process)
    (child,) = _children_of(process.pid)[1:]  # one of the two
    start_s = time.monotonic()
    os.kill(child, signal.SIGTERM)
    text = finish(process)
    assert time.monotonic() - start_s < LIMIT_S
    assert process.returncode == 0, text
    assert "Stopped by" in text
    states = tmp_path / "tiny" / "ckpts" / "training_states" / "tiny_epoch_0"
    assert read_values(states / "shared.pt")["progress"]["epoch"] == 0


def _is_anybody_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _children_of(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True).stdout
    return sorted(int(word) for word in found.split())
