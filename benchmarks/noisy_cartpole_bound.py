"""What can be had in NoisyPositionOnlyCartPoleEasy by one who knows its dynamics? Prints JSON.

    python benchmarks/noisy_cartpole_bound.py

A Kalman filter of the dynamics, linear around the upright pole, and the sign of a linear-quadratic
regulator's force, for every choice of its costs in a grid: the best of 1,000 episodes each, measured again in
20,000 new ones. Simulated in numpy with the equations of gymnasium's CartPole, 200 timesteps, positions with
noise of 0.1.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
EDGE, TILT, NOISE, STEPS = 2.4, np.radians(12.0), 0.1, 200
START_VARIANCE = 0.1**2 / 12  # states begin uniform in +-0.05
SEEN = np.eye(4)[[0, 2]]  # position and angle, of (position, velocity, angle, its velocity)


def step(state: Array, force: Array) -> Array:
    """States (N, 4) after forces (N,)."""
    _, velocity, angle, turning = state.T
    total = CART + POLE
    push = (force + POLE * HALF_LENGTH * turning**2 * np.sin(angle)) / total
    inertia = HALF_LENGTH * (4 / 3 - POLE * np.cos(angle) ** 2 / total)
    turn = (GRAVITY * np.sin(angle) - np.cos(angle) * push) / inertia
    speedup = push - POLE * HALF_LENGTH * turn * np.cos(angle) / total
    change = np.stack([velocity, speedup, turning, turn], axis=1)
    return state + SECONDS * change


def linear() -> tuple[Array, Array]:
    """Matrices (4, 4) and (4, 1) of the dynamics around zero, by central differences."""
    tiny, none = 1e-5, np.zeros(4)
    by_state = (step(np.eye(4) * tiny, none) - step(-np.eye(4) * tiny, none)) / (2 * tiny)
    force = np.array([tiny])
    by_force = (step(np.zeros((1, 4)), force) - step(np.zeros((1, 4)), -force)) / (2 * tiny)
    return by_state.T, by_force.T


def regulator(costs: tuple[float, ...], force_cost: float) -> Array:
    """Gains (1, 4) of the regulator with these costs of states, and of the force."""
    a, b = linear()
    cost, value = np.diag(costs), np.diag(costs)
    for _ in range(3_000):  # iterations of Riccati's equation, far beyond convergence
        gains = np.linalg.solve(force_cost + b.T @ value @ b, b.T @ value @ a)
        value = cost + a.T @ value @ (a - b @ gains)
    return gains


def play(gains: Array, episodes: int, seed: int) -> float:
    """Mean return of episodes: the share of their 200 timesteps that they last."""
    rng, (a, _) = np.random.default_rng(seed), linear()
    state = rng.uniform(-0.05, 0.05, (episodes, 4))
    believed, variance = np.zeros((episodes, 4)), np.eye(4) * START_VARIANCE
    going_on, lasted = np.ones(episodes, bool), np.zeros(episodes)
    for _ in range(STEPS):
        seen = state @ SEEN.T + rng.normal(0.0, NOISE, (episodes, 2))
        trust = variance @ SEEN.T @ np.linalg.inv(SEEN @ variance @ SEEN.T + np.eye(2) * NOISE**2)
        believed = believed + (seen - believed @ SEEN.T) @ trust.T
        force = np.where(believed @ gains[0] < 0, FORCE, -FORCE)
        state, believed = step(state, force), step(believed, force)
        variance = a @ (variance - trust @ SEEN @ variance) @ a.T + np.eye(4) * 1e-6
        lasted += going_on
        going_on &= (np.abs(state[:, 0]) < EDGE) & (np.abs(state[:, 2]) < TILT)
    return float(lasted.mean() / STEPS)


def main() -> None:
    """Search, measure again, print."""
    grid = itertools.product(
        (0.001, 0.003, 0.01, 0.03), (0.003, 0.01, 0.03, 0.1), (10.0,), (0.03, 0.1, 0.3), (1e-3, 1e-2)
    )
    gains = {costs: regulator(costs[:4], costs[4]) for costs in grid}
    returns = {costs: play(found, 1_000, seed=0) for costs, found in gains.items()}
    best = max(returns, key=returns.__getitem__)
    quartiles = np.quantile(list(returns.values()), (0.25, 0.5, 0.75)).round(4).tolist()
    found = {
        "best": round(play(gains[best], 20_000, seed=1), 4),
        "costs": best,
        "quartiles_of_grid": quartiles,
    }
    print(json.dumps({"known dynamics": found}))


if __name__ == "__main__":
    main()
