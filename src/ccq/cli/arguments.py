"""What several commands share: the class of their parsers, and arguments."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any, TypeAlias

# What `add_subparsers` returns: where `add_parser` of each module puts its command.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Parser(argparse.ArgumentParser):
    """Names an option that is unknown before anything else that is wrong, with the nearest one and the usage of its
    command. argparse would take the value behind it for an argument, say first what is missing, and show the usage of
    `ccq` alone.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        known = [option for action in self._actions for option in action.option_strings]
        has_commands = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        for text in itertools.takewhile(lambda text: text != "--", () if has_commands else given):
            option = text.partition("=")[0]
            # With a space in it, it is an argument.
            if option.startswith("--") and " " not in option and not any(name.startswith(option) for name in known):
                # Here, as no command that is spelled right should wait for it.
                import difflib

                nearest = difflib.get_close_matches(option, known, 1)
                hint = f" (did you mean {nearest[0]}?)" if nearest else ""
                self.error(f"unrecognized arguments: {option}{hint}")
        return super().parse_known_args(args, namespace)


def positive(text: str) -> int:
    """The type of an argument that counts something."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, got {text!r}")
    return value


def seed(text: str) -> int:
    """The type of an argument that is the seed of a random stream."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"a whole number from 0 to 2**63 - 1 is needed, got {text!r}")
    return value


def add_gates(parser: argparse.ArgumentParser) -> None:
    """--gates, the argument of `ccq.models.auto_model.read_auto_model`."""
    parser.add_argument(
        "--gates",
        type=Path,
        metavar="FILE",
        help="of ccq.models.save_gates: attach the read step with them; default: those in the model's folder",
    )


def add_read(parser: argparse.ArgumentParser) -> None:
    """--read and --gate-values, the arguments of `ccq.models.intervention.switch_read`."""
    parser.add_argument(
        "--read",
        metavar="CHANGE",
        help="change the read steps' correction: off, or some of scale=X, layers=0,3-5, heads=0, gate=mean, "
        "gate=shuffled, joined by commas; default on",
    )
    parser.add_argument(
        "--gate-values",
        type=Path,
        metavar="FILE",
        help="of `ccq gates`, for gate=mean and gate=shuffled; default: that in the model's folder",
    )
