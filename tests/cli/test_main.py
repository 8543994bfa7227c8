"""The command line: what it prints for wrong input, and that it runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ccq import __version__, cli
from ccq.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "tinny"], r"ccq: unknown preset 'tinny' \(did you mean 'tiny'\?\); accepted: tiny, smoke"),
        (["--arms", "gla,mamba"], "ccq: unknown arm 'mamba'.*gla, gla.ccq, gla-hedgehog"),
        (["--text", "/no/such/folder"], "ccq: .*folder /no/such/folder: it does not exist"),
    ],
)
def test_wrong_input_ends_with_one_clear_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--out", str(tmp_path / "run"), *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare"], "required: --out"),
        (["compare", "--out", "x", "--seeds", "0"], "a whole number of at least 1 is needed, got '0'"),
        (["compare", "--out", "x", "--sedes", "2"], "unrecognized arguments: --sedes (did you mean --seeds?)"),
        (["compare", "--sedes=2"], "ccq compare: error: unrecognized arguments: --sedes (did you mean --seeds?)"),
        (["bench", "layer", "--zzz"], "ccq bench layer: error: unrecognized arguments: --zzz\n"),
        (["trian"], "invalid choice: 'trian'"),
        ([], "required: COMMAND"),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"ccq {__version__}\n"


def test_it_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "ccq.cli", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"ccq {__version__}\n"
    wrong = [sys.executable, "-m", "ccq.cli", "report", "/no/such/file", "--out", "/no/such/folder"]
    assert subprocess.run(wrong, capture_output=True).returncode == 2


def test_every_command_is_the_one_of_its_module(capsys: pytest.CaptureFixture[str]) -> None:
    modules = {path.stem for path in Path(cli.__path__[0]).glob("*.py")} - {"__init__", "__main__", "arguments"}
    assert modules == {command.__name__.rpartition(".")[2] for command in cli.COMMANDS}
    for name in modules:
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        assert caught.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: ccq {name} ")
