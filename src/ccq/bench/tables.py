"""The page docs/speed.md, made from the files that `ccq bench operator` wrote.

    ccq bench tables benchmarks/results > docs/speed.md

No figure of the page is written by hand: a test compares the page with what this module makes of the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SCHEMAS = ("ccq-bench-operator/1", "ccq-bench-operator/2")
PASS_NAMES = {"forward": "forward", "forward_backward": "forward + backward"}

INTRODUCTION = """\
# Speed

`ccq bench tables benchmarks/results` makes this page from the files of that folder; change neither by hand. Each file
comes from `ccq bench operator` and holds every setting. All functions of a file were measured in one process and in
turn. Times are medians, with quartiles in brackets. Warm-up and compilation are left out unless they are what is
measured. B rows, T tokens, H heads, D size per head.
"""

GPU_EXPLANATION = """\
"triton" and "torch" are the backends of `curvature_conditioned_query`; "composed" is the same computation from
flash-linear-attention's linear attention and PyTorch. Forward runs without autograd; forward + backward gives the
gradients of q, k and the gate.

- Device: CUDA graph replays that follow each other, so at B 1 part of the inputs is still in the card's L2 cache.
- Eager: one call, from an idle card until it is idle again.
- Floor: the time in which the copy bandwidth moves q, k, y (backward: q, k, dy, dq, dk) once, and the chunk states
  (half of each, chunks of 128, in the dtype of the input; backward: their gradients too) once out and once in. The
  share is floor over device time.
- Memory: bytes above the inputs, in MiB; what is kept between the passes includes the output.
- Error: of the correction itself, |r - exact| / |exact|, against the chunked form in float64.
"""


def speed_page(folder: Path) -> str:
    """The page, from the files operator*.json of `folder` in the order of their names.

    Raises ValueError for a folder without such files and for a file of an unknown schema.
    """
    paths = sorted(folder.glob("operator*.json"))
    if not paths:
        raise ValueError(f"{folder} has no file operator*.json; `ccq bench operator --out` writes them")
    sections = [INTRODUCTION]
    for path in paths:
        figures = json.loads(path.read_text(encoding="utf-8"))
        if figures.get("schema") not in SCHEMAS:
            raise ValueError(f"{path} has the schema {figures.get('schema')!r}; accepted: {', '.join(SCHEMAS)}")
        sections.append(
            _gpu_section(path.name, figures) if "functions" in figures else _cpu_section(path.name, figures)
        )
    return "\n".join(sections)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table that ends with a newline."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cpu_section(name: str, figures: dict[str, Any]) -> str:
    shape, made = figures["settings"]["shape"], figures["environment"]
    threads = made["threads_per_run"]
    text = (
        f"## CPU: {made['processor']}\n\n"
        f"B {shape['rows']}, T {shape['tokens']}, H {shape['heads']}, D {shape['size']}, "
        f"{figures['settings']['dtype']}, {figures['settings']['repeats']} rounds on {threads} "
        f"thread{'s' if threads > 1 else ''}; torch {made['torch']}, Python {made['python']}, ccq {made['ccq']} "
        f"([{name}](../benchmarks/results/{name})). Milliseconds; the ratio is to "
        f"{figures['settings']['baseline']}.\n\n"
    )
    times = _table(
        ("function", "forward", "forward + backward", "ratio"),
        (
            (
                row["function"],
                f"{row['forward_ms']:.1f}",
                f"{row['forward_backward_ms']:.1f} ({row['lower_quartile_ms']:.1f} to {row['upper_quartile_ms']:.1f})",
                f"{row['ratio']:.2f}",
            )
            for row in figures["times"]
        ),
    )
    errors = _table(
        ("dtype", "largest relative error of the correction", "at"),
        ((row["dtype"], f"{row['largest_relative_error']:.1e}", row["at"]) for row in figures["errors"]),
    )
    return f"{text}{times}\n{errors}"


def _gpu_section(name: str, figures: dict[str, Any]) -> str:
    settings, made, card = figures["settings"], figures["environment"], figures["gpu"]
    versions = [
        f"torch {made['torch']}",
        *(
            f"{label} {card[key]}"
            for label, key in (
                ("CUDA", "cuda"),
                ("driver", "driver"),
                ("Triton", "triton"),
                ("flash-linear-attention", "fla"),
            )
            if card[key] is not None
        ),
        f"ccq {made['ccq']}",
    ]
    text = (
        f"## GPU: {card['card']}\n\n"
        f"H {settings['heads']}, D {settings['size']}, {settings['dtype']}, up to {settings['repeats']} rounds; "
        f"{', '.join(versions)} ([{name}](../benchmarks/results/{name})).\n\n{GPU_EXPLANATION}"
    )
    if figures["copy_bytes_per_second"] is not None:
        text += f"\nCopy on the device: {figures['copy_bytes_per_second'] / 1e12:.2f} TB/s, read plus written.\n"
    if figures["first_call"] is not None:
        first = figures["first_call"]
        text += (
            f'\nFirst forward + backward of "triton" in a fresh process with empty caches: '
            f"{first['first_call_seconds']:.1f} s (the whole process {first['process_seconds']:.1f} s).\n"
        )
    if figures["functions"]:
        header = ("B", "T", "function", "pass", "device ms", "eager ms", "floor ms", "share")
        text += "\n" + _table(header, (_time_row(row, one) for row in figures["functions"] for one in PASS_NAMES))
        header = (
            "B",
            "T",
            "function",
            "peak forward MiB",
            "peak forward + backward MiB",
            "kept MiB",
            "output MiB",
            "error",
        )
        text += "\n" + _table(header, (_memory_row(row) for row in figures["functions"]))
    if figures["long"]:
        text += f"\nTime per token as the sequence grows, B 1, device:\n\n{_long_table(figures['long'])}"
    if figures["notes"]:
        text += "\n" + "".join(f"- {note}\n" for note in figures["notes"])
    return text


def _spread(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    return f"{found['median_ms']:.3f} ({found['lower_quartile_ms']:.3f} to {found['upper_quartile_ms']:.3f})"


def _time_row(row: dict[str, Any], one: str) -> tuple[str, ...]:
    part = row[one]
    share = f"{part['floor_share']:.0%}" if "floor_share" in part else "-"
    start = (str(row["rows"]), str(row["tokens"]), row["function"], PASS_NAMES[one])
    return (*start, _spread(part.get("device")), _spread(part.get("wall")), f"{part['floor_ms']:.3f}", share)


def _memory_row(row: dict[str, Any]) -> tuple[str, ...]:
    both = row["forward_backward"]
    values = (row["forward"]["peak_bytes"], both["peak_bytes"], both["kept_bytes"], both["output_bytes"])
    start = (str(row["rows"]), str(row["tokens"]), row["function"])
    return (*start, *(f"{value / 2**20:.1f}" for value in values), f"{row['correction_error']:.1e}")


def _long_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for a function and pass, a column for each length, and the longest over the shortest."""
    lengths = sorted({row["tokens"] for row in rows})
    found = {(row["function"], row["pass"], row["tokens"]): row["nanoseconds_per_token"] for row in rows}
    lines = []
    for function, one in dict.fromkeys((row["function"], row["pass"]) for row in rows):
        times = [found.get((function, one, tokens)) for tokens in lengths]
        first, last = times[0], times[-1]
        ratio = f"{last / first:.2f}" if len(lengths) > 1 and first is not None and last is not None else "-"
        cells = ("-" if value is None else f"{value:.2f}" for value in times)
        lines.append((function, PASS_NAMES[one], *cells, ratio))
    return _table(("function", "pass", *(f"ns at T {tokens}" for tokens in lengths), "ratio"), lines)
