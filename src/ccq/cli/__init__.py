"""The command `ccq`: parse, call, print. A module a command, with its parser and what it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ccq import __version__
from ccq.cli import bench, compare, data, diagnose, eval, gates, generate, models, reads, report, train
from ccq.cli.arguments import Parser

# In the order of `ccq --help`.
COMMANDS = (compare, data, train, bench, models, reads, generate, eval, diagnose, report, gates)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 if it failed, 2 for wrong input, 130 if it was interrupted."""
    parser: argparse.ArgumentParser = Parser(
        prog="ccq", description="Curvature-Conditioned Query: linear attention that reads with q - lambda Cov(keys) q."
    )
    parser.add_argument("--version", action="version", version=f"ccq {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except (ValueError, OSError) as error:
        print(f"ccq: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ccq: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
