"""Acting with a trained policy: neither the experiment nor its gin file is needed.

python examples/run.py --config ppo/cartpole       # a few seconds
python examples/act.py runs/ppo_cartpole
"""

import sys

import gymnasium as gym

from loxodon.experiment import load_policy

policy = load_policy(sys.argv[1] if sys.argv[1:] else "runs/ppo_cartpole")  # its best policy
env = gym.make("CartPole-v1")
for episode in range(3):
    policy.reset()  # forget the episode before
    obs, _ = env.reset(seed=episode)
    action, over, total = policy.act(obs), False, 0.0
    while not over:
        obs, reward, terminated, truncated, _ = env.step(action)
        over, total = terminated or truncated, total + float(reward)
        action = policy.act(obs, reward)  # previous reward and action are inputs, too
    print(f"episode {episode}: return {total:g}")
