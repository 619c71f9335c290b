"""What `python -m loxodon.data` can do: one file per command."""
