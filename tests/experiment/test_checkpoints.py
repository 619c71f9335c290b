"""Checkpoints: restoring, retention, refusals; damaged and untrusted files, which never execute code."""

from __future__ import annotations

import ast
import functools
import io
import json
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from loxodon.data import DiskTrajDataset, MixtureOfDatasets, Sampler, load_trajectory
from loxodon.envs import EnvSpec
from loxodon.experiment import Experiment, load_policy
from loxodon.experiment.checkpoint import policy_file, store
from loxodon.experiment.checkpoint.store import MARKER, read_values, write_values

from .fakes import CountingEnv, TinyAgent, make_experiment, run


def started(folder: Path, **changes: Any) -> Experiment:
    exp = make_experiment(folder, **changes)
    exp.start()
    return exp


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run with checkpoints of epochs 1 and 3."""
    return run(make_experiment(tmp_path_factory.mktemp("finished"), epochs=4)).run_dir


@pytest.fixture
def four_epochs(finished: Path, tmp_path: Path) -> Experiment:
    """A run that continues in a copy of it."""
    shutil.copytree(finished, tmp_path / finished.name)
    return started(tmp_path, epochs=4)


def perturb(policy: Any) -> None:
    with torch.no_grad():
        policy.actor.bias.add_(1.0)


def test_weights_optimizer_counters_and_exploration_are_restored(tmp_path: Path) -> None:
    one, two = run(make_experiment(tmp_path)), started(tmp_path)
    assert two.load_checkpoint() == 2
    for a, b in zip(one.policy.state_dict().values(), two.policy.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert (two.env_steps, two.learner.gradient_steps, two.best_score) == (72, 8, one.best_score)
    moments = [next(iter(e.optimizer.state_dict()["state"].values()))["exp_avg"] for e in (one, two)]
    assert torch.equal(*moments)
    first, second = (exp.collector.groups[0].exploration for exp in (one, two))  # type: ignore[union-attr]
    assert second.num_calls == first.num_calls == 24


def test_a_start_that_resumes_takes_the_seed_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = run(make_experiment(tmp_path, seed=None))
    two = make_experiment(tmp_path, seed=None, epochs=3)
    two.start(resume=True)
    assert (two.run_seed, two.epoch) == (one.run_seed, 2)
    assert {record.args for record in caplog.records if "uses seed" in record.msg} == {(one.run_seed,)}
    two.close()
    with pytest.raises(FileNotFoundError, match="has no complete checkpoint"):
        make_experiment(tmp_path, run_name="other").start(resume=True)


def test_the_state_of_another_kind_of_dataset_is_refused_before_files_are_touched(tmp_path: Path) -> None:
    run(make_experiment(tmp_path, dataset=DiskTrajDataset()))
    files = sorted(tmp_path.rglob("*"))
    two = started(tmp_path, dataset=MixtureOfDatasets([DiskTrajDataset()], [1.0]))
    with pytest.raises(ValueError, match=r"kind of dataset than Mixture.*has no datasets. Fix"):
        two.load_checkpoint()
    assert set(files) <= set(tmp_path.rglob("*"))


def test_loading_only_weights_starts_at_the_first_epoch(tmp_path: Path) -> None:
    one = run(make_experiment(tmp_path))
    two = started(tmp_path, run_name="other")
    two.load_checkpoint_from_path(one.run_dir / "ckpts" / "policy_weights" / "policy_epoch_1.safetensors")
    assert torch.equal(one.policy.actor.bias, two.policy.actor.bias)
    assert (two.epoch, two.learner.gradient_steps) == (0, 0)
    assert started(tmp_path).load_checkpoint(1, resume_training_state=False) == 0


def test_saving_an_epoch_twice_keeps_the_second_checkpoint(tmp_path: Path) -> None:
    exp = started(tmp_path)
    exp.epoch = 1
    exp.save_checkpoint()
    perturb(exp.policy)
    exp.save_checkpoint()
    expected = exp.policy.actor.bias.detach().clone()
    perturb(exp.policy)
    exp.load_checkpoint(0)
    assert torch.equal(exp.policy.actor.bias, expected)
    assert [p.name for p in exp.checkpoints.states_dir.iterdir()] == ["tiny_epoch_0"]


def test_every_nth_and_the_newest_checkpoints_are_kept_and_all_policies(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "ckpt_interval": 1,
        "CheckpointManager.keep": 2,
        "CheckpointManager.keep_every": 3,
    }
    exp = run(make_experiment(tmp_path, epochs=8, **settings))
    assert exp.checkpoints.complete_epochs() == [2, 5, 6, 7]  # after 3 and 6 epochs, and the last two
    assert exp.checkpoints.best_path.exists()
    assert len(list(exp.checkpoints.weights_dir.iterdir())) == 8


def test_published_weights_have_increasing_versions_and_are_loaded_once(tmp_path: Path) -> None:
    learner, actor = started(tmp_path), started(tmp_path, mode="collect")
    assert actor.read_latest_policy() is None
    for version in (1, 2):
        perturb(learner.policy)
        learner.write_latest_policy()
        info = actor.read_latest_policy()
        assert info is not None
        assert (info.version, info.epoch, info.is_final) == (version, 0, False)
        assert torch.equal(actor.policy.actor.bias, learner.policy.actor.bias)
    perturb(actor.policy)
    actor.read_latest_policy()  # the same version is not loaded again
    assert not torch.equal(actor.policy.actor.bias, learner.policy.actor.bias)
    assert list((learner.run_dir / "ckpts" / "latest").iterdir()) == [learner.checkpoints.latest_path]


def test_an_actor_that_starts_late_explores_like_the_others(tmp_path: Path) -> None:
    learner, actor = started(tmp_path), started(tmp_path, mode="collect")
    noise = actor.collector.groups[0].exploration  # type: ignore[union-attr]
    for env_steps, num_calls in ((300, 100), (240, 100), (306, 102)):
        learner.ctx.progress.env_steps = env_steps
        learner.write_latest_policy()
        actor.read_latest_policy()
        assert noise.num_calls == num_calls  # 3 environments; the count never decreases


# --- what cannot be loaded ------------------------------------------------------------------------------


def test_incomplete_missing_and_misshapen_checkpoints_are_clear_errors(
    tmp_path: Path, four_epochs: Experiment
) -> None:
    class Wider(TinyAgent):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.critic = nn.Linear(99, 1)

    exp = started(tmp_path / "new")
    with pytest.raises(FileNotFoundError, match=r"has no complete checkpoint.*Fix:"):
        exp.load_checkpoint()
    with pytest.raises(FileNotFoundError, match=r"no weights at.*Fix:"):
        exp.load_checkpoint_from_path(tmp_path / "nothing.safetensors")
    exp = four_epochs
    with pytest.raises(
        FileNotFoundError, match=r"does not exist. Complete checkpoints exist for the epochs \[1, 3\].*Fix"
    ):
        exp.load_checkpoint(9)
    (exp.checkpoints.state_dir(3) / MARKER).unlink()
    assert exp.checkpoints.newest_epoch() == 1
    with pytest.raises(
        FileNotFoundError, match=r"is incomplete. Complete checkpoints exist for the epochs \[1\].*Fix:"
    ):
        exp.load_checkpoint(3)
    shapes = r"critic.weight is \(1, 6\) in the file and \(1, 99\) in the agent.*Fix:"
    with pytest.raises(ValueError, match=shapes):
        started(tmp_path, agent_type=Wider).load_checkpoint()


def test_another_number_of_processes_shares_the_states_out(four_epochs: Experiment) -> None:
    folder = four_epochs.checkpoints.state_dir(3)
    for rank in range(3):
        write_values(folder / f"rank_{rank}.pt", {"number": rank})
    for num_ranks, expected in ((2, [[0, 2], [1]]), (4, [[0], [1], [2], []])):
        for rank, numbers in enumerate(expected):
            checkpoints = store.CheckpointManager(four_epochs.run_dir, "tiny", rank=rank, num_ranks=num_ranks)
            (folder / MARKER).write_text(json.dumps({"files": {}}))
            state = checkpoints.read(folder)
            assert state.num_ranks == 3
            assert [own["number"] for own in state.inherited] == numbers
            assert state.own["number"] == (numbers or [0])[0]


def test_a_run_of_two_processes_continues_in_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = started(tmp_path, traj_save_len=1000, make_train_env=EnvSpec(CountingEnv, {"length": 99}))
    first.collect_new_training_data()
    folder = first.save_checkpoint()
    assert folder is not None
    shutil.copy(folder / "rank_0.pt", folder / "rank_1.pt")
    second = started(tmp_path, traj_save_len=1000)
    second.load_checkpoint()
    assert caplog.text.count("saved by 2 process(es), but this run has 1. Fix: resume with the number") == 1
    assert second.collector is not None
    exploration = second.collector.groups[0].exploration
    assert exploration is not None
    assert exploration.num_calls == 12
    stored = list(Path(second.dataset.save_new_trajs_to).glob("*.npz"))
    assert sum(len(load_trajectory(path)) for path in stored) == 2 * 36  # steps of both
    assert not second.collector.groups[0].state.time_idxs.any()  # type: ignore[union-attr]
    for exp in (first, second):
        exp.close()


def test_another_format_is_refused(four_epochs: Experiment) -> None:
    exp, folder = four_epochs, four_epochs.checkpoints.state_dir(3)
    path = folder / "metadata.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))
    (folder / MARKER).write_text(json.dumps({"files": {}}))
    with pytest.raises(ValueError, match=r"format version 99, but this Loxodon reads \d. Fix:"):
        exp.load_checkpoint()


# --- values ---------------------------------------------------------------------------------------------


def test_all_values_that_states_may_hold_are_restored(tmp_path: Path) -> None:
    base, array = torch.arange(6), np.arange(6.0).reshape(2, 3)
    tree = {
        "shared memory": [base, base[::2]],
        "plain": (None, True, "text", 2**127, [{7: ()}]),
        "generators": [np.random.default_rng(0).bit_generator.state, random.Random(0).getstate()],
    }
    arrays = [array[:, ::2], array.astype(">i2"), np.zeros((0, 3), np.uint8), np.array(True)]
    write_values(tmp_path / "x.pt", {**tree, "arrays": arrays, "scalar": np.float32(0.1)})
    back = read_values(tmp_path / "x.pt")
    for one, two in zip(arrays, back.pop("arrays"), strict=True):
        assert (two.dtype, two.shape) == (one.dtype, one.shape)
        assert np.array_equal(one, two)
    scalar = back.pop("scalar")
    assert (type(scalar), scalar) == (np.float32, np.float32(0.1))
    assert [t.tolist() for t in back.pop("shared memory")] == [[0, 1, 2, 3, 4, 5], [0, 2, 4]]
    del tree["shared memory"]
    assert back == tree


@pytest.mark.parametrize(
    ("value", "what"), [({"x": object()}, "object"), ({(1, 2): 3}, r"\(1, 2\)"), ({None: 1}, "key None")]
)
def test_objects_are_refused(tmp_path: Path, value: Any, what: str) -> None:
    with pytest.raises(TypeError, match=rf"cannot hold .*{what}.*Fix:"):
        write_values(tmp_path / "x.pt", value)


# ---- damage ----


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "bit": ("model.safetensors", flip_a_byte, "does not have the checksum it was written with"),
    "cut": ("shared.pt", cut_short, r"shared.pt has \d+ bytes instead of"),
    "gone": ("rank_0.pt", Path.unlink, "rank_0.pt is missing"),
    "marker": (MARKER, cut_short, "its marker COMPLETE cannot be read"),
}


@pytest.mark.parametrize("how", list(DAMAGES))
def test_a_damaged_newest_checkpoint_is_skipped_with_one_warning(
    four_epochs: Experiment, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    exp, (name, spoil, text) = four_epochs, DAMAGES[how]
    newest = exp.checkpoints.state_dir(3)
    spoil(newest / name)
    assert exp.load_checkpoint() == 2
    (warning,) = (r.getMessage() for r in caplog.records if "damaged" in r.getMessage())
    assert "tiny_epoch_3 is damaged" in warning
    assert warning.endswith("Continuing from the checkpoint of epoch 1 instead.")
    with pytest.raises(ValueError, match=rf"tiny_epoch_3 is damaged: .*{text}.*Fix:"):
        exp.load_checkpoint(3)
    if how == "marker":
        exp.learn()  # replaces the damaged checkpoint
        exp.close()
        assert exp.checkpoints.newest_intact_epoch() == (3, [])
        flip_a_byte(exp.checkpoints.state_dir(1) / name)
        spoil(newest / name)
        with pytest.raises(ValueError, match=r"No checkpoint can.*epoch_3 is.*epoch_1 is damaged.*Fix:"):
            exp.load_checkpoint()


def test_states_after_the_loaded_one_are_set_aside_when_the_run_goes_another_way(tmp_path: Path) -> None:
    run(make_experiment(tmp_path, epochs=4))
    settings: dict[str, Any] = {"epochs": 3, "ckpt_interval": 1, "CheckpointManager.keep": 1}
    exp = make_experiment(tmp_path, **settings)
    exp.start()
    exp.load_checkpoint(1)
    assert exp.checkpoints.complete_epochs() == [1, 3]  # nothing moves before the run continues
    exp.learn()
    exp.close()
    assert exp.checkpoints.complete_epochs() == [2]
    assert (exp.checkpoints.states_dir / "superseded" / "tiny_epoch_3" / MARKER).is_file()
    again = make_experiment(tmp_path, **settings)
    again.start()
    assert again.load_checkpoint() == 3
    again.close()


def test_checkpoints_of_another_run_are_named_when_there_are_no_others(tmp_path: Path) -> None:
    exp = run(make_experiment(tmp_path))
    facts = json.loads(exp.checkpoints.versions_path.read_text())
    exp.checkpoints.versions_path.write_text(json.dumps({**facts, "run_id": "other"}))
    later = started(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"only checkpoints of another run.*tiny_epoch_1\. Fix: copy"):
        later.load_checkpoint()
    later.close()


def test_a_save_interrupted_between_its_two_renames_is_finished(four_epochs: Experiment) -> None:
    checkpoints = four_epochs.checkpoints
    final = checkpoints.state_dir(3)
    final.rename(final.with_name(final.name + ".replaced"))
    final.with_name("tiny_epoch_5.tmp").mkdir()
    checkpoints.make_folders(clean=True)
    assert checkpoints.complete_epochs() == [1, 3]
    assert sorted(final.parent.iterdir()) == [checkpoints.state_dir(1), final]


def test_a_deleted_checkpoint_folder_is_created_again(tmp_path: Path) -> None:
    exp = started(tmp_path, epochs=4, val_interval=None)
    update, seen = exp.learner.update, []

    def deleting(*args: Any) -> Any:
        if exp.epoch == 2 and not seen:
            shutil.rmtree(exp.checkpoints.root)
            seen.append(True)
        return update(*args)

    exp.learner.update = deleting  # type: ignore[method-assign]
    exp.learn()
    exp.close()
    assert exp.checkpoints.complete_epochs() == [3]
    assert exp.checkpoints.latest_path.exists()
    assert (exp.checkpoints.root / "config.txt").exists()
    assert started(tmp_path, epochs=4).load_checkpoint() == 4


# --- disks that cannot be written -----------------------------------------------------------------------


def full(*args: Any, **kwargs: Any) -> Any:
    raise OSError(28, "No space left on device")


def torch_on_a_full_disk(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("PytorchStreamWriter failed writing file data/0: No space left on device")


@pytest.mark.parametrize(("name", "failure"), [("save_file", full), ("write_values", torch_on_a_full_disk)])
def test_a_full_disk_is_one_clear_error_and_existing_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, failure: Any
) -> None:
    exp = started(tmp_path, epochs=4)
    commit = exp.checkpoints.commit

    def commit_on_a_full_disk(*args: Any) -> Any:
        if exp.epoch >= 4:
            monkeypatch.setattr(store, name, failure)
        return commit(*args)

    exp.checkpoints.commit = commit_on_a_full_disk  # type: ignore[method-assign]
    with pytest.raises(OSError, match=r"checkpoint of epoch 3 could not .*No space.*epochs \[1\].*Fix:"):
        exp.learn()
    exp.close()
    monkeypatch.undo()
    assert exp.checkpoints.newest_intact_epoch() == (1, [])
    assert [path.name for path in exp.checkpoints.states_dir.iterdir()] == ["tiny_epoch_1"]
    lengths = [len(load_trajectory(path)) for path in (exp.run_dir / "buffer" / "fifo").glob("*.npz")]
    assert sum(lengths) == exp.env_steps == 4 * 12 * 3


def test_a_save_that_fails_restores_the_earlier_checkpoint_of_its_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = started(tmp_path)
    exp.epoch = 1
    exp.save_checkpoint()
    rename = Path.rename

    def failing(self: Path, target: Any) -> Any:
        if self.name.endswith(".tmp"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match=r"epoch 0 could not be written.*Input/output error"):
        exp.save_checkpoint()
    monkeypatch.undo()
    assert [path.name for path in exp.checkpoints.states_dir.iterdir()] == ["tiny_epoch_0"]
    assert exp.load_checkpoint() == 1


def test_a_file_where_the_folder_should_be_is_one_clear_error(tmp_path: Path) -> None:
    exp = started(tmp_path)
    exp.checkpoints.states_dir.rmdir()
    exp.checkpoints.states_dir.touch()
    with pytest.raises(
        OSError, match=r"could not .*states.*There is no earlier checkpoint. Fix:.*start again"
    ):
        exp.save_checkpoint()


@pytest.mark.parametrize("what", ["a link to nowhere", "a file"])
def test_something_else_where_ckpts_should_be_is_one_clear_error(tmp_path: Path, what: str) -> None:
    exp = make_experiment(tmp_path)
    exp.run_dir.mkdir(parents=True)
    place = exp.run_dir / "ckpts"
    place.touch() if what == "a file" else place.symlink_to("nowhere")
    with pytest.raises(
        FileExistsError, match=rf"cannot be created: .*tiny/ckpts is {what}.*Fix: remove .*ckpts"
    ):
        exp.start()


def test_a_policy_that_cannot_be_published_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = started(tmp_path)
    exp.write_latest_policy()
    before = exp.checkpoints.latest_path.read_bytes()
    monkeypatch.setattr(policy_file, "save_file", full)
    with pytest.raises(OSError, match=r"policy could not be written.*No space.*Fix:"):
        exp.write_latest_policy()
    assert exp.checkpoints.latest_path.read_bytes() == before
    assert len(list(exp.checkpoints.latest_path.parent.iterdir())) == 1


# --- untrusted files ------------------------------------------------------------------------------------


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> Any:
        return (open, (self.target, "w"))


@pytest.fixture
def went_off(tmp_path: Path) -> Iterator[Path]:
    """The file that a bomb would create; it must not exist after the test."""
    yield tmp_path / "it_went_off"
    assert not (tmp_path / "it_went_off").exists(), "a pickle was executed"


def by_torch(value: Any, **settings: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **settings)
    return buffer.getvalue()


def with_a_pickle_of(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A file of torch with its pickle replaced."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.endswith("data.pkl") else content)
    return buffer.getvalue()


CRAFTED: dict[str, Callable[[Path], bytes]] = {
    "pickle": lambda target: pickle.dumps(Bomb(target)),
    "torch": lambda target: by_torch({"rng": Bomb(target)}),
    "old torch": lambda target: by_torch(Bomb(target), _use_new_zipfile_serialization=False),
    "larger than the file": lambda _: by_torch({"x": torch.zeros(1).expand(2 * 10**8)}),  # 800 MB
    "larger together": lambda _: by_torch([*torch.zeros(1, 9999).expand(100, -1)]),
    "larger as an array": lambda _: by_torch(
        {None: ("|u1", (10**9,), torch.zeros(1, dtype=torch.uint8).expand(10**9))}
    ),
    "lists of lists": lambda _: by_torch(functools.reduce(lambda inner, _: [inner] * 10, range(9), [0])),
    "another size": lambda _: with_a_pickle_of(
        by_torch({"x": torch.zeros(10)}), lambda data: data.replace(b"K\n", b"J\x00\x00\x00\x40")
    ),
    "array of objects": lambda _: by_torch({None: ("O", (1,), torch.zeros(8, dtype=torch.uint8))}),
    "nesting": lambda _: with_a_pickle_of(
        by_torch([]), lambda data: b"\x80\x02" + b"]" * 9999 + b"a" * 9998 + b"."
    ),
    "nothing": lambda _: b"",
}


def test_the_bombs_work(tmp_path: Path) -> None:
    pickle.loads(CRAFTED["pickle"](tmp_path / "x")).close()
    assert (tmp_path / "x").exists()
    torch.load(io.BytesIO(CRAFTED["torch"](tmp_path / "y")), weights_only=False)["rng"].close()
    assert (tmp_path / "y").exists()


@pytest.mark.parametrize("how", list(CRAFTED))
def test_a_crafted_state_is_refused_and_runs_nothing(tmp_path: Path, went_off: Path, how: str) -> None:
    path = tmp_path / "shared.pt"
    path.write_bytes(CRAFTED[how](went_off))
    what = "larger than the file" if how.startswith(("larger", "lists")) else ".*"
    with pytest.raises(ValueError, match=rf"is not a readable part of a checkpoint \(.*{what}\)\. Fix:"):
        read_values(path)


@pytest.mark.parametrize("name", ["model.safetensors", "shared.pt", "rank_0.pt"])
def test_a_checkpoint_with_a_pickle_is_skipped_or_refused(
    four_epochs: Experiment, went_off: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    folder = four_epochs.checkpoints.state_dir(3)
    (folder / name).write_bytes(CRAFTED["torch"](went_off))
    for extra in ("rank_0.safetensors", "optimizer.pt", "model.pt"):
        (folder / extra).write_bytes(CRAFTED["torch"](went_off))
    assert four_epochs.load_checkpoint() == 2
    assert "tiny_epoch_3 is damaged" in caplog.text
    (folder / MARKER).write_text('{"files": {}}')  # claims that all files are as written
    with pytest.raises(ValueError, match=r"is not a readable.*Fix:"):
        four_epochs.load_checkpoint()


def test_a_pickle_in_the_buffer_is_quarantined(tmp_path: Path, went_off: Path) -> None:
    dataset = DiskTrajDataset(sampler=Sampler("timestep"))  # opens every file
    exp = started(tmp_path, epochs=2, val_interval=None, dataset=dataset)
    fifo = exp.run_dir / "buffer" / "fifo"
    name = "env_00000000_9999999999.0.npz"
    (fifo / name).write_bytes(CRAFTED["pickle"](went_off))
    exp.epoch = exp.env_steps = 1  # a new run would move the file away
    exp.learn()
    exp.close()
    assert name in [path.name for path in (exp.run_dir / "buffer" / "quarantine").iterdir()]


def test_a_pickle_instead_of_the_latest_policy_is_refused(tmp_path: Path, went_off: Path) -> None:
    learner, actor = started(tmp_path), started(tmp_path, mode="collect")
    path = learner.checkpoints.latest_path
    for content in (CRAFTED["pickle"](went_off), CRAFTED["torch"](went_off), b"not weights"):
        learner.write_latest_policy()  # the next publication replaces it
        assert actor.read_latest_policy() is not None
        path.write_bytes(content)
        unreadable = r"policy\.safetensors is not a readable safetensors file.*Fix:"
        for read in (actor.read_latest_policy, lambda: load_policy(path)):
            with pytest.raises(ValueError, match=unreadable):
                read()
        with pytest.raises(ValueError, match=unreadable):
            learner.load_checkpoint_from_path(path)


def test_the_experiment_never_calls_a_pickle_loader() -> None:
    for path in Path(store.__file__).parents[1].rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        for call in calls:
            if ast.unparse(call.func) == "torch.load":
                assert "weights_only=True" in map(ast.unparse, call.keywords), path
        assert "pickle.load" not in text
