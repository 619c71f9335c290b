"""Atari games, with one grey image per decision."""

from __future__ import annotations

from typing import Any

import gin
import gymnasium as gym

from ..spec import EnvSpec


@gin.configurable
def atari_env(
    game: str = gin.REQUIRED,
    frame_skip: int = 4,
    sticky: float = 0.25,
    screen_size: int = 84,
    all_actions: bool = False,
) -> EnvSpec:
    """Recipe for an Atari game: observations (screen_size, screen_size, 1) uint8, rewards not clipped.

    An episode is a whole game, with all lives.

    Args:
        game: name in the Arcade Learning Environment, such as "Pong".
        frame_skip: number of frames for which an action is held; the image is the maximum of the last two.
        sticky: probability that a frame repeats the previous action instead.
        screen_size: height and width in pixels.
        all_actions: use all 18 actions instead of those that have an effect in the game.
    Source: Machado et al. 2018, arXiv:1709.06009, sections 2 and 5.
    """
    settings = {
        "game": game,
        "frame_skip": frame_skip,
        "sticky": sticky,
        "screen_size": screen_size,
        "all_actions": all_actions,
    }
    return EnvSpec(_atari_game, settings, env_name=game)


def _atari_game(
    game: str, frame_skip: int, sticky: float, screen_size: int, all_actions: bool
) -> gym.Env[Any, Any]:
    kwargs = {"frameskip": 1, "repeat_action_probability": sticky, "full_action_space": all_actions}
    return gym.wrappers.AtariPreprocessing(
        EnvSpec(f"ALE/{game}-v5", kwargs).build_raw(),
        noop_max=0,  # sticky actions already make games differ
        frame_skip=frame_skip,
        screen_size=screen_size,
        grayscale_newaxis=True,
    )
