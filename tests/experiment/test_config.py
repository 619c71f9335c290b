"""Every mistake in a config has a clear error, and nothing is built or trained before it is reported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, Protocol

import gin
import pytest

from loxodon.experiment.artifacts import UrlStore
from loxodon.experiment.config import ConfigError, LoadedConfig, checks, explained, load_config
from loxodon.experiment.config.reading import import_path

from .fakes import TINY

BUILT: list[str] = []
Seconds = NewType("Seconds", float)


class CfgShape(Protocol):
    def area(self) -> float: ...


class CfgEncoder:
    """The base class of the fakes below."""

    def __call__(self) -> None: ...


@gin.configurable
class CfgPlain:
    """A class without a constructor."""

    def __call__(self) -> None: ...


@gin.configurable(denylist=["width"])
class CfgGRU(CfgEncoder):
    def __init__(self, width: int, *, layers: int = 1, rate: float = 0.1, norm: str | None = None) -> None:
        if layers < 1:
            raise ValueError(f"layers is {layers}, but must be at least 1. Fix: raise it.")
        BUILT.append("CfgGRU")
        self.width, self.layers, self.rate, self.norm = width, layers, rate, norm


@gin.configurable(denylist=["width"])
class CfgDeepGRU(CfgGRU):
    """Gets the settings of its base class, as it has the same constructor."""


@gin.configurable(denylist=["width"])
class CfgConv(CfgEncoder):
    def __init__(
        self, width: int, *, kernel: int = gin.REQUIRED, kind: Literal["same", "valid"] = "same"
    ) -> None:
        self.kernel, self.kind = kernel, kind


@gin.configurable
@dataclass
class CfgHead:
    """Constructed by CfgRun itself but absent from its signature; `size` comes from the caller."""

    size: int = 1
    bias: bool = False
    make_late: Callable[..., CfgEncoder] | None = None


@gin.configurable
def cfg_bonus(share: int = 1) -> int:
    """Called by user code during training."""
    return share


@gin.configurable
def cfg_env(size: int) -> dict[str, int]:
    """Called by the code without arguments."""
    return {"size": size}


@gin.configurable
@dataclass
class CfgTypes:
    """A parameter for each kind of annotation; nothing that runs refers to it."""

    flag: bool = False
    seconds: Seconds = Seconds(1.0)
    counted: Annotated[int, "count"] = 1
    either: str | int = 1
    pair: tuple[int, str] = (1, "a")
    items: Sequence[int] = ()
    table: Mapping[str, Sequence[int]] | None = None
    path: Path | None = None
    shape: CfgShape | None = None
    made_by: Callable[..., CfgEncoder] | None = None
    kind_of: type[CfgEncoder] | None = None
    encoder: CfgEncoder | None = None
    number: float = 0.0
    names: str | Sequence[str] = ()
    makers: Sequence[Callable[..., CfgEncoder]] = ()
    to_int: Callable[..., int] | None = None
    anything: Any = None


@gin.configurable
class CfgStore:
    def __init__(self, root: str = "here", sizes: Sequence[int] = ()) -> None:
        BUILT.append("CfgStore")


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
        self.encoder: Any = self.encoder_type(8) if self.encoder_type else None
        self.head = CfgHead(size=4)


BASE = "CfgRun.run_name = 'a'\nCfgRun.store = @CfgStore()\n"  # two lines, so added text begins in line 3


@pytest.fixture(autouse=True)
def _in_a_clean_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    BUILT.clear()


def load(added: str = "", *overrides: str, base: str = BASE) -> LoadedConfig:
    Path("a.gin").write_text(base + added)
    return load_config(["a.gin"], overrides, root="CfgRun", is_complete=True)


def problem(added: str = "", *overrides: str, base: str = BASE) -> str:
    """The error message that a config causes; nothing may have been built."""
    with pytest.raises(ConfigError) as caught:
        load(added, *overrides, base=base)
    assert BUILT == []
    for text in caught.value.problems:
        assert "Fix:" in text
    return str(caught.value)


def run() -> Any:
    return CfgRun()  # type: ignore[call-arg]  # gin supplies the arguments


# --- what works --------------------------------------------------------------------------------------


def test_blocks_scopes_includes_macros_and_overrides_reach_the_constructor() -> None:
    Path("sub").mkdir()
    Path("sub/base.gin").write_text(BASE + "CfgRun.shapes = (1, 2)\ninclude 'deeper.gin'\n")
    Path("sub/deeper.gin").write_text("CfgGRU:\n  layers = 7\n  rate = 0.5\n")
    Path("later.gin").write_text("CfgRun.epochs = %N\n")
    Path("a.gin").write_text(
        "include 'sub/base.gin'\nN = 2\nCfgRun.epochs = 8\n"
        "CfgRun.encoder_type = @wide/CfgGRU\nwide/CfgGRU.layers = 9\n"
    )
    overrides = ["N=4", "CfgRun.options={'a': (1, @CfgHead)}"]
    config = load_config(["a.gin", "later.gin"], overrides, root="CfgRun")
    made = run()
    assert (made.run_name, made.epochs, made.shapes) == ("a", 4, (1, 2))
    assert (made.encoder.layers, made.encoder.rate) == (9, 0.5)
    assert made.options == {"a": (1, CfgHead)}
    text = config.text()
    assert "\nCfgGRU.rate = 0.5 " in text
    assert "# a.gin:5" in text
    assert "# command line, `N=4`" in text
    Path("again.gin").write_text(text)
    load_config(["again.gin"], root="CfgRun")
    again = run()
    assert (again.epochs, again.encoder.layers, again.options) == (4, 9, made.options)


@pytest.mark.parametrize(
    ("written", "value"),
    [("my-run", "my-run"), ("a b", "a b"), ("'5'", "5"), ("x=y", "x=y"), ("/a/b", "/a/b")],
)
def test_overrides_need_no_quotes_where_gin_cannot_parse_them(written: str, value: str) -> None:
    load("", f"CfgRun.run_name={written}")
    assert run().run_name == value


def test_a_module_in_the_working_folder_can_be_imported() -> None:
    Path("my_own_env.py").write_text(
        "import gin\n@gin.configurable\ndef cfg_own_env(size: int = 3): return {'size': size}\n"
    )
    load("CfgRun.make_env = @cfg_own_env\ncfg_own_env.size = 4\n", base="import my_own_env\n" + BASE)
    assert run().make_env() == {"size": 4}
    assert "import my_own_env" in gin.config_str()


# --- names, syntax, types ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("added", "parts"),
    [
        ("CfgRum.epochs = 3", ["a.gin:3: no class or function 'CfgRum'", "Did you mean 'CfgRun'"]),
        ("CfgRun.epoch = 3", ["a.gin:3: CfgRun has no parameter 'epoch'", "Did you mean 'epochs'"]),
        ("\n# remark\nCfgRun:\n  epoch = 3\n", ["a.gin:6: CfgRun has no parameter 'epoch'"]),
        ("CfgGRU.width = 3", ["a.gin:3: CfgGRU.width is set by the code", "layers, rate, norm"]),
        ("CfgRun.options = {'a': [@CfgGru()]}", ["a.gin:3:", "'CfgGru'", "Did you mean 'CfgGRU'?"]),
        ("NUM = 3\nCfgRun.epochs = %NUMM", ["a.gin:4:", "nothing defines NUMM", "'%NUM'"]),
        ("CfgRun.run_name = run one  # why", ["a.gin:3:", "a quoted string"]),
        ("CfgRun.run_name = /some/where", ["a.gin:3: `CfgRun.run_name = /some/where` cannot be read"]),
        ("CfgRun.options = {'a': foo}", ["a.gin:3:", "a quoted string"]),
        ("CfgRun.encoder_type = CfgGRU", ["a.gin:3:", "write @CfgGRU"]),
        ("CfgRun.epochs = true", ["a.gin:3:", "True, False, None"]),
        ("CfgRun.epochs = = 3", ["a.gin:3: `CfgRun.epochs = = 3` cannot be read"]),
        ("CfgRun.epochs 3", ["a.gin:3: `CfgRun.epochs 3` cannot be read (Couldn't parse"]),
        ("CfgRun.run_name = 'abc\nCfgRun.epochs = 3", ["a.gin:3:", "close each bracket and quote"]),
        ("CfgRun.shapes = (1,\n  2\nCfgRun.epochs = 3", ["a.gin:5:", "close each bracket", "lines above"]),
        ("CfgRun.shapes = (1,\n  2\n", ["a.gin:4:", "EOF", "close each bracket"]),
        ("include 'nowhere.gin'", ["a.gin:3: include 'nowhere.gin' names no file", "Searched in"]),
        ("include 'a.gin'", ["a.gin:3:", "includes a file that includes this one"]),
        ("include nowhere.gin", ["a.gin:3:", "Fix: write include 'nowhere.gin'."]),
        ("CfgPlain.size = 3", ["CfgPlain has no parameter 'size'", "give its __init__ this parameter"]),
        ("import no_such_module_xyz", ["a.gin:3: importing 'no_such_module_xyz' failed"]),
        ("CfgRun.epochs = 3.0", ["a.gin:3: CfgRun.epochs = 3.0 is a float, but must be int"]),
        ("CfgRun.epochs = True", ["is a bool, but must be int"]),
        ("N = 'x'\nCfgRun.epochs = %N", ["a.gin:3: CfgRun.epochs = %N is a str"]),
        ("CfgRun.epochs = None", ["is None, but must be int", "Fix: give a value of type int"]),
        ("CfgRun.epochs = @cfg_bonus", ["the class or function itself", "write @cfg_bonus()"]),
        ("CfgRun.run_name = @cfg_bonus()", ["the result of that call, but must be str"]),
        (
            "CfgRun.encoder_type = 'CfgGRU'",
            ["@Name that creates a CfgEncoder or None", "Fix: write @CfgGRU."],
        ),
        ("CfgRun.encoder_type = @CfgGRU()", ["the result of that call", "write @CfgGRU."]),
        (
            "CfgTypes.made_by = @CfgStore()",
            ["the result of that call, but must be @Name that creates a CfgEncoder"],
        ),
        ("CfgRun.encoder_type = @CfgPlain", ["choose @CfgGRU or @CfgDeepGRU or @CfgConv"]),
        ("CfgRun.store = @CfgStore", ["a.gin:3:", "write @CfgStore()"]),
        ("CfgRun.shapes = [1, 2]", ["must be tuple[int, ...]", "give a value of type tuple[int, ...]"]),
        ("CfgGRU.norm = 3", ["is an int, but must be str or None"]),
        ("CfgStore.sizes = 'ab'", ["is a str, but must be Sequence[int]"]),
        ("CfgStore.sizes = [1, 'a']", ["is a list, but must be Sequence[int]"]),
        ("CfgTypes.number = '0.5'", ["write 0.5."]),
        ("CfgTypes.makers = [@CfgGRU()]", ["Fix: write [@CfgGRU]."]),
        ("CfgTypes.makers = @CfgGRU", ["Fix: write [@CfgGRU]."]),
        ("CfgTypes.seconds = '1s'", ["must be float"]),
        ("CfgTypes.counted = '1'", ["must be int", "write 1."]),
        ("CfgTypes.pair = (1,)", ["must be tuple[int, str]"]),
        ("CfgTypes.table = {'a': 1}", ["must be Mapping[str, Sequence[int]] or None"]),
        ("CfgTypes.path = 1", ["must be Path or None"]),
        ("CfgTypes.kind_of = @CfgStore", ["@Name that creates a CfgEncoder or None"]),
        ("CfgTypes.to_int = 'bonus'", ["a function that returns an int", "Fix: choose @cfg_bonus."]),
        ("CfgTypes.to_int = @CfgPlain", ["the class or function itself", "Fix: write @CfgPlain()."]),
        ("CfgRun.kernel = 3", ["no parameter 'kernel'. Did you mean 'CfgConv.kernel'?"]),
        ("CfgTypes.encoder = 3", ["choose @CfgGRU() or @CfgDeepGRU() or @CfgConv()"]),
        ("CfgConv.kind = 'vald'", ["must be 'same' or 'valid'", "Did you mean 'valid'"]),
    ],
)
def test_mistakes_in_a_file_are_explained(added: str, parts: list[str]) -> None:
    text = problem(added)
    for part in parts:
        assert part in text


def test_values_that_fit_their_types_are_accepted() -> None:
    load("""
CfgTypes:
    flag = True
    seconds = 2
    counted = 3
    either = 'a'
    pair = (2, 'b')
    items = [1, 2]
    table = {'a': (1, 2), 'b': []}
    path = 'a/b'
    shape = 3
    made_by = @CfgGRU
    kind_of = @CfgGRU
    encoder = @wide/CfgGRU()
    number = @cfg_bonus()
    anything = @CfgStore
""")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("CfgRun.epoch=3", ["command line, `CfgRun.epoch=3`", "Did you mean 'epochs'"]),
        ("kernel=3", ["no config file defines kernel", "'CfgConv.kernel'"]),
        ("a.gin", ["must look like Name.param=value", "--config a.gin"]),
        ("CfgRun.run_name=5", ["5 is an int, but must be str"]),
        ("CfgRun.epochs=ten", ["'ten' is a str, but must be int"]),
        ("CfgRun.encoder_type=@Cfg(", ["`@Cfg(` is not a reference"]),
    ],
)
def test_mistakes_on_the_command_line_are_explained(override: str, parts: list[str]) -> None:
    text = problem("", override)
    for part in parts:
        assert part in text


def test_several_problems_in_several_files_are_one_message() -> None:
    Path("other.gin").write_text("\nCfgRun.epoch = 3\n")
    text = problem("include 'other.gin'\nCfgGRU.layers = 2.5\n", "CfgRun.epoks=2")
    assert text.startswith("3 problems")
    assert "other.gin:2: CfgRun has no parameter" in text
    assert "command line, `CfgRun.epoks=2`: CfgRun has no parameter" in text
    assert "a.gin:4: CfgGRU.layers = 2.5 is a float" in text
    Path("other.gin").write_text("CfgRun.epochs 3\n")
    text = problem("include 'other.gin'\nimport no_such_module_xyz\n")
    assert text.startswith("2 problems")
    assert "other.gin:1: `CfgRun.epochs 3` cannot be read" in text


def test_a_class_that_cannot_be_found_is_one_problem_in_however_many_lines() -> None:
    text = problem("CfgRun.encoder_type = @Shells\nShells.delay = 20\nb/Shells.delay = 2\n")
    assert text.startswith("a.gin:3: CfgRun.encoder_type = @Shells: no class or function 'Shells' is known")
    assert text.count("Shells'") == 1
    assert "a class of a script needs a module of its own" in text


def test_settings_that_a_trunk_passes_to_its_mixer_are_checked() -> None:
    import loxodon.nets  # noqa: F401  # registers them

    text = problem("GLATrajEncoder.n_heads = '4'\nMamba2TrajEncoder.step_bas = 1.0")
    assert "a.gin:3: GLATrajEncoder.n_heads = '4' is a str, but must be int. Fix: write 4." in text
    assert "Mamba2TrajEncoder has no parameter 'step_bas'. Did you mean 'step_bias'?" in text


def test_names_of_amago_are_answered_with_ours() -> None:
    import loxodon.experiment  # noqa: F401  # registers them

    assert problem("Agent.n_step = 3").startswith("a.gin:3: Agent.n_step is AMAGO's name for NStep.n (")
    for names, is_there in ((checks.OF_AMAGO.keys(), False), (checks.OF_AMAGO.values(), True)):
        for name in names:
            owner, _, param = name.partition(" ")[0].rpartition(".")
            assert (param in checks.registry.find(owner)[0].params) == is_there


def test_settings_of_a_base_class_are_known_by_name_and_type() -> None:
    import loxodon.experiment  # noqa: F401  # registers the agents

    agent = checks.registry.find("MultiTaskAgent")[0]
    assert not agent.takes_any
    assert {"tau", "fake_filter"} <= agent.params.keys()
    assert agent.params["gamma"].annotation is float
    inherited = checks.registry.find("Experiment")[0].params[
        "agent_type"
    ]  # a field that is defined in another module
    assert inherited.annotation is not Any


def test_an_unknown_file_is_answered_with_the_presets() -> None:
    with pytest.raises(
        ConfigError, match=r"--config tmase.*no such file or preset.*Did you mean 'tmaze'.*Fix:"
    ):
        load_config(["tmase"])


# --- required and repeated settings ------------------------------------------------------------------


def test_missing_required_values_of_the_root_and_its_parts_are_named() -> None:
    text = problem("CfgRun.encoder_type = @CfgConv\n", base="CfgRun.run_name = 'a'\n")
    assert "a.gin: CfgRun needs a value for store" in text
    assert "a.gin:2: CfgConv needs a value for kernel" in text
    assert "CfgConv.kernel = <int>" in text
    assert "a.gin:4: cfg_env needs a value for size" in problem("CfgRun.make_env = %ENV\nENV = @cfg_env\n")


def test_a_value_marked_as_required_must_be_replaced() -> None:
    assert "CfgRun needs a value for epochs" in problem("CfgRun.epochs = %gin.REQUIRED")
    load("CfgRun.epochs = %gin.REQUIRED", "CfgRun.epochs=2")


def test_a_repeated_setting_gives_a_warning_in_one_file_but_not_across_files() -> None:
    (warning,) = load("CfgRun.epochs = 1\nCfgRun.epochs = 2").source.warnings
    assert "a.gin:4: CfgRun.epochs is also set in line 3" in warning
    Path("b.gin").write_text(BASE + "CfgRun.epochs = 1\n")
    assert load("CfgRun.epochs = 2", base="include 'b.gin'\n").source.warnings == []


# --- after building ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("added", "part"),
    [
        ("CfgConv.kernel = 3", "a.gin:3: CfgConv.kernel = 3 is set, but nothing in this experiment uses it"),
        ("SPARE = 3", "a.gin:3: SPARE = 3 is set, but nothing"),
        ("narrow/CfgGRU.layers = 3", "refer to it where it is needed: @narrow/CfgGRU."),
        ("CfgRun.encoder_type = None\nCfgGRU.layers = 3", "a.gin:4: CfgGRU.layers = 3 is set, but nothing"),
        (
            "CfgHead.size = 2",
            "a.gin:3: CfgHead.size = 2 has no effect: the code that creates CfgHead sets it",
        ),
    ],
)
def test_settings_that_were_not_used_are_an_error(added: str, part: str) -> None:
    config = load(added)
    run()
    with pytest.raises(ConfigError, match="Fix:") as caught:
        config.check_unused()
    assert part in str(caught.value)


def test_settings_of_a_part_that_this_kind_of_run_does_not_use_are_an_error() -> None:
    config = load("CfgHead.make_late = @late/CfgConv\nlate/CfgConv.kernel = 3\n")
    run()
    assert config.check_unused() == ""
    with pytest.raises(ConfigError, match=r"^a.gin:4: late/CfgConv.kernel = 3 is set, but nothing"):
        config.check_unused(["CfgHead.make_late"])


def test_settings_that_were_used_or_may_be_used_later_are_accepted() -> None:
    late = "CfgHead.make_late = @late/CfgConv\nlate/CfgConv.kernel = %N\nN = 3\nCfgConv.kernel = 4\n"
    config = load(f"CfgHead.bias = True\nCfgGRU.layers = 2\n{late}cfg_bonus.share = 2\n")
    run()
    assert config.check_unused() == (
        "a.gin:9: cfg_bonus.share = 2 has not been used so far; it takes effect if code uses it later."
    )


def test_settings_of_a_part_that_a_later_source_replaced_are_not_an_error() -> None:
    overrides = ["CfgRun.encoder_type=@CfgConv", "CfgConv.kernel=2", "CfgRun.epochs=1"]
    config = load("N = 2\nCfgRun.epochs = %N\nCfgGRU.layers = 3\n", *overrides)
    run()
    assert config.check_unused() == ""
    text = config.text()  # unused settings become comments
    assert text.endswith("# unused: a.gin:3: N = 2\n# unused: a.gin:5: CfgGRU.layers = 3\n")
    Path("again.gin").write_text(text)
    again = load_config(["again.gin"], root="CfgRun", is_complete=True)
    run()
    assert again.check_unused() == ""


def test_from_python_arguments_may_supply_what_configs_leave_out() -> None:
    Path("a.gin").write_text(BASE.replace("CfgRun.run_name = 'a'\n", ""))
    config = load_config("a.gin", {"CfgRun.epochs": 7, "cfg_bonus.share": 2}, root="CfgRun")
    values = {binding.key: binding.value for binding in config.bindings}
    assert values["CfgRun.epochs"] == 7
    assert values["cfg_bonus.share"] == 2
    with pytest.raises(ConfigError, match="CfgRun needs a value for"):
        load_config("a.gin", root="CfgRun", is_complete=True)


def test_the_printed_config_shows_settings_that_a_class_gets_from_its_base_class() -> None:
    text = load("CfgRun.encoder_type = @CfgDeepGRU\n", "CfgGRU.rate=0.5").text()
    run()
    assert "CfgGRU.rate = 0.5" in text
    assert "CfgDeepGRU.layers = 1" in text
    assert "CfgDeepGRU.rate" not in text
    assert "# unused" not in text


def test_other_settings_of_a_file_are_checked_when_a_later_source_replaces_a_part() -> None:
    config = load("CfgGRU.layers = 3\nnarrow/CfgGRU.layers = 3\n", "CfgRun.encoder_type=None")
    run()
    with pytest.raises(ConfigError, match=r"^a.gin:4: narrow/CfgGRU.layers = 3 is set, but nothing"):
        config.check_unused()


def test_unused_settings_of_presets_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "preset_root", Path.cwd)
    config = load("CfgConv.kernel = 3")
    run()
    assert config.check_unused() == ""


def test_errors_of_a_constructor_are_reported_without_the_traceback_of_gin() -> None:
    load("CfgGRU.layers = 0\n")
    with pytest.raises(ConfigError) as caught, explained():
        run()
    assert str(caught.value) == "layers is 0, but must be at least 1. Fix: raise it."
    with pytest.raises(ValueError, match=r"^shapes differ$"), explained():
        raise ValueError("shapes differ")


# --- modules next to a config ---------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of configs outside the working folder."""
    (tmp_path / "working").mkdir()
    (tmp_path / "configs" / "parts").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "working")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path / "configs"


def test_a_module_is_found_next_to_the_config_that_names_it_and_next_to_included_files(
    elsewhere: Path,
) -> None:
    for folder, name in ((elsewhere, "beside_whole"), (elsewhere / "parts", "beside_part")):
        (folder / f"{name}.py").write_text("")
    (elsewhere / "whole.gin").write_text(f"include 'parts/part.gin'\nimport beside_whole\n{TINY}")
    (elsewhere / "parts" / "part.gin").write_text("import beside_part\n")
    config = load_config([str(elsewhere / "whole.gin")])
    assert {"import beside_whole", "import beside_part"} <= set(config.source.imports)
    assert str(elsewhere) in import_path()
    assert config.source.warnings == []


def test_a_module_that_calls_exit_is_an_error_of_the_config(elsewhere: Path) -> None:
    (elsewhere / "leaving.py").write_text("import sys\nsys.exit()\n")
    (elsewhere / "mine.gin").write_text(f"import leaving\n{TINY}")
    with pytest.raises(ConfigError, match=r"leaving.py:2: SystemExit.*Fix"):
        load_config([str(elsewhere / "mine.gin")])


def test_a_missing_value_of_a_part_that_code_builds_is_named() -> None:
    with (
        pytest.raises(ConfigError, match=r"UrlStore needs a value for url, .* Fix: set UrlStore.url\."),
        explained(),
    ):
        UrlStore()
