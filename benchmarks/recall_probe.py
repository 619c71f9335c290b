"""Updates until recall is learned, without the rest of reinforcement learning. Prints JSON.

    python benchmarks/recall_probe.py --positions rotary mixed fixed --seeds 0 1
    python benchmarks/recall_probe.py reverse --positions mixed --first-episodes 24 120

A Transformer of the general preset's size sees symbols, draws random answers and regresses their values to 1
(right) or -1, like a critic. The tasks are recall from a distance of 32, in reverse, by key, or of one symbol
after a delay of 100. Episodes are added at the rate of an actor at the preset's replay ratio, and batches are
drawn from all of them. Results are the number of updates until the best answers are right in 95 % of new
episodes, or null.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from provenance import provenance
from recommended import TRANSFORMER
from torch import Tensor, nn
from torch.nn import functional as F

from loxodon.nets import TransformerTrajEncoder

SYMBOLS, KEYS, WIDTH, BATCH, WARM_UP = 4, 32, 128, 24, 100
DISTANCE, LIST, DELAY = 32, 52, 100
NO_ANSWER = -1
ENOUGH, LOOK_EVERY = 0.95, 5
POSITIONS: dict[str, dict[str, Any]] = {
    "rotary": {"heads": "rotary"},
    "mixed": {},  # the heads of the recommended preset
    "fixed": {"heads": "plain", "pos_emb": "fixed"},
    "learned": {"heads": "plain", "pos_emb": "learned"},
}

Probe = tuple[dict[str, Any], Callable[..., dict[str, Any]]]
"""The facts that describe a probe, and a function from a seed to its figures by name."""


def episodes(task: str, number: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs (N, L, D) float32 and right answers (N, L) int64, NO_ANSWER where no answer is requested."""
    if task == "distance":
        shown = torch.randint(SYMBOLS, (number, 2 * LIST), generator=rng)
        answers = F.pad(shown[:, :-DISTANCE], (DISTANCE, 0), value=NO_ANSWER)
        return F.one_hot(shown, SYMBOLS).float(), answers
    if task == "delay":
        shown = torch.randint(SYMBOLS, (number, 1), generator=rng)
        seen = F.pad(F.one_hot(shown, SYMBOLS).float(), (0, 1, 0, DELAY))
        seen[:, -1, SYMBOLS] = 1.0  # requests an answer
        return seen, F.pad(shown, (DELAY, 0), value=NO_ANSWER)
    length = KEYS if task == "by_key" else LIST
    shown = torch.randint(SYMBOLS, (number, length), generator=rng)
    seen = F.pad(F.one_hot(shown, SYMBOLS).float(), (0, 1, 0, length))
    seen[:, length:, SYMBOLS] = 1.0  # requests an answer
    asked = shown.flip(1)
    if task == "by_key":
        keys, wanted = (torch.rand(number, KEYS, generator=rng).argsort(1) for _ in range(2))
        seen = torch.cat([seen, F.one_hot(torch.cat([keys, wanted], 1), KEYS).float()], -1)
        asked = shown.gather(1, keys.argsort(1).gather(1, wanted))
    return seen, F.pad(asked, (length, 0), value=NO_ANSWER)


def updates_needed(
    task: str, positions: str, seed: int, *, limit: int, first_episodes: int, episodes_per_update: float
) -> dict[str, int | None]:
    """Train until the task is learned; return the number of updates, or None if `limit` is exceeded."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed + 100)
    seen, answers = episodes(task, first_episodes, rng)
    drawn = torch.randint(SYMBOLS, answers.shape, generator=rng)
    model = nn.ModuleList(
        [
            nn.Sequential(
                nn.Linear(seen.shape[-1], WIDTH), nn.LeakyReLU(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
            ),
            TransformerTrajEncoder(
                WIDTH,
                seen.shape[1],
                d_model=WIDTH,
                d_ff=4 * WIDTH,
                n_layers=2,
                **{**TRANSFORMER, **POSITIONS[positions]},
            ),
            nn.Linear(WIDTH, SYMBOLS),
        ]
    )
    into, encoder, values = model
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-3)
    times = torch.arange(seen.shape[1])[None, :, None]
    share = 0.0
    for update in range(1, limit + 1):
        if new := int(update * episodes_per_update) - int((update - 1) * episodes_per_update):
            more, right = episodes(task, new, rng)
            seen, answers = torch.cat([seen, more]), torch.cat([answers, right])
            drawn = torch.cat([drawn, torch.randint(SYMBOLS, right.shape, generator=rng)])
        rows = torch.randint(len(seen), (BATCH,), generator=rng)
        due = answers[rows] != NO_ANSWER
        chosen = drawn[rows][due]
        rewards = 2.0 * (chosen == answers[rows][due]).float() - 1.0
        found = values(encoder(into(seen[rows]), times.expand(BATCH, -1, -1))[0])[due]
        loss = F.mse_loss(found.gather(1, chosen[:, None])[:, 0], rewards)
        optimizer.param_groups[0]["lr"] = 3e-4 * min(1.0, update / WARM_UP)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if update % LOOK_EVERY == 0:
            new_seen, right = episodes(task, BATCH, rng)
            model.eval()
            with torch.no_grad():
                best = values(encoder(into(new_seen), times.expand(BATCH, -1, -1))[0]).argmax(-1)
            model.train()
            due = right != NO_ANSWER
            share = 0.5 * (share + float((best == right)[due].float().mean()))
            if share > ENOUGH:
                return {"updates": update}
    return {"updates": None}


def run_probes(probes: Iterable[Probe], seeds: Sequence[int]) -> None:
    """Run each probe with all seeds on one thread, and print one JSON document; progress goes to stderr."""
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for facts, call in probes:
        begin_s = time.process_time()
        found = [call(seed=seed) for seed in seeds]
        one = {**facts, **{name: [figures[name] for figures in found] for name in found[0]}}
        one["cpu_s"] = round(time.process_time() - begin_s, 1)
        print(json.dumps(one), file=sys.stderr, flush=True)
        results.append(one)
    print(json.dumps({"provenance": provenance(), "seeds": seeds, "results": results}, indent=1))


def main() -> None:
    """Run the probes and print one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", default=["distance", "reverse", "by_key", "delay"])
    parser.add_argument("--positions", nargs="+", choices=tuple(POSITIONS), default=[*POSITIONS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--first-episodes", type=int, nargs="+", default=[96])
    parser.add_argument("--episodes-per-update", type=float, nargs="+", default=[0.5])
    parser.add_argument("--limit", type=int, default=600)
    args = parser.parse_args()
    probes: list[Probe] = []
    for task in args.tasks:
        for positions in args.positions:
            for first in args.first_episodes:
                for rate in args.episodes_per_update:
                    facts = {"first_episodes": first, "episodes_per_update": rate}
                    call = partial(updates_needed, task, positions, limit=args.limit, **facts)
                    probes.append(({"task": task, "positions": positions, **facts}, call))
    run_probes(probes, args.seeds)


if __name__ == "__main__":
    main()
