"""What an epoch does with stored trajectories: updates, the optimizer behind them, and pre-training."""
