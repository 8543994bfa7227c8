"""`ccq bench tune`: measure in which configurations flash-linear-attention's kernels are fastest on this card.

    ccq bench tune                 writes (or goes on with) the card's file, where the write rules look for it

Every kernel that a write rule, or the norm behind it, launches is recorded once, at each batch size, with the
arguments it got. Then its candidates, which are the configurations the package itself would try, are compiled in
parallel processes and timed on those arguments. Candidates that differ in the number of pipeline stages only are not
all tried: one stage count is timed for every tile and number of warps, and the others for the two best of those and
for those that did not fit. The present configuration is always timed. A candidate must give the numbers that it
gives, because compilers have miscompiled single ones.

What is found is written after each kernel. A run that was cut short goes on with the kernels that are missing; one
during which it died keeps the configuration it had.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ccq.bench.machine import gpu_environment
from ccq.bench.measure import Card
from ccq.files import write_json_atomically
from ccq.ops import flash_linear_attention, rms_norm_gated
from ccq.ops.flash_linear_attention import Configuration, Launcher, Table
from ccq.ops.gated_delta_rule import fused as gated_delta_rule
from ccq.ops.gla import fused as gla
from ccq.ops.ssd import fused as ssd

OPERATORS = {each.RULE: each for each in (gla, gated_delta_rule, ssd)}
MAMBA2 = "128/64"
SIZES = ("256/512", "64/64", "64/128", "128/128", "128/256", MAMBA2)
"""D/V: the paper's first, that of Mamba2 last."""
ROWS = (1, 8)
TOKENS = 4096
HEADS = {gla.RULE: 6, gated_delta_rule.RULE: 6, ssd.RULE: 32, rms_norm_gated.OPERATION: 6}
"""As many as the models have: the paper's 6, Mamba2 at 500M 32, which share their keys."""
STAGES = 3
"""Pipeline stages of the first round."""
BEST = 2
"""Tiles whose other stage counts are timed as well."""
AGREEMENT = 1e-2
"""Largest relative difference from the present configuration: rounding differs, a miscompiled kernel differs more."""
KNOWN_BAD = {("prepare_wy_repr_bwd_kernel", "9", 4)}
"""Kernel, major compute capability, warps: wrong numbers or an illegal access, which would end the process
(flash-linear-attention, issue 984)."""


class Launch(NamedTuple):
    """One launch of a kernel as it was recorded."""

    autotuner: Any
    args: tuple[Any, ...]
    arguments: dict[str, Any]
    blank: dict[str, float]
    """Arguments that the kernel writes, with what stood in them before: zero or NaN."""
    rows: int
    """The batch size."""

    @property
    def kernel(self) -> str:
        return str(self.autotuner.base_fn.__name__)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What the compiled kernel depends on besides the configuration."""
        kept = {name: value for name, value in self.arguments.items() if name not in ("grid", "T")}
        values = (str(value.dtype) if isinstance(value, Tensor) else value for value in kept.values())
        return (self.kernel, *zip(kept, values, strict=True))

    def run(self, configuration: Configuration) -> None:
        self.autotuner.fn.run(*self.args, **self.arguments, **configuration)

    def compile(self, configuration: Configuration) -> None:
        """Into Triton's cache on disk; nothing is launched."""
        arguments = {name: value for name, value in self.arguments.items() if name != "warmup"}
        self.autotuner.fn.warmup(*self.args, **arguments, **configuration)

    def written(self, configuration: Configuration) -> dict[str, Tensor]:
        """What the kernel writes into blank tensors."""
        for name, value in self.blank.items():
            self.arguments[name].fill_(value)
        self.run(configuration)
        return {name: self.arguments[name].clone() for name in self.blank}


class Recorder(Launcher):
    """Launches, and keeps what was launched."""

    def __init__(self, configurations: Mapping[str, Configuration], rows: int) -> None:
        super().__init__(configurations)
        self.rows = rows
        self.launches: list[Launch] = []

    def launch(self, autotuner: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
        blank = {}
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                if torch.isnan(value).all():
                    blank[name] = math.nan
                elif not value.any():
                    blank[name] = 0.0
        done = super().launch(autotuner, args, arguments)
        for name, value in list(blank.items()):
            after = arguments[name]
            if torch.isnan(after).all() if math.isnan(value) else not after.any():
                del blank[name]
        self.launches.append(Launch(autotuner, args, dict(arguments), blank, self.rows))
        return done


def draw(operation: str, rows: int, tokens: int, size: int, value_size: int, device: torch.device) -> list[Tensor]:
    """Arguments of an operator, as a layer would give them: q, k, v bfloat16, gates and state float32."""
    random = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=random, device=device)

    heads = HEADS[operation]
    groups = 1 if operation == ssd.RULE else heads
    q, k = (F.normalize(normal(rows, tokens, groups, size), dim=-1).bfloat16() for _ in range(2))
    v = normal(rows, tokens, heads, value_size).bfloat16()
    state = normal(rows, heads, size, value_size)
    if operation == rms_norm_gated.OPERATION:
        return [v.flatten(0, 2), normal(rows * tokens * heads, value_size).bfloat16(), normal(value_size).bfloat16()]
    if operation == gla.RULE:
        return [q, k, v, F.logsigmoid(normal(rows, tokens, heads, size)) / 16, state]
    gates = normal(2, rows, tokens, heads).sigmoid()
    if operation == ssd.RULE:
        return [q, k, v, -gates[0], state]
    return [q, k, v, -gates[0], gates[1], state]


@contextlib.contextmanager
def _marked_memory() -> Iterator[None]:
    """New tensors are full of NaN, so that what a kernel writes can be told."""
    memory: Any = torch.utils.deterministic
    before = memory.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    memory.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = before[0]
        torch.use_deterministic_algorithms(before[1])


def record(
    operation: str, rows: int, tokens: int, size: int, value_size: int, configurations: Mapping[str, Configuration]
) -> list[Launch]:
    """Every launch of a forward and backward pass, and of the package's own for one token of a write rule."""
    arguments = draw(operation, rows, tokens, size, value_size, torch.device("cuda"))
    recorder = Recorder(configurations, rows)
    with flash_linear_attention.using(recorder), _marked_memory():
        if operation == rms_norm_gated.OPERATION:
            y, reciprocal = rms_norm_gated.forward(*arguments, 1e-5)
            rms_norm_gated.backward(torch.randn_like(y), *arguments, reciprocal, 1e-5)
            return recorder.launches
        *values, state = arguments
        operator = OPERATORS[operation]
        output, final, *kept = operator.forward(*values, state, size**-0.5, None)
        d_final = torch.randn_like(final)
        operator.backward(*values[:3], *values[4:], *kept, state, torch.randn_like(output), d_final, size**-0.5, None)
        if operation == ssd.RULE:
            return recorder.launches
        # For these the library has kernels of its own; the package's layers, beside which it is measured, run them.
        one = dict(zip(("q", "k", "v"), (x[:, :1].contiguous() for x in values), strict=False))
        gates = [x[:, :1].contiguous() for x in values[3:]]
        options = {"scale": size**-0.5, "initial_state": state, "output_final_state": True}
        if operation != gla.RULE:
            from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule_fwd

            fused_recurrent_gated_delta_rule_fwd(**one, g=gates[0], beta=gates[1], **options)
        else:
            from fla.ops.common.fused_recurrent import fused_recurrent_fwd
            from fla.ops.gla.chunk import chunk_gla_bwd_dqk_intra, chunk_gla_fwd_intra_gk

            fused_recurrent_fwd(**one, gk=gates[0], **options)
            given = {"q": values[0], "k": values[1], "g": kept[0], "chunk_size": flash_linear_attention.CHUNK}
            weights = chunk_gla_fwd_intra_gk(**given, scale=size**-0.5)
            chunk_gla_bwd_dqk_intra(**given, dA=weights)
    return recorder.launches


def usable(kernel: str, offered: Sequence[Configuration], capability: str) -> list[Configuration]:
    """Candidates that are worth a try: without those known to be wrong, and those whose tile fills a warp's registers
    many times over.
    """
    found = []
    for configuration in offered:
        tile = configuration.get("BK", 1) * configuration.get("BV", configuration.get("BS", 1))
        crowded = tile > 2048 * configuration["num_warps"]
        bad = (kernel, capability.split(".")[0], configuration["num_warps"]) in KNOWN_BAD
        if not crowded and not bad:
            found.append(configuration)
    return found or list(offered[:1])


def _shape(configuration: Configuration) -> tuple[tuple[str, int], ...]:
    """A configuration without its pipeline stages."""
    return tuple(sorted((name, value) for name, value in configuration.items() if name != "num_stages"))


def first_round(offered: Sequence[Configuration]) -> list[Configuration]:
    """For every tile and number of warps one stage count, the one nearest to `STAGES`."""
    nearest: dict[Any, Configuration] = {}
    for configuration in offered:
        shape = _shape(configuration)
        if shape not in nearest or _distance(configuration) < _distance(nearest[shape]):
            nearest[shape] = configuration
    return list(nearest.values())


def _distance(configuration: Configuration) -> int:
    return abs(configuration["num_stages"] - STAGES)


def second_round(
    offered: Sequence[Configuration], tried: Sequence[Configuration], ranked: Sequence[Configuration]
) -> list[Configuration]:
    """The other stage counts of the best of the first round, and of what did not work there; `ranked` are those that
    worked, the best first.
    """
    wanted = [_shape(configuration) for configuration in ranked[:BEST]]
    wanted += [_shape(configuration) for configuration in tried if configuration not in ranked]
    return [found for found in offered if _shape(found) in wanted and found not in tried]


_jobs: list[tuple[Launch, Configuration]] = []
"""What the compiling processes, which are forked, find here."""


def _compile(index: int) -> str | None:
    launch, configuration = _jobs[index]
    try:
        launch.compile(configuration)
    except Exception as error:  # too much shared memory, or a fault of the compiler: no candidate
        return f"{launch.kernel} {_short(configuration)}: {type(error).__name__}"
    return None


class _CompilerOnly:
    """Stands for the GPU in a forked process, which must not touch it."""

    def __init__(self, target: Any, device: int) -> None:
        self.target = target
        self.device = device

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


def _without_gpu(target: Any, device: int) -> None:
    from triton.runtime import driver

    driver.set_active(_CompilerOnly(target, device))


def compile_in_parallel(
    pairs: Sequence[tuple[Launch, Configuration]], *, jobs: int, ends: float, say: Callable[[str], None]
) -> None:
    """Compile each launch in its configuration into Triton's cache, until `ends` at the latest."""
    from triton.runtime import driver

    _jobs[:] = pairs
    if not pairs:
        return
    started = said = time.monotonic()
    here = driver.active.get_current_target(), driver.active.get_current_device()
    with multiprocessing.get_context("fork").Pool(min(jobs, len(pairs)), _without_gpu, here) as pool:
        results = pool.imap_unordered(_compile, range(len(pairs)))
        for done in range(1, len(pairs) + 1):
            try:
                results.next(timeout=max(0.1, ends - time.monotonic()))
            except multiprocessing.TimeoutError:
                say(f"  time is up with {done - 1} of {len(pairs)} compiled")
                break
            if time.monotonic() - said > 10 or done == len(pairs):
                said = time.monotonic()
                say(f"  compiled {done} of {len(pairs)} in {said - started:.0f} s")
    _jobs.clear()


def _short(configuration: Configuration) -> str:
    return " ".join(f"{name.removeprefix('num_')}={value}" for name, value in configuration.items())


def agrees(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Whether the same elements were written, with the same numbers up to rounding."""
    for name, value in expected.items():
        here, there = torch.isnan(found[name]), torch.isnan(value)
        if not torch.equal(here, there):
            return False
        exact = value.nan_to_num().float()
        if (found[name].nan_to_num().float() - exact).norm() > AGREEMENT * exact.norm():
            return False
    return True


class Tuner:
    """Tunes one file, which `save` writes."""

    def __init__(
        self,
        table: Table,
        figures: dict[str, Any],
        *,
        card: Card,
        rows: Sequence[int],
        jobs: int,
        ends: float,
        say: Callable[[str], None],
        save: Callable[[dict[str, Any]], None],
    ) -> None:
        self.table = table
        self.figures = figures
        self.card = card
        self.rows = rows
        self.jobs = jobs
        self.ends = ends
        self.say = say
        self.save = save

    def time_is_up(self) -> bool:
        return time.monotonic() > self.ends

    def milliseconds(self, launches: Sequence[Launch], configuration: Configuration) -> float | None:
        """The time of the kernel over all batch sizes, each weighing the same; None if it fails or errs."""
        try:
            for launch in launches:
                if (
                    launch.rows == launches[0].rows
                    and launch.blank
                    and not agrees(launch.written(configuration), self.expected(launch))
                ):
                    return None
            return math.prod(self.once(launch, configuration) for launch in launches) ** (1 / len(launches))
        except Exception as error:  # too much shared memory, or a fault of the compiler: no candidate
            self.say(f"    {_short(configuration)}: {type(error).__name__}")
            return None

    def expected(self, launch: Launch) -> dict[str, Tensor]:
        return launch.written(self.sure[launch.kernel])

    def once(self, launch: Launch, configuration: Configuration) -> float:
        replay = self.card.capture(lambda: launch.run(configuration))
        replay()
        count = max(1, min(50, round(2 / max(self.card.elapsed_ms(replay), 1e-3))))

        def several() -> None:
            for _ in range(count):
                replay()

        return min(self.card.elapsed_ms(several) for _ in range(3)) / count

    def sizes(self, operation: str, sizes: str) -> None:
        """Everything for one operation and one pair of sizes."""
        size, value_size = map(int, sizes.split("/"))
        known: dict[str, Any] = self.figures["operations"][operation]
        done: dict[str, Any] = self.figures["milliseconds"].setdefault(operation, {}).setdefault(sizes, {})
        self.present = dict(self.table.choose(operation, size, value_size)) | known.get(sizes, {})
        known[sizes] = self.present
        self.sure = dict(self.present)
        self.say(f"{operation} {sizes}")
        by_kernel: dict[str, list[Launch]] = {}
        for rows in self.rows:
            for launch in record(operation, rows, TOKENS, size, value_size, self.present):
                if launch.kernel not in done:
                    by_kernel.setdefault(launch.kernel, []).append(launch)
        offered = {
            kernel: usable(
                kernel,
                flash_linear_attention.candidates(found[0].autotuner, found[0].args, found[0].arguments),
                self.figures["capability"],
            )
            for kernel, found in by_kernel.items()
        }
        ranked: dict[str, list[tuple[float, Configuration]]] = {}
        # What a kernel has now is the one that is sure to work.
        tried = {kernel: [self.present[kernel]] for kernel in by_kernel}
        for kernel, found in offered.items():
            tried[kernel] += [each for each in first_round(found) if each != self.present[kernel]]
        wanted = tried
        for _ in range(2):
            if self.time_is_up():
                return
            self.compile(by_kernel, wanted)
            for kernel, configurations in wanted.items():
                if self.time_is_up() or not configurations:
                    continue
                self.figures["trying"] = [operation, sizes, kernel]
                self.save(self.figures)
                working = [*ranked.get(kernel, []), *self.measure(by_kernel[kernel], configurations)]
                ranked[kernel] = sorted(working, key=lambda pair: pair[0])
                if working:
                    milliseconds, best = ranked[kernel][0]
                    done[kernel], self.present[kernel] = round(milliseconds, 4), dict(best)
                    self.say(
                        f"  {kernel}: {milliseconds:.3f} ms with {_short(best)}; "
                        f"slowest of {len(working)} {ranked[kernel][-1][0]:.3f}"
                    )
                self.figures["trying"] = None
                self.save(self.figures)
            wanted = {
                kernel: second_round(offered[kernel], tried[kernel], [configuration for _, configuration in working])
                for kernel, working in ranked.items()
            }

    def compile(self, launches: Mapping[str, Sequence[Launch]], wanted: Mapping[str, Sequence[Configuration]]) -> None:
        pairs = [
            (launch, configuration)
            for kernel, configurations in wanted.items()
            for launch in {launch.signature: launch for launch in launches[kernel]}.values()
            for configuration in configurations
        ]
        compile_in_parallel(pairs, jobs=self.jobs, ends=self.ends, say=self.say)

    def measure(self, launches: Sequence[Launch], configurations: Sequence[Configuration]) -> list[tuple[float, Any]]:
        """Milliseconds and configuration of those that work."""
        found = []
        for configuration in configurations:
            milliseconds = self.milliseconds(launches, configuration)
            if milliseconds is None:
                self.say(f"    {launches[0].kernel} {_short(configuration)}: left out")
            else:
                found.append((milliseconds, configuration))
        return found


def default_folder() -> Path:
    """Where the write rules look for tables."""
    return Path(str(importlib.resources.files("ccq.ops").joinpath("configurations")))


def _start(path: Path, card: str, capability: str, versions: dict[str, str]) -> tuple[Table, dict[str, Any]]:
    """The table that holds for the card now, and the figures to go on with."""
    table = flash_linear_attention.table_for(card, capability)
    figures: dict[str, Any] = {}
    if path.exists():
        text = path.read_text(encoding="utf-8")
        table, figures = flash_linear_attention.parse_table(text), json.loads(text)
    if figures.get("measured") != versions:
        figures = {
            "schema": flash_linear_attention.SCHEMA,
            "card": card,
            "capability": capability,
            "measured": versions,
            "settings": {"tokens": TOKENS, "dtype": "bfloat16"},
            "operations": json.loads(json.dumps(table.operations)),
            "milliseconds": {},
            "trying": None,
        }
    if figures["trying"] is not None:
        operation, sizes, kernel = figures["trying"]
        figures["milliseconds"].setdefault(operation, {}).setdefault(sizes, {})[kernel] = None
    return table, figures


def plan(sizes: Sequence[str] | None) -> list[tuple[str, str]]:
    """Operations and their sizes in the order of their turn: at every given D/V all of them, at each of `SIZES` those
    whose models have it.
    """
    found = []
    for text in SIZES if sizes is None else sizes:
        for operation in flash_linear_attention.OPERATIONS:
            if sizes is not None or (operation == ssd.RULE) == (text == MAMBA2):
                value_size = text.partition("/")[2]
                is_norm = operation == rms_norm_gated.OPERATION
                found.append((operation, f"{value_size}/{value_size}" if is_norm else text))
    return found


def tune(
    out: Path | None,
    *,
    sizes: Sequence[str] | None,
    rows: Sequence[int],
    limit: float,
    jobs: int,
    say: Callable[[str], None],
) -> Path:
    """Write the file of the present card into the folder `out` (None: where the write rules look for it).

    Args:
        sizes: "D/V", in the order in which they are tuned; None for those of the models, see `plan`.
        rows: batch sizes; a configuration is judged by its mean time over them.
        limit: seconds after which nothing new is begun.
        jobs: processes that compile.

    Raises:
        ValueError: without a GPU, without flash-linear-attention, or for sizes that its kernels do not take.
    """
    if not torch.cuda.is_available():
        raise ValueError("configurations are measured on a GPU, and torch finds none")
    for rule in flash_linear_attention.RULES:
        if reason := flash_linear_attention.reason_against(rule, torch.cuda.current_device()):
            raise ValueError(reason)
    for text in sizes or ():
        parts = text.split("/")
        multiple = flash_linear_attention.MULTIPLE
        if len(parts) != 2 or not all(part.isdigit() and int(part) % multiple == 0 for part in parts):
            raise ValueError(f"sizes are D/V, both multiples of {multiple}, got {text!r}")
    found = gpu_environment()
    card, capability = str(found["card"]), str(found["capability"])
    versions = {"torch": torch.__version__, "triton": str(found["triton"]), "fla": str(found["fla"])}
    folder = default_folder() if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / flash_linear_attention.card_file(card)
    table, figures = _start(path, card, capability, versions)
    figures["settings"] |= {"rows": list(rows), "heads": HEADS}
    say(f"{card}, {', '.join(f'{name} {version}' for name, version in versions.items())}: {path}")
    started = time.monotonic()
    tuner = Tuner(
        table,
        figures,
        card=Card(),
        rows=rows,
        jobs=jobs,
        ends=started + limit,
        say=say,
        save=lambda value: write_json_atomically(path, value),
    )
    tuner.save(figures)  # a place that cannot be written is known before minutes are spent
    for operation, text in plan(sizes):
        if not tuner.time_is_up():
            tuner.sizes(operation, text)
            torch.cuda.empty_cache()
    missing = sum(
        milliseconds is None
        for by_sizes in figures["milliseconds"].values()
        for kernels in by_sizes.values()
        for milliseconds in kernels.values()
    )
    say(f"{time.monotonic() - started:.0f} s; {missing} kernels kept the configuration they had")
    say(f"written: {path}")
    return path
