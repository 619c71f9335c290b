"""The stage before the first epoch: an on-policy agent learns from stored trajectories."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import gin
from torch import Tensor, nn

from ...agents import Agent, BaseAgent, Demonstrations, OnPolicyAgent
from ...data import Batch, BatchLoader, RLDataset
from ...data.errors import check_choice
from ...nets import Actor, PolicyHead
from ..callbacks import Callback
from ..checkpoint.policy_file import load_what_fits, plain_tensors
from ..collect.build import layout_of
from ..contracts import Run
from ..learn.learner import Learner, log_figures, masked_losses
from ..learn.optimizer import make_optimizer
from ..ppo import PPOLearner
from ..process.distributed import StopWatch, merge_metrics
from ..process.ranges import check_number
from ..process.rng import derive_seed, isolated_rng
from ..settings import Settings

logger = logging.getLogger("loxodon")
VALUE_COEFS = {"bc": 0.5, "off_policy": 10.0}
"""Weight of the critic's loss by method if `Pretraining.value_coef` is None: as in PPO, and as off-policy."""
_TEST_UPDATES = 2
_SHOW_EVERY_S = 0.3
_LOSSES = ("loss", "actor_loss", "critic_loss")
_ENCODERS = ("tstep_encoder.", "traj_encoder.")


@gin.configurable
class Pretraining(Callback):
    """Trains the agent on stored trajectories, once, before the first epoch of `learn`.

    "bc" imitates the stored actions, and fits the value function to their returns as the run's
    `advantage_estimator` defines them: with GAE.lam < 1 they lean on the value function's own predictions, as
    they always do where a window ends without termination. "off_policy" trains an off-policy agent with the
    run's encoders and hands over its encoders, and its policy where both are built alike.

    Batches, precision, clipping, warm-up and accumulation are those of the run; the optimizer of PPO begins
    anew afterwards. With a ParamFreezer nothing is frozen yet. In gin: `Experiment.callbacks =
    [@Pretraining]`.

    Args:
        dataset: where windows come from; it is only read.
        method: "bc" or "off_policy".
        num_batches: of this stage, per process.
        batch_size: windows per batch and process; None for that of the run.
        learning_rate: None for that of the run.
        value_coef: weight of the critic's loss beside the actor's; None for 0.5 with "bc", 10 otherwise.
        agent_type: the agent of "off_policy".

    Raises: ValueError or TypeError for a setting that cannot work.
    """

    def __init__(
        self,
        dataset: RLDataset = gin.REQUIRED,
        *,
        method: str = "bc",
        num_batches: int = 1000,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        value_coef: float | None = None,
        agent_type: Callable[..., BaseAgent] = Agent,
    ) -> None:
        if not isinstance(dataset, RLDataset):
            raise TypeError(
                f"Pretraining.dataset is {dataset!r}, but must be a dataset. Fix: set Pretraining.dataset = "
                "@demos/DiskTrajDataset() and demos/DiskTrajDataset.dset_name."
            )
        check_choice("Pretraining.method", method, tuple(VALUE_COEFS))
        check_number("Pretraining.num_batches", num_batches, lowest=1, whole=True)
        check_number("Pretraining.batch_size", batch_size, lowest=1, whole=True, optional=True)
        check_number("Pretraining.learning_rate", learning_rate, above=0, optional=True)
        check_number("Pretraining.value_coef", value_coef, lowest=0, optional=True)
        self.dataset, self.method, self.num_batches = dataset, method, num_batches
        self.batch_size, self.learning_rate = batch_size, learning_rate
        self.value_coef = VALUE_COEFS[method] if value_coef is None else value_coef
        self.agent_type = agent_type
        self.is_done = False
        self.run: Run
        self.settings: Settings  # those of the run
        self.trainer: PPOLearner

    def on_start(self, run: Run) -> None:
        """Look whether this goes with the run's agent, and prepare the dataset.

        Raises: ValueError if it does not.
        """
        if run.ctx.role.is_actor:
            return
        if not isinstance(run.policy, OnPolicyAgent):
            raise ValueError(
                f"Pretraining is for on-policy agents, but {type(run.policy).__name__} learns "
                "from stored trajectories itself. Fix: leave it out, and set "
                "Experiment.start_collecting_at_epoch."
            )
        assert isinstance(run, Settings)
        assert isinstance(run.trainer, PPOLearner)
        self.run, self.settings, self.trainer = run, run, run.trainer
        if self.trainer.reward_normalizer is not None and self.method == "bc" and self.value_coef:
            raise ValueError(
                f"Pretraining.value_coef is {self.value_coef}, but with PPOLearner.reward_normalizer the "
                "values of stored rewards have another scale than those of PPO. Fix: set "
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
        """Train if the run is at its beginning; a stop request leaves everything as it was before."""
        if run.ctx.role.is_actor or self.is_done or run.epoch > 0:
            return
        self.dataset.refresh()
        if not self.dataset.ready_for_training:
            where = self.dataset.save_new_trajs_to or ""
            raise ValueError(
                f"Pretraining.dataset, a {type(self.dataset).__name__}, has not enough trajectories to train "
                f"on {where}. Fix: name its folder, e.g. demos/DiskTrajDataset.dset_root and dset_name, or "
                "collect trajectories first."
            )
        run.ctx.status.state("learning")
        # Its own random numbers, so that the rest of the run does not depend on them.
        with isolated_rng(
            derive_seed(run.ctx.progress.seed, "pretraining", run.ctx.accelerator.process_index)
        ):
            self.is_done = self._train_or_undo()

    def state_dict(self) -> dict[str, Any]:
        """Whether it is done."""
        return {"is_done": self.is_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.is_done = bool(state["is_done"])

    def _train_or_undo(self) -> bool:
        """Train; False if a stop was asked for, which leaves the weights as they were, as an error does."""
        run = self.run
        before = plain_tensors(run.policy)
        try:
            figures = self._train()
            if not math.isfinite(figures["loss"]):
                raise FloatingPointError(
                    f"The loss of pre-training is {figures['loss']}. Fix: lower Pretraining.learning_rate, "
                    "or look for NaN in the data with loxodon data check."
                )
        except FloatingPointError:
            run.policy.load_state_dict(before)
            raise
        if run.ctx.stop_agreed():
            run.policy.load_state_dict(before)
            run.ctx.console.say("Stopped in pre-training, which begins again on resume.")
            return False
        run.log(figures, "pretrain")
        return True

    def _train(self) -> dict[str, float]:
        """Train, and hand over what an off-policy agent has learned; returns the figures of the stage."""
        run = self.run
        if self.method == "bc":
            demos = functools.partial(Demonstrations, estimate=self.trainer.advantage_estimator)
            before, agent = copy.deepcopy(run.learner.state_dict()), run.policy
            assert isinstance(agent, OnPolicyAgent)
            try:
                learner = self._learner(agent, run.learner.model, run.learner.optimizer)
                return self._updates(learner, demos, agent.after_imitation)
            finally:
                run.learner.load_state_dict(before)
                agent.eval()
        with self._offline_agent() as parts:
            figures = self._updates(self._learner(*parts), lambda batch: batch, lambda: None)
            if not run.ctx.stop_agreed():
                hand_over(parts[0], run.policy)
            return figures

    @contextlib.contextmanager
    def _offline_agent(self) -> Iterator[tuple[BaseAgent, nn.Module, Any]]:
        """An off-policy agent, model and optimizer; Accelerate prepares them, and forgets them afterwards."""
        run, settings, accelerator = self.run, self.settings, self.run.ctx.accelerator
        held = accelerator._models, accelerator._optimizers
        known = [list(things) for things in held]
        with isolated_rng(derive_seed(run.ctx.progress.seed, "offline agent")):  # alike in all processes
            agent = self.agent_type(
                run.obs_space,
                run.action_space,
                settings.tstep_encoder_type,
                settings.traj_encoder_type,
                settings.max_seq_len,
            )
        optimizer = make_optimizer(
            agent,
            agent.trainable_params(),
            learning_rate=settings.learning_rate,
            l2_coeff=settings.l2_coeff,
            fused=settings.mixed_precision != "fp16",
            lr_multipliers=None,
        )
        try:
            yield agent, *accelerator.prepare(agent, optimizer)
        finally:
            for things, before in zip(held, known, strict=True):
                things[:] = before

    def _learner(self, agent: Any, model: Any, optimizer: Any) -> Learner:
        """The run's learner with this stage's losses, without the hooks that are meant for PPO's batches."""

        def compute_loss(batch: Any, log_step: bool) -> dict[str, Any]:
            with self.run.caster():
                terms = model(batch, log_step)
            return masked_losses(batch, dataclasses.replace(terms, extra={}))  # which are for the run itself

        learner = Learner(
            agent,
            model,
            optimizer,
            self.run.ctx.accelerator,
            compute_loss=compute_loss,
            critic_loss_weight=self.value_coef,
            lr_warmup_steps=self.settings.lr_warmup_steps,
            grad_clip=self.settings.grad_clip,
            run_dir=self.run.ctx.run_dir,
        )
        learner.lr_scale = (self.learning_rate or self.settings.learning_rate) / learner.base_learning_rate
        return learner

    def _updates(
        self, learner: Learner, prepare: Callable[[Batch], Any], after_update: Callable[[], None]
    ) -> dict[str, float]:
        """All updates of the stage, or those until a stop request; returns the means of the last tenth."""
        run, group = self.run, self.settings.batches_per_update
        num_updates = max(1, self.num_batches // group)
        if run.test_run:
            num_updates = min(num_updates, _TEST_UPDATES)
        run.ctx.console.say(f"Pre-training ({self.method}): {num_updates:,} updates.")
        learner.agent.train()
        stops = StopWatch(run.ctx.stop.requested, run.ctx.accelerator)
        start_s = shown_s = time.perf_counter()
        seen = list[dict[str, Any]]()  # the losses of every update
        loader, micro_batches = self._loader(), list[Any]()
        try:
            for batch in loader.epoch(0, num_updates * group):
                micro_batches.append(prepare(batch))
                if len(micro_batches) < group:
                    continue
                logs = len(seen) % max(1, self.settings.log_interval // group) == 0
                metrics = log_figures(learner.update(micro_batches, logs))
                micro_batches = []
                after_update()
                seen.append({name: metrics[name] for name in _LOSSES})
                if logs:
                    run.log({**metrics, "updates": len(seen)}, "pretrain-update")
                if run.ctx.console.verbose and time.perf_counter() - shown_s > _SHOW_EVERY_S:
                    shown_s, loss = time.perf_counter(), float(metrics["loss"])
                    run.ctx.console.show(0, f"pre-training {len(seen):,}/{num_updates:,}", {"loss": loss})
                if stops.after_update():
                    break
        finally:
            loader.close()
            learner.agent.eval()
        last = seen[min(int(0.9 * num_updates), len(seen) - 1) :]
        own = {name: sum(float(one[name]) for one in last) / len(last) for name in _LOSSES}
        counts = {"first_loss": float(seen[0]["loss"]), "updates": float(len(seen))}
        figures = merge_metrics({**own, **counts}, 1.0, run.ctx.accelerator)
        run.ctx.console.say(f"Pre-training: loss {figures['first_loss']:.4g} -> {figures['loss']:.4g}.")
        return {**figures, "seconds": time.perf_counter() - start_s}

    def _loader(self) -> BatchLoader:
        of_run = self.settings.sequences_per_batch
        size = self.batch_size or of_run
        return BatchLoader(
            self.dataset,
            batch_size=size if not self.run.test_run else min(size, of_run),
            num_workers=self.settings.dloader_workers,
            seed=derive_seed(self.run.ctx.progress.seed, "pretraining loader"),
            rank=self.run.ctx.accelerator.process_index,
            pin_memory=self.run.DEVICE.type == "cuda",
            packs=self.settings.packed_batches,
        )


def hand_over(source: BaseAgent, target: nn.Module) -> None:
    """Copy encoders, and the policy where both heads are built alike; says what was copied.

    Raises: ValueError if nothing fits.
    """
    weights = {name: value for name, value in source.state_dict().items() if name.startswith(_ENCODERS)}
    weights |= _policy_weights(getattr(source, "actor", None), getattr(target, "policy_head", None))
    found = load_what_fits(target, weights, f"the {type(source).__name__} of pre-training")
    logger.info("Pre-training hands over %s.", found)


def _policy_weights(actor: Any, head: Any) -> dict[str, Tensor]:
    """The acting part of the actor (last discount) as a policy head; {} where that computes another."""
    if not isinstance(actor, Actor) or not isinstance(head, PolicyHead):
        return {}
    weights = {f"policy_head.{name}": value for name, value in actor.state_dict().items()}
    for name in ("policy_head.mlp.out.weight", "policy_head.mlp.out.bias"):
        weights[name] = weights[name][-actor.num_params :]
    own = {f"policy_head.{name}": value.shape for name, value in head.state_dict().items()}
    is_alike = (
        _factors(actor.distribution) == _factors(head.distribution)
        and actor.mlp.activation is head.mlp.activation
        and own == {name: value.shape for name, value in weights.items()}
    )
    return weights if is_alike else {}


def _factors(distribution: Any) -> Any:
    """Tells MultiCategorical types apart, of which every agent has its own."""
    return getattr(distribution, "nvec", None) or distribution
