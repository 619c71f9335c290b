"""On a GPU, everything gives the results that it gives on a CPU. `make test-all` runs these tests."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from loxodon.agents import Agent
from loxodon.data import Batch, pack_batch, pad_batch
from loxodon.experiment.learn.batches import copied_ahead
from loxodon.experiment.learn.learner import masked_losses
from loxodon.experiment.process.transfer import to_device, to_host
from loxodon.nets import TransformerTrajEncoder

from ..agents.test_packed_batches import CASES, MAX_SEQ_LEN, OBS, of_windows, tstep, windows
from ..experiment.fakes import TINY, learning, metrics
from ..experiment.ppo.whole_runs import learned, ppo_experiment
from ..experiment.test_learner import TRAJECTORIES
from ..nets.encoders import DIM, ENCODERS, MEMORYLESS, WINDOW, episode_times, make_encoder
from ..transformers import recommended

DEVICE = torch.device("cuda")
ROUNDING = {"rtol": 2e-2, "atol": 2e-3}  # kernels round products to TF32
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def sequences() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (3, 5, 6), timesteps and first timesteps of episodes, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    resets = torch.zeros(3, WINDOW, dtype=torch.bool)
    resets[:, 0] = resets[1, 2] = resets[2, 4] = True
    return torch.randn(3, WINDOW, DIM, generator=generator), episode_times(resets), resets


@pytest.mark.parametrize("has_resets", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_kernels_have_the_outputs_and_gradients_of_plain_operations(name: str, has_resets: bool) -> None:
    x, times, resets = sequences()
    found = []
    for device in (torch.device("cpu"), DEVICE):
        encoder, inputs = make_encoder(name).to(device), x.to(device).requires_grad_()
        starts = resets.to(device) if has_resets else None
        steps = times if has_resets else torch.arange(WINDOW).expand(3, -1)[..., None]
        encoded = encoder(inputs, steps.to(device), resets=starts)[0]
        encoded.square().sum().backward()
        assert inputs.grad is not None
        found.append((encoded.detach().cpu(), inputs.grad.cpu()))
    torch.testing.assert_close(found[1], found[0], **ROUNDING)


@pytest.mark.parametrize("name", sorted(set(ENCODERS) - MEMORYLESS))
def test_acting_step_by_step_equals_a_pass_over_the_sequence(name: str) -> None:
    x = sequences()[0].to(DEVICE)
    times = torch.arange(WINDOW, device=DEVICE).expand(3, -1)[..., None]
    encoder = make_encoder(name).to(DEVICE)
    with torch.inference_mode():
        whole, state, steps = encoder(x, times)[0], encoder.init_hidden_state(3, DEVICE), []
        for t in range(WINDOW):
            encoded, state = encoder(x[:, t : t + 1], times[:, t : t + 1], state)
            steps.append(encoded)
    torch.testing.assert_close(torch.cat(steps, 1), whole, **ROUNDING)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("imitation")])
def test_packed_windows_have_the_losses_of_padded_ones(case: str) -> None:
    kind, space, encoder, settings = CASES[case]
    found = []
    for batch in (pad_batch(windows(space)), pack_batch(windows(space), MAX_SEQ_LEN)):
        torch.manual_seed(0)
        agent = kind(OBS, space, tstep, encoder, MAX_SEQ_LEN, **settings).train().to(DEVICE)
        on_device = batch.to(DEVICE)
        terms = agent(on_device)
        found.append([of_windows(x.detach(), on_device).cpu() for x in (terms.actor, terms.critic)])
    torch.testing.assert_close(found[1], found[0], **ROUNDING)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch
def test_updates_compiled_for_three_lengths_learn_like_others() -> None:
    kind, space, _, settings = CASES["actor-critic, GRU"]
    encoder = partial(
        TransformerTrajEncoder,
        d_model=16,
        n_layers=1,
        d_ff=16,
        dropout_ff=0.0,
        dropout_emb=0.0,
        **recommended(8),
    )
    torch.manual_seed(0)
    plain = kind(OBS, space, tstep, encoder, MAX_SEQ_LEN, **settings).to(DEVICE)
    compiled: Agent = copy.deepcopy(plain)
    compiled.compile_learning()

    def loss_of(agent: Agent, batch: Batch) -> Tensor:
        torch.manual_seed(1)
        losses = masked_losses(batch, agent(batch))
        loss: Tensor = losses["Actor Loss"] + losses["Critic Loss"]
        return loss

    for most in (12, 6, 3, 12):
        batch = pad_batch([x for x in windows(space) if len(x) <= most]).to(DEVICE)
        torch.testing.assert_close(loss_of(compiled, batch), loss_of(plain, batch), **ROUNDING)


def test_batches_are_copied_in_the_background_and_updates_hardly_wait(
    tmp_path: Path,
) -> None:
    batches = [pad_batch(TRAJECTORIES[: i + 1]) for i in range(4)]
    for batch, same in zip(batches, copied_ahead(batches, DEVICE), strict=True):
        assert torch.equal(same.obs["observation"].cpu(), batch.obs["observation"])
        assert torch.equal(same.mask.cpu(), batch.mask)
    exp = learning(tmp_path)
    (batch,) = copied_ahead(batches[-1:], DEVICE)
    exp.train_step(batch, log_step=True)
    assert waits_of(lambda: exp.train_step(batch)) == 0
    assert waits_of(lambda: exp.train_step(batch, log_step=True)) <= 4  # losses, gradients, figures, norms
    exp.close()


def waits_of(call: Callable[[], object]) -> int:
    """The number of times that a call waits for the GPU."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in seen)


def test_a_transfer_there_and_back_keeps_all_values() -> None:
    arrays = {
        "flags": np.array([True, False, True]),
        "times": np.array([[5], [7]]),
        "obs": np.eye(3, dtype="f4"),
    }
    found = to_host(to_device(arrays, DEVICE))
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())


def test_fp16_skips_an_update_that_overflows(tmp_path: Path) -> None:
    exp = learning(tmp_path, mixed_precision="fp16")
    assert exp.accelerator.scaler is not None
    before, scale = copy.deepcopy(exp.policy.state_dict()), exp.accelerator.scaler.get_scale()
    exp.accelerator.backward(1e30 * sum(p.sum() for p in exp.policy.trainable_params()))
    exp.learner.optimizer.step()
    assert exp.learner.optimizer.step_was_skipped
    assert exp.accelerator.scaler.get_scale() < scale
    for name, value in exp.policy.state_dict().items():
        assert torch.equal(value, before[name]), name
    exp.close()


def loxodon_run(folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> None:
    """Run `loxodon run` with a small config in a process of its own."""
    (folder / "tiny.gin").write_text(TINY)
    command = [sys.executable, *launcher, "-m", "loxodon.tools", "run", "--config", "tiny.gin", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_run_moves_from_a_gpu_to_a_cpu_and_back(tmp_path: Path) -> None:
    for epochs, device in enumerate(("cuda", "cpu", "cuda"), 1):
        resume = ("--resume",) if epochs > 1 else ()
        loxodon_run(tmp_path, "--device", device, *resume, f"Experiment.epochs={epochs}")
    rows = metrics(tmp_path / "runs" / "tiny")
    assert max(row["gradient_steps"] for row in rows if "gradient_steps" in row) == 3


def test_one_process_trains_with_nccl(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1")
    loxodon_run(tmp_path, launcher=launcher)
    assert metrics(tmp_path / "runs" / "tiny")


def test_a_deterministic_run_repeats_itself(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        loxodon_run(folder, "Experiment.deterministic=True", "Experiment.epochs=3", "--seed", "0")
    first, second = (metrics(folder / "runs" / "tiny") for folder in folders)
    assert first == second


@pytest.mark.parametrize("encoder", ["gru", "transformer"])
def test_ppo_learns(encoder: str, tmp_path: Path) -> None:
    exp = ppo_experiment(tmp_path, encoder)
    exp.start()
    before = copy.deepcopy(exp.policy.state_dict())
    learned(exp)
    after = exp.policy.state_dict()
    assert all(x.device.type == "cuda" for x in after.values())
    assert any(not torch.equal(value, before[name]) for name, value in after.items())
    assert all(value.isfinite().all() for value in after.values())
