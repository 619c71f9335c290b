"""Subclasses of Experiment written for AMAGO: signatures, shapes, and what masks do to gradients."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from loxodon.data import Batch, BatchLoader, RLDataset, pad_batch
from loxodon.envs import EnvSpec
from loxodon.experiment import Experiment

from .fakes import CountingEnv, TinyAgent, learning, make_experiment, metrics, run
from .test_learner import TRAJECTORIES, Picky

B, C, G = 4, 3, 2  # the sizes of fakes.TinyAgent and its batches


class AsForAmago(Experiment):
    """Overrides every hook and calls the base class."""

    def note(self, name: str) -> None:
        self.__dict__.setdefault("calls", Counter())[name] += 1

    def init_dsets(self) -> Any:
        self.note("init_dsets")
        out = super().init_dsets()
        assert isinstance(out, RLDataset)
        return out

    def init_envs(self) -> Any:
        self.note("init_envs")
        return super().init_envs() + " of mine"

    def init_dloaders(self) -> Any:
        self.note("init_dloaders")
        out = super().init_dloaders()
        assert isinstance(out, BatchLoader)
        return out

    def summary(self, env_summary: str) -> None:
        self.note("summary")
        assert env_summary == "3 x sync of mine"
        assert super().summary(env_summary) is None  # type: ignore[func-returns-value]

    def interact(self, envs: Any, timesteps: int, hidden_state: Any = None, **kwargs: Any) -> Any:
        self.note("interact")
        hidden_state, (returns, specials) = super().interact(envs, timesteps, hidden_state, **kwargs)
        assert hidden_state.shape == (3,)
        return hidden_state, (returns, specials)

    def policy_metrics(self, returns: Any, specials: Any) -> dict[str, float]:
        self.note("policy_metrics")
        scores, successes = [], []
        for ret, spe in zip(returns, specials, strict=True):
            for env_name, values in ret.data.items():
                scores.extend(values)
                successes.extend(spe.data[env_name]["success"])
        assert len(scores) == len(successes) == 9  # in 3 envs, episodes begin at steps 0, 5 and 10 of 12
        return super().policy_metrics(returns, specials=specials) | {"best": max(scores)}

    def edit_actor_mask(self, batch: Batch, actor_loss: Tensor, pad_mask: Tensor) -> Tensor:
        self.note("edit_actor_mask")
        length = batch.actions.shape[1]
        assert actor_loss.shape == pad_mask.shape == (B, length, G, 1)
        assert torch.equal(pad_mask, batch.mask[:, :, None].expand(B, length, G, 1))
        assert not actor_loss.requires_grad
        pad_mask[:, 3:] = False  # in place
        return pad_mask

    def edit_critic_mask(self, batch: Batch, critic_loss: Tensor, pad_mask: Tensor) -> Tensor:
        self.note("edit_critic_mask")
        length = batch.actions.shape[1]
        assert critic_loss.shape == pad_mask.shape == (B, length, C, G, 1)
        assert torch.equal(pad_mask, batch.mask[:, :, None, None].expand(B, length, C, G, 1))
        return pad_mask & (critic_loss < 2.0)

    def compute_loss(self, batch: Batch, log_step: bool) -> dict[str, Any]:
        self.note("compute_loss")
        losses = super().compute_loss(batch, log_step=log_step)
        assert losses["Actor Loss"].shape == losses["Critic Loss"].shape == ()
        losses["Mine"] = self.policy.actor.weight.square().mean()
        losses["Actor Loss"] = losses["Actor Loss"] + 0.1 * losses["Mine"]
        return losses

    def train_step(self, batch: Any, log_step: bool) -> dict[str, Any]:
        self.note("train_step")
        losses = super().train_step(batch, log_step)
        torch.testing.assert_close(losses["Loss"], losses["Actor Loss"] + 10.0 * losses["Critic Loss"])
        losses["mine_too"] = 2.0
        return losses


def test_a_subclass_written_for_amago_runs(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path, AsForAmago, log_interval=2))
    updates = 2 * 4
    assert exp.__dict__["calls"] == {
        **{name: 1 for name in ("init_dsets", "init_envs", "init_dloaders", "summary")},
        **{name: 3 for name in ("interact", "policy_metrics")},  # two epochs and the end
        **{name: updates for name in ("edit_actor_mask", "edit_critic_mask", "compute_loss", "train_step")},
    }
    found = {name for one in metrics(exp.run_dir) for name in one}
    assert {"val/best", "val/return", "train-update/Mine", "train-update/mine_too", "train/loss"} <= found
    assert not {name for name in found if "Loss" in name or "Mask" in name}


class Told(TinyAgent):
    """Records every notification of a loaded checkpoint, with one weight at that time."""

    def on_checkpoint_loaded(self, is_resume: bool) -> None:
        self.__dict__.setdefault("told", []).append((is_resume, self.actor.bias[0].item()))


def test_an_agent_is_notified_of_every_loaded_checkpoint(tmp_path: Path) -> None:
    settings = {"agent_type": Told}
    exp = run(make_experiment(tmp_path, **settings))
    assert "told" not in exp.policy.__dict__
    weight, state = exp.policy.actor.bias[0].item(), exp.checkpoints.state_dir(1)
    new = make_experiment(tmp_path, run_name="new", restore_from=str(state / "model.safetensors"), **settings)
    new.start()
    new.load_checkpoint_from_path(state)
    new.load_checkpoint_from_path(state / "model.safetensors")
    new.close()
    assert new.policy.__dict__["told"] == [(False, weight), (True, weight), (False, weight)]
    warm = make_experiment(tmp_path, run_name="warm", **{**settings, "WarmStart.source": str(state)})
    actor = make_experiment(tmp_path, mode="collect", **settings)
    for one in (warm, actor):
        one.start()
        one.read_latest_policy()
        one.read_latest_policy()  # there is no newer policy
        one.close()
        assert one.policy.__dict__["told"] == [(False, weight)]


def test_with_accumulation_an_update_is_one_step_on_a_list_of_batches(tmp_path: Path) -> None:
    steps: list[list[int]] = []

    class Watching(Experiment):
        def train_step(self, batch: Any, log_step: bool) -> dict[str, Any]:
            steps.append([type(one) is Batch for one in batch])
            return super().train_step(batch, log_step)

    exp = run(make_experiment(tmp_path, Watching, epochs=1, batches_per_update=3))
    assert steps == [[True] * 3, [True]]  # four batches
    assert exp.learner.gradient_steps == 2


@pytest.mark.parametrize("wrong", ["shape", "dtype"])
def test_a_mask_must_keep_its_shape_and_dtype(tmp_path: Path, wrong: str) -> None:
    class Wrong(Experiment):
        def edit_critic_mask(self, batch: Any, critic_loss: Tensor, pad_mask: Tensor) -> Tensor:
            return batch.mask if wrong == "shape" else pad_mask.float()  # type: ignore[no-any-return]

    exp = learning(tmp_path, Wrong)
    with pytest.raises(ValueError, match=r"edit_critic_mask returned .*torch.bool \(4, 8, 3, 2, 1\).*Fix:"):
        exp.train_step(pad_batch(TRAJECTORIES))


# --- masks and gradients --------------------------------------------------------------------------------


class Pushing(CountingEnv):
    """Continuous actions, so that losses are drawn at random."""

    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)


def test_masks_per_critic_and_discount_stop_only_the_matching_gradients(tmp_path: Path) -> None:
    class Masked(Experiment):
        def edit_actor_mask(self, batch: Any, actor_loss: Tensor, pad_mask: Tensor) -> Tensor:
            pad_mask[:, :, 0] = False  # the first discount
            return pad_mask

        def edit_critic_mask(self, batch: Any, critic_loss: Tensor, pad_mask: Tensor) -> Tensor:
            pad_mask[:, :, 1] = False  # the second critic
            pad_mask[:, :, 2, 1] = False  # the second discount of the third critic
            return pad_mask

    exp = learning(tmp_path, Masked)
    losses = exp.compute_loss(pad_batch(TRAJECTORIES), log_step=False)
    (losses["Actor Loss"] + losses["Critic Loss"]).backward()
    critics, actor = exp.policy.critics.out.bias.grad, exp.policy.actor.mlp.out.bias.grad
    assert (critics.view(3, 2, 3).abs().sum(-1) > 0).tolist() == [[True, True], [False, False], [True, False]]
    assert (actor.view(2, 3).abs().sum(-1) > 0).tolist() == [False, True]


def test_counting_in_advance_sees_the_losses_of_the_update_and_leaves_no_trace(tmp_path: Path) -> None:
    """Losses draw random numbers, and masks of several micro-batches are computed twice."""
    seen: list[Tensor] = []

    class Watching(Picky):
        def edit_critic_mask(self, batch: Any, critic_loss: Tensor, pad_mask: Tensor) -> Tensor:
            seen.append(critic_loss.clone())
            return super().edit_critic_mask(batch, critic_loss, pad_mask)

    trajs = [
        replace(traj, actions=np.tanh(traj.rl2s[1:, 1:3]), rl2s=traj.rl2s[:, :3]) for traj in TRAJECTORIES[:2]
    ]
    states = []
    for i, kind in enumerate((Watching, Experiment)):
        exp = learning(tmp_path / str(i), kind, make_train_env=EnvSpec(Pushing))
        torch.manual_seed(1)
        exp.train_step([pad_batch([t]) for t in trajs])
        states.append((torch.get_rng_state(), exp.policy.tstep_encoder.input_norm.state_dict()))
    assert len(seen) == 4
    for ahead, then in zip(seen[:2], seen[2:], strict=True):
        torch.testing.assert_close(ahead, then, rtol=0, atol=0)
    torch.testing.assert_close(*states)
