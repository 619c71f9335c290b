"""One page about runs: `python -m loxodon.experiment.report RUN...`; main.py is the way through."""
