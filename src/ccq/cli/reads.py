"""`ccq reads`: list the read steps."""

from __future__ import annotations

import argparse

from ccq.cli.arguments import Commands


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "reads",
        help="list the read steps",
        description="Lists every read step NAME of an arm BACKBONE+NAME with its formula, and the parameters and state "
        "of one layer with the paper's 6 heads of 256. docs/reads.md explains them.",
    )
    parser.add_argument("--json", action="store_true", help="print exact figures, sources and options as JSON")
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    import json

    from rich.console import Console
    from rich.table import Table

    from ccq.nn.reads import describe_reads

    rows = describe_reads()
    if parsed.json:
        print(json.dumps(rows, indent=1))
        return 0
    table = Table("name", "formula", "what it is", "parameters", "state", box=None)
    for column in table.columns[3:]:
        column.justify = "right"
    for row in rows:
        state = f"{row['state_bytes'] / 2**10:,.1f} KiB"
        table.add_row(row["name"], row["formula"], row["summary"], f"{row['parameters']:,}", state)
    Console().print(table)
    return 0
