"""An agent of your own: encoders, critics and targets are provided; you define the loss.

python examples/own_agent.py AdvantageWeightedAgent.temperature=0.3     # or any other settings on top
"""

import sys

import gin
import torch

from loxodon.agents import LossTerms
from loxodon.agents.off_policy import OffPolicyAgent
from loxodon.tools.run import main


@gin.configurable
class AdvantageWeightedAgent(OffPolicyAgent):
    """Imitates the data, weighting good actions more: exp(A / temperature).

    B batch, L timesteps, C critics, G discounts, A actions.
    """

    def __init__(self, *given, temperature: float = 1.0, **shared):
        super().__init__(*given, **shared)
        self.temperature = temperature

    def losses(self, transitions, with_metrics):
        policy = self.policies(self.actor, transitions.current)  # over (B, L, G, A)
        following = self.policies(self.actor, transitions.following)
        targets = self.policy_targets(transitions, following)  # (B, L, G, 1)
        self.gather_targets(targets, transitions)  # updates the scale of values
        state = transitions.current.state
        q = self.recorded_values(self.critics, state, transitions.recorded)  # (B, L, C, G, 1)
        with torch.no_grad():
            expected = self.policy_values(self.critics, state, policy)  # (B, L, C, G, 1)
            advantages = q - expected
            weights = (advantages.mean(2) / (self.temperature * self.values.sigma)).exp().clamp(max=20.0)
        self.gather_advantages(advantages, transitions)  # updates loss_weights, if there are any
        metrics = self.metrics(transitions, q=q, targets=targets) if with_metrics else {}
        log_probs = self.imitation_log_prob(policy, transitions.recorded)
        return LossTerms(-weights * log_probs, self.critic_errors(q, targets), metrics)


if __name__ == "__main__":
    name = "AdvantageWeightedAgent"
    words = [f"Experiment.agent_type=@{name}", f"{name}.values=@SummedValues()", "SummedValues.beta=0.005"]
    words += [f"{name}.training_discounts=%DISCOUNTS", f"{name}.gamma=%GAMMA", f"{name}.tau=%TAU"]
    words += ["HORIZON=10", "Experiment.max_seq_len=11"]  # a short T-maze, learned in a minute
    sys.exit(main(["--config", "tmaze", "--run-name", "own-agent", *words, *sys.argv[1:]]))
