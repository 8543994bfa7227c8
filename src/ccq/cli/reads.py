"""`ccq reads`: list the read steps."""

from __future__ import annotations

import argparse

from ccq.cli.arguments import Commands


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "reads",
        help="list the read steps",
        description="Lists every read step NAME of an arm BACKBONE+NAME with its formula, source and options, and the "
        "parameters, state and arithmetic of one layer with the paper's 6 heads of 256. docs/reads.md explains them.",
    )
    parser.add_argument("--json", action="store_true", help="print all of it as JSON, with exact figures")
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    import json

    from rich.console import Console
    from rich.table import Column, Table

    from ccq.nn.reads import describe_reads

    rows = describe_reads()
    if parsed.json:
        print(json.dumps(rows, indent=1))
        return 0
    # Too much for columns: a few lines for each, folded where a terminal is narrow.
    table = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(row["name"], row["formula"])
        table.add_row("", row["summary"])
        table.add_row("", f"source: {row['source']}")
        if row["options"]:
            table.add_row(
                "", "options: " + ", ".join(f"{name} (default {value})" for name, value in row["options"].items())
            )
        costs = (
            f"{row['parameters']:,} parameters",
            f"{row['state_bytes'] / 2**10:,.1f} KiB of state",
            f"{row['operations_per_token'] / 1e6:.2f} M operations/token",
        )
        table.add_row("", ", ".join(costs))
        table.add_row()
    console = Console(highlight=False)
    console.print(table)
    console.print("Figures are of one layer with 6 heads of 256; M is a million.")
    console.print("`ccq reads --json` prints them exactly; docs/reads.md explains the read steps.")
    return 0
