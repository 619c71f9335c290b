"""The stage before the first epoch: an on-policy agent imitates stored trajectories."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import gin

from ...agents import Demonstrations, OnPolicyAgent
from ...data import BatchLoader, RLDataset
from ...data.errors import check_number
from ..callbacks import Callback
from ..checkpoint.policy_file import plain_tensors
from ..collect.build import layout_of
from ..contracts import Run
from ..learn.batches import copied_ahead
from ..learn.learner import Learner, masked_losses
from ..learn.loop import LOSSES, LossDisplay, updates
from ..ppo import PPOLearner
from ..process.distributed import merge_metrics
from ..process.rng import derive_seed, isolated_rng
from ..settings import Settings

_TEST_UPDATES = 2


@gin.configurable
class Pretraining(Callback):
    """Lets the agent imitate stored trajectories, once, before the first epoch of `learn`.

    The policy learns the stored actions, and the value function their returns as the run's
    `advantage_estimator` defines them. With GAE.lam < 1 they depend on the value function's own predictions,
    as they always do where a window ends without termination.

    Batches, precision, clipping, warm-up and accumulation are those of the run; the optimizer of PPO begins
    anew afterwards. A ParamFreezer has no effect in this stage. In gin: `Experiment.callbacks =
    [@Pretraining]`.

    Args:
        dataset: source of the windows; it is only read.
        num_batches: number of batches of this stage, per process.
        batch_size: windows per batch and process; None for that of the run.
        learning_rate: None for that of the run.
        value_coef: weight of the critic's loss besides the actor's; 0 trains the policy alone.

    Raises: ValueError or TypeError for an invalid setting.
    """

    def __init__(
        self,
        dataset: RLDataset = gin.REQUIRED,
        *,
        num_batches: int = 1000,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        value_coef: float = 0.5,
    ) -> None:
        if not isinstance(dataset, RLDataset):
            raise TypeError(
                f"Pretraining.dataset is {dataset!r}, but must be a dataset. Fix: set Pretraining.dataset = "
                "@demos/DiskTrajDataset() and demos/DiskTrajDataset.dset_name."
            )
        check_number("Pretraining.num_batches", num_batches, lowest=1, whole=True)
        check_number("Pretraining.batch_size", batch_size, lowest=1, whole=True, optional=True)
        check_number("Pretraining.learning_rate", learning_rate, above=0, optional=True)
        check_number("Pretraining.value_coef", value_coef, lowest=0)
        self.dataset, self.num_batches = dataset, num_batches
        self.batch_size, self.learning_rate, self.value_coef = batch_size, learning_rate, value_coef
        self.is_done = False
        self.run: Run
        self.settings: Settings  # the settings of the run
        self.trainer: PPOLearner

    def on_start(self, run: Run) -> None:
        """Check that the run's agent can be pretrained, and prepare the dataset.

        Raises: ValueError if it cannot.
        """
        if run.ctx.role.is_actor:
            return
        if not isinstance(run.policy, OnPolicyAgent):
            raise ValueError(
                f"Pretraining is for on-policy agents, but {type(run.policy).__name__} learns from stored "
                "trajectories itself. Fix: remove Pretraining, and set "
                "Experiment.start_collecting_at_epoch."
            )
        assert isinstance(run, Settings)
        assert isinstance(run.trainer, PPOLearner)
        self.run, self.settings, self.trainer = run, run, run.trainer
        if self.trainer.reward_normalizer is not None and self.value_coef:
            raise ValueError(
                f"Pretraining.value_coef is {self.value_coef}, but with PPOLearner.reward_normalizer the "
                "values of stored rewards are on a different scale from those of PPO. Fix: set "
                "Pretraining.value_coef = 0, or use PPOAgent.value_norm instead of the reward normaliser."
            )
        self.dataset.configure(
            max_seq_len=self.settings.max_seq_len,
            padded_sampling=self.settings.padded_sampling,
            has_edit_rights=False,
            default_root=str(run.ctx.run_dir.parent),
            default_name=run.ctx.run_name,
        )
        self.dataset.expect(layout_of(run.obs_space, run.action_space))

    def on_fit_start(self, run: Run) -> None:
        """Train if the run is at its beginning; a stop request leaves everything unchanged."""
        if run.ctx.role.is_actor or self.is_done or run.epoch > 0:
            return
        self.dataset.refresh()
        if not self.dataset.ready_for_training:
            raise ValueError(
                f"Pretraining.dataset {self.dataset.describe_lack()}. Fix: name the folder of the "
                "demonstrations, such as demos/DiskTrajDataset.dset_root and dset_name."
            )
        run.ctx.status.state("learning")
        # Separate random numbers, so that the rest of the run does not depend on them.
        with isolated_rng(
            derive_seed(run.ctx.progress.seed, "pretraining", run.ctx.accelerator.process_index)
        ):
            self.is_done = self._train_or_undo()

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`: True once the stage is done."""
        return {"is_done": self.is_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.is_done = bool(state["is_done"])

    def _train_or_undo(self) -> bool:
        """Train; False after a stop request. A stop or an error restores the weights."""
        run = self.run
        before, optimizer = plain_tensors(run.policy), copy.deepcopy(run.learner.state_dict())
        try:
            metrics = self._updates(self._learner())
            if not math.isfinite(metrics["loss"]):
                raise FloatingPointError(
                    f"The loss of pre-training is {metrics['loss']}. Fix: lower Pretraining.learning_rate, "
                    "or look for NaN in the data with loxodon data check."
                )
        except BaseException:  # the checkpoint that follows has the weights from which a resume begins
            run.policy.load_state_dict(before)
            raise
        finally:
            run.learner.load_state_dict(optimizer)
        if run.ctx.stop_agreed():
            run.policy.load_state_dict(before)
            run.ctx.console.say("Stopped during pre-training, which starts over on resume.")
            return False
        run.log(metrics, "pretrain")
        return True

    def _learner(self) -> Learner:
        """The run's learner with this stage's losses, without the hooks that are meant for PPO's batches."""
        of_run = self.run.learner

        def compute_loss(batch: Any, log_step: bool) -> dict[str, Any]:
            with self.run.caster():
                terms = of_run.model(batch, log_step)
            # Extra terms belong to the run itself.
            return masked_losses(batch, dataclasses.replace(terms, extra={}))

        learner = Learner(
            of_run.agent,
            of_run.model,
            of_run.optimizer,
            self.run.ctx.accelerator,
            compute_loss=compute_loss,
            critic_loss_weight=self.value_coef,
            lr_warmup_steps=self.settings.lr_warmup_steps,
            grad_clip=self.settings.grad_clip,
            run_dir=self.run.ctx.run_dir,
        )
        learner.lr_scale = (self.learning_rate or self.settings.learning_rate) / learner.base_learning_rate
        return learner

    def _updates(self, learner: Learner) -> dict[str, float]:
        """All updates of the stage, or those until a stop request; returns the means of the last tenth."""
        run, group = self.run, self.settings.batches_per_update
        num_updates = max(1, self.num_batches // group)
        if run.test_run:
            num_updates = min(num_updates, _TEST_UPDATES)
        run.ctx.console.say(f"Pre-training: {num_updates:,} updates.")
        agent, estimate = learner.agent, self.trainer.advantage_estimator
        assert isinstance(agent, OnPolicyAgent)
        agent.train()
        start_s, display = time.perf_counter(), LossDisplay(run.ctx, 0)
        seen = list[dict[str, Any]]()  # the losses of every update
        loader, num_batches = self._loader(), num_updates * group
        batches = copied_ahead(loader.epoch(0, num_batches), run.DEVICE)
        demonstrations: Iterator[Any] = (Demonstrations(batch, estimate) for batch in batches)
        try:
            for metrics, logs in updates(
                demonstrations,
                num_batches,
                learner.update,
                ctx=run.ctx,
                batches_per_update=group,
                log_interval=self.settings.log_interval,
            ):
                agent.after_imitation()
                seen.append({name: metrics[name] for name in LOSSES})
                if logs:
                    run.log({**metrics, "updates": len(seen)}, "pretrain-update")
                display.show(f"pre-training {len(seen):,}/{num_updates:,}", metrics["loss"])
        finally:
            loader.close()
            agent.eval()
        last = seen[min(int(0.9 * num_updates), len(seen) - 1) :]
        own = {name: sum(float(one[name]) for one in last) / len(last) for name in LOSSES}
        counts = {"first_loss": float(seen[0]["loss"]), "updates": float(len(seen))}
        means = merge_metrics({**own, **counts}, 1.0, run.ctx.accelerator)
        run.ctx.console.say(f"Pre-training: loss {means['first_loss']:.4g} -> {means['loss']:.4g}.")
        return {**means, "seconds": time.perf_counter() - start_s}

    def _loader(self) -> BatchLoader:
        of_run = self.settings.sequences_per_batch
        size = self.batch_size or of_run
        return BatchLoader(
            self.dataset,
            batch_size=size if not self.run.test_run else min(size, of_run),
            num_workers=self.settings.dloader_workers,
            seed=derive_seed(self.run.ctx.progress.seed, "pretraining loader"),
            rank=self.run.ctx.accelerator.process_index,
            packs=self.settings.packed_batches,
        )
