"""The stage before the first epoch: an on-policy agent learns from stored trajectories."""

from __future__ import annotations

import copy
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gin

from ..agents import Agent, BaseAgent, Demonstrations, OnPolicyAgent
from ..data import Batch, BatchLoader, RLDataset
from .building import layout_of
from .checkpoint.policy_file import plain_tensors
from .distributed import StopWatch, any_process, merge_metrics
from .learner import Learner, log_figures, make_optimizer, masked_losses
from .offline_agent import hand_over, offline_agent
from .param_groups import param_groups
from .pretraining_cache import digest_of, load_cached, store_cached
from .rng import derive_seed, isolated_rng

if TYPE_CHECKING:
    from .experiment import Experiment

logger = logging.getLogger("loxodon")
_METHODS = {"bc": 0.5, "off_policy": 10.0}  # with the default weight of the critic's loss
_TEST_UPDATES = 2
_SHOW_EVERY_S = 0.3


@gin.configurable
class Pretraining:
    """Trains the agent on stored trajectories, once, before the first epoch of `learn`.

    "bc" imitates the stored actions, and fits the value function to their returns as the run's
    `advantage_estimator` defines them: with GAE.lam < 1 they lean on the value function's own predictions, as
    they always do where a window ends without termination. "off_policy" trains an off-policy agent with the
    run's encoders and hands over its encoders, and its policy where both are built alike.

    Batches, precision, clipping, warm-up and accumulation are those of the run; the optimizer of PPO begins
    anew afterwards. With `Experiment.freeze` nothing is frozen yet. In gin: `Experiment.pretraining =
    @Pretraining`.

    Args:
        dataset: where windows come from; it is only read.
        method: "bc" or "off_policy".
        num_batches: of this stage, per process.
        batch_size: windows per batch and process; None for that of the run.
        learning_rate: None for that of the run.
        value_coef: weight of the critic's loss beside the actor's; None for 0.5 with "bc", 10 otherwise.
        agent_type: the agent of "off_policy".
        cache_dir: folder in which results are kept; a run with the same agent, data, seed and settings of
            this stage loads one instead. None for no cache.

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
        cache_dir: str | None = None,
    ) -> None:
        if not isinstance(dataset, RLDataset):
            raise TypeError(
                f"Pretraining.dataset is {dataset!r}, but must be a dataset. Fix: set Pretraining.dataset = "
                "@demos/DiskTrajDataset() and demos/DiskTrajDataset.dset_name."
            )
        if method not in _METHODS:
            raise ValueError(
                f"Pretraining.method is {method!r}; allowed are {', '.join(map(repr, _METHODS))}. Fix: set "
                "Pretraining.method = 'bc'."
            )
        if num_batches < 1 or (batch_size is not None and batch_size < 1):
            raise ValueError(
                f"Pretraining.num_batches is {num_batches} and batch_size {batch_size}, but both must be at "
                "least 1. Fix: set them so, or leave out Experiment.pretraining."
            )
        if (learning_rate is not None and learning_rate <= 0) or (value_coef is not None and value_coef < 0):
            raise ValueError(
                f"Pretraining.learning_rate is {learning_rate} and value_coef {value_coef}, but they must be "
                "above 0 and at least 0. Fix: set them so, or leave them out."
            )
        self.dataset, self.method, self.num_batches = dataset, method, num_batches
        self.batch_size, self.learning_rate = batch_size, learning_rate
        self.value_coef = _METHODS[method] if value_coef is None else value_coef
        self.agent_type = agent_type
        self.cache_dir = None if cache_dir is None else Path(cache_dir).expanduser()

    def settings(self) -> dict[str, Any]:
        """What decides the result beside agent, data and run; JSON-able."""
        names = ("method", "num_batches", "batch_size", "learning_rate", "value_coef")
        return {name: getattr(self, name) for name in names}


def prepare_pretraining(exp: Experiment) -> Pretraining | None:
    """Build the stage that `Experiment.pretraining` asks for, at the start of the run; None without.

    Raises: ValueError if it does not go with the run's agent.
    """
    if exp.pretraining is None or exp.mode == "collect":
        return None
    if not isinstance(exp.policy, OnPolicyAgent) or exp.on_policy is None:
        raise ValueError(
            f"Experiment.pretraining is for on-policy agents, but {type(exp.policy).__name__} learns from "
            "stored trajectories itself. Fix: leave it out, and set Experiment.start_collecting_at_epoch."
        )
    stage = exp.pretraining()
    if exp.on_policy.reward_normalizer is not None and stage.method == "bc" and stage.value_coef:
        raise ValueError(
            f"Pretraining.value_coef is {stage.value_coef}, but with PPOLearner.reward_normalizer the values "
            "of stored rewards have another scale than those of PPO. Fix: set Pretraining.value_coef = 0, or "
            "use PPOAgent.value_norm instead of the reward normaliser."
        )
    stage.dataset.configure(
        max_seq_len=exp.max_seq_len,
        padded_sampling=exp.padded_sampling,
        has_edit_rights=False,
        default_root=str(exp.run_dir.parent),
        default_name=exp.run_name,
    )
    stage.dataset.expect(layout_of(exp.obs_space, exp.action_space))
    return stage


def pretrain_if_due(exp: Experiment) -> None:
    """Run the stage if this run is at its beginning; a stop request leaves everything as it was before."""
    stage = exp.pretraining_stage
    if stage is None or exp.is_pretrained or exp.epoch > 0:
        return
    stage.dataset.refresh()
    if not stage.dataset.ready_for_training:
        where = stage.dataset.save_new_trajs_to or ""
        raise ValueError(
            f"Pretraining.dataset, a {type(stage.dataset).__name__}, has not enough trajectories to train on "
            f"{where}. Fix: name its folder, e.g. demos/DiskTrajDataset.dset_root and dset_name, or collect "
            "trajectories first."
        )
    exp.fleet.state("learning")
    # Its own random numbers: what follows is the same with a result from the cache.
    with isolated_rng(derive_seed(exp.run_seed, "pretraining", exp.accelerator.process_index)):
        exp.is_pretrained = _run(exp, stage)


def _run(exp: Experiment, stage: Pretraining) -> bool:
    """Load the result or train; False if a stop was asked for."""
    digest = None if exp.test_run or stage.cache_dir is None else digest_of(exp, stage)
    if digest is not None and stage.cache_dir is not None:
        path = stage.cache_dir / f"{digest}.safetensors"
        if not any_process(not load_cached(exp, path), exp.accelerator):
            exp.view.say(f"Pre-trained weights come from {path}.")
            return True
    before = plain_tensors(exp.policy)
    figures = _train(exp, stage)
    is_stopped = any_process(exp.stop.requested(), exp.accelerator)
    if is_stopped or not math.isfinite(figures.get("loss", 0.0)):
        exp.policy.load_state_dict(before)
    if is_stopped:
        exp.view.say("Stopped in pre-training, which begins again on resume.")
        return False
    if not math.isfinite(figures.get("loss", 0.0)):
        raise ValueError(
            f"The loss of pre-training is {figures['loss']}. Fix: lower Pretraining.learning_rate, or look "
            "for NaN in the data with python -m loxodon.data check."
        )
    exp.log(figures, "pretrain")
    if digest is not None and stage.cache_dir is not None:
        store_cached(exp, stage.cache_dir / f"{digest}.safetensors")
    return True


def _train(exp: Experiment, stage: Pretraining) -> dict[str, float]:
    """Train, and hand over what an off-policy agent has learned; returns the figures of the stage."""
    if stage.method == "bc":
        assert isinstance(exp.policy, OnPolicyAgent)
        assert exp.on_policy is not None
        demos = functools.partial(Demonstrations, estimate=exp.on_policy.advantage_estimator)
        learner = _learner(exp, stage, exp.policy, exp.model, exp.optimizer)
        before = copy.deepcopy(exp.learner.state_dict())
        try:
            return _updates(exp, stage, learner, demos, exp.policy.after_imitation)
        finally:
            exp.learner.load_state_dict(before)
            exp.policy.eval()
    seed = derive_seed(exp.run_seed, "offline agent")  # the same weights in all processes
    with offline_agent(exp, stage.agent_type, seed, functools.partial(_optimizer, exp)) as parts:
        learner = _learner(exp, stage, *parts)
        figures = _updates(exp, stage, learner, lambda batch: batch, lambda: None)
        if not any_process(exp.stop.requested(), exp.accelerator):
            hand_over(parts[0], exp.policy)
        return figures


def _optimizer(exp: Experiment, agent: BaseAgent) -> Any:
    params = param_groups(
        agent, agent.trainable_params(), learning_rate=exp.learning_rate, lr_multipliers=None
    )
    return make_optimizer(
        params,
        learning_rate=exp.learning_rate,
        l2_coeff=exp.l2_coeff,
        fused=exp.mixed_precision != "fp16",
        eps=exp.adam_eps,
    )


def _learner(exp: Experiment, stage: Pretraining, agent: Any, model: Any, optimizer: Any) -> Learner:
    """The run's learner with this stage's losses, and without the hooks that are meant for PPO's batches."""

    def compute_loss(batch: Any, log_step: bool) -> dict[str, Any]:
        with exp.caster():
            terms = model(batch, log_step)
        return masked_losses(batch, terms)

    learner = Learner(
        agent,
        model,
        optimizer,
        exp.accelerator,
        compute_loss=compute_loss,
        critic_loss_weight=stage.value_coef,
        lr_warmup_steps=exp.lr_warmup_steps,
        grad_clip=exp.grad_clip,
        bad_grad=exp.bad_grad,
    )
    learner.lr_scale = (stage.learning_rate or exp.learning_rate) / learner.base_learning_rate
    return learner


def _updates(
    exp: Experiment,
    stage: Pretraining,
    learner: Learner,
    prepare: Callable[[Batch], Any],
    after_update: Callable[[], None],
) -> dict[str, float]:
    """All updates of the stage, or those until a stop request; returns the means of the last tenth."""
    learner.agent.train()
    num_updates = max(1, stage.num_batches // exp.batches_per_update)
    if exp.test_run:
        num_updates = min(num_updates, _TEST_UPDATES)
    exp.view.say(f"Pre-training ({stage.method}): {num_updates:,} updates.")
    stops, start_s, shown_s = StopWatch(exp.stop.requested, exp.accelerator), time.perf_counter(), 0.0
    loader = _loader(exp, stage)
    last: dict[str, list[Any]] = {"loss": [], "actor_loss": [], "critic_loss": []}
    done = 0
    try:
        for batches in _grouped(
            loader.epoch(0, num_updates * exp.batches_per_update), exp.batches_per_update
        ):
            logs = done % max(1, exp.log_interval // exp.batches_per_update) == 0
            metrics = log_figures(learner.update([prepare(batch) for batch in batches], logs))
            after_update()
            done += 1
            if logs:
                exp.log({**metrics, "updates": done}, "pretrain-update")
            if done > 0.9 * num_updates or done == 1:
                for name, values in last.items():
                    values.append(metrics[name])
            if exp.view.verbose and time.perf_counter() - shown_s > _SHOW_EVERY_S:
                shown_s = time.perf_counter()
                exp.view.show(0, f"pre-training {done:,}/{num_updates:,}", {"loss": float(metrics["loss"])})
            if stops.after_update():
                break
    finally:
        loader.close()
        learner.agent.eval()
    own = {
        name: sum(map(float, values[1:] or values)) / len(values[1:] or values)
        for name, values in last.items()
    }
    first = {"first_loss": float(last["loss"][0]), "updates": float(done)}
    figures = merge_metrics({**own, **first}, 1.0, exp.accelerator)
    exp.view.say(f"Pre-training: loss {figures['first_loss']:.4g} -> {figures['loss']:.4g}.")
    return {**figures, "seconds": time.perf_counter() - start_s}


def _loader(exp: Experiment, stage: Pretraining) -> BatchLoader:
    return BatchLoader(
        stage.dataset,
        batch_size=min(stage.batch_size or exp.batch_size, exp.batch_size if exp.test_run else 2**31),
        num_workers=exp.dloader_workers,
        seed=derive_seed(exp.run_seed, "pretraining loader"),
        rank=exp.accelerator.process_index,
        pin_memory=exp.DEVICE.type == "cuda",
    )


def _grouped(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    group: list[Batch] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
