"""One page about runs: `loxodon report RUN...`; main.py is the way through."""
