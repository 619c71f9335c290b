"""The Experiment: all settings of a run in one place, and the parts that do the work."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gin
import torch
from gymnasium import spaces
from torch import Tensor

from ..agents import BaseAgent, LossTerms
from ..data import BatchLoader, RLDataset
from ..data.spaces import PolicyActionSpace
from ..envs import Histories, ReturnHistory, SpecialMetricHistory
from . import building, collecting, evaluating, loop, resume
from .artifacts.upload import Uploads
from .callbacks import CallbackList
from .checkpoint.policy_file import PolicyInfo, fit_weights, load_weights, read_policy
from .checkpoint.record import RunRecord, check_policy, known_bindings, record_run
from .checkpoint.spaces import EnvSpaces
from .checkpoint.store import CheckpointManager
from .collector import Collector
from .config_hash import config_hash
from .console import ConsoleView
from .distributed import merge_episodes
from .evaluator import Evaluator
from .final_test import check_test_envs
from .fleet import WatchedFile, pacing
from .learner import AnyBatch, Learner, make_optimizer, masked_losses
from .logs import MetricLogger
from .overlap import OverlappedCollector
from .param_groups import param_groups
from .pretraining import prepare_pretraining
from .rollout_state import check_env_states
from .settings import MakeEnv, Settings
from .signals import StopRequest
from .test_mode import shrink
from .threads import choose_threads
from .timing import StageTimer
from .validate import check_hooks, check_settings

logger = logging.getLogger("loxodon")


@gin.configurable
@dataclass
class Experiment(Settings):
    """One run: environments, agent, replay data, and the order in which they work. `start()`, then `learn()`.

    Its fields are those of `Settings`.
    """

    def __post_init__(self) -> None:
        """Check the settings and set up Accelerate; nothing is built and nothing is written yet."""
        check_hooks(self)
        check_settings(self)
        if self.test_run:
            shrink(self)
        self.hooks, self.timer = CallbackList(self, self.callbacks), StageTimer()
        self.epoch_figures: dict[str, Any] = {}  # all that was logged in the running epoch
        choose_threads(self.torch_threads)
        self.accelerator = building.make_accelerator(self.mixed_precision)
        self.run_seed = building.agree_on_seed(self.seed, self.accelerator)
        self.epoch = self.env_steps = self.policy_version = 0  # epoch: the running one, or the next
        self.fleet = pacing.make_membership(self)
        self.loaded_policy: PolicyInfo | None = None
        self.best_score: float | None = None
        self.is_pretrained = False
        self.is_finished = False  # nothing is left to do after the last epoch
        self.idle_epochs = 0  # in a row, without an update for want of trajectories
        self.last_val_metrics: dict[str, float] = {}
        self.stop = StopRequest()
        self.actors: AbstractContextManager[Any] | None = None  # actors that run as long as learn() does
        self.view = ConsoleView(self.verbose and self.accelerator.is_main_process, None)
        self.obs_space: spaces.Dict
        self.action_space: PolicyActionSpace
        self.env_spaces: EnvSpaces  # before anything is flattened or scaled
        self.collector: Collector | OverlappedCollector | None = None
        self.interaction: Collector | None = None  # the newest
        self.train_envs: Any = None
        self.val_envs: Any = None

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(self.ckpt_base_dir).expanduser() / self.run_name

    @property
    def DEVICE(self) -> torch.device:  # noqa: N802 - the name is part of the public interface
        """Where the agent is."""
        device: torch.device = self.accelerator.device
        return device

    @property
    def policy(self) -> BaseAgent:
        """The agent itself, without what Accelerate wraps around it."""
        return self._policy

    @functools.cached_property
    def record(self) -> RunRecord:
        """What this run is made with, as it is when that is first written or compared."""
        names = ("agent_type", "tstep_encoder_type", "traj_encoder_type")
        return record_run(
            spaces=self.env_spaces,
            types={name: getattr(self, name) for name in names},
            max_seq_len=self.max_seq_len,
            config_hash=self.config_hash,
        )

    def start(self) -> None:
        """Build everything, in dependency order."""
        with self.fleet.joining():
            building.seed_process(self)
            self.init_dsets()
            env_summary = self.init_envs()
            self.init_dloaders()
            self.hooks.around("model_init", self.init_model)
            check_test_envs(self)
            self.init_checkpoints()
            self.init_logger()
            resume.warm_start_if_asked(self)
            resume.restore_if_asked(self)
            self.pretraining_stage = prepare_pretraining(self)
        self.summary(env_summary)

    def init_dsets(self) -> RLDataset:
        """Tell the dataset its folder, window length and rights."""
        building.configure_dataset(self)
        return self.dataset

    def init_envs(self) -> str:
        """Build the environments this mode needs and take over their spaces; returns a line on them."""
        building.build_envs(self)
        return building.describe_envs(self)

    def init_dloaders(self) -> BatchLoader:
        """Build the batch loader, once for the whole run."""
        self.loader = building.build_loader(self)
        return self.loader

    def init_model(self) -> None:
        """Build agent and optimizer and place them on the device; then whatever acts or learns with them."""
        self._policy = self.agent_type(
            self.obs_space,
            self.action_space,
            self.tstep_encoder_type,
            self.traj_encoder_type,
            self.max_seq_len,
        )
        if self.compile_acting:
            self._policy.compile_acting()
        optimizer = self.hooks.around("optimizer_init", self.init_optimizer, self._policy)
        self.model = self.accelerator.prepare(self._policy)
        if self.accelerator.scaler is not None:  # without one, Accelerate's wrapper only takes time
            optimizer = self.accelerator.prepare(optimizer)
        self.optimizer = optimizer
        self.learner = Learner(
            self.policy,
            self.model,
            self.optimizer,
            self.accelerator,
            compute_loss=self.compute_loss,
            critic_loss_weight=self.critic_loss_weight,
            lr_warmup_steps=self.lr_warmup_steps,
            grad_clip=self.grad_clip,
            report_priorities=self.dataset.update_priorities if self.dataset.takes_priorities else None,
            bad_grad=self.bad_grad,
            timer=self.timer,
            edits_masks=any(
                getattr(getattr(self, name), "__func__", None) is not getattr(Experiment, name)
                for name in ("edit_actor_mask", "edit_critic_mask")
            ),
        )
        self.learner.frozen = building.make_frozen(self)
        self.on_policy = building.make_on_policy_learner(self)
        if self.torch_threads is None:
            choose_threads(None, building.forward_work(self))
        self.evaluator = Evaluator(self.interact, self.policy_metrics)
        building.build_collector(self)
        check_env_states(self)

    def init_optimizer(self, policy: BaseAgent) -> torch.optim.Optimizer:
        """The optimizer of the agent's trainable parameters."""
        optimizer: torch.optim.Optimizer = make_optimizer(
            param_groups(
                policy,
                policy.trainable_params(),
                learning_rate=self.learning_rate,
                lr_multipliers=self.lr_multipliers,
            ),
            learning_rate=self.learning_rate,
            l2_coeff=self.l2_coeff,
            fused=self.mixed_precision != "fp16",  # a fused step hides whether the scaler skipped it
            eps=self.adam_eps,
        )
        return optimizer

    def init_checkpoints(self) -> None:
        """Make the run's checkpoint folders."""
        self.checkpoints = CheckpointManager(
            self.run_dir,
            self.run_name,
            rank=self.accelerator.process_index,
            num_ranks=self.accelerator.num_processes,
            facts=lambda: self.record.header(),  # noqa: PLW0108 - it is made after this
        )
        self.checkpoints.make_folders(clean=self.mode != "collect")
        self.latest = WatchedFile(self.checkpoints.latest_path, self.checkpoints.policy_info)

    def init_logger(self) -> None:
        """Prepare metric files; nothing is written before there is something to log."""
        self.config_hash = config_hash(self, known_bindings())
        self.artifacts: Uploads = building.make_uploads(self)
        self.metric_logger: MetricLogger = building.build_logger(self)

    def summary(self, env_summary: str) -> None:
        """Print what this run is, in a few lines. env_summary: what init_envs returned."""
        self.view.say(building.summarize(self, env_summary))

    def close(self) -> None:
        """End worker processes and background threads; finished trajectories and metrics are stored first."""
        building.close(self)

    def learn(self) -> dict[str, float]:
        """Run the remaining epochs; returns the figures of the last evaluation.

        On SIGINT or SIGTERM: stores trajectories and a checkpoint, says how to go on, raises SystemExit:
        130 after SIGINT, 0 after SIGTERM. After an error the same is stored before it is raised.
        """
        for _ in self.learn_iter():
            pass
        return self.last_val_metrics

    fit = learn  # the name that others have for it

    def learn_iter(self) -> Iterator[dict[str, Any]]:
        """As `learn`, epoch by epoch: yields the newest value of all figures that each epoch has logged.

        To end early with a checkpoint call `request_stop`; leaving the loop alone saves nothing.
        """
        with self.fleet.reporting():
            for _ in loop.run_epochs(self):
                yield {name: float(value) for name, value in self.epoch_figures.items()}
        if self.best_score is None and self.checkpoints.best_by != "val/return":
            logger.warning(
                "CheckpointManager.best_by is %r, but no such figure was logged, so no policy is the best.",
                self.checkpoints.best_by,
            )

    def request_stop(self, reason: str = "") -> None:
        """End training after the running epoch, with a checkpoint; `learn` then returns as usual.

        Any process may ask; all end at the same epoch. reason: is printed.
        """
        self.stop.ask_after_epoch(reason or "request_stop")

    def restart_train_envs(self, epoch: int) -> None:
        """Begin fresh episodes in all training environments, seeded by the run's seed and `epoch`."""
        assert self.collector is not None
        self.collector.restart(building.stream_seed(self, "train_envs", epoch))

    def collect_new_training_data(self) -> dict[str, float]:
        """Go on with the training rollout for one epoch's timesteps; returns its figures."""
        return collecting.collect(self)

    def evaluate_val(self) -> dict[str, float]:
        """Evaluate in the validation environments; logs and returns figures named `val/...`."""
        return evaluating.evaluate_val(self)

    def evaluate_test(
        self,
        make_test_env: MakeEnv | Sequence[MakeEnv],
        timesteps: int,
        render: bool = False,
        save_trajs_to: str | None = None,
        episodes: int | None = None,
    ) -> dict[str, float]:
        """Evaluate in new environments for `timesteps` steps per env or until `episodes` have ended.

        Logs and returns figures named `test/...`. save_trajs_to: folder for the trajectories.
        """
        return evaluating.evaluate_test(self, make_test_env, timesteps, render, save_trajs_to, episodes)

    def interact(
        self,
        envs: Any,
        timesteps: int,
        hidden_state: Any = None,
        render: bool = False,
        save_on_done: bool | str = False,
        episodes: int | None = None,
    ) -> tuple[Any, Histories]:
        """Act in `envs`, without exploration; returns hidden state, (returns, specials).

        hidden_state: what the previous call returned, to go on in the same `envs` where that one stopped;
            otherwise all are reset.
        save_on_done: a folder, or True for that of the dataset, to store trajectories in.
        """
        return evaluating.interact(self, envs, timesteps, hidden_state, render, save_on_done, episodes)

    def train_step(self, batch: AnyBatch | Sequence[AnyBatch], log_step: bool = False) -> dict[str, Tensor]:
        """One optimizer step; returns scalar tensors: "Loss", "Actor Loss", "Critic Loss", and others.

        batch: with batches_per_update above 1 the list of all batches of the update, whose gradients add up
            to those of one large batch. log_step: compute all figures.
        """
        micro_batches = batch if isinstance(batch, Sequence) else [batch]
        return self.learner.update(micro_batches, log_step)

    def compute_loss(self, batch: AnyBatch, log_step: bool = False) -> dict[str, Any]:
        """Hook: the losses of one batch, means over what its own masks leave; see `learner.masked_losses`.

        An override may change "Actor Loss" and "Critic Loss" or add figures, which are logged if they are
        scalars. With several micro-batches or processes each mean weighs as much as its mask has of all.
        """
        with self.caster():
            terms: LossTerms = self.model(batch, log_step)
        return masked_losses(batch, terms, self.edit_actor_mask, self.edit_critic_mask)

    def edit_actor_mask(self, batch: AnyBatch, actor_loss: Tensor, pad_mask: Tensor) -> Tensor:
        """Hook: what counts in the actor's loss, (B, L, G, 1) bool for G discounts.

        actor_loss: of the same shape, without gradient. pad_mask: True on real timesteps.
        """
        return pad_mask

    def edit_critic_mask(self, batch: AnyBatch, critic_loss: Tensor, pad_mask: Tensor) -> Tensor:
        """Hook: what counts in the critics' loss, (B, L, C, G, 1) bool for C critics and G discounts."""
        return pad_mask

    def caster(self) -> AbstractContextManager[Any]:
        """Context of the forward pass: autocast to mixed_precision on the agent's device."""
        context: AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    def policy_metrics(self, returns: ReturnHistory, specials: SpecialMetricHistory) -> dict[str, float]:
        """Hook: figures of a rollout, over the episodes of all processes; empty when no episode ended."""
        return merge_episodes(Histories(returns, specials), self.accelerator).summary("")

    def x_axis_metrics(self) -> dict[str, int]:
        """What every record carries: where the run stands."""
        steps = {"env_steps": self.env_steps, "gradient_steps": self.learner.gradient_steps}
        return {"epoch": self.epoch, **steps}

    def log(self, metrics: dict[str, Any], key: str = "") -> None:
        """Write one record, each name as `<key>/<name>`; only the main process writes."""
        named = {f"{key}/{name}" if key else name: value for name, value in metrics.items()}
        self.epoch_figures |= named
        if self.accelerator.is_main_process:
            self.metric_logger.log(named, self.x_axis_metrics())
        evaluating.keep_if_best(self, named)

    def save_checkpoint(self) -> Path | None:
        """Save everything needed to go on with epoch `self.epoch`; returns the folder in the main process."""
        return resume.save(self, epoch=max(self.epoch - 1, 0), next_epoch=self.epoch)

    def load_checkpoint(self, epoch: int | None = None, resume_training_state: bool = True) -> int:
        """Load the checkpoint after `epoch` (None: the newest intact one); returns the epoch to go on with.

        With resume_training_state False only the weights are loaded and the run starts at its first epoch.
        """
        chosen = resume.choose_epoch(self) if epoch is None else epoch
        path = self.checkpoints.state_dir(chosen)
        self.load_checkpoint_from_path(
            path if resume_training_state else path / "model.safetensors", resume_training_state
        )
        return self.epoch

    def load_checkpoint_from_path(self, path: str | Path, is_accelerate_state: bool | None = None) -> None:
        """Load a training state (a folder; the whole run goes on from it) or policy weights (a file).

        is_accelerate_state: True for a training state, False for weights; None decides by what is at `path`.
        """
        path = Path(path)
        if path.is_dir() if is_accelerate_state is None else is_accelerate_state:
            self.hooks.around("load_checkpoint", resume.load, self, path)
        else:
            self.hooks.around("load_checkpoint", load_weights, self.policy, path)

    def write_latest_policy(self, is_final: bool = False) -> None:
        """Publish the weights for collecting processes under the next version number."""
        building.begin_run(self)
        self.policy_version += 1
        if self.accelerator.is_main_process:
            info = PolicyInfo(self.policy_version, self.epoch, is_final)
            self.checkpoints.save_policy(self.checkpoints.latest_path, self.policy, info)
        self.fleet.put(policy_version=self.policy_version)

    def read_latest_policy(self) -> PolicyInfo | None:
        """Load the published weights if they are newer than what was loaded; None if there are none yet.

        Raises: ValueError if they are for another environment or of another format.
        """
        info, path = self.latest.poll(), self.checkpoints.latest_path
        if info is not None and info != self.loaded_policy:
            check_policy(info, path, self.env_spaces, warns=self.loaded_policy is None)
            info, weights = read_policy(path)
            fit_weights(self.policy, weights, path)
            self.loaded_policy = info
        return info

    def delete_buffer_from_disk(self) -> None:
        """Delete the collected trajectories; protected ones stay."""
        self.dataset.delete()
