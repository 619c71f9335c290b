"""Act with a trained policy. Neither the experiment nor its gin file is needed.

python examples/run.py --config ppo/cartpole       # a few seconds
python examples/act.py runs/ppo_cartpole           # plays CartPole-v1
python examples/act.py runs/mine Pendulum-v1       # a policy that was trained in another environment
"""

import sys

import gymnasium as gym

from loxodon.experiment import load_policy

run = sys.argv[1] if sys.argv[1:] else "runs/ppo_cartpole"
env_id = sys.argv[2] if sys.argv[2:] else "CartPole-v1"
policy, env = load_policy(run), gym.make(env_id)  # the best policy of the run
print(f"{run} plays {env_id}")
for episode in range(3):
    policy.reset()  # forget the previous episode
    obs, _ = env.reset(seed=episode)
    action, over, total = policy.act(obs), False, 0.0
    while not over:
        obs, reward, terminated, truncated, _ = env.step(action)
        over, total = terminated or truncated, total + float(reward)
        action = policy.act(obs, reward)  # the previous reward and action are inputs, too
    print(f"episode {episode}: return {total:g}")
