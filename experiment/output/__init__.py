"""Output for people: console, metric logs and learning curves."""
