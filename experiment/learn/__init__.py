"""Learning from stored trajectories: updates, the optimizer behind them, and pre-training."""
