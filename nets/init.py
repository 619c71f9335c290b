"""Initial weights: the gains, shares and standard deviations of the networks in this package.

Each is the default of the argument in the last column, which gin can set: `GRUTrajEncoder.gate_gain = 1.0`.
A gain multiplies torch's initial weights, so 1 keeps them. The reason for a value is written below it.

| name | value | scales | source | argument |
|---|---|---|---|---|
| `FAN_IN_GAIN` | sqrt(3) | critics | LeCun et al. 1998 | none: as published |
| `GATE_GAIN` | 8 | inputs of gates | Ours. | `gate_gain` of GRU, LSTM, GLA, Mamba, Mamba-2 |
| `EXP_GATE_GAIN` | 4 | inputs of exponential gates | Ours. | `MLSTMTrajEncoder.gate_gain` |
| `MIN_RNN_GATE_GAIN` | 16 | inputs of gates | Ours. | `gate_gain` of minGRU, minLSTM |
| `MIN_RNN_OUT_GAIN` | 3 | reads from the state | Ours. | `out_gain` of minGRU, minLSTM |
| `SELECT_GAIN` | 4 | step sizes, writes and reads | Ours. | `MambaTrajEncoder.select_gain` |
| `STEP_BIAS` | 0 | bias of step sizes, not a gain | Ours. | `step_bias` of Mamba, Mamba-2 |
| `LASTING_SHARE` | 0.5 | features with long memories | Ours. | `lasting_share` of GRU, LSTM |
| `QK_GAIN` | 3 | normalised queries | Ours. | `TransformerTrajEncoder.qk_gain` |
| `FIXED_CONTENT_GAIN` | 0.3 | queries, keys of fixed heads | Ours. | `fixed_content_gain` of Transformer |
| `ORTHOGONAL_GAIN` | sqrt(2) | orthogonal weights | He et al. 2015, eq. 10 | none: layers before a ReLU |
| `EMBEDDING_STD` | 0.02 | deviation of normal weights | Radford et al. 2019 | none: any small value |
"""

from __future__ import annotations

import math

FAN_IN_GAIN = math.sqrt(3.0)
"""Weights are uniform within gain / sqrt(fan_in), so this gives them a variance of 1 / fan_in: outputs are as
large as inputs. With a gain of 1, the sequence model receives little gradient from the critics at first.
"""

GATE_GAIN = 8.0
"""By chance, some gates then admit a rare timestep and keep it. With a gain of 1, all gates are open to about
the same degree at every timestep: a cue is one of a hundred equal parts of the memory, too little to learn
from.
"""

EXP_GATE_GAIN = GATE_GAIN / 2
"""Exponential gates are sharper than sigmoids."""

MIN_RNN_GATE_GAIN = 2 * GATE_GAIN
"""Gates that see only the input must be sharper: otherwise a cue fades in the trunk before it is used."""

MIN_RNN_OUT_GAIN = 3.0
"""The output of the state is scaled up for the same reason."""

SELECT_GAIN = 4.0
"""A cue must outweigh the timesteps that follow it."""

STEP_BIAS = 0.0
"""Step sizes begin at softplus(0) = 0.7. With those of the reference (0.001 to 0.1), lasting memories are
written with so little weight that a cue from 100 timesteps earlier is not learned.
"""

LASTING_SHARE = 0.5
"""These features begin with memories of all lengths up to the training window (Tallec & Ollivier 2018,
arXiv:1804.11188). The others keep torch's biases and forget quickly, as control tasks need.
"""

QK_GAIN = 3.0
"""Some heads then single out rare timesteps by chance, and recall is learned from there."""

FIXED_CONTENT_GAIN = 0.3
"""Heads of the kind "fixed" begin with queries and keys that depend on places more than on contents."""

ORTHOGONAL_GAIN = math.sqrt(2.0)
"""ReLUs halve the second moment of their inputs."""

EMBEDDING_STD = 0.02
"""Learned positions, attention sinks and weights with a learned spectral norm begin small."""
