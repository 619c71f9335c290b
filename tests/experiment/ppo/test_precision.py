"""Updates in several parts, in bfloat16, and with gradients that are not finite."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from loxodon.agents import GAE, AdvantageNorm, PPOAgent, PPOLoss
from loxodon.data import DoNothingDataset
from loxodon.envs import EnvSpec
from loxodon.experiment import Experiment
from loxodon.experiment.distributed import merged
from loxodon.experiment.ppo import sequences
from loxodon.experiment.ppo.trainer import mean_kl
from loxodon.nets import FFTstepEncoder, GRUTrajEncoder, IdentityTrajEncoder, TransformerTrajEncoder

from ...rounding import assert_equal_but_for_rounding
from ..fakes import make_experiment
from .rollouts import RandomLengths, make_agent, make_collector, make_learner

ENCODERS: dict[str, Any] = {
    "ff": IdentityTrajEncoder,
    "gru": partial(GRUTrajEncoder, d_hidden=16, d_output=16),
    "transformer": partial(
        TransformerTrajEncoder, d_model=16, n_heads=2, d_ff=32, n_layers=1, dropout_ff=0.0, dropout_emb=0.0
    ),
}


@pytest.mark.parametrize("mode", ["batch", "minibatch"])
@pytest.mark.parametrize("encoder", ["ff", "gru"])
def test_a_minibatch_in_parts_gives_the_update_of_the_whole(encoder: str, mode: str) -> None:
    weights = []
    for parts in (1, 3):
        agent = make_agent(ENCODERS[encoder], normalize_inputs=True, value_norm="popart")
        norm = partial(AdvantageNorm, mode=mode)
        learner = make_learner(agent, 8, 4, batches_per_update=parts, advantage_norm=norm)
        collector = make_collector(agent, learner)
        learner.learner.lr_scale = 0.1
        collector.restart(seed=3)
        torch.manual_seed(1)
        for epoch in range(2):
            collector.collect(8)
            figures = learner.learn_from_rollout(epoch)
        assert learner.learner.gradient_steps == figures["updates"] * 2 == 16
        weights.append(agent.state_dict())
    for name, value in weights[0].items():
        assert_equal_but_for_rounding(weights[1][name], value, 256 * 4 * 8 * 16, name)  # of 16 updates


def test_a_process_with_too_few_sequences_reads_one_without_loss() -> None:
    agent = make_agent()
    learner = make_learner(agent, 8, 1, chunk_len=4)
    collector = make_collector(agent, learner, num_envs=1, longest=30)
    collector.collect(8)
    tensors = sequences.RolloutTensors(
        learner.buffers[0].read(), np.zeros((8, 1, 3), np.float32), torch.device("cpu")
    )
    pieces = learner._pieces(tensors)
    groups = sequences.shuffled_minibatches(pieces, len(pieces) + 2, np.random.default_rng(0))
    masks = [tensors.gather(tensors.places(group), {}).mask for group in groups]
    assert [bool(mask.any()) for mask in masks] == [True] * len(pieces) + [False, False]
    assert sum(int(mask.sum()) for mask in masks) == 8
    with pytest.raises(ValueError, match="The rollout has no step"):
        sequences.shuffled_minibatches(pieces.take(np.arange(0)), 2, np.random.default_rng(0))


def test_episodes_that_were_broken_off_do_not_reach_the_reward_normaliser() -> None:
    agent = make_agent(IdentityTrajEncoder)
    seen: list[Tensor | None] = []

    class Recording:
        def __init__(self) -> None:
            self.carried = False

        def restart(self) -> None:
            self.carried = False

        def __call__(self, rewards: Tensor, ended: Tensor, mask: Tensor) -> Tensor:
            seen.append(self.carried)
            self.carried = True
            return rewards

    learner = make_learner(agent, 4, 2, reward_normalizer=Recording)
    collector = make_collector(agent, learner, num_envs=2, longest=500)
    for epoch in range(3):
        if epoch == 2:
            collector.restart(seed=5)
        collector.collect(4)
        learner.learn_from_rollout(epoch)
    assert seen == [False, True, False]


def make_run(folder: Path, encoder: str, is_discrete: bool = True, **changes: Any) -> Experiment:
    """A started run of PPO in a single process."""
    settings: dict[str, Any] = {
        "agent_type": PPOAgent,
        "dataset": DoNothingDataset(),
        "tstep_encoder_type": partial(FFTstepEncoder, d_hidden=16, d_output=16),
        "traj_encoder_type": ENCODERS[encoder],
        "make_train_env": EnvSpec(RandomLengths, {"is_discrete": is_discrete}),
        "val_timesteps_per_epoch": 0,
        "train_timesteps_per_epoch": 8,
        "exploration_wrapper_type": None,
        "learning_rate": 1e-3,
        "epochs": 3,
        "parallel_actors": 4,
    }
    exp = make_experiment(folder, **{**settings, **changes})
    exp.start()
    return exp


@pytest.fixture
def float32_only() -> Any:
    """Fails when what PPO compares and divides comes in another precision."""
    actor, critic, ratio, gae = PPOLoss.actor, PPOLoss.critic, PPOLoss.log_ratio, GAE.__call__
    calls = []

    def checked(inner: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            found = inner(self, *args)
            every = [*args, *(found if isinstance(found, tuple) else (found,))]
            kinds = {x.dtype for x in every if isinstance(x, Tensor) and x.is_floating_point()}
            assert kinds == {torch.float32}
            calls.append(inner)
            return found

        return call

    with (
        mock.patch.object(PPOLoss, "actor", checked(actor)),
        mock.patch.object(PPOLoss, "critic", checked(critic)),
        mock.patch.object(PPOLoss, "log_ratio", checked(ratio)),
        mock.patch.object(GAE, "__call__", checked(gae)),
    ):
        yield
    assert set(calls) == {actor, critic, ratio, gae}


@pytest.mark.usefixtures("float32_only")
@pytest.mark.parametrize("is_discrete", [True, False])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_bfloat16_keeps_ratios_and_losses_in_float32(tmp_path: Path, encoder: str, is_discrete: bool) -> None:
    exp = make_run(tmp_path, encoder, is_discrete, mixed_precision="bf16")
    figures: list[dict[str, float]] = []
    log = exp.log
    exp.log = lambda values, *args: (figures.append(dict(values)), log(values, *args))[1]  # type: ignore[method-assign]
    exp.learn()
    found = [one for one in figures if "ppo/loss" in one]
    assert len(found) == 3
    for one in found:
        assert 0.0 <= one["ppo/initial_logratio_abs_max"] < one["ppo/initial_logratio_rounding_max"]
        assert np.isfinite([one["ppo/loss"], one["ppo/grad_norm"], one["ppo/kl"]]).all()
        assert one["ppo/skipped_updates"] == 0
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in exp.policy.parameters())
    exp.close()


def test_figures_of_updates_are_means_or_extremes() -> None:
    names = ("kl", "ratio_min", "ratio_max")
    updates = [{name: torch.tensor(value) for name in names} for value in (1.0, 4.0, 1.0)]
    updates.append({"kl": torch.tensor(6.0, dtype=torch.float64)})
    assert merged([(update, 1.0) for update in updates]) == {"kl": 3.0, "ratio_min": 1.0, "ratio_max": 4.0}
    assert mean_kl([(1.0, 3.0), (float("nan"), 5.0), (3.0, 1.0)]) == 1.5
    assert mean_kl([]) == 0.0


@pytest.mark.parametrize("bad_grad", [None, "skip"])
def test_losses_that_are_nan_stop_the_run_or_are_left_out(tmp_path: Path, bad_grad: str | None) -> None:
    exp = make_run(tmp_path, "ff", **{"Learner.bad_grad": bad_grad}, epochs=1)
    spoils = [True] * 3 + [False] * 13
    compute_loss = exp.learner.compute_loss

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        found = compute_loss(*args, **kwargs)
        return {**found, "Actor Loss": found["Actor Loss"] * torch.nan} if spoils.pop(0) else found

    exp.learner.compute_loss = spoilt
    if bad_grad is None:
        with pytest.raises(ValueError, match="The loss of epoch 0 is nan"):
            exp.learn()
    else:
        exp.learn()
        lines = (Path(exp.run_dir) / "logs" / "metrics.jsonl").read_text().splitlines()
        (record,) = [one for one in map(json.loads, lines) if "ppo/loss" in one]
        assert (record["ppo/skipped_updates"], record["ppo/updates"]) == (3, 13)
        assert np.isfinite([record["ppo/loss"], record["ppo/kl_last"]]).all()
        assert all(p.isfinite().all() for p in exp.policy.parameters())
    exp.close()
