"""An experiment from Python, or in a notebook: no gin file; settings are keyword arguments.

python examples/from_python.py 40          # epochs
"""

import sys
from functools import partial

from loxodon.agents import PPOAgent
from loxodon.data import DoNothingDataset
from loxodon.envs import EnvSpec
from loxodon.experiment import Experiment
from loxodon.nets import FFTstepEncoder, IdentityTrajEncoder

experiment = Experiment(
    run_name="from-python",
    ckpt_base_dir="runs",
    make_train_env="CartPole-v1",  # an id, a class, or a recipe with arguments
    make_val_env=EnvSpec("CartPole-v1", {"max_episode_steps": 200}),
    tstep_encoder_type=partial(FFTstepEncoder, d_hidden=64, d_output=64),  # types; partial has the settings
    traj_encoder_type=IdentityTrajEncoder,  # no memory
    agent_type=partial(PPOAgent, share_encoder=False),
    dataset=DoNothingDataset(),  # PPO keeps no files
    max_seq_len=128,
    train_timesteps_per_epoch=128,  # per environment
    val_timesteps_per_epoch=400,
    val_interval=10,
    epochs=int(sys.argv[1]) if sys.argv[1:] else 40,
    learning_rate=1e-3,
    env_mode="sync",
    exploration_wrapper_type=None,
    sample_actions_val=False,
    verbose=False,
)
experiment.start()
for figures in experiment.learn_iter():  # or experiment.learn()
    if "val/return" in figures:
        print(
            f"epoch {experiment.epoch:3d}  env steps {experiment.env_steps:6d}  {figures['val/return']:6.1f}"
        )
experiment.close()
