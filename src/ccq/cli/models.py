"""`ccq models`: list the named models with their sizes."""

from __future__ import annotations

import argparse
from typing import Any

from ccq.cli.arguments import Commands


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "models",
        help="list the named models with their sizes",
        description="Lists every preset with its parameters, the state it keeps of one sequence (in bfloat16, memories "
        "and statistics in float32; the transformer's at its training length) and the arithmetic of one token.",
    )
    parser.add_argument("--json", action="store_true", help="print exact figures as JSON")
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    import json

    from rich.console import Console
    from rich.table import Table

    from ccq.models.counts import flops_per_token, parameter_count, state_bytes
    from ccq.models.presets import PRESETS, preset

    configurations = {name: preset(name) for name in PRESETS}
    figures: list[dict[str, Any]] = [
        {
            "name": name,
            "parameters": parameter_count(config),
            "state_bytes": state_bytes(config),
            "flops_per_token": flops_per_token(config),
        }
        for name, config in configurations.items()
    ]
    if parsed.json:
        print(json.dumps(figures, indent=1))
        return 0
    table = Table("name", "parameters", "state a sequence", "FLOPs a token", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in figures:
        table.add_row(
            row["name"],
            f"{row['parameters'] / 1e6:,.2f} M",
            f"{row['state_bytes'] / 2**20:,.2f} MiB",
            f"{row['flops_per_token'] / 1e6:,.1f} M",
        )
    Console().print(table)
    return 0
