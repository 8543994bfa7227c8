"""The suites of `ccq eval`: which tasks they have, at which lengths, and what is written beside their scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ccq.data.ruler import RULER_TASKS
from ccq.evals.benchmarks import LANGUAGE, LONGBENCH, benchmark_tasks, suite_mean
from ccq.evals.harness import EvalTask, LoadedModel, run_tasks
from ccq.evals.needle import LENGTHS, READ_OFF_LENGTHS, needle_tasks
from ccq.evals.perplexity import CORPORA, extrapolation_tasks
from ccq.evals.results import EnvironmentResult, EvalResults, EvalScore, EvalSettings, EvalTaskResult

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SUITES = ("extrapolation", "needle", "language", "longbench")
EXTRAPOLATION_LENGTHS = tuple(range(4096, 20480 + 1, 2048))
"""Of the paper's figures 3 and 4."""
EXTRAPOLATION_TOKENS = 2**21
"""The most predicted tokens of a corpus and a length, unless others are asked for; the paper does not say."""
NEEDLE_SAMPLES = 500
"""Of a task and a length, unless others are asked for; the paper's percentages are multiples of 0.2."""


def run_suite(
    suite: str,
    loaded: LoadedModel,
    out: Path,
    *,
    tasks: Sequence[str] | None = None,
    data: Path | None = None,
    batch_size: int,
    limit: int | None,
    seed: int = 0,
    lengths: Sequence[int] | None = None,
    preset: str | None = None,
    hub_essays: bool = False,
    max_tokens: int | None = None,
    max_length: int | None = None,
    environment: EnvironmentResult,
    console: Console,
) -> EvalResults:
    """Run one of `SUITES` and write its results file; go on where an earlier run ended.

    Args:
        suite: its name.
        loaded: the model.
        out: the results file.
        tasks: some of the suite's tasks; None for all (needle: those of the preset, or the three single needles).
        data: the folder of local data; None for the hub.
        batch_size: rows of a call.
        limit: the most samples of a task; documents of a corpus (extrapolation); samples of a cell (needle).
        seed: of what is drawn.
        lengths: in tokens (extrapolation, needle).
        preset: "read-off" for `READ_OFF_LENGTHS` (needle).
        hub_essays: take the hub's essays (needle).
        max_tokens: of a corpus and length (extrapolation).
        max_length: of prompt and answer together (language, longbench); None for the model's own.
        environment: where this runs.
        console: shows what is run and how far.

    Raises:
        ValueError: a name is unknown, data are missing, or `out` holds another evaluation.
    """
    if data is not None and not data.is_dir():
        raise ValueError(f"the data folder {data} does not exist or is not a folder")
    others: dict[str, Any] = {}
    side: Literal["left", "middle", "none"] = "none"
    planned: list[EvalTask]
    summarize: Callable[[Sequence[EvalTaskResult]], list[EvalScore]] = _no_summary
    if suite == "extrapolation":
        names = list(tasks or CORPORA)
        sizes = list(lengths or EXTRAPOLATION_LENGTHS)
        most = max_tokens or EXTRAPOLATION_TOKENS
        others = {"lengths": sizes, "max_tokens": most}
        planned = extrapolation_tasks(
            loaded, names, folder=data, lengths=sizes, batch_size=batch_size, max_tokens=most, limit=limit
        )
    elif suite == "needle":
        by_task = _needle_lengths(tasks, lengths, preset)
        names = list(by_task)
        limit = limit or NEEDLE_SAMPLES
        others = {"lengths": {name: list(sizes) for name, sizes in by_task.items()}, "hub_essays": hub_essays}
        planned = needle_tasks(
            loaded,
            by_task,
            samples=limit,
            seed=seed,
            batch_size=batch_size,
            folder=data,
            hub_essays=hub_essays,
        )
    elif suite in ("language", "longbench"):
        known = LANGUAGE if suite == "language" else LONGBENCH
        names = list(tasks or known)
        side = "left" if suite == "language" else "middle"
        max_length = max_length or loaded.max_length
        console.print(f"Maximum length: {max_length} tokens, prompt and answer together; cut at the {side}")
        planned = benchmark_tasks(
            loaded,
            known,
            names,
            folder=data,
            max_length=max_length,
            truncation_side=side,
            batch_size=batch_size,
            limit=limit,
            seed=seed,
        )

        def summarize(results: Sequence[EvalTaskResult]) -> list[EvalScore]:
            return suite_mean(suite, results)
    else:
        raise ValueError(f"unknown suite {suite!r}; accepted: {', '.join(SUITES)}")
    settings: EvalSettings = {
        "max_length": max_length if suite in ("language", "longbench") else None,
        "truncation_side": side,
        "bos": loaded.bos,
        "batch_size": batch_size,
        "limit": limit,
        "seed": seed,
        "tasks": names,
        "data": None if data is None else str(data),
        "others": others,
    }
    return run_tasks(
        out,
        suite,
        loaded,
        settings,
        planned,
        summarize=summarize,
        environment=environment,
        console=console,
    )


def _needle_lengths(
    tasks: Sequence[str] | None, lengths: Sequence[int] | None, preset: str | None
) -> Mapping[str, Sequence[int]]:
    if preset is not None and (tasks is not None or lengths is not None):
        raise ValueError("a preset names tasks and lengths; leave --tasks and --lengths out")
    if preset == "read-off":
        return READ_OFF_LENGTHS
    if preset is not None:
        raise ValueError(f"unknown preset {preset!r}; accepted: read-off")
    names = tasks or ("niah_single_1", "niah_single_2", "niah_single_3")
    unknown = [name for name in names if name not in RULER_TASKS]
    if unknown:
        raise ValueError(f"unknown needle task {unknown[0]!r}; accepted: {', '.join(RULER_TASKS)}")
    return {name: tuple(lengths or LENGTHS) for name in names}


def _no_summary(_: Sequence[EvalTaskResult]) -> list[EvalScore]:
    return []


def score_table(results: EvalResults) -> Table:
    """All scores of a file, for the terminal."""
    from rich.table import Table

    table = Table("task", "metric", "score", "standard error", "samples", box=None)
    for column in table.columns[2:]:
        column.justify = "right"
    rows = [(task["task"], score) for task in results["tasks"] for score in task["scores"]]
    for name, score in [*rows, *((results["suite"], score) for score in results["summary"])]:
        error = "" if score["standard_error"] is None else f"{score['standard_error']:.4f}"
        table.add_row(name, score["metric"], f"{score['value']:.4f}", error, f"{score['samples']:,}")
    return table
