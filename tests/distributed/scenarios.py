"""Scenarios of the tests, run by their group of processes, and by the tests themselves for comparison."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import gin
import numpy as np
import torch
from accelerate import PartialState
from accelerate.optimizer import AcceleratedOptimizer
from gymnasium import spaces
from torch import distributed

from loxodon.agents import Agent, PPOAgent, SummedValues, WeighByAdvantage
from loxodon.data import Batch, DiskTrajDataset, PrioritySampler, Trajectory, pad_batch, save_trajectory
from loxodon.envs import EnvSpec, Histories, TMazePassive
from loxodon.experiment import Callback, Experiment
from loxodon.experiment.learn.optimizer import make_optimizer
from loxodon.experiment.optional.freezing import ParamFreezer
from loxodon.experiment.process.distributed import StopPoller, merge_episodes, merge_metrics
from loxodon.nets import TanhGaussian

from ..agents.recommended import all_of, recommended
from ..experiment.demonstrations import make_ppo, pretrained, stage
from ..experiment.fakes import CountingEnv, Predicting, learning, make_experiment
from .ppo_scenarios import everything

LENGTHS = (3, 8, 1, 5, 7, 2, 8, 4)
NUM_UPDATES = 5


class PushingEnv(CountingEnv):
    """CountingEnv with two continuous actions."""

    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)


class Masking(Experiment):
    """Changes the masks of actor, critics and extra losses in different ways."""

    def edit_actor_mask(self, batch: Batch, actor_loss: torch.Tensor, pad_mask: torch.Tensor) -> torch.Tensor:
        return pad_mask & (batch.time_idxs[:, :-1, None] < 3)

    def edit_critic_mask(
        self, batch: Batch, critic_loss: torch.Tensor, pad_mask: torch.Tensor
    ) -> torch.Tensor:
        pad_mask[:, :, 1] &= batch.rews[:, :, None] > 0
        return pad_mask

    def edit_extra_mask(
        self, batch: Batch, name: str, loss: torch.Tensor, pad_mask: torch.Tensor
    ) -> torch.Tensor:
        return pad_mask & (batch.time_idxs[:, 1:] > 1) if name == "next_obs" else pad_mask


def make_trajectory(length: int, seed: int, is_discrete: bool) -> Trajectory:
    rng = np.random.default_rng(seed)
    actions = rng.integers(3, size=(length, 1)) if is_discrete else rng.uniform(-0.9, 0.9, (length, 2))
    width = 3 if is_discrete else 2
    return Trajectory(
        # Far from zero, sums of squares in float32 would lose the variance.
        obs={"observation": (500.0 + 3.0 * rng.standard_normal((length + 1, 2))).astype(np.float32)},
        rl2s=rng.standard_normal((length + 1, 1 + width)).astype(np.float32),
        time_idxs=np.arange(length + 1)[:, None],
        actions=actions if is_discrete else actions.astype(np.float32),
        rews=rng.standard_normal((length, 1)).astype(np.float32),
        dones=rng.random((length, 1)) < 0.2,
    )


def store_trajectories(folder: Path) -> None:
    """Write twenty files of a dataset."""
    folder.mkdir(parents=True)
    for i in range(20):
        traj = make_trajectory(5 + i % 3, i, is_discrete=True)
        save_trajectory(folder, traj, save_as="npz", traj_id=f"{i:08x}", unix_time=1000 + i)


def make_learning(folder: Path, is_discrete: bool = True, **changes: Any) -> Experiment:
    """An experiment without environments, with a real agent whose losses draw no random numbers."""
    parts = recommended(
        values=SummedValues(beta=0.1),
        loss_weights=WeighByAdvantage(beta=0.1),
        critic_subset=all_of(3),
    )
    agent = partial(Agent, num_critics=3, training_discounts=(0.9,), tau=0.1, **parts)
    settings: dict[str, Any] = {
        "agent_type": agent,
        "make_train_env": EnvSpec(CountingEnv if is_discrete else PushingEnv),
        "mode": "learn",
        "grad_clip": 0.5,
        "learning_rate": 1e-3,
        "AdamW.eps": 1e-3,  # otherwise gradients that are only rounding make full steps
    }
    return learning(folder, **{**settings, **changes})


def share(batches_per_update: int, update: int, rank: int, world: int, is_discrete: bool) -> list[Batch]:
    """The micro-batches of one process; together, all processes have the same ones in every world."""
    trajs = [make_trajectory(n, 100 * update + i, is_discrete) for i, n in enumerate(LENGTHS)]
    own = trajs[rank * len(trajs) // world : (rank + 1) * len(trajs) // world]
    size = len(own) // batches_per_update
    return [pad_batch(own[i : i + size]) for i in range(0, len(own), size)]


def train(
    folder: Path,
    is_discrete: bool,
    batches_per_update: int,
    kind: type[Experiment] = Experiment,
    **changes: Any,
) -> dict[str, Any]:
    """Gradients of the first update, the state after five, and the metrics on the way."""
    exp = make_learning(folder, is_discrete, kind=kind, **changes)
    rank, world = exp.accelerator.process_index, exp.accelerator.num_processes
    clip, gradients = exp.accelerator.clip_grad_norm_, []

    def spy(params: Any, limit: float) -> Any:
        gradients.append([p.grad.clone() for p in params])
        return clip(params, limit)

    logs, rates = [], []
    with (
        mock.patch.object(exp.accelerator, "clip_grad_norm_", spy),
        mock.patch.object(TanhGaussian, "sample", TanhGaussian.mode),
    ):
        exp.policy.train()
        for update in range(NUM_UPDATES):
            batches = share(batches_per_update, update, rank, world, is_discrete)
            metrics = exp.train_step(batches, log_step=True)
            logs.append({name: float(value) for name, value in metrics.items()})
            rates.append(exp.optimizer.param_groups[0]["lr"])
    state = {name: value.clone() for name, value in exp.policy.state_dict().items()}
    exp.close()
    return {"gradients": gradients[0], "state": state, "logs": logs, "rates": rates}


EXTRA = {
    "agent_type": partial(
        Predicting,
        tau=0.1,
        values=SummedValues(beta=0.1),
        loss_weights=WeighByAdvantage(beta=0.1),
    ),
    "extra_loss_weights": {"next_obs": 1e-4, "size": 0.25},
}
FORMS: dict[str, tuple[bool, type[Experiment], dict[str, Any]]] = {
    "discrete-1": (True, Experiment, {}),
    "box-2": (False, Experiment, {}),
    "masked-2": (True, Masking, EXTRA),
}


def updates(folder: Path) -> dict[str, Any]:
    """Results of all forms of training: kinds of actions and masks, and batches per update."""
    found = {
        name: train(folder / f"run-{name}", is_discrete, int(name[-1]), kind, **changes)
        for name, (is_discrete, kind, changes) in FORMS.items()
    }
    gin.clear_config()  # the optimizer settings of this scenario are not those of the next test
    return found


def _skipped(folder: Path, rank: int) -> dict[str, Any]:
    """The gradient of one micro-batch overflows in one process only; there is a scaler, as for fp16."""
    exp = make_learning(folder / "skipped")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    exp.accelerator.scaler = scaler
    plain = make_optimizer(
        exp.policy, exp.policy.trainable_params(), learning_rate=1e-3, l2_coeff=0.0, fused=False
    )
    plain.param_groups[0]["initial_lr"] = 1e-3
    exp.learner.optimizer = AcceleratedOptimizer(plain, scaler=scaler)
    backward = exp.accelerator.backward
    overflows = [rank == 1, False, False, False]

    def spoilt(loss: torch.Tensor) -> None:
        backward(loss * torch.inf if overflows.pop(0) else loss)

    exp.accelerator.backward = spoilt
    exp.policy.train()
    counts, norm = [], exp.policy.tstep_encoder.input_norm
    for _ in range(2):
        exp.train_step(share(2, 0, rank, 2, True))
        counts.append((exp.learner.gradient_steps, float(norm.count), scaler.get_scale()))
    return {"counts": counts, "state": exp.policy.state_dict()}


def _guarded(folder: Path, rank: int) -> dict[str, Any]:
    """The critics are frozen, and the gradient of the second update is not finite in one process only."""
    freeze = partial(ParamFreezer, ("critics",))
    exp = make_learning(folder / "guarded", **{"Learner.on_nan": "skip"}, callbacks=[freeze])
    backward, spoils = exp.accelerator.backward, [False, rank == 1, False]
    exp.accelerator.backward = lambda loss: backward(loss * torch.nan if spoils.pop(0) else loss)
    exp.policy.train()
    states = [{name: value.clone() for name, value in exp.policy.state_dict().items()}]
    for update in range(3):
        exp.train_step(share(1, update, rank, 2, True))
        states.append({name: value.clone() for name, value in exp.policy.state_dict().items()})
    counts = (exp.learner.gradient_steps, exp.learner.skipped_updates)
    return {"states": states, "counts": counts}


def _stopped_by_nan(folder: Path, rank: int) -> str:
    """The error of each process if the batch of one has a NaN reward."""
    exp = make_learning(folder / "nan", **{"Learner.on_nan": "stop"})
    exp.policy.train()
    (batch,) = share(1, 0, rank, 2, True)
    if rank == 1:
        batch.rews[0, 0] = torch.nan
    try:
        exp.train_step(batch, log_step=True)
    except FloatingPointError as error:
        return str(error)
    return ""


def _stored_envs(folder: Path) -> list[dict[str, Any]]:
    """The position of this process's rollout when it is saved, and in a resumed run."""
    found = []
    for _ in range(2):
        exp = make_learning(
            folder / "stored",
            mode="both",
            make_train_env=EnvSpec(TMazePassive, {"horizon": 30}),
            train_timesteps_per_epoch=7,
            **{"Collector.save_env_state": True},
        )
        if not found:
            exp.collect_new_training_data()
            exp.save_checkpoint()
        else:
            exp.load_checkpoint()
        state = exp.collector.groups[0].state
        found.append({"time_idxs": state.time_idxs, "rl2s": state.rl2s, "envs": exp.train_envs.get_states()})
        exp.close()
    return found


def _empty(folder: Path, rank: int) -> dict[str, Any]:
    """Only a single timestep of one process counts."""
    exp = make_learning(folder / "empty", grad_clip=1e9)
    exp.edit_actor_mask = exp.edit_critic_mask = lambda batch, loss, mask: (
        mask & (torch.arange(mask.numel()).view(mask.shape) == (0 if rank == 0 else -1))
    )
    exp.learner.edits_masks = True
    exp.policy.train()
    metrics = exp.train_step(share(1, 0, rank, 2, True), log_step=True)
    return {name: float(metrics[name]) for name in ("Loss", "grad_norm")}


class OwnBufferAgent(Agent):
    """Has a statistic that is not merged between processes."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.register_buffer("own", torch.zeros(2))


def _buffers(folder: Path, rank: int) -> list[float]:
    """A statistic of each process after an update."""
    exp = make_learning(folder / "buffers", agent_type=partial(OwnBufferAgent, num_critics=2))
    exp.policy.train()
    exp.policy.own.fill_(float(rank))  # DDP made them equal at construction
    exp.train_step(share(1, 0, rank, 2, True))
    values: list[float] = exp.policy.own.tolist()
    return values


def _unused(folder: Path, rank: int) -> str:
    exp = make_learning(folder / "unused", agent_type=partial(Agent, online_coeff=0.0, offline_coeff=0.0))
    try:
        exp.train_step(share(1, 0, rank, 2, True))
    except ValueError as error:
        return str(error)
    return "no error"


def _episodes(exp: Experiment, rank: int) -> dict[str, float]:
    """Process 0 has finished three episodes; process 1 has finished one episode of each of two envs."""
    own = Histories.create(1)
    for value in [1.0, 2.0, 3.0] if rank == 0 else [9.0]:
        own.returns.add_step(np.array([value]), np.array([True]), ["a"])
        own.specials.add("a", "success", value > 2.5)
    if rank == 1:
        own.returns.add_step(np.array([50.0]), np.array([True]), ["b"])
    return merge_episodes(own, exp.accelerator).summary("collect")


def _stops(exp: Experiment, rank: int) -> int:
    """The update at which the processes stop if one of them is asked to before its fourth."""
    count = 0
    watch = StopPoller(lambda: rank == 1 and count >= 4, exp.accelerator)
    while not watch.after_update():
        count += 1
        torch.ones(1).sum()
    return count


def _windows(folder: Path) -> dict[str, Any]:
    """Windows that this process draws from a shared folder, and its rights there."""
    exp = make_learning(
        folder / "windows", dataset=DiskTrajDataset(str(folder), "data", sampler=PrioritySampler(1.0))
    )
    exp.dataset.refresh()
    drawn = [batch for batch in exp.loader.epoch(0, 3)]
    reported: list[tuple[Any, Any]] = []
    exp.learner.report_priorities = lambda slots, priorities: reported.append((slots, priorities))
    exp.train_step(drawn[:1])
    result = {
        "drawn": torch.cat([batch.obs["observation"][:, 0, 0] for batch in drawn]),
        "may_delete": exp.dataset.has_edit_rights,
        "slots": drawn[0].priority_slots,
        "reported": [(torch.as_tensor(s), torch.as_tensor(p)) for s, p in reported],
    }
    exp.close()
    return result


def agreements(folder: Path) -> dict[str, Any]:
    """Results of everything else that processes have to agree on."""
    exp = make_learning(folder / "any")
    rank = exp.accelerator.process_index
    own = {"q": float(rank), "q_max": float(rank), "q_min": float(rank), "n": 1.0 + rank, "loss": float(rank)}
    return {
        "skipped": _skipped(folder, rank),
        "guarded": _guarded(folder, rank),
        "nan": _stopped_by_nan(folder, rank),
        "stored": _stored_envs(folder),
        "empty": _empty(folder, rank),
        "buffers": _buffers(folder, rank),
        "metrics": merge_metrics(own, 3.0 - 2 * rank, exp.accelerator, sums=("n",), shares=("loss",)),
        "episodes": _episodes(exp, rank),
        "stops": _stops(exp, rank),
        "windows": _windows(folder),
        # last, because its processes no longer wait for the same collectives
        "unused": _unused(folder, rank),
    }


def _stopped_in(phase: str, folder: Path) -> dict[str, Any]:
    """A run in mode `both`, one process of which receives SIGTERM in `phase` of the second epoch."""
    exp = make_experiment(folder / phase, epochs=50, ckpt_interval=None, train_timesteps_per_epoch=7)
    exp.start()
    owner, name = {
        "evaluating": (exp.evaluator, "play"),
        "collecting": (exp.collector, "collect"),
        "learning": (exp.learner, "update"),
    }[phase]
    work = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if exp.epoch == 1 and exp.accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return work(*args, **kwargs)

    setattr(owner, name, interrupted)
    try:
        exp.learn()
    except SystemExit as stopped:
        return {"code": stopped.code, "saved": exp.checkpoints.complete_epochs(), "env_steps": exp.env_steps}
    return {"code": None}


def stops(folder: Path) -> dict[str, Any]:
    """Runs of which one process is asked to stop, at different moments."""
    found = {phase: _stopped_in(phase, folder) for phase in ("evaluating", "collecting", "learning")}
    return {**found, "requested": _requested(folder)}


def _requested(folder: Path) -> dict[str, Any]:
    """A run whose second process requests the end in the second epoch."""

    class Asking(Callback):
        def after_train(self, exp: Experiment) -> None:
            if exp.epoch == 1 and exp.accelerator.process_index == 1:
                exp.request_stop()

    exp = make_experiment(folder / "requested", epochs=50, ckpt_interval=None, callbacks=[Asking])
    exp.start()
    exp.learn()
    found = {"epoch": exp.epoch, "finished": exp.is_finished, "saved": exp.checkpoints.complete_epochs()}
    exp.close()
    return found


def pretraining(folder: Path) -> dict[str, Any]:
    """Weights before the first epoch."""
    agent = partial(PPOAgent, share_encoder=False, value_norm="popart")
    return pretrained(make_ppo(folder / "taught", agent_type=agent, callbacks=[stage(num_batches=6)]))


def main(folder: str) -> None:
    """Run all scenarios in this process and keep what they return."""
    PartialState(cpu=True, timeout=timedelta(seconds=45))  # the time that a rank waits for one that hangs
    rank, path = int(os.environ["RANK"]), Path(folder)
    scenarios = {
        "updates": lambda: updates(path),
        "stops": lambda: stops(path),
        "pretraining": lambda: pretraining(path),
        "ppo": lambda: everything(rank),
        "agreements": lambda: agreements(path),
    }
    found = {}
    for name, scenario in scenarios.items():
        found[name] = scenario()
        gin.clear_config()
    torch.save(found, path / f"rank_{rank}.pt")
    distributed.destroy_process_group()
