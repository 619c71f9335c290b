"""The residual trunk that trajectory encoders share, and the interface of its mixers."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .dropout import Dropout
from .mlp import Linear, activation_fn, as_rows, norm_layer, require_at_least, require_positive, require_share
from .positions import HeadPositions
from .short_conv import ShortConv
from .sigma_reparam import linear
from .timeline import Timeline
from .traj_encoders import TrajEncoder

_SHORT_CONV = "short_conv"  # key in the state of a layer

State: TypeAlias = dict[str, Tensor]
"""Memory of one layer for N envs, each tensor (N, ...) and all zeros before the first timestep."""


class Mixer(nn.Module, ABC):
    """Base class of the modules that move information along time in one layer of a trunk.

    A mixer is built as `Name(d_model, max_seq_len)`; keyword arguments are settings. A ValueError about one
    names it `Name.setting`; `build_mixer` replaces `Name` by the encoder that has this setting. The trunk
    implements the rest of the interface of trajectory encoders. Only a step without gradient may write into
    the state that is passed to it.
    """

    context_len: int | None = None
    """Number of earlier timesteps that an output can depend on; None without a bound."""

    state_shapes: dict[str, tuple[int, ...]]
    """Shape of each part of the state of one env; set by subclasses."""

    short_conv: ClassVar[int] = 0
    """Width in timesteps of a convolution before the mixer, 0 for none; see the trunk's setting."""

    @abstractmethod
    def forward(self, x: Tensor, resets: Tensor | None, state: State) -> tuple[Tensor, State]:
        """Mix a sequence.

        Args:
            x: (B, L, D) float.
            resets: (B, L) bool, True on the first timestep of an episode; nothing crosses one.
            state: the state before the sequence.
        Returns: (B, L, D) float and the state after the last timestep.
        """

    @abstractmethod
    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Mix one timestep, with the same result as `forward`: x (N, D) -> (N, D) and the state after it."""


class GRUGate(nn.Module):
    """A gated residual connection that begins close to the identity: x, y (..., D) -> (..., D).

    Source: Parisotto et al. 2019, arXiv:1910.06764 (GTrXL), section 3.2.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.of_new = Linear(d_model, 3 * d_model, bias=False)
        self.of_old = Linear(d_model, 2 * d_model, bias=False)
        self.of_kept = Linear(d_model, d_model, bias=False)
        self.bias = nn.Parameter(torch.full((d_model,), 2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        new_r, new_z, new_h = self.of_new(F.relu(y)).chunk(3, dim=-1)
        old_r, old_z = self.of_old(x).chunk(2, dim=-1)
        candidate = torch.tanh(new_h + self.of_kept(torch.sigmoid(new_r + old_r) * x))
        return x + torch.sigmoid(new_z + old_z - self.bias) * (candidate - x)


@dataclass(frozen=True)
class BlockSettings:
    """Settings of a residual block, which `MixerTrajEncoder` explains."""

    d_model: int
    d_ff: int
    dropout: float = 0.0
    activation: str = "leaky_relu"
    norm: str | None = "layer"
    glu: bool = False
    normformer_norms: bool = False
    gating: str | None = None
    sigma_reparam: bool = False

    def __post_init__(self) -> None:
        if self.gating not in (None, "gru"):
            raise ValueError(
                f"gating is {self.gating!r}; allowed are 'gru' and None. Fix: bind gating to one of these."
            )


class ResidualBlock(nn.Module, ABC):
    """Norm, mixing, residual; norm, feed-forward, residual. Subclasses implement the mixing.

    Source: Vaswani et al. 2017, arXiv:1706.03762; norms after each part: Shleifer et al. 2021,
    arXiv:2110.09456 (NormFormer); gated linear units: Shazeer 2020, arXiv:2002.05202.
    """

    context_len: int | None
    """Number of earlier timesteps that an output can depend on; None without a bound."""

    def __init__(self, settings: BlockSettings) -> None:
        super().__init__()
        self.settings, width = settings, settings.d_model
        self.dropout, self.activation = (
            Dropout(settings.dropout),
            activation_fn(settings.activation, overwrites=True),
        )
        # It is named after attention for every mixer, so that the weights of a Transformer keep their names.
        self.norm_attn = norm_layer(settings.norm, width)
        self.norm_ff = norm_layer(settings.norm, width) if settings.d_ff else None

    def _add_feed_forward(self) -> None:
        """Add the feed-forward part. Subclasses call this last: optimizers identify parameters by order."""
        s = self.settings
        if s.d_ff:
            self.up = linear(s.d_model, s.d_ff, sigma_reparam=s.sigma_reparam)
            self.down = linear(s.d_ff, s.d_model, sigma_reparam=s.sigma_reparam)
            self.gate_ff = linear(s.d_model, s.d_ff, sigma_reparam=s.sigma_reparam) if s.glu else None
        after = s.norm if s.normformer_norms else None
        self.norm_mixed = norm_layer(after, s.d_model) if after else None
        self.norm_up = norm_layer(after, s.d_ff) if after and s.d_ff else None
        self.join_mixed = GRUGate(s.d_model) if s.gating else None
        self.join_ff = GRUGate(s.d_model) if s.gating and s.d_ff else None

    @abstractmethod
    def forward(self, x: Tensor, timeline: Timeline, state: State | None) -> tuple[Tensor, State | None]:
        """Process a sequence.

        Args:
            x: (B, L, D) float, the residual stream.
            timeline: the current call, shared by all blocks.
            state: the state before the sequence; None without history.
        Returns: (B, L, D) float and the state after the last timestep, which may be None if
            `timeline.keeps_state` is False.
        """

    @abstractmethod
    def step(self, x: Tensor, timeline: Timeline, state: State) -> tuple[Tensor, State | None]:
        """Process one timestep, with the result of `forward`: x (N, D) -> (N, D) and the state after it."""

    @abstractmethod
    def begin(self, num_envs: int, device: torch.device) -> State:
        """The state before the first timestep."""

    @abstractmethod
    def forget(self, state: State, ended: Tensor) -> State:
        """Clear the state of rows where ended (N,) bool is True."""

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add the result of mixing and the feed-forward part to x; all (..., D)."""
        mixed = mixed if self.norm_mixed is None else self.norm_mixed(mixed)
        x = self._join(x, mixed, self.join_mixed)
        if self.norm_ff is None:
            return x
        y = as_rows(self.norm_ff(x))
        up = self.up(y)
        up = self.activation(up) if self.gate_ff is None else self.activation(self.gate_ff(y)) * up
        up = up if self.norm_up is None else self.norm_up(up)
        return self._join(x, self.down(up).view(x.shape), self.join_ff)

    def _join(self, x: Tensor, y: Tensor, gate: nn.Module | None) -> Tensor:
        y = self.dropout(y) if self.training else y
        return x + y if gate is None else gate(x, y)


class MixerBlock(ResidualBlock):
    """A residual block around a mixer."""

    def __init__(self, settings: BlockSettings, mixer: Mixer, short_conv: int | None = None) -> None:
        super().__init__(settings)
        if not hasattr(mixer, "state_shapes"):
            raise TypeError(
                f"{type(mixer).__name__} has no state_shapes, the shapes of its memory. Fix: set them in its "
                'constructor, such as self.state_shapes = {"mean": (d_model,)}.'
            )
        self.mixer, self.context_len, self.state_shapes = mixer, mixer.context_len, mixer.state_shapes
        width = mixer.short_conv if short_conv is None else short_conv
        self.conv = ShortConv(settings.d_model, width) if width else None
        if self.conv is not None:
            reach = self.conv.num_kept
            self.context_len = None if mixer.context_len is None else mixer.context_len + reach
            self.state_shapes = {**mixer.state_shapes, _SHORT_CONV: (reach, settings.d_model)}
        self._add_feed_forward()

    def begin(self, num_envs: int, device: torch.device) -> State:
        return {
            name: torch.zeros(num_envs, *shape, device=device) for name, shape in self.state_shapes.items()
        }

    def forget(self, state: State, ended: Tensor) -> State:
        def without_ended(x: Tensor) -> Tensor:
            return x.masked_fill(ended.to(x.device).view(-1, *[1] * (x.ndim - 1)), 0)

        return {name: without_ended(x) for name, x in state.items()}

    def forward(self, x: Tensor, timeline: Timeline, state: State | None) -> tuple[Tensor, State]:
        state = self.begin(len(x), x.device) if state is None else state
        y, kept = self.norm_attn(x), {}
        if self.conv is not None:
            y, kept[_SHORT_CONV] = self.conv(y, timeline.resets, state[_SHORT_CONV])
        mixed, state = self.mixer(y, timeline.resets, state)
        return self.finish(x, mixed), {**state, **kept}

    def step(self, x: Tensor, timeline: Timeline, state: State) -> tuple[Tensor, State]:
        y, kept = self.norm_attn(x), {}
        if self.conv is not None:
            y, kept[_SHORT_CONV] = self.conv.step(y, state[_SHORT_CONV])
        mixed, state = self.mixer.step(y, state)
        return self.finish(x, mixed), {**state, **kept}


class TrunkTrajEncoder(TrajEncoder):
    """Base class of stacks of residual blocks, which process a sequence or one timestep.

    Hidden state: one `State` per block, of a size that does not depend on the time passed.

    Args:
        tstep_dim: given by the agent.
        max_seq_len: given by the agent.
        make_block: builds the block of layer i.
        d_model: width.
        n_layers: number of blocks.
        norm: normalisation of the result.
        dropout_emb: dropout on the input.
        positions: maps time_idxs (B, L, 1) to vectors that are added to the input; None for none.
        head_positions: positions for queries and keys of attention; None if no block needs them.
    """

    layers: nn.ModuleList

    def __init__(
        self,
        tstep_dim: int,
        max_seq_len: int,
        make_block: Callable[[int], ResidualBlock],
        *,
        d_model: int,
        n_layers: int,
        norm: str | None,
        dropout_emb: float,
        positions: nn.Module | None = None,
        head_positions: HeadPositions | None = None,
    ) -> None:
        super().__init__(tstep_dim, max_seq_len)
        require_positive(type(self).__name__, d_model=d_model, n_layers=n_layers)
        self.inp, self.dropout_emb = Linear(tstep_dim, d_model), Dropout(dropout_emb)
        self.input_positions, self.head_positions = positions, head_positions
        self.layers = nn.ModuleList(make_block(i) for i in range(n_layers))
        self.out_norm = norm_layer(norm, d_model)
        self._emb_dim = d_model

    @property
    def emb_dim(self) -> int:
        return self._emb_dim

    @property
    def blocks(self) -> Sequence[ResidualBlock]:
        return list(self.layers)  # type: ignore[arg-type]

    def init_hidden_state(self, num_envs: int, device: torch.device) -> Any:
        return [block.begin(num_envs, device) for block in self.blocks]

    def reset_hidden_state(self, hidden_state: Any, ended: Tensor) -> Any:
        return [block.forget(state, ended) for block, state in zip(self.blocks, hidden_state, strict=True)]

    @property
    def context_len(self) -> int | None:
        bounds = [block.context_len for block in self.blocks]
        known = [bound for bound in bounds if bound is not None]
        return sum(known) if len(known) == len(bounds) else None

    def export_hidden_state(self, hidden_state: Any) -> dict[str, Tensor]:
        return {
            f"{i}.{name}": x.detach().clone(memory_format=torch.contiguous_format)
            for i, state in enumerate(hidden_state)
            for name, x in state.items()
        }

    def import_hidden_state(self, rows: dict[str, Tensor]) -> Any:
        return [
            {
                name.removeprefix(f"{i}."): x.detach().clone()
                for name, x in rows.items()
                if name.startswith(f"{i}.")
            }
            for i in range(len(self.layers))
        ]

    def encode_from(
        self, seq: Tensor, time_idxs: Tensor, rows: dict[str, Tensor], resets: Tensor | None = None
    ) -> Tensor:
        states = self.import_hidden_state(rows)
        return self._encode(seq, time_idxs, states, resets, keeps_state=False)[0]

    def forward(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: Any = None, resets: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        keeps_state = hidden_state is not None
        encoded, states = self._encode(seq, time_idxs, hidden_state, resets, keeps_state)
        return encoded, states if keeps_state else None

    def _encode(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: Any, resets: Tensor | None, keeps_state: bool
    ) -> tuple[Tensor, list[State | None]]:
        if hidden_state is not None and seq.shape[1] == 1:
            if resets is not None:
                hidden_state = self.reset_hidden_state(hidden_state, resets[:, 0])
            y, states = self._step(seq[:, 0], time_idxs[:, 0], hidden_state)
            return y[:, None], states
        x, states = self._embed(seq, time_idxs), []
        timeline = self._timeline(x, time_idxs, resets, keeps_state)
        for block, state in zip(self.blocks, hidden_state or [None] * len(self.layers), strict=True):
            x, state_after = block(x, timeline, state)
            states.append(state_after)
        return self.out_norm(x), states

    def _step(
        self, seq: Tensor, time_idxs: Tensor, hidden_state: list[State]
    ) -> tuple[Tensor, list[State | None]]:
        """Encode one timestep of N envs, seq (N, tstep_dim), time_idxs (N, 1), as (N, D) and new states."""
        x, states = self._embed(seq, time_idxs), []
        timeline = self._timeline(x, time_idxs)
        for block, state in zip(self.blocks, hidden_state, strict=True):
            x, state_after = block.step(x, timeline, state)
            states.append(state_after)
        return self.out_norm(x), states

    def _timeline(
        self, x: Tensor, time_idxs: Tensor, resets: Tensor | None = None, keeps_state: bool = True
    ) -> Timeline:
        positions = None if self.head_positions is None else self.head_positions(time_idxs, x.dtype)
        return Timeline(time_idxs, resets, positions, keeps_state)

    def _embed(self, seq: Tensor, time_idxs: Tensor) -> Tensor:
        """The input (..., D) of the first block, from seq (..., tstep_dim) and time_idxs (..., 1)."""
        x = self.inp(seq)
        if self.input_positions is not None:
            x = x + self.input_positions(time_idxs)
        y: Tensor = self.dropout_emb(x) if self.training else x
        return y


class MixerTrajEncoder(TrunkTrajEncoder):
    """Base class of trunks with a single kind of mixer, which a subclass names.

    Args:
        tstep_dim: given by the agent.
        max_seq_len: given by the agent.
        d_model: width.
        n_layers: number of blocks.
        d_ff: width of the feed-forward part of each block, 0 for none; None means `ff_ratio` times d_model.
        dropout_ff: dropout after mixer and feed-forward part.
        dropout_emb: dropout on the input.
        activation: of the feed-forward part: relu, leaky_relu, gelu, silu, mish or tanh.
        norm: normalisation before each part and of the result, "layer", "rmsnorm" or None.
        glu: the feed-forward part is gated: activation(A x) * B x.
        normformer_norms: normalise after the mixer and inside the feed-forward part, too.
        gating: "gru" replaces residual sums by gates that begin close to the identity; None for sums.
        sigma_reparam: linear layers of the feed-forward part have a learned spectral norm.
        short_conv: width in timesteps of a depthwise convolution before the mixer; 0 for none. None takes the
            mixer's default: 4 for mixers that do not distinguish the most recent timesteps.
        mixer: settings of the mixer, see its class.
    Raises: ValueError for a size below 1 or an unknown name; TypeError for an unknown setting.
    """

    mixer_type: ClassVar[type[Mixer]]
    ff_ratio: ClassVar[int] = 4

    def __init__(  # noqa: PLR0913 - every keyword is a gin setting
        self,
        tstep_dim: int,
        max_seq_len: int,
        *,
        d_model: int = 128,
        n_layers: int = 2,
        d_ff: int | None = None,
        dropout_ff: float = 0.0,
        dropout_emb: float = 0.0,
        activation: str = "leaky_relu",
        norm: str | None = "layer",
        glu: bool = False,
        normformer_norms: bool = False,
        gating: str | None = None,
        sigma_reparam: bool = False,
        short_conv: int | None = None,
        **mixer: Any,
    ) -> None:
        d_ff = self.ff_ratio * d_model if d_ff is None else d_ff
        require_at_least(0, type(self).__name__, d_ff=d_ff, short_conv=short_conv or 0)
        require_share(type(self).__name__, dropout_ff=dropout_ff, dropout_emb=dropout_emb)
        settings = BlockSettings(
            d_model, d_ff, dropout_ff, activation, norm, glu, normformer_norms, gating, sigma_reparam
        )
        super().__init__(
            tstep_dim,
            max_seq_len,
            lambda i: MixerBlock(
                settings,
                build_mixer(type(self).__name__, self.mixer_type, d_model, max_seq_len, mixer),
                short_conv,
            ),
            d_model=d_model,
            n_layers=n_layers,
            norm=norm,
            dropout_emb=dropout_emb,
        )


def check_setting_names(
    owner: str, layer_type: type[nn.Module], num_supplied: int, settings: Mapping[str, Any]
) -> None:
    """Raise TypeError for settings that a layer does not have; the code supplies its first arguments."""
    allowed = list(inspect.signature(layer_type).parameters)[num_supplied:]
    if unknown := sorted(settings.keys() - set(allowed)):
        raise TypeError(
            f"{owner} has no setting {unknown}; its layers have {allowed}. Fix: set one of these, or bind a "
            "setting of the trunk, which MixerTrajEncoder explains."
        )


def build_mixer(
    owner: str, mixer_type: type[Mixer], d_model: int, max_seq_len: int, settings: dict[str, Any]
) -> Mixer:
    """Build a mixer whose settings belong to `owner`, which its errors then name instead of its class.

    Raises: TypeError for settings that it does not have; ValueError for impossible ones.
    """
    check_setting_names(owner, mixer_type, 2, settings)
    try:
        return mixer_type(d_model, max_seq_len, **settings)
    except ValueError as error:
        error.args = (str(error).replace(f"{mixer_type.__name__}.", f"{owner}."),)
        raise
