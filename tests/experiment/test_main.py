"""The command `loxodon`: what its words lead to, the list of presets, and completion in a shell."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loxodon.gin_configs import main as command
from loxodon.gin_configs.main import COMMANDS, main

from .fakes import TINY


def test_help_and_presets_need_no_torch() -> None:
    code = "import sys; from loxodon.gin_configs.main import main; main(['--help']); main(['presets'])"
    code += "; assert not {'torch', 'gin', 'numpy'} & sys.modules.keys()"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name, (_, about) in COMMANDS.items():
        assert f"{name} " in text
        assert about in text
    (tmaze,) = (line for line in text.splitlines() if line.startswith("tmaze "))
    assert "remember one bit for 50 steps" in tmaze
    assert "transformer_small" in tmaze
    assert re.search(r"  success 1\.0 after [\d,]+ env steps, \d+ s on [a-z0-9A-Z ]+$", tmaze)


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["evalute"], 2, "error: 'evalute' is no command. Did you mean 'evaluate'? Fix: "),
        (["presets", "tmase"], 2, "error: there is no preset 'tmase'. Did you mean 'tmaze'? Fix: "),
        (["--completion", "tcsh"], 2, "error: --completion got 'tcsh'. Fix: write bash, zsh or fish"),
        (["status", "nowhere"], 2, "error: "),
        (["run"], 2, "no --config is given. Fix: "),
        (["--config", "tmaze", "Experiment.epoch=3"], 2, "Did you mean 'epochs'? Fix: "),
    ],
)
def test_what_cannot_be_done_is_one_message(
    words: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = main(words)
    except SystemExit as error:
        found = error.code  # type: ignore[assignment]
    assert found == status
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", [["run"], []])
def test_run_is_also_what_no_command_means(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/loxodon"])
    Path("tiny.gin").write_text(TINY)
    assert main([*words, "--config", "tiny.gin", "--seed", "1", "Experiment.verbose=False"]) == 0
    again = "try another seed    loxodon run --config tiny.gin Experiment.verbose=False --seed 2"
    assert again in capsys.readouterr().out
    assert main(["status", "runs/tiny"]) == 0  # it has finished
    assert main(["data", "ls", "runs/tiny"]) == 0


def test_presets_are_printed_with_the_places_of_their_parts_or_as_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["presets", "tmaze_pixels"]) == 0
    (include,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("include"))
    assert Path(include.partition("#")[2].strip()).is_file()
    assert main(["presets", "--json"]) == 0
    presets = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert presets["tmaze_pixels"]["encoder"] == "transformer_small"  # of what it includes
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
        ("loxodon status runs --w", {"--watch"}),
        ("loxodon presets ppo/pend", {"ppo/pendulum"}),
    ]:
        words = typed.split()
        ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _loxodon; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", script + ask], capture_output=True, text=True, check=True)
        assert set(done.stdout.split()) == found, typed
    for shell in ("zsh", "fish"):
        main(["--completion", shell])
        assert "--print-config" in (text := capsys.readouterr().out) or "-l print-config" in text
