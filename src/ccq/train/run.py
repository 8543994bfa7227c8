"""`ccq train`: one recipe in one folder, from the data to the exported model.

recipe.json       what was asked for; written first
metrics.jsonl     a line a step
tensorboard/      the same, where TensorBoard is installed
checkpoints/      the newest ones
model/            the trained model with its tokenizer, in transformers' format; written last
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ccq.data.loader import TokenLoader
from ccq.data.prepare import prepare_shards
from ccq.data.shards import TokenArray, TokenFolder, TokenStream, token_dtype
from ccq.data.sources import embedded_source
from ccq.files import claim_folder, lock_folder
from ccq.models.configuration import CCQConfig
from ccq.models.modeling import CCQForCausalLM, save_model
from ccq.models.text import save_tokenizer
from ccq.models.training_record import write_training_record
from ccq.processes import Processes, processes
from ccq.train.config import Recipe
from ccq.train.engine import Engine, initial_model
from ccq.train.graph import check_cuda_graph
from ccq.train.held_out import HeldOutWindows
from ccq.train.loop import CHECKPOINTS, Outcome, Progress, Schedule, train
from ccq.train.throughput import Plan, plan

RECIPE_FILE, MODEL = "recipe.json", "model"
_STDLIB_TOKENS = 4_000_000
"""Of a folder that is prepared for a recipe: more than tiny models see, in a few seconds."""
_STDLIB_HELD_OUT = 0.05
_LINE_SECONDS = 30.0
"""Between lines of progress where there is no terminal."""


class TrainingRun(NamedTuple):
    outcome: Outcome
    signal: int | None
    """The signal that ended it, if one did."""


class Data(NamedTuple):
    """What a run reads."""

    stream: TokenStream
    vocabulary: int
    """Token ids are below this."""
    folder: TokenFolder | None
    """None for random tokens."""


def run_recipe(
    recipe: Recipe, out: Path, *, stop_after: int | None = None, console: Console | None = None
) -> TrainingRun:
    """Train a recipe in the folder `out`, go on where an earlier call ended, or find that it is done.

    Under torchrun every process calls it. SIGTERM and SIGINT save a checkpoint and end the run; a second one kills.

    Args:
        recipe: must equal that of an earlier call with the same folder, but for `system` and the place of the data.
        out: the folder; made if missing.
        stop_after: end as an interruption would once so many steps are done.
        console: where the first process shows progress.

    Raises:
        ValueError: the folder belongs to another recipe, another process is using it, the data cannot be used, or
            `system.cuda_graph` is asked for where it cannot be had.
        FloatingPointError: losses or gradients were not finite, several steps in a row.
        OSError: the last checkpoint or the model could not be written.
    """
    with processes() as group, contextlib.ExitStack() as stack:
        if recipe.system.cuda_graph:
            check_cuda_graph(group)
        shown = (Console() if console is None else console) if group.is_first else Console(quiet=True)
        is_new = group.from_first(lambda: not (out / RECIPE_FILE).exists())
        group.from_first(lambda: claim_folder(out, RECIPE_FILE, recipe.to_dict(), "run", compared=_what_is_learned))
        group.from_first(lambda: stack.enter_context(lock_folder(out, "training")))
        with contextlib.ExitStack() as release:
            if is_new and group.is_first:
                # A recipe that cannot be trained leaves the folder free for the corrected one.
                release.callback((out / RECIPE_FILE).unlink, missing_ok=True)
            data = _open_data(recipe, group, shown)
            config = model_config(recipe, data)
            steps = recipe.training.total_steps
            if group.from_first(lambda: _is_done(out, steps)):
                shown.print(f"{out} holds a finished run; its model is in {out / MODEL}.", markup=False, soft_wrap=True)
                return TrainingRun(Outcome(steps, True, steps * recipe.training.tokens_per_step, 0.0), None)
            engine = make_engine(recipe, config, group)
            loader = TokenLoader(
                data.stream,
                length=recipe.data.length,
                batch_size=recipe.batch_size,
                rows=recipe.system.rows,
                seed=recipe.training.seed,
                process=group.rank,
                processes=group.count,
                pack_documents=recipe.data.pack_documents,
                workers=recipe.system.workers,
            )
            held_out = _held_out(recipe, data, group)
            release.pop_all()
        with _stop_signals() as stop, _ProgressLine(shown, steps) as line:
            outcome = train(
                engine,
                loader,
                out,
                make_schedule(recipe, stop_after=stop_after),
                length=lambda step: recipe.data.length,
                on_progress=line.update,
                say=line.say,
                asked_to_stop=lambda: stop.received is not None,
                held_out_loss=None if held_out is None else lambda: engine.measure(held_out.batches()),
                tensorboard=True,
            )
        if data.folder is not None and outcome.finished:
            export(engine, data.folder, out / MODEL, recipe)
            shown.print(f"Model: {out / MODEL}", markup=False, soft_wrap=True)
        elif not outcome.finished:
            from_where = "from here" if recipe.system.checkpoint_every is not None else "from the start"
            text = f"Stopped after step {outcome.step:,} of {steps:,}; the same command goes on {from_where}."
            shown.print(text, markup=False, soft_wrap=True)
        return TrainingRun(outcome, stop.received)


def plan_recipe(recipe: Recipe) -> Plan:
    """What the recipe would need on the GPUs of this machine, or on the processes of torchrun."""
    with processes(connect=False) as group:
        count = group.count
        if count == 1 and group.device.type == "cuda":
            count = torch.cuda.device_count()
        data = None
        if recipe.data.folder is not None and Path(recipe.data.folder).exists():
            folder = TokenFolder.open(recipe.data.folder)
            data = Data(folder.train, folder.vocabulary_size, folder)
        return plan(recipe, model_config(recipe, data), processes=count, device=group.device)


def make_engine(recipe: Recipe, config: CCQConfig, group: Processes) -> Engine:
    """The model of a recipe at its start, with its optimizer, on these processes."""
    return Engine(
        initial_model(config, recipe.training.seed, group.device),
        recipe.optimizer,
        group,
        dtype=recipe.system.dtype,
        compile=recipe.system.compile,
        activation_checkpointing=recipe.system.activation_checkpointing,
        reshard_after_forward=recipe.system.reshard_after_forward,
        cuda_graph=recipe.system.cuda_graph,
    )


def make_schedule(recipe: Recipe, *, stop_after: int | None = None) -> Schedule:
    system = recipe.system
    return Schedule(
        steps=recipe.training.total_steps,
        checkpoint_every=system.checkpoint_every,
        log_every=system.log_every,
        observe_every=system.observe_every,
        evaluate_every=recipe.evaluation.every,
        keep_checkpoints=system.keep_checkpoints,
        stop_after=stop_after,
    )


def model_config(recipe: Recipe, data: Data | None) -> CCQConfig:
    """The model of a recipe for its data, or for data that are not there yet.

    Raises:
        ValueError: the recipe asks for a smaller vocabulary than the data have.
    """
    changes: dict[str, Any] = {"max_position_embeddings": recipe.data.length}
    if data is not None and data.folder is not None:
        changes["vocab_size"] = data.vocabulary
        for name in ("bos", "eos"):
            token = data.folder.index[name]
            changes[f"{name}_token_id"] = None if token is None else token["id"]
    elif recipe.data.stdlib_tokenizer is not None:
        changes["vocab_size"] = recipe.data.stdlib_tokenizer
    asked = recipe.model.options.get("vocab_size")
    if data is not None and asked is not None and asked < data.vocabulary:
        raise ValueError(
            f"model.vocab_size is {asked}, but the data have tokens up to {data.vocabulary - 1}; leave it out to take "
            "as many as the data have"
        )
    return recipe.model.config(**changes)


def export(engine: Engine, data: TokenFolder, folder: Path, recipe: Recipe) -> None:
    """Write the model as transformers' `from_pretrained` reads it, in float32, with the tokenizer of its data and a
    record of its training. Every process must call it.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(engine.model, options=options)

    def write() -> None:
        with torch.device("meta"):
            model = CCQForCausalLM(engine.model.config)
        model.load_state_dict(weights, assign=True)
        model.tie_weights()
        end = data.index["eos"]
        save_tokenizer(data.tokenizer(), folder, end=None if end is None else end["token"])
        training = recipe.training
        write_training_record(
            folder,
            seed=training.seed,
            steps=training.total_steps,
            tokens=training.total_steps * training.tokens_per_step,
            settings={**_without_seed(recipe), "data_sha256": data.train.sha256},
        )
        save_model(model, folder)

    engine.processes.from_first(write)


def _without_seed(recipe: Recipe) -> dict[str, Any]:
    """What determines a training beside its seed."""
    values = _what_is_learned(recipe.to_dict())
    return {**values, "training": {name: value for name, value in values["training"].items() if name != "seed"}}


def _is_done(out: Path, steps: int) -> bool:
    # The weights, or the index of several files of them, are the last that `export` puts in place.
    return any((out / MODEL).glob("model.safetensors*")) and (out / CHECKPOINTS / f"step-{steps:08}").exists()


def _what_is_learned(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe without what may change when a run goes on; that the data are the same is seen from their hash."""
    values = {name: section for name, section in recipe.items() if name not in ("system", "evaluation")}
    places = ("folder", "stdlib_tokenizer")
    values["data"] = {name: value for name, value in recipe["data"].items() if name not in places}
    return values


def _open_data(recipe: Recipe, group: Processes, console: Console) -> Data:
    """The tokens of a recipe. The first process prepares them where the recipe says how."""
    asked = recipe.data
    if asked.synthetic_tokens is not None:
        vocabulary = recipe.model.config().vocab_size
        random = np.random.default_rng(0)
        tokens = random.integers(vocabulary, size=asked.synthetic_tokens, dtype=np.uint32)
        return Data(TokenArray(tokens.astype(token_dtype(vocabulary))), vocabulary, None)
    assert asked.folder is not None
    path = Path(asked.folder)

    def prepare() -> None:
        if asked.stdlib_tokenizer is not None and not (path / "index.json").exists():
            prepare_shards(
                path,
                embedded_source(),
                asked.stdlib_tokenizer,
                held_out=_STDLIB_HELD_OUT,
                tokens=_STDLIB_TOKENS,
                console=console,
            )

    group.from_first(prepare)
    folder = TokenFolder.open(path)
    return Data(folder.train, folder.vocabulary_size, folder)


def _held_out(recipe: Recipe, data: Data, group: Processes) -> HeldOutWindows | None:
    """What the loss on held-out text is measured on, if it is.

    Raises:
        ValueError: the data hold no window of it.
    """
    if recipe.evaluation.every is None:
        return None
    assert data.folder is not None
    tokens, needed = data.folder.held_out.tokens, recipe.data.length + 1
    if tokens < needed:
        raise ValueError(
            f"evaluation.every needs held-out text: {data.folder.path} holds out {tokens:,} tokens and a window takes "
            f"{needed:,}; prepare the data with a larger --held-out, or leave evaluation.every out"
        )
    return HeldOutWindows(
        data.folder.held_out,
        length=recipe.data.length,
        tokens=recipe.evaluation.tokens,
        rows=recipe.system.rows,
        process=group.rank,
        processes=group.count,
        pack_documents=recipe.data.pack_documents,
    )


class _Stop:
    received: int | None = None


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stop]:
    """Inside the block the first SIGTERM or SIGINT is noted; after it both do what they did before."""
    stop = _Stop()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        stop.received = number
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        restore()


class _ProgressLine:
    """Loss, tokens a second, utilisation, memory and time left: a line that changes on a terminal, else a line every
    half a minute.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self.console, self.steps = console, steps
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )
        self.bars = Bars(*columns, console=console, disable=not console.is_terminal)
        self.bar = self.bars.add_task("training", total=steps, note="")
        self.shown_at = self.started = time.monotonic()
        self.first: int | None = None

    def update(self, progress: Progress) -> None:
        note = f"loss {progress.result.loss:.3f}  {progress.tokens_per_second:,.0f} tokens/s"
        if progress.utilization is not None:
            note += f"  MFU {progress.utilization:.1%}"
        if progress.memory is not None:
            note += f"  {progress.memory / 2**30:.1f} GiB"
        self.bars.update(self.bar, completed=progress.step, note=note)
        now = time.monotonic()
        if self.first is None:
            self.first, self.started = progress.step, now
        last = progress.step == self.steps
        if not self.console.is_terminal and (last or now - self.shown_at > _LINE_SECONDS):
            self.shown_at = now
            left = (self.steps - progress.step) * (now - self.started) / max(progress.step - self.first, 1)
            self.say(f"step {progress.step:,} of {self.steps:,}  {note}  {left / 3600:.1f} h left")

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True, highlight=False)

    def __enter__(self) -> _ProgressLine:
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()
