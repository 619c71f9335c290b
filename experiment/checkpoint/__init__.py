"""Files that a run leaves on disk, to resume from or to act with.

store.py: the `ckpts` folder of a run, training states. policy_file.py: weights with a header. record.py: the
record of how a run was made. spaces.py: spaces of the environment. start_from.py: other runs to begin from.
load_policy.py: acting without the experiment.
"""
