"""Every mistake in a config: what the error says, and that nothing is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import gin
import pytest

from loxodon.experiment.config import (
    ConfigError,
    LoadedConfig,
    explain_build_error,
    load_config,
)

BUILT: list[str] = []


class CfgEncoder:
    """What the fakes below make."""


@gin.configurable(denylist=["width"])
class CfgGRU(CfgEncoder):
    def __init__(self, width: int, *, layers: int = 1, rate: float = 0.1, norm: str | None = None) -> None:
        if layers < 1:
            raise ValueError(f"layers is {layers}, but must be at least 1. Fix: raise it.")
        BUILT.append("CfgGRU")
        self.width, self.layers, self.rate, self.norm = width, layers, rate, norm


@gin.configurable(denylist=["width"])
class CfgConv(CfgEncoder):
    def __init__(
        self, width: int, *, kernel: int = gin.REQUIRED, kind: Literal["same", "valid"] = "same"
    ) -> None:
        self.kernel, self.kind = kernel, kind


@gin.configurable
class CfgHead:
    """Constructed by CfgRun itself, named nowhere in its signature; `size` comes from the caller."""

    def __init__(self, size: int = 1, bias: bool = False) -> None:
        self.size, self.bias = size, bias


@gin.configurable
class CfgSpare:
    """Named in CfgRun's code, and never constructed."""

    def __init__(self, count: int = 0) -> None:
        self.count = count


@gin.configurable
class CfgStore:
    def __init__(self, root: str = "here", sizes: Sequence[int] = ()) -> None:
        BUILT.append("CfgStore")
        self.root, self.sizes = root, sizes


@gin.configurable
@dataclass
class CfgRun:
    run_name: str
    store: CfgStore
    make_env: Callable[..., Any] = dict
    encoder_type: Callable[..., CfgEncoder] | None = CfgGRU
    epochs: int = 3
    shapes: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.encoder = self.encoder_type(8) if self.encoder_type else None
        self.head = CfgHead(size=4)

    def later(self) -> type:
        return CfgSpare


BASE = "CfgRun.run_name = 'a'\nCfgRun.store = @CfgStore()\n"  # two lines: what is added begins in line 3


@pytest.fixture(autouse=True)
def _in_a_clean_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    BUILT.clear()
    yield
    gin.clear_config()


def load(added: str = "", *overrides: str, base: str = BASE) -> LoadedConfig:
    Path("a.gin").write_text(base + added)
    return load_config(["a.gin"], overrides, root="CfgRun")


def problem(added: str = "", *overrides: str, base: str = BASE) -> str:
    """The text of the error that a config causes; nothing may have been built."""
    with pytest.raises(ConfigError) as caught:
        load(added, *overrides, base=base)
    assert BUILT == []
    for text in caught.value.problems:
        assert "Fix:" in text
    return str(caught.value)


def run() -> Any:
    return CfgRun()  # type: ignore[call-arg]  # gin supplies the arguments


# --- what works --------------------------------------------------------------------------------------


def test_a_sound_config_reaches_the_constructor() -> None:
    load("CfgGRU.layers = 2\nCfgGRU.rate = 1\nN = 5\nCfgRun.epochs = %N\nCfgRun.shapes = (1, 2)\n")
    made = run()
    assert (made.run_name, made.epochs, made.shapes, made.encoder.layers) == ("a", 5, (1, 2), 2)


def test_blocks_scopes_and_includes() -> None:
    Path("sub").mkdir()
    Path("sub/base.gin").write_text(BASE + "include 'deeper.gin'\n")
    Path("sub/deeper.gin").write_text("CfgGRU:\n  layers = 7\n  rate = 0.5\n")
    config = load(
        "CfgRun.encoder_type = @wide/CfgGRU\nwide/CfgGRU.layers = 9\n", base="include 'sub/base.gin'\n"
    )
    made = run()
    assert (made.encoder.layers, made.encoder.rate) == (9, 0.5)
    assert "wide/CfgGRU.rate = 0.5" in config.text()


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("CfgRun.run_name=my-run", "my-run"),
        ("CfgRun.run_name=a b", "a b"),
        ("CfgRun.run_name='5'", "5"),
        ("CfgRun.run_name=2024-01-02", "2024-01-02"),
        ("CfgRun.run_name=x=y", "x=y"),
        ("CfgRun.run_name=/some/where", "/some/where"),
    ],
)
def test_overrides_win_and_need_no_quotes_where_gin_cannot_parse(override: str, value: str) -> None:
    load("", override)
    assert run().run_name == value


def test_overrides_that_parse_stay_parsed() -> None:
    load(
        "N = 2\nCfgRun.epochs = %N\n",
        "N=4",
        "CfgRun.encoder_type=None",
        "CfgRun.options={'a': (1, @CfgHead)}",
    )
    made = run()
    assert (made.epochs, made.encoder, made.options) == (4, None, {"a": (1, CfgHead)})


def test_later_files_win() -> None:
    Path("b.gin").write_text("CfgRun.epochs = 9\n")
    Path("a.gin").write_text(BASE + "CfgRun.epochs = 8\n")
    load_config(["a.gin", "b.gin"], root="CfgRun")
    assert run().epochs == 9


def test_a_module_in_the_working_folder_can_be_imported() -> None:
    Path("my_own_env.py").write_text(
        "import gin\n@gin.configurable\ndef cfg_own_env(size: int = 3): return {'size': size}\n"
    )
    load("CfgRun.make_env = @cfg_own_env\ncfg_own_env.size = 4\n", base="import my_own_env\n" + BASE)
    assert run().make_env() == {"size": 4}
    assert "import my_own_env" in gin.config_str()


def test_the_resolved_text_can_be_loaded_again() -> None:
    text = load("CfgGRU.layers = 2\nN = 5\nCfgRun.epochs = %N\n", "CfgGRU.rate=0.5").text()
    assert "CfgRun.run_name = 'a'" in text
    assert "# a.gin:3" in text
    assert "# command line, `CfgGRU.rate=0.5`" in text
    assert "CfgGRU.norm = None" in text
    Path("again.gin").write_text(text)
    load_config(["again.gin"], root="CfgRun")
    made = run()
    assert (made.epochs, made.encoder.layers, made.encoder.rate) == (5, 2, 0.5)


# --- names and syntax --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("added", "parts"),
    [
        ("CfgRum.epochs = 3", ["a.gin:3: no class or function 'CfgRum'", "Did you mean 'CfgRun'"]),
        ("CfgRun.epoch = 3", ["a.gin:3: CfgRun has no parameter 'epoch'", "Did you mean 'epochs'"]),
        ("\n# remark\nCfgRun:\n  epoch = 3\n", ["a.gin:6: CfgRun has no parameter 'epoch'"]),
        ("CfgGRU.width = 3", ["a.gin:3: CfgGRU.width is given by the code", "layers, rate, norm"]),
        ("CfgRun.encoder_type = @CfgGru", ["a.gin:3:", "@CfgGru", "Did you mean 'CfgGRU'"]),
        ("CfgRun.options = {'a': [@CfgGru()]}", ["a.gin:3:", "'CfgGru'", "Did you mean 'CfgGRU'"]),
        ("NUM = 3\nCfgRun.epochs = %NUMM", ["a.gin:4:", "nothing defines NUMM", "'%NUM'"]),
        ("CfgRun.run_name = my-run", ["a.gin:3:", "put quotes around it: 'my-run'"]),
        ("CfgRun.run_name = run one  # why", ["a.gin:3:", "put quotes around it: 'run one'."]),
        ("CfgRun.run_name = /some/where", ["a.gin:3:", "'/some/where'"]),
        ("CfgRun.options = {'a': foo}", ["a.gin:3:", "put quotes around it: 'foo'"]),
        ("CfgRun.encoder_type = CfgGRU", ["a.gin:3:", "write @CfgGRU"]),
        ("CfgRun.epochs = true", ["a.gin:3:", "write True"]),
        ("CfgRun.epochs = = 3", ["a.gin:3:", "a single `=`"]),
        ("CfgRun.run_name = f'x'", ["a.gin:3:", "without letters before"]),
        ("CfgRun.epochs 3", ["a.gin:3: `CfgRun.epochs 3` is no binding"]),
        ("CfgRun.run_name = 'abc\nCfgRun.epochs = 3", ["a.gin:3:", "a quote that is never closed"]),
        ("CfgRun.shapes = (1,\n  2\nCfgRun.epochs = 3", ["a.gin:3:", "a bracket that is never closed"]),
        ("CfgRun.shapes = (1,\n  2\n", ["a.gin:3:", "a bracket that is never closed"]),
        ("include 'nowhere.gin'", ["a.gin:3: include 'nowhere.gin' names no file", "Searched in"]),
        ("include 'a.gin'", ["a.gin:3:", "leads back to itself"]),
        ("import no_such_module_xyz", ["a.gin:3: importing 'no_such_module_xyz' failed"]),
        ("from __gin__ import dynamic_registration", ["a.gin:3: dynamic registration is not supported"]),
    ],
)
def test_names_and_syntax(added: str, parts: list[str]) -> None:
    text = problem(added)
    for part in parts:
        assert part in text


def test_mistakes_in_an_included_file_are_placed_there() -> None:
    Path("other.gin").write_text("\nCfgRun.epoch = 3\n")
    assert "other.gin:2: CfgRun has no parameter" in problem("include 'other.gin'")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("CfgRun.epoch=3", ["command line, `CfgRun.epoch=3`", "Did you mean 'epochs'"]),
        ("kernel=3", ["no config file defines kernel", "'CfgConv.kernel'"]),
        ("a.gin", ["must look like Name.param=value", "--config a.gin"]),
        ("CfgRun.run_name=5", ["5 is an int, but str is allowed", "CfgRun.run_name=\"'5'\""]),
        ("CfgRun.epochs=ten", ["'ten' is a str, but int is allowed"]),
        ("CfgRun.encoder_type=@Cfg(", ["`@Cfg(` is no reference"]),
    ],
)
def test_mistakes_on_the_command_line(override: str, parts: list[str]) -> None:
    text = problem("", override)
    for part in parts:
        assert part in text


def test_an_unknown_file_lists_presets() -> None:
    with pytest.raises(
        ConfigError, match=r"--config tmase.*no such file or preset.*Did you mean 'tmaze'.*Fix:"
    ):
        load_config(["tmase"])


# --- types -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("added", "parts"),
    [
        ("CfgRun.epochs = 3.0", ["a.gin:3: CfgRun.epochs = 3.0 is a float, but int is allowed", "write 3."]),
        ("CfgRun.epochs = True", ["is a bool, but int is allowed"]),
        ("N = 'x'\nCfgRun.epochs = %N", ["a.gin:4: CfgRun.epochs = %N is a str"]),
        ("CfgRun.encoder_type = 'CfgGRU'", ["write @CfgGRU without quotes"]),
        ("CfgRun.encoder_type = @CfgGRU()", ["what that call returns", "write @CfgGRU."]),
        ("CfgRun.encoder_type = @CfgStore", ["choose @CfgGRU or @CfgConv"]),
        ("CfgRun.shapes = [1, 2]", ["write (1, 2)"]),
        ("CfgGRU.norm = 3", ["str or None is allowed", "put quotes around it: '3'"]),
        ("CfgStore.sizes = 3", ["write [3]"]),
        ("CfgStore.sizes = 'ab'", ["is a str, but Sequence[int] is allowed"]),
        (
            "CfgRun.encoder_type = @CfgConv\nCfgConv.kernel = 1\nCfgConv.kind = 'vald'",
            ["Did you mean 'valid'"],
        ),
    ],
)
def test_types(added: str, parts: list[str]) -> None:
    text = problem(added)
    for part in parts:
        assert part in text


def test_a_class_where_an_object_is_wanted() -> None:
    text = problem(base="CfgRun.run_name = 'a'\nCfgRun.store = @CfgStore\n")
    assert "a.gin:2:" in text
    assert "write @CfgStore()" in text


# --- required, unused, twice -------------------------------------------------------------------------


def test_missing_required_values_of_the_root_and_of_what_it_builds() -> None:
    text = problem("CfgRun.encoder_type = @CfgConv\n", base="CfgRun.run_name = 'a'\n")
    assert "a.gin: CfgRun needs a value for store" in text
    assert "a.gin:2: CfgConv needs a value for kernel" in text
    assert "CfgConv.kernel = <int>" in text


def test_a_value_marked_as_required_must_be_replaced() -> None:
    assert "CfgRun needs a value for epochs" in problem("CfgRun.epochs = %gin.REQUIRED")
    load("CfgRun.epochs = %gin.REQUIRED", "CfgRun.epochs=2")


@pytest.mark.parametrize(
    ("added", "part"),
    [
        ("CfgConv.kernel = 3", "a.gin:3: CfgConv.kernel = 3 is set, but nothing in this experiment uses it"),
        ("SPARE = 3", "a.gin:3: SPARE = 3 is set, but nothing"),
        ("narrow/CfgGRU.layers = 3", "refer to it as @narrow/CfgGRU"),
        ("CfgRun.encoder_type = None\nCfgGRU.layers = 3", "a.gin:4: CfgGRU.layers = 3 is set, but nothing"),
    ],
)
def test_unused_bindings_are_errors(added: str, part: str) -> None:
    assert part in problem(added)


def test_what_an_override_puts_out_of_use_is_no_mistake() -> None:
    config = load("CfgGRU.layers = 3\n", "CfgRun.encoder_type=@CfgConv", "CfgConv.kernel=2")
    run()
    assert config.check_unused().startswith("1 setting is unused, because a later file or the command line")
    assert "# unused: a.gin:3: CfgGRU.layers = 3" in config.text()


def test_twice_in_one_file_warns_and_across_files_does_not() -> None:
    assert (
        "a.gin:4: CfgRun.epochs was set in line 3 too"
        in load("CfgRun.epochs = 1\nCfgRun.epochs = 2").warnings[0]
    )
    Path("b.gin").write_text(BASE + "CfgRun.epochs = 1\n")
    assert load("CfgRun.epochs = 2", base="include 'b.gin'\n").warnings == ()


def test_several_problems_come_in_one_message() -> None:
    text = problem("CfgRun.epoch = 1\nCfgRun.epoks = 2\n")
    assert text.startswith("2 problems")
    assert "a.gin:3:" in text
    assert "a.gin:4:" in text


# --- after building ----------------------------------------------------------------------------------


def test_what_building_read_passes_and_what_it_did_not_read_stops() -> None:
    config = load("CfgHead.bias = True\nCfgGRU.layers = 2\n")
    run()
    config.check_unused()
    config = load("CfgSpare.count = 2\n")
    run()
    with pytest.raises(
        ConfigError, match=r"a\.gin:3: CfgSpare\.count = 2 is set, but building .* never read it.*Fix:"
    ):
        config.check_unused()


def test_a_value_that_the_caller_gives_itself_stops() -> None:
    config = load("CfgHead.size = 2\n")
    run()
    with pytest.raises(ConfigError, match=r"a\.gin:3: CfgHead\.size = 2 has no effect.*Fix:"):
        config.check_unused()


def test_errors_of_a_constructor_lead_to_the_line_that_caused_them() -> None:
    config = load("CfgGRU.rate = 0.2\nCfgGRU.layers = 0\n")
    with pytest.raises(ValueError, match="layers is 0") as caught:
        run()
    text = explain_build_error(caught.value, config)
    assert text == "a.gin:4: layers is 0, but must be at least 1. Fix: raise it."
    assert explain_build_error(ValueError("shapes differ"), config) is None


def test_a_setting_of_what_the_experiment_builds_through_its_modules_is_known() -> None:
    load_config(["tmaze"], ["BatchLoader.pool_batches=1"])
    with pytest.raises(ConfigError, match=r"Did you mean 'pool_batches'"):
        load_config(["tmaze"], ["BatchLoader.pool_batchs=1"])
