"""Updates until an encoder knows which actions it has taken, apart from other learning. Prints JSON.

    python benchmarks/own_actions_probe.py --encoders transformer gru --rl2-gains 0.1 1.0

Episodes of 64 timesteps with random actions out of 64. Half of them repeat none, as a good player of POPGym's
BattleshipEasy. The timestep encoder and an encoder of the general preset's size predict for each action
whether it has been taken. Results are the number of updates until the action with the lowest prediction is a
new one in 95 % of the last 16 timesteps, or null, and the loss (nats per action and timestep) after the last.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from recall_probe import run_probes
from recommended import TRANSFORMER
from torch import Tensor, nn
from torch.nn import functional as F

from loxodon.nets import MLP, FFTstepEncoder, GRUTrajEncoder, TransformerTrajEncoder

ACTIONS, LENGTH, BATCH, WIDTH, WARM_UP = 64, 64, 24, 128, 100
LATE = slice(48, 64)  # timesteps at which few new actions are left
ENOUGH, LOOK_EVERY = 0.95, 50
ENCODERS: dict[str, Any] = {
    "transformer": partial(
        TransformerTrajEncoder, d_model=WIDTH, d_ff=4 * WIDTH, n_layers=2, dropout_ff=0.05, **TRANSFORMER
    ),
    "gru": partial(GRUTrajEncoder, d_hidden=WIDTH, d_output=WIDTH, n_layers=1),
}
OBS = spaces.Dict({"observation": spaces.Discrete(2)})


def episodes(rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Hits (B, L, 1) int64, rl2s (B, L, 1 + A) float32 and actions taken so far (B, L, A) float32."""
    actions = rng.integers(ACTIONS, size=(BATCH, LENGTH))
    actions[: BATCH // 2] = rng.permuted(np.tile(np.arange(ACTIONS), (BATCH // 2, 1)), axis=1)
    hits = (rng.random((BATCH, LENGTH, 1)) < 12 / ACTIONS).astype(np.int64)
    previous = F.pad(F.one_hot(torch.from_numpy(actions), ACTIONS)[:, :-1], (0, 0, 1, 0)).float()
    rl2s = F.pad(previous, (1, 0))
    return torch.from_numpy(hits), rl2s, previous.cumsum(1).clamp(max=1.0)


def probe(encoder: str, rl2_gain: float, seed: int, limit: int) -> dict[str, Any]:
    """Train until the actions taken are known; return the number of updates or None, and the loss."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    into = FFTstepEncoder(OBS, 1 + ACTIONS, rl2_gain=rl2_gain)
    memory = ENCODERS[encoder](into.emb_dim, LENGTH)
    model = nn.ModuleList([into, memory, MLP(memory.emb_dim, 2 * WIDTH, ACTIONS, 1, "leaky_relu")])
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-3)
    times, mask = torch.arange(LENGTH).expand(BATCH, -1)[..., None], torch.ones(BATCH, LENGTH, 1).bool()
    share, loss = 0.0, torch.zeros(())
    for update in range(1, limit + 1):
        hits, rl2s, taken = episodes(rng)
        states = memory(into({"observation": hits}, rl2s, times, mask), times)[0]
        found = model[2](states)
        loss = F.binary_cross_entropy_with_logits(found, taken)
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, update / WARM_UP)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if into.input_norm is not None:
            into.input_norm.commit()
        chosen = found[:, LATE].argmin(-1, keepdim=True)
        share = 0.9 * share + 0.1 * (1.0 - float(taken[:, LATE].gather(-1, chosen).mean()))
        if update % LOOK_EVERY == 0 and share > ENOUGH:
            return {"updates": update, "loss": round(loss.item(), 3)}
    return {"updates": None, "loss": round(loss.item(), 3)}


def main() -> None:
    """Run the probes and print one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encoders", nargs="+", choices=tuple(ENCODERS), default=[*ENCODERS])
    parser.add_argument("--rl2-gains", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--limit", type=int, default=1000)
    args = parser.parse_args()
    probes = [
        ({"encoder": encoder, "rl2_gain": gain}, partial(probe, encoder, gain, limit=args.limit))
        for encoder in args.encoders
        for gain in args.rl2_gains
    ]
    run_probes(probes, args.seeds)


if __name__ == "__main__":
    main()
