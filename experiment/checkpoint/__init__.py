"""What a run leaves on disk to go on from or to act with.

store.py: the `ckpts` folder of a run, training states. policy_file.py: weights with a header. record.py: what
a run was made with. spaces.py: those of the environment. start_from.py: other runs to begin from.
load_policy.py: acting without the experiment.
"""
