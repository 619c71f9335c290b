"""The command `loxodon`: its subcommands, the list of presets, and shell completion."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loxodon.tools import main as command
from loxodon.tools.arguments import program_name
from loxodon.tools.main import COMMANDS, main

from ..experiment.fakes import TINY


def test_help_and_presets_need_no_torch() -> None:
    code = "import sys; from loxodon.tools.main import main; main(['--help']); main(['presets'])"
    code += "; assert not {'torch', 'gin', 'numpy'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    text = done.stdout.decode()
    for name, (_, purpose) in COMMANDS.items():
        assert f"{name} " in text
        assert purpose in text
    assert re.search(r"^tmaze +T-maze: remember one bit", text, re.M)


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["evalute"], 2, "error: unknown command 'evalute'. Did you mean 'evaluate'? Fix: "),
        (["presets", "tmase"], 2, "error: there is no preset 'tmase'. Did you mean 'tmaze'? Fix: "),
        (["--completion", "tcsh"], 2, "error: --completion got 'tcsh', but must be bash or zsh. Fix: "),
        (["status", "nowhere"], 2, "error: "),
        (["run"], 2, "no preset, .gin file or --env is given. Fix: "),
        (["--config", "tmaze", "Experiment.epoch=3"], 2, "Did you mean 'epochs'? Fix: "),
    ],
)
def test_impossible_commands_are_one_message(
    words: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = main(words)
    except SystemExit as error:
        found = error.code  # type: ignore[assignment]
    assert found == status
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", [["run"], []])
def test_run_is_the_default_command(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/loxodon"])
    Path("tiny.gin").write_text(TINY)
    assert main([*words, "--config", "tiny.gin", "--seed", "1", "Experiment.verbose=False"]) == 0
    again = "try another seed    loxodon run --config tiny.gin Experiment.verbose=False --seed 2"
    assert again in capsys.readouterr().out
    assert main(["status", "runs/tiny"]) == 0  # the run has finished
    assert main(["data", "ls", "runs/tiny"]) == 0


@pytest.mark.parametrize(
    ("typed", "status", "says"),
    [
        ("--version", 0, "loxodon "),
        ("run --help", 0, "--save-config FILE"),
        ("status --help", 0, "--json"),
        ("runn", 2, "Did you mean 'run'? Fix: "),
        (
            "run tmaze --sead 3",
            2,
            "unrecognized arguments: --sead 3. Did you mean '--seed' or '--seeds'? Fix: ",
        ),
        ("run tmaze --seed", 2, "argument --seed: expected one argument. Fix: "),
        ("run tmase", 2, "command line, `tmase`: there is no such file or preset. Did you mean 'tmaze'"),
        (
            "run tmaze Experiment.epochs=",
            2,
            "`Experiment.epochs=`: an override must look like Name.param=value. Fix",
        ),
        (
            "run tmaze --agent sac",
            2,
            "--agent needs --env. Fix: write agents/sac after a preset.",
        ),
        ("run tmaze --agent ppo", 2, "--agent needs --env. Fix: add --env CartPole-v1, for example."),
        ("run tmaze --seed x", 2, "argument --seed: invalid int value: 'x'. Fix: see loxodon run --help"),
        ("evaluate nowhere", 2, "error: nowhere does not exist. Fix: give the folder of a run"),
        ("evaluate . --contxt 1", 2, "unrecognized arguments: --contxt 1. Did you mean '--context'"),
        ("evaluate . --context 1,two", 2, "'1,two' is not a list such as 1,16,full. Fix: "),
        ("export nowhere -o there", 2, "error: nowhere does not exist. Fix: give the folder of a run"),
        ("export .", 2, "the following arguments are required: -o/--output. Fix: see loxodon export --help"),
        (
            "evaluate . --set HORIZON",
            2,
            "`--set HORIZON`: an override must look like Name.param=value. Fix: ",
        ),
        ("benchmark", 2, "the following arguments are required: SUITE. Fix: see loxodon benchmark --help"),
        ("evaluate . --json .", 2, "--json . is not a plain file. Fix: "),
        ("evaluate . --json file/a.json", 2, "the output folder file cannot be written to (Not a directory)"),
        ("evaluate . --video file", 2, "the output folder file cannot be written to (Not a directory). Fix"),
        (
            "export . -o file/x",
            2,
            "(Not a directory). Fix: choose another place with -o",
        ),
        ("report . -o /dev/null", 2, "cannot be written to (Not a directory). Fix: choose another place"),
        ("sweep tmaze --trials 1 -o file", 2, "cannot be written to (Not a directory). Fix: "),
        ("benchmark classic CartPole-v1 -o file", 2, "cannot be written to (Not a directory). Fix: "),
        ("benchmark classic --page file/x.md", 2, "cannot be written to (Not a directory). Fix: "),
        ("report . --metrics val/return", 2, "Did you mean '--metric'"),
        ("status nowhere", 2, "error: nowhere does not exist. Fix: give the folder of a run"),
        ("sweep tmaze", 2, "the following arguments are required: --trials. Fix: see loxodon sweep --help"),
        ("sweep tmaze --trials 0", 2, "--trials: '0' is not a whole number of at least 1. Fix: "),
        ("sweep tmase --trials 2", 2, "command line, `tmase`: there is no such file or preset. Did you mean"),
        ("sweep tmaze --trials 2 --seeds 0:2", 2, "a sweep names its runs itself. Fix: remove --seeds"),
        ("run tmaze --jobs 2", 2, "--jobs needs --seeds. Fix: "),
        (
            "run tmaze --env CartPole-v1",
            2,
            "--env begins from general settings, so it cannot be combined with 'tmaze'. Fix",
        ),
        ("run --env CartPoll-v1", 2, "--env 'CartPoll-v1' is not registered. Did you mean 'CartPole-v1'"),
        (
            "run --env CartPole-v1 --agent pppo",
            2,
            "--agent 'pppo' is not known. Did you mean 'ppo'? Fix: choose",
        ),
        ("run --env CartPole-v1 --encoder grru", 2, "--encoder 'grru' is not known. Did you mean 'gru'"),
        (
            "run --env tmaze",
            2,
            "--env 'tmaze' is a preset, not an environment. Fix: write loxodon run tmaze.",
        ),
        ("status . --jsn", 2, "unrecognized arguments: --jsn. Did you mean '--json'"),
    ],
)
def test_arguments_are_checked_before_torch_is_imported(
    typed: str,
    status: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()

    def refuse(name: str) -> None:
        raise AssertionError(f"{typed} imported what does {name}")

    monkeypatch.setattr(command, "_function", refuse)
    monkeypatch.setattr(sys, "argv", ["loxodon"])
    try:
        found = main(typed.split())
    except SystemExit as error:
        found = int(str(error.code))
    printed = capsys.readouterr()
    assert found == status
    assert says in printed.out + printed.err


@pytest.mark.parametrize(
    ("started", "shown"),
    [
        ("/venv/bin/loxodon", "loxodon run"),
        ("-c", "loxodon run"),  # a run of --seeds that the command started
        ("examples/run.py", "python examples/run.py"),
        (
            str(Path(command.__file__).with_name("__main__.py")),
            "python -m loxodon.tools run",
        ),
    ],
)
def test_printed_commands_begin_with_the_program_that_was_typed(
    started: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [started])
    assert program_name() == shown


def test_parsing_arguments_needs_no_torch() -> None:
    code = "import sys; from loxodon.tools.arguments import parse_run; parse_run(['tmaze', '--seed', '1'])"
    code += "; assert not {'torch', 'gin', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_presets_fit_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["presets"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(
        r"^tmaze +T-maze: remember one bit for 50 steps\n +transformer_small; success 1.0", text, re.M
    )
    assert main(["presets", "tmaze"]) == 0
    text = capsys.readouterr().out
    for part in ("# T-maze: remember", "loxodon run tmaze\n", "transformer_small", "Experiment.epochs = 150"):
        assert part in text


def test_presets_are_printed_with_the_paths_of_their_parts_or_as_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["presets", "tmaze_pixels"]) == 0
    (include,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("include"))
    assert Path(include.partition("#")[2].strip()).is_file()
    assert main(["presets", "--json"]) == 0
    presets = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert presets["tmaze_pixels"]["encoder"] == "transformer_small"  # set in an included file
    assert presets["ppo/cartpole"]["measured"].startswith("return 475 after")


def test_a_shell_completes_commands_presets_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "COMMANDS", {name: COMMANDS[name] for name in ("run", "status", "presets")})
    main(["--completion", "bash"])
    script = capsys.readouterr().out
    for typed, found in [
        ("loxodon st", {"status"}),
        ("loxodon run --config tmaze_p", {"tmaze_pixels"}),
        ("loxodon run --print", {"--print-config"}),
        ("loxodon status runs --j", {"--json"}),
        ("loxodon presets ppo/pend", {"ppo/pendulum"}),
    ]:
        words = typed.split()
        ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _loxodon; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", script + ask], capture_output=True, text=True, check=True)
        assert set(done.stdout.split()) == found, typed
    main(["--completion", "zsh"])
    assert capsys.readouterr().out.endswith(script)


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"loxodon {importlib.metadata.version('loxodon')}\n"
