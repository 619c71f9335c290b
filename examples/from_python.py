"""An experiment from Python or a notebook: the settings of a preset, with keyword arguments on top.

python examples/from_python.py 40          # epochs
"""

import sys
from functools import partial

from loxodon.envs import EnvSpec
from loxodon.experiment import Experiment
from loxodon.experiment.config import load_config
from loxodon.nets import FFTstepEncoder

load_config(["ppo/cartpole"])  # the settings that the arguments below leave open
experiment = Experiment(  # type: ignore[call-arg]  # the preset has the others
    run_name="from-python",
    make_train_env="CartPole-v1",  # an id, a class, or a recipe with arguments
    make_val_env=EnvSpec("CartPole-v1", {"max_episode_steps": 200}),
    tstep_encoder_type=partial(FFTstepEncoder, d_hidden=128),  # types; `partial` holds their settings
    val_timesteps_per_epoch=400,
    stop_at_val_return=None,
    epochs=int(sys.argv[1]) if sys.argv[1:] else 40,
    verbose=False,
)
experiment.start()
for metrics in experiment.learn_iter():  # or experiment.learn()
    if "val/return" in metrics:
        print(f"after {metrics['val/after_env_steps']:6,d} env steps  {metrics['val/return']:6.1f}")
print(f"at the end             {experiment.last_val_metrics['val/return']:6.1f}")
experiment.close()
