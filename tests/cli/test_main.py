"""The command line: fast help, exit status, one line for a mistake."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import types
from pathlib import Path
from typing import get_args

import pytest

from lowtide.cli import main as cli
from lowtide.cli.plan import _STATE_PLACES
from lowtide.config.run import OptimizerKind, Precision
from lowtide.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_help_is_fast_and_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from lowtide.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        "finally:\n    assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    seconds = []
    for _ in range(3):  # processor time of the fastest: the wall clock depends on what else this machine is doing
        before = os.times()
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert result.returncode == 0, result.stderr
        assert all(command in result.stdout for command in ("plan", "profile", "train"))
    assert min(seconds) < 0.3


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == "lowtide 0.2.0\n"


def test_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "lowtide: the following arguments are required: command; see lowtide --help\n"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """Replaces the table by one command `do` whose `run` is given."""

    def install(run) -> None:
        module = types.ModuleType("lowtide.cli.fake_command")
        module.run = run
        monkeypatch.setitem(sys.modules, "lowtide.cli.fake_command", module)
        options = {"--level": {"type": "int", "default": 0}}
        monkeypatch.setattr(cli, "COMMANDS", {"do": {"run": "fake_command:run", "help": "do it", "options": options}})

    return install


def test_arguments_and_status(command) -> None:
    command(lambda args: args.level)
    assert cli.main(["do", "--level", "3"]) == 3
    assert cli.main(["do"]) == 0


def test_a_mistake_of_the_user_is_one_line(command, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args) -> int:
        raise ConfigError("run.yaml:2:3: unknown key 'memory.budgett'; did you mean 'budget'?")

    command(run)
    assert cli.main(["do"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "run.yaml:2:3: unknown key 'memory.budgett'; did you mean 'budget'?\n"
    assert captured.out == ""


def test_interrupt(command, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args) -> int:
        raise KeyboardInterrupt

    command(run)
    assert cli.main(["do"]) == 130
    assert capsys.readouterr().err == "lowtide: interrupted\n"


def test_a_closed_pipe_is_no_error(
    command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(args) -> int:
        raise BrokenPipeError

    command(run)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back afterwards
    assert cli.main(["do"]) == 141
    assert capsys.readouterr().err == ""


def test_our_own_bugs_are_not_hidden(command) -> None:
    def run(args) -> int:
        raise ValueError("a bug")

    command(run)
    with pytest.raises(ValueError, match=r"^a bug$"):
        cli.main(["do"])


def test_python_dash_m() -> None:
    result = subprocess.run([sys.executable, "-m", "lowtide", "--version"], capture_output=True, text=True, timeout=200)
    assert (result.returncode, result.stdout) == (0, "lowtide 0.2.0\n")


def test_lines_fit_the_terminal_and_a_pipe_has_them_whole() -> None:
    """With a real terminal of 60 columns: what is printed is the same, in lines of at most so many characters."""
    code = "from lowtide.cli.waiting import width_of_stdout; from lowtide.core.text_table import wrapped; "
    code += "print('\\n'.join(wrapped(['what goes out comes back ' * 9] * 3, width_of_stdout(), indent='    ')))"
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        environment = {**os.environ, "COLUMNS": "60"}
        process = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, cwd=ROOT, env=environment)
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux ends a terminal without writers so
            while part := terminal.read(4096):
                shown += part
        assert process.wait(60) == 0
    lines = shown.decode().splitlines()
    assert max(map(len, piped.stdout.splitlines())) > 100 and max(map(len, lines)) <= 60
    assert " ".join(lines).split() == piped.stdout.split()


def test_choices_of_the_table_are_those_of_the_code() -> None:
    optimizers = (*_STATE_PLACES, *get_args(OptimizerKind))
    assert tuple(cli.COMMANDS["plan"]["options"]["--optimizer"]["choices"]) == optimizers
    assert {*cli.COMMANDS["plan"]["options"]["--precision"]["choices"]} == {*get_args(Precision)}
