"""Many processes, one run: supervised actors, launchers, heartbeats."""
