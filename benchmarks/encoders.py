"""Cost of trajectory encoders in training and acting. Prints one JSON document.

    OMP_NUM_THREADS=1 python benchmarks/encoders.py                       # all, about 20 minutes
    OMP_NUM_THREADS=1 python benchmarks/encoders.py min_gru gla --lengths 128 --contexts 128 --seconds 0.5

Width 128, 3 layers, one torch thread, float32; all times are CPU time, of the fastest of several runs.

train: forward and backward pass over 4,096 timesteps in sequences of each length, or over one sequence if
that is longer. It reports timesteps per second; the time of the counted operations of matrix products and
attention at the speed of one large product; and its share of the total. Attention covers the whole sequence.
act: one step of 12 environments after each number of timesteps, in milliseconds, in inference mode like
actors.
state_bytes: size of the state of one environment at that point.
floor_act_ms: a Transformer's matrix products and attention alone, with plain tensors.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from provenance import provenance
from recommended import TRANSFORMER
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from loxodon import nets
from loxodon.nets import TrajEncoder

WIDTH, LAYERS, NUM_ENVS, TIMESTEPS, HEADS, FIXED_HEADS = 128, 3, 12, 4096, 8, 2
CPU = torch.device("cpu")
TRUNK = {"d_model": WIDTH, "n_layers": LAYERS}
RNN = {"d_hidden": WIDTH, "n_layers": LAYERS, "d_output": WIDTH}
HYBRID = {"mixers": ["gated_delta", "gated_delta", "attention"], "d_model": WIDTH}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer": ("TransformerTrajEncoder", {**TRUNK, "d_ff": 4 * WIDTH, **TRANSFORMER}),
    "gru": ("GRUTrajEncoder", RNN),
    "lstm": ("LSTMTrajEncoder", RNN),
    "min_gru": ("MinGRUTrajEncoder", TRUNK),
    "min_lstm": ("MinLSTMTrajEncoder", TRUNK),
    "lru": ("LRUTrajEncoder", TRUNK),
    "s5": ("S5TrajEncoder", TRUNK),
    "ffm": ("FFMTrajEncoder", TRUNK),
    "mamba": ("MambaTrajEncoder", TRUNK),
    "mamba2": ("Mamba2TrajEncoder", TRUNK),
    "gla": ("GLATrajEncoder", TRUNK),
    "retnet": ("GLATrajEncoder", {**TRUNK, "decay": "fixed"}),
    "mlstm": ("MLSTMTrajEncoder", TRUNK),
    "gated_delta": ("GatedDeltaNetTrajEncoder", TRUNK),
    "hybrid": ("HybridTrajEncoder", HYBRID),
}


MIN_CALLS, NUM_TURNS = 3, 10


def cpu_s(call: Callable[[], object], seconds: float) -> float:
    """CPU seconds of the fastest of all calls that fit into `seconds`, but of at least three calls."""
    times: list[float] = []
    call()
    while len(times) < MIN_CALLS or sum(times) < seconds:
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return min(times)


def flops_per_s(seconds: float) -> float:
    """Speed of one large matrix product, in floating-point operations per second."""
    size = 1024
    x, y = torch.randn(2, size, size).unbind(0)
    return 2 * size**3 / cpu_s(lambda: x @ y, seconds)


def _attention_flop(num_products: int, first: int) -> Callable[..., int]:
    """Count `num_products` products of attention; queries and keys are the arguments from `first` on."""

    def count(*args: Any, out_val: object, attn_mask: Tensor | None = None, **_: object) -> int:
        (batch, heads, length, width), num_keys = args[first].shape, args[first + 1].shape[2]
        num_pairs = batch * heads * length * num_keys
        if attn_mask is not None:
            allowed = attn_mask > -torch.inf  # bool masks have become numbers here
            num_pairs = int(allowed.expand(batch, heads, -1, -1).sum())
        elif any(x is True for x in args):  # causal attention
            num_pairs = batch * heads * length * (length + 1) // 2
        return int(2 * num_products * num_pairs * width)

    count._get_raw = True  # type: ignore[attr-defined] # passes tensors rather than shapes, to count masks
    return count


_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # not counted by torch
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def count_flop(call: Callable[[], object]) -> int:
    """Floating-point operations of matrix products and of attention, without masked pairs."""
    of_attention = {_ATTENTION: _attention_flop(2, 0), _ATTENTION_BACKWARD: _attention_flop(4, 1)}
    with FlopCounterMode(display=False, custom_mapping=of_attention) as counter:
        call()
    return int(counter.get_total_flops())


def build(name: str, max_seq_len: int) -> TrajEncoder:
    """Build an encoder, with the same weights in each call."""
    torch.manual_seed(0)
    kind, settings = ENCODERS[name]
    encoder: TrajEncoder = getattr(nets, kind)(WIDTH, max_seq_len, **settings)
    return encoder


def train(name: str, length: int, seconds: float, speed: float) -> dict[str, float]:
    """Measure forward and backward passes, see above."""
    encoder, rows = build(name, length), max(1, TIMESTEPS // length)
    seq, times = torch.randn(rows, length, WIDTH), torch.arange(length).expand(rows, -1)[..., None]

    def update() -> None:
        encoder(seq, times)[0].square().mean().backward()

    products = count_flop(update) / speed
    took = cpu_s(update, seconds)
    return {
        "timesteps_per_s": round(rows * length / took),
        "products_s": round(products, 4),
        "products_share": round(products / took, 3),
    }


def remembering(encoder: TrajEncoder, context: int) -> tuple[Any, int]:
    """A state with the size of one after `context` timesteps, and its bytes per env."""
    rows = encoder.export_hidden_state(encoder.init_hidden_state(NUM_ENVS, CPU))
    for name, part in rows.items():
        if part.is_floating_point():
            part.normal_(std=0.1)
        elif part.dtype == torch.bool:
            part.fill_(True)
        if name.endswith("age"):
            part.fill_(context)
    state_bytes = sum(part.nbytes for part in rows.values()) // NUM_ENVS
    return encoder.import_hidden_state(rows), state_bytes


@torch.inference_mode()
def act(name: str, context: int, seconds: float) -> dict[str, float]:
    """Measure a step after `context` timesteps, see above."""
    with torch.inference_mode(False):  # actors create their weights outside of inference mode
        encoder = build(name, context).eval()
    state, state_bytes = remembering(encoder, context)
    seq, times = torch.randn(NUM_ENVS, 1, WIDTH), torch.full((NUM_ENVS, 1, 1), context)

    def step() -> Tensor:
        nonlocal state
        encoded: Tensor
        encoded, state = encoder(seq, times, state)
        return encoded

    calls = {"ms": step}
    if name == "transformer":
        calls["floor_act_ms"] = bare_transformer_step(context)
    turns = [[cpu_s(call, seconds / NUM_TURNS) for call in calls.values()] for _ in range(NUM_TURNS)]
    fastest = (round(1e3 * min(times), 3) for times in zip(*turns, strict=True))
    return {**dict(zip(calls, fastest, strict=True)), "state_bytes": state_bytes}


def bare_transformer_step(context: int) -> Callable[[], Tensor]:
    """A function that computes only the matrix products and the attention of a Transformer's step."""
    x = torch.randn(NUM_ENVS, WIDTH)
    shapes = {
        "qkv": (3 * WIDTH, WIDTH),
        "proj": (WIDTH, WIDTH),
        "up": (4 * WIDTH, WIDTH),
        "down": (WIDTH, 4 * WIDTH),
        "waves": (2 * WIDTH * FIXED_HEADS // HEADS, WIDTH),
    }
    layers = [{name: torch.randn(n, m) / m**0.5 for name, (n, m) in shapes.items()} for _ in range(LAYERS)]
    inp = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    kept = (LAYERS, NUM_ENVS, HEADS, context, WIDTH // HEADS)
    keys, values = torch.randn(kept), torch.randn(kept)

    def step() -> Tensor:
        y = F.linear(x, inp)
        for layer, weights in enumerate(layers):
            F.linear(x, weights["waves"])
            q = F.linear(y, weights["qkv"])[:, :WIDTH].view(NUM_ENVS, HEADS, 1, -1)
            attended = torch.softmax(q @ keys[layer].mT, -1) @ values[layer]
            y = F.linear(attended.flatten(1), weights["proj"])
            y = F.linear(F.linear(y, weights["up"]), weights["down"])
        return y

    return step


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        default=list(ENCODERS),
        help=f"encoders to measure, from {list(ENCODERS)} (default: all)",
    )
    parser.add_argument("--lengths", type=int, nargs="*", default=[128, 1024, 4096])
    parser.add_argument("--contexts", type=int, nargs="*", default=[128, 1024, 2048, 8192])
    parser.add_argument("--seconds", type=float, default=3.0, help="CPU time per figure")
    args = parser.parse_args()
    torch.set_num_threads(1)
    speed = flops_per_s(args.seconds)
    found = {
        name: {
            "parameters": sum(p.numel() for p in build(name, 128).parameters()),
            "train": {length: train(name, length, args.seconds, speed) for length in args.lengths},
            "act": {context: act(name, context, args.seconds) for context in args.contexts},
        }
        for name in args.names
    }
    head = {**provenance(), "gflops_per_s_of_a_large_product": round(speed / 1e9, 1)}
    print(json.dumps({**head, "encoders": found}, indent=2))


if __name__ == "__main__":
    main()
