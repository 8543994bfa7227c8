"""`ccq report`: put runs beside the paper's tables and figures."""

from __future__ import annotations

import argparse
from pathlib import Path

from ccq.cli.arguments import Commands


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "report",
        help="put runs beside the paper's tables and figures",
        description="Reads results of `ccq eval`, `ccq compare` and `ccq bench layer`, `model` and `decode`, and run "
        "folders of `ccq train`, and writes the paper's tables and figures with their values beside the paper's own, "
        "paired differences, and quality against cost: report.html, report.md, CSV, PNG and SVG files.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a results file, or a folder")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the report is written")
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from ccq.report.paper_report import write_paper_report
    from ccq.report.runs import read_runs

    if parsed.out.exists() and not parsed.out.is_dir():
        raise ValueError(f"{parsed.out} is a file; --out takes the folder of the report, which is made if missing")
    console = Console()
    with console.status("reading"):
        runs = read_runs(parsed.runs)
        for finding in write_paper_report(runs, parsed.out):
            console.print(f"- {finding.text}", markup=False, highlight=False)
    console.print(f"Report: {parsed.out / 'report.html'}", markup=False, soft_wrap=True)
    return 0
