"""Cost of trajectory encoders in training and acting. Prints one JSON document.

    OMP_NUM_THREADS=1 python benchmarks/encoders.py                       # all, about 20 minutes
    OMP_NUM_THREADS=1 python benchmarks/encoders.py min_gru gla --lengths 128 --contexts 128 --seconds 0.5
    python benchmarks/encoders.py --device cuda --width 256 --timesteps 32768 --lengths 2048

Width 128, 3 layers, one torch thread, float32 (on a GPU: training with autocast to bfloat16); times are those
of the fastest of several runs, CPU time or the time of the GPU.

train: forward and backward pass over 4,096 timesteps in sequences of each length, or over one sequence if
that is longer. It reports timesteps per second; the time if four episodes begin in each sequence; on a CPU,
the time of the counted operations of matrix products and attention at the speed of one large product, and its
share of the total. Attention covers the whole sequence.
act: one step of 12 environments after each number of timesteps, in milliseconds, in inference mode like
actors.
state_bytes: size of the state of one environment at that point.
floor_act_ms: a Transformer's matrix products and attention alone, with plain tensors.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from clock import seconds_of
from provenance import provenance
from recommended import TRANSFORMER
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from loxodon import nets
from loxodon.nets import TrajEncoder

LAYERS, NUM_ENVS, HEADS, FIXED_HEADS = 3, 12, 8, 2
CPU = torch.device("cpu")
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer": ("TransformerTrajEncoder", TRANSFORMER),
    "gru": ("GRUTrajEncoder", {}),
    "lstm": ("LSTMTrajEncoder", {}),
    "min_gru": ("MinGRUTrajEncoder", {}),
    "min_lstm": ("MinLSTMTrajEncoder", {}),
    "lru": ("LRUTrajEncoder", {}),
    "s5": ("S5TrajEncoder", {}),
    "ffm": ("FFMTrajEncoder", {}),
    "mamba": ("MambaTrajEncoder", {}),
    "mamba2": ("Mamba2TrajEncoder", {}),
    "gla": ("GLATrajEncoder", {}),
    "retnet": ("GLATrajEncoder", {"decay": "fixed"}),
    "mlstm": ("MLSTMTrajEncoder", {}),
    "gated_delta": ("GatedDeltaNetTrajEncoder", {}),
    "hybrid": ("HybridTrajEncoder", {"mixers": ["gated_delta", "gated_delta", "attention"]}),
}


def sizes(name: str, width: int) -> dict[str, Any]:
    """The sizes of an encoder with 3 layers."""
    if name in ("gru", "lstm"):
        return {"d_hidden": width, "n_layers": LAYERS, "d_output": width}
    if name == "hybrid":  # its mixers are its layers
        return {"d_model": width}
    return {"d_model": width, "n_layers": LAYERS, **({"d_ff": 4 * width} if name == "transformer" else {})}


MIN_CALLS, NUM_TURNS = 3, 10


def fastest_s(call: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Seconds of the fastest of all calls that fit into `seconds`, but of at least three calls."""
    times: list[float] = []
    call()
    while len(times) < MIN_CALLS or sum(times) < seconds:
        times.append(seconds_of(call, device))
    return min(times)


def flops_per_s(seconds: float, device: torch.device = CPU, precision: str = "no") -> float:
    """Speed of one large matrix product, in floating-point operations per second."""
    size = 1024 if device.type == "cpu" else 8192
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x, y = torch.randn(2, size, size, device=device, dtype=dtype).unbind(0)
    return 2 * size**3 / fastest_s(lambda: x @ y, seconds, device)


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


def build(name: str, max_seq_len: int, width: int) -> TrajEncoder:
    """Build an encoder, with the same weights in each call."""
    torch.manual_seed(0)
    kind, settings = ENCODERS[name]
    encoder: TrajEncoder = getattr(nets, kind)(width, max_seq_len, **sizes(name, width), **settings)
    return encoder


def train(name: str, length: int, args: argparse.Namespace, speed: float) -> dict[str, float]:
    """Measure forward and backward passes, see above."""
    device, rows = torch.device(args.device), max(1, args.timesteps // length)
    encoder = build(name, length, args.width).to(device)
    seq = torch.randn(rows, length, args.width, device=device)
    times = torch.arange(length, device=device).expand(rows, -1)[..., None]
    resets = torch.zeros(rows, length, dtype=torch.bool, device=device)
    resets[:, :: length // 4] = True

    def update(starts: Tensor | None = None) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            encoded = encoder(seq, times, resets=starts)[0]
        encoded.float().square().mean().backward()

    took = fastest_s(update, args.seconds, device)
    found = {
        "timesteps_per_s": round(rows * length / took),
        "with_resets_ms": round(1e3 * fastest_s(lambda: update(resets), args.seconds, device), 3),
    }
    if device.type == "cpu":  # kernels for GPUs are not counted
        products = count_flop(update) / speed
        found |= {"products_s": round(products, 4), "products_share": round(products / took, 3)}
    return found


def remembering(encoder: TrajEncoder, context: int, device: torch.device) -> tuple[Any, int]:
    """A state with the size of one after `context` timesteps, and its bytes per env."""
    rows = encoder.export_hidden_state(encoder.init_hidden_state(NUM_ENVS, device))
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
def act(name: str, context: int, args: argparse.Namespace) -> dict[str, float]:
    """Measure a step after `context` timesteps, see above."""
    device = torch.device(args.device)
    with torch.inference_mode(False):  # actors create their weights outside of inference mode
        encoder = build(name, context, args.width).eval().to(device)
    state, state_bytes = remembering(encoder, context, device)
    seq = torch.randn(NUM_ENVS, 1, args.width, device=device)
    times = torch.full((NUM_ENVS, 1, 1), context, device=device)

    def step() -> Tensor:
        nonlocal state
        encoded: Tensor
        encoded, state = encoder(seq, times, state)
        return encoded

    calls = {"ms": step}
    if name == "transformer":
        calls["floor_act_ms"] = bare_transformer_step(context, args.width, device)
    turns = [
        [fastest_s(call, args.seconds / NUM_TURNS, device) for call in calls.values()]
        for _ in range(NUM_TURNS)
    ]
    fastest = (round(1e3 * min(times), 3) for times in zip(*turns, strict=True))
    return {**dict(zip(calls, fastest, strict=True)), "state_bytes": state_bytes}


def bare_transformer_step(context: int, width: int, device: torch.device) -> Callable[[], Tensor]:
    """A function that computes only the matrix products and the attention of a Transformer's step."""
    draw = partial(torch.randn, device=device)
    x = draw(NUM_ENVS, width)
    shapes = {
        "qkv": (3 * width, width),
        "proj": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
        "waves": (2 * width * FIXED_HEADS // HEADS, width),
    }
    layers = [{name: draw(n, m) / m**0.5 for name, (n, m) in shapes.items()} for _ in range(LAYERS)]
    inp = draw(width, width) / width**0.5
    kept = (LAYERS, NUM_ENVS, HEADS, context, width // HEADS)
    keys, values = draw(kept), draw(kept)

    def step() -> Tensor:
        y = F.linear(x, inp)
        for layer, weights in enumerate(layers):
            F.linear(x, weights["waves"])
            q = F.linear(y, weights["qkv"])[:, :width].view(NUM_ENVS, HEADS, 1, -1)
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
    parser.add_argument("--timesteps", type=int, default=4096, help="timesteps of a training batch")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=3.0, help="time per figure")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    speed = flops_per_s(args.seconds, torch.device(args.device))
    found = {
        name: {
            "parameters": sum(p.numel() for p in build(name, 128, args.width).parameters()),
            "train": {length: train(name, length, args, speed) for length in args.lengths},
            "act": {context: act(name, context, args) for context in args.contexts},
        }
        for name in args.names
    }
    head = {**provenance(args.device), "gflops_per_s_of_a_large_product": round(speed / 1e9, 1)}
    print(json.dumps({**head, "encoders": found}, indent=2))


if __name__ == "__main__":
    main()
