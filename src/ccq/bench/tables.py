"""The page docs/speed.md, made from the files that `ccq bench operator`, `layer`, `model` and `decode` wrote.

    ccq bench tables benchmarks/results > docs/speed.md

No figure of the page is written by hand: a test compares the page with what this module makes of the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SCHEMAS = {
    "operator": ("ccq-bench-operator/1", "ccq-bench-operator/2"),
    "layer": ("ccq-bench-layer/1",),
    "model": ("ccq-bench-model/1",),
    "decode": ("ccq-bench-decode/1",),
    "answers": ("ccq-bench-answers/1",),
}
"""Accepted schemas of the files KIND*.json, in the order of the page."""
PASS_NAMES = {"forward": "forward", "forward_backward": "forward + backward"}

INTRODUCTION = """\
# Speed

`ccq bench tables benchmarks/results` makes this page from the files of that folder; change neither by hand. Each file
comes from `ccq bench` and holds every setting. All functions of a file were measured in one process and in
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


LAYER_EXPLANATION = """\
Each backbone is a layer of this library; "+ccq" is the same with the read step, "flash-linear-attention" that library's
layer, all with the same weights. Its kernels behind the write rules run in the configurations that this library uses.
Forward runs without autograd; forward + backward gives the gradients of the input and of every weight. Device and eager
as above. Peak: bytes above weights and input.
"""

MODEL_EXPLANATION = """\
A training step is forward, backward, AdamW and clearing the gradients, with float32 weights under autocast to bfloat16;
prefill reads the prompt into a cache, with bfloat16 weights. Times are eager. Peak: weights, moments, and the most that
a step allocates on top. Share: of the card's dense bfloat16 rate, by three forward passes a token.
"""

DEVICE_STEP_EXPLANATION = """\
Device: the same training step replayed as a CUDA graph, what the card needs without waiting for launches.
"""


DECODE_EXPLANATION = """\
A step takes the most likely next token of every row. Memories and statistics are float32. The models of a backbone take
turns. Ratios are of milliseconds a step; the paper's 457 and 297 tokens/s without and with the read step (-35 %) are a
ratio of 1.54.

- Eager: {steps} steps one after the other, from idle until idle again, divided by {steps}.
- CUDA graph: replays of the captured step that follow each other.
- Floor: the copy bandwidth moves the weights without the embedding once, and the states out and in.
- Peak: weights, states, and the most that a step allocates on top.
"""


ANSWERS_EXPLANATION = """\
The loop of `ccq eval needle` on random tokens and weights (benchmarks/answers.py), against reading alone in calls of as
many tokens. Apart: prompts without a common beginning. Together: prompts that differ from a place on, evenly spread, as
one haystack with a needle makes them, whose common beginnings are read once; they can be above 1.
"""


def speed_page(folder: Path) -> str:
    """The page, from the files operator*.json, layer*.json, model*.json, decode*.json and answers*.json of `folder`,
    each kind in the order of its names.

    Raises ValueError for a folder without such files and for a file of an unknown schema.
    """
    sections = [INTRODUCTION]
    for kind, schemas in SCHEMAS.items():
        for path in sorted(folder.glob(f"{kind}*.json")):
            figures = json.loads(path.read_text(encoding="utf-8"))
            if figures.get("schema") not in schemas:
                raise ValueError(f"{path} has the schema {figures.get('schema')!r}; accepted: {', '.join(schemas)}")
            if kind == "operator":
                section = _gpu_section if "functions" in figures else _cpu_section
            else:
                section = {
                    "layer": _layer_section,
                    "model": _model_section,
                    "decode": _decode_section,
                    "answers": _answers_section,
                }[kind]
            sections.append(section(path.name, figures))
    if len(sections) == 1:
        raise ValueError(
            f"{folder} has no file {' or '.join(f'{kind}*.json' for kind in SCHEMAS)}; `ccq bench` writes them"
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


def _made_with(figures: dict[str, Any]) -> str:
    """The versions behind figures of a GPU."""
    made, card = figures["environment"], figures["gpu"]
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
    return ", ".join(versions)


def _gpu_section(name: str, figures: dict[str, Any]) -> str:
    settings = figures["settings"]
    text = (
        f"## GPU: {figures['gpu']['card']}\n\n"
        f"H {settings['heads']}, D {settings['size']}, {settings['dtype']}, up to {settings['repeats']} rounds; "
        f"{_made_with(figures)} ([{name}](../benchmarks/results/{name})).\n\n{GPU_EXPLANATION}"
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
    return text + _notes(figures)


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


def _layer_section(name: str, figures: dict[str, Any]) -> str:
    settings = figures["settings"]
    text = (
        f"## Layers: {figures['gpu']['card']}\n\n"
        f"Hidden {settings['hidden']}, {settings['heads']} heads of {settings['size']}/{settings['value_size']}, "
        f"{settings['dtype']}, up to {settings['repeats']} rounds; {_made_with(figures)} "
        f"([{name}](../benchmarks/results/{name})).\n\n{LAYER_EXPLANATION}"
    )
    if figures["layers"]:
        header = ("B", "T", "pass", "layer", "device ms", "eager ms", "peak MiB")
        text += "\n" + _table(header, (_layer_row(row) for row in figures["layers"]))
    if figures["ratios"]:
        names = [
            ("+ccq over backbone", "ccq_over_backbone"),
            ("+ccq over backbone, compiled", "ccq_over_backbone_compiled"),
            ("backbone over flash-linear-attention", "backbone_over_package"),
        ]
        shown = [
            (title, f"{key}_{clock}", clock)
            for title, key in names
            for clock in ("device", "wall")
            if any(row[f"{key}_{clock}"] is not None for row in figures["ratios"])
        ]
        titles = (f"{title}, {'eager' if clock == 'wall' else clock}" for title, _, clock in shown)
        lines = (
            (
                row["backbone"],
                str(row["rows"]),
                str(row["tokens"]),
                PASS_NAMES[row["pass"]],
                *(_ratio(row[key]) for _, key, _ in shown),
            )
            for row in figures["ratios"]
        )
        text += "\n" + _table(("backbone", "B", "T", "pass", *titles), lines)
    return text + _notes(figures)


def _layer_row(row: dict[str, Any]) -> tuple[str, ...]:
    start = (str(row["rows"]), str(row["tokens"]), PASS_NAMES[row["pass"]])
    name = f"{row['layer']} ({row['backbone']})" if row["layer"] == "flash-linear-attention" else row["layer"]
    return (*start, name, _spread(row.get("device")), _spread(row.get("wall")), f"{row['peak_bytes'] / 2**20:.1f}")


def _model_section(name: str, figures: dict[str, Any]) -> str:
    settings = figures["settings"]
    text = (
        f"## Models: {figures['gpu']['card']}, {settings['scale']}\n\n"
        f"B {settings['rows']}, T {settings['tokens']}, up to {settings['repeats']} rounds; {_made_with(figures)} "
        f"([{name}](../benchmarks/results/{name})).\n\n{MODEL_EXPLANATION}"
    )
    # Files from before it was measured have no device time of a step.
    with_device = any(row.get("step_device") is not None for row in figures["models"])
    if with_device:
        text += DEVICE_STEP_EXPLANATION
    steps = {"training step": "step", **({"device": "step_device"} if with_device else {})}
    if figures["models"]:
        header = (
            "model",
            "parameters",
            *(f"{title} ms" for title in steps),
            "tokens/s",
            "share",
            "peak GiB",
            "prefill ms",
        )
        text += "\n" + _table(header, (_model_row(row, list(steps.values())) for row in figures["models"]))
    if figures["ratios"]:
        text += "\n" + _table(
            ("backbone", "of", *steps, "prefill", "peak GiB more"),
            (
                (
                    row["backbone"],
                    title,
                    *(_ratio(row.get(f"{key}_{step}")) for step in steps.values()),
                    _ratio(row[f"{key}_prefill"]),
                    "-" if row[f"{key}_peak_bytes"] is None else f"{row[f'{key}_peak_bytes'] / 2**30:+.2f}",
                )
                for row in figures["ratios"]
                for title, key in (
                    ("+ccq over backbone", "ccq_over_backbone"),
                    ("backbone over flash-linear-attention", "backbone_over_package"),
                )
                if row[f"{key}_peak_bytes"] is not None
            ),
        )
    costs = figures.get("read_costs", [])
    if any(not cost["arm"].endswith("+ccq") for cost in costs):
        text += "\nA training step over that of the backbone:\n\n"
        lines = ((cost["arm"], _ratio(cost["device"]), _ratio(cost["eager"])) for cost in costs)
        text += _table(("arm", "device", "eager"), lines)
    for row in figures["first_steps"]:
        text += (
            f"\nFirst training step of {row['arm']} in a fresh process with empty caches: "
            f"{row['first_step_seconds']:.1f} s (the whole process {row['process_seconds']:.1f} s).\n"
        )
    if figures["sweep"]:
        text += f"\nA training step of {settings['sweep_tokens']} tokens, tokens/s (peak GiB):\n\n"
        text += _sweep_table(figures["sweep"])
    return text + _notes(figures)


def _model_row(row: dict[str, Any], steps: Sequence[str]) -> tuple[str, ...]:
    name = f"{row['model']} ({row['backbone']})" if row["model"] == "flash-linear-attention" else row["model"]
    speed, share = row.get("tokens_per_second"), row.get("flops_share")
    return (
        name,
        f"{row['parameters']:,}",
        *(_spread(row.get(step)) for step in steps),
        "-" if speed is None else f"{speed:,.0f}",
        "-" if share is None else f"{share:.0%}",
        "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}",
        _spread(row["prefill"]),
    )


def _sweep_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for an arm, a column for each shape."""
    shapes = sorted({(row["tokens"], row["rows"]) for row in rows})
    found = {(row["arm"], row["tokens"], row["rows"]): row for row in rows}
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        cells = []
        for shape in shapes:
            row = found.get((arm, *shape))
            cells.append("-" if row is None else f"{row['tokens_per_second']:,.0f} ({row['peak_bytes'] / 2**30:.1f})")
        lines.append((arm, *cells))
    return _table(("arm", *(f"{rows} x {tokens}" for tokens, rows in shapes)), lines)


def _decode_section(name: str, figures: dict[str, Any]) -> str:
    settings, made = figures["settings"], figures["environment"]
    place = made["processor"] if made["device"] == "cpu" else figures["gpu"]["card"]
    text = (
        f"## Decoding: {place}, {settings['scale']}\n\n"
        f"B {settings['rows']}, after {settings['context']} tokens, weights in {settings['dtype']}, up to "
        f"{settings['repeats']} rounds; {_made_with(figures)} ([{name}](../benchmarks/results/{name})).\n\n"
        f"{DECODE_EXPLANATION.format(steps=settings['steps'])}"
    )
    if figures["copy_bytes_per_second"] is not None:
        text += f"\nCopy on the device: {figures['copy_bytes_per_second'] / 1e12:.2f} TB/s, read plus written.\n"
    if figures["models"]:
        header = (
            "model",
            "eager ms",
            "tokens/s",
            "CUDA graph ms",
            "tokens/s",
            "floor tokens/s",
            "state MiB a row",
            "peak GiB",
        )
        text += "\n" + _table(header, (_decode_row(row) for row in figures["models"]))
    if figures["ratios"]:
        lines = (
            (line["model"], line["over"], *(_ratio(line[key]) for key in ("eager", "graph", "state_bytes")))
            for line in figures["ratios"]
        )
        text += "\n" + _table(("model", "over", "eager", "CUDA graph", "state"), lines)
    return text + _notes(figures)


def _decode_row(row: dict[str, Any]) -> tuple[str, ...]:
    name = f"{row['model']} ({row['backbone']})" if row["model"] == "flash-linear-attention" else row["model"]
    cells = [name]
    for way in ("eager", "graph"):
        found = row[way]
        cells += [_spread(found), "-" if found is None else f"{found['tokens_per_second']:,.0f}"]
    floor, state, peak = row["floor_tokens_per_second"], row["state_bytes"], row["peak_bytes"]
    cells.append("-" if floor is None else f"{floor:,.0f}")
    cells.append("-" if state is None else f"{state / 2**20:.2f}")
    cells.append("-" if peak is None else f"{peak / 2**30:.2f}")
    return tuple(cells)


def _answers_section(name: str, figures: dict[str, Any]) -> str:
    settings = figures["settings"]
    text = (
        f"## Answers to long prompts: {figures['gpu']['card']}, {settings['arm']}, {settings['scale']}\n\n"
        f"{settings['samples']} prompts of {settings['length']} tokens in batches of {settings['batch_size']}, answers "
        f"of {settings['answer_tokens']} tokens, bfloat16; {_made_with(figures)} "
        f"([{name}](../benchmarks/results/{name})).\n\n{ANSWERS_EXPLANATION}"
        f"\nReading speed: {figures['reading_tokens_per_second']:,.0f} tokens/s.\n"
    )
    rows = (
        (
            kind,
            f"{found['samples_per_second']:.1f}",
            f"{found['prompt_tokens_per_second']:,.0f}",
            f"{found['share_of_reading']:.2f}",
        )
        for kind in ("apart", "together")
        if (found := figures.get(kind)) is not None
    )
    text += "\n" + _table(("prompts", "samples/s", "prompt tokens/s", "of reading speed"), rows)
    if figures.get("long"):
        lines = (
            (f"{row['tokens']:,}", f"{row['seconds']:.2f}", f"{row['peak_bytes'] / 2**30:.2f}")
            for row in figures["long"]
        )
        text += "\n" + _table(("one prompt of", "seconds", "peak GiB"), lines)
    return text


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _notes(figures: dict[str, Any]) -> str:
    return "\n" + "".join(f"- {note}\n" for note in figures["notes"]) if figures["notes"] else ""
