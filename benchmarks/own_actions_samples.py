"""How well a number of timesteps of random play can teach not to repeat an action. Prints JSON.

    python benchmarks/own_actions_samples.py --timesteps 20000 50000 100000

Random play of POPGym's BattleshipEasy is stored, models learn to predict the reward of the action taken, and
their best actions are then played. Rewards are mostly chance: whether an action is new explains 8 % of their
variance. Models:

- shared: a mean reward of new and one of repeated actions, for all 64 actions together
- own: these two means for each action
- linear: for each action, ridge regression on the set of actions taken; the best of four penalties
- gru: the encoder of the general preset with a GRU and an MLP, which has to find the set by itself; 37 passes
  over the data. Its loss is that of the last tenth of updates over the variance of rewards. The best possible
  loss is 0.92, and less means that chance is memorised.

`--symmetries` fits only the GRU, and renumbers the actions of each episode at random in every update: which
of them repeat others stays the same, but an episode cannot be recognised by its actions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import popgym  # noqa: F401  registers its tasks
import torch
from own_actions_probe import ACTIONS, BATCH, ENCODERS, LENGTH, OBS, WIDTH
from torch import Tensor, nn
from torch.nn import functional as F

from loxodon.nets import MLP, FFTstepEncoder

ENV_ID, SIDE, PASSES, WARM_UP, EPISODES = "popgym-BattleshipEasy-v0", 8, 37, 100, 72
PENALTIES = (1.0, 10.0, 100.0, 1000.0)
Policy = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass
class Episodes:
    """E episodes; all arrays are (E, 64), with rewards of 0 after all ships were hit."""

    actions: np.ndarray
    rewards: np.ndarray

    @property
    def taken(self) -> np.ndarray:
        """(E, 64, 64) bool, the actions taken before each timestep."""
        shown = np.eye(ACTIONS, dtype=bool)[self.actions]
        earlier = np.concatenate([np.zeros_like(shown[:, :1]), shown[:, :-1]], axis=1)
        found: np.ndarray = np.logical_or.accumulate(earlier, axis=1)
        return found


def play(num_episodes: int, policy: Policy, seed: int) -> Episodes:
    """Play episodes; policy: (E, t) actions and rewards so far and (E, 64) actions taken -> (E,) actions."""
    envs = [gym.make(ENV_ID) for _ in range(num_episodes)]
    for i, env in enumerate(envs):
        env.reset(seed=seed + i)
    actions = np.zeros((num_episodes, LENGTH), np.int64)
    rewards = np.zeros((num_episodes, LENGTH), np.float32)
    taken, over = np.zeros((num_episodes, ACTIONS), bool), np.zeros(num_episodes, bool)
    for t in range(LENGTH):
        chosen = policy(actions[:, :t], rewards[:, :t], taken)
        actions[:, t] = chosen
        for i in np.flatnonzero(~over).tolist():
            _, rewards[i, t], over[i], _, _ = envs[i].step(np.array([chosen[i] // SIDE, chosen[i] % SIDE]))
        taken[np.arange(num_episodes), chosen] = True
    return Episodes(actions, rewards)


def mean_return(values: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]) -> float:
    """Mean return of playing the action with the highest of values (E, 64)."""
    found = play(EPISODES, lambda *seen: values(*seen).argmax(-1), seed=10**6)
    return round(float(found.rewards.sum(1).mean()), 3)


def means(data: Episodes, by_action: bool) -> float:
    """Return of play by mean rewards of new and of repeated actions."""
    is_repeated = np.take_along_axis(data.taken, data.actions[..., None], axis=-1)[..., 0]
    table = np.zeros((2, ACTIONS))
    for repeated in (0, 1):
        for action in range(ACTIONS):
            counts = (is_repeated == repeated) & ((data.actions == action) | (not by_action))
            table[repeated, action] = data.rewards[counts].mean()
    return mean_return(lambda _actions, _rewards, taken: np.where(taken, table[1], table[0]))


def linear(data: Episodes) -> float:
    """Return of play by ridge regressions, one per action, on the set of actions taken."""
    taken, actions, rewards = data.taken.reshape(-1, ACTIONS), data.actions.ravel(), data.rewards.ravel()
    center = taken.mean(0)
    best = -np.inf
    for penalty in PENALTIES:
        weights = np.zeros((ACTIONS, 1 + ACTIONS))
        for action in range(ACTIONS):
            rows = actions == action
            x = np.c_[np.ones(rows.sum()), taken[rows] - center]
            shrink = penalty * np.diag([0.0] + [1.0] * ACTIONS)
            weights[action] = np.linalg.solve(x.T @ x + shrink, x.T @ rewards[rows])

        def values(_a: np.ndarray, _r: np.ndarray, taken: np.ndarray, w: np.ndarray = weights) -> np.ndarray:
            found: np.ndarray = w[:, 0] + (taken - center) @ w[:, 1:].T
            return found

        best = max(best, mean_return(values))
    return best


class Network(nn.Module):
    """Predicts the reward of each action, (B, L, 64), from previous actions and rewards."""

    def __init__(self) -> None:
        super().__init__()
        self.into = FFTstepEncoder(OBS, 1 + ACTIONS, rl2_gain=0.1)
        self.memory = ENCODERS["gru"](self.into.emb_dim, LENGTH)
        self.out = MLP(self.memory.emb_dim, 2 * WIDTH, ACTIONS, 2, "leaky_relu")

    def forward(self, actions: Tensor, rewards: Tensor) -> Tensor:
        """actions, rewards: (B, L-1), those before timesteps 1 to L-1."""
        steps = torch.cat([rewards[..., None], F.one_hot(actions, ACTIONS)], dim=-1)
        rl2s = F.pad(steps, (0, 0, 1, 0))
        times = torch.arange(rl2s.shape[1]).expand(len(rl2s), -1)[..., None]
        obs = {"observation": (rl2s[..., :1] > 0.0).long()}
        mask = torch.ones_like(times, dtype=torch.bool) if self.training else None
        found: Tensor = self.out(self.memory(self.into(obs, rl2s, times, mask), times)[0])
        return found


def network(data: Episodes, seed: int, permutes: bool) -> dict[str, float]:
    """Return of play by a network, and its loss in the last tenth of its updates."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = Network().train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=1e-3)
    actions, rewards = torch.from_numpy(data.actions), torch.from_numpy(data.rewards)
    scale, losses = rewards.std(), []
    for update in range(1, PASSES * len(actions) // BATCH + 1):
        rows = torch.from_numpy(rng.integers(len(actions), size=BATCH))
        shown, targets = actions[rows], rewards[rows]
        if permutes:
            order = torch.from_numpy(rng.permuted(np.tile(np.arange(ACTIONS), (BATCH, 1)), axis=1))
            shown = order.gather(1, shown)
        found = model(shown[:, :-1], targets[:, :-1]).gather(-1, shown[..., None])[..., 0]
        loss = ((found - targets / scale) ** 2).mean()
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, update / WARM_UP)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if model.into.input_norm is not None:
            model.into.input_norm.commit()
        losses.append(loss.item())
    model.eval()

    @torch.no_grad()
    def values(actions: np.ndarray, rewards: np.ndarray, _taken: np.ndarray) -> np.ndarray:
        found: np.ndarray = model(torch.from_numpy(actions), torch.from_numpy(rewards))[:, -1].numpy()
        return found

    last = losses[-len(losses) // 10 :]
    return {"return": mean_return(values), "loss": round(float(np.mean(last)), 3)}


def main() -> None:
    """Fit all models to each number of timesteps and print one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--timesteps", type=int, nargs="+", default=[20_000, 50_000, 100_000])
    parser.add_argument("--symmetries", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(args.seed)

    def at_random(actions: np.ndarray, _rewards: np.ndarray, _taken: np.ndarray) -> np.ndarray:
        found: np.ndarray = rng.integers(ACTIONS, size=len(actions))
        return found

    everything = play(max(args.timesteps) // LENGTH, at_random, seed=0)
    found: list[dict[str, Any]] = []
    for timesteps in args.timesteps:
        size = timesteps // LENGTH
        data = Episodes(everything.actions[:size], everything.rewards[:size])
        row: dict[str, Any] = {"timesteps": timesteps}
        if not args.symmetries:
            row |= {"shared": means(data, False), "own": means(data, True), "linear": linear(data)}
        row["gru"] = network(data, args.seed, args.symmetries)
        found.append(row)
    random_play = round(float(everything.rewards.sum(1).mean()), 3)
    options = {"seed": args.seed, "symmetries": args.symmetries}
    print(json.dumps({"env": ENV_ID, "random_play": random_play, **options, "results": found}, indent=1))


if __name__ == "__main__":
    main()
