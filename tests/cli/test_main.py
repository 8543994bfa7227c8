"""The command line: what it prints for wrong input, and that it runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ccq import __version__, cli
from ccq.cli import main

_WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


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
        (["generate", "x", "--prompt", "y", "--seed", "-1"], "a whole number from 0 to 2**63 - 1 is needed, got '-1'"),
        (["diagnose", "x", "--out", "y", "--seed", "-1"], "a whole number from 0 to 2**63 - 1 is needed, got '-1'"),
        (["eval", "needle", "x", "--seed", str(2**63)], f"2**63 - 1 is needed, got '{2**63}'"),
        (["trian"], "invalid choice: 'trian'"),
        ([], "required: COMMAND"),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "extrapolation", "--out", "x.json", "--device", "cuda:99"],
        ["eval", "extrapolation", "--out", "x.json", "--device", "foo"],
        ["gates", "--device", "cuda:99"],
        pytest.param(["diagnose", "--out", "x", "--device", "cuda"], marks=_WITHOUT_GPU),
        pytest.param(["generate", "--prompt", "x", "--device", "cuda"], marks=_WITHOUT_GPU),
    ],
)
def test_a_device_that_is_not_there_is_named(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ccq: device is {command[-1]!r}, which cannot be used here; accepted: cpu")
    assert error.count("\n") == 1


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
