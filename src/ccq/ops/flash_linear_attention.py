"""flash-linear-attention's kernels as this library uses them: whether they can be used, and in which configurations.

The package's kernels autotune: at the first call of each they compile and time up to 48 configurations, which takes
minutes and picks another one in another run. Its own cache of configurations (FLA_CONFIG_DIR, FLA_CACHE_MODE) covers
part of them only: the states of gated linear attention and the recurrent kernels are tuned by Triton itself. So inside
`launching`, and nowhere else, every autotuner of the package takes its configuration from a table of this library.
Whoever calls the package directly in the same process finds it as it is.

Tables are the files `configurations/CARD.json`, written by `ccq bench tune`. A card without a file of its own takes
that of a card of its compute capability, any other `any.json`, whose tiles fit every card since Ampere and are not
measured.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.resources
import importlib.util
import json
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

PACKAGE = "flash-linear-attention"
SERIES = "0.6"
"""The releases whose inner functions are called here."""
RULES = ("gla", "gated_delta_rule", "ssd")
OPERATIONS = (*RULES, "rms_norm_gated")
"""What has configurations. D and V of a norm are both its size."""
CHUNK = 64
"""Tokens a chunk, for every T, so that a new length compiles nothing."""
MULTIPLE = 16
"""D and V must be multiples of this, as the matrix units want them."""
MAX_SIZE = 256
"""The largest D of the kernels."""
SCHEMA = "ccq-write-rule-configurations/1"
ANY = "any"
"""The table, and inside a table the sizes, for whatever has none of its own."""

P = ParamSpec("P")
R = TypeVar("R")
Configuration = Mapping[str, int]
"""What a kernel is launched with: its block sizes, num_warps, num_stages."""


class Table(NamedTuple):
    """The configurations for one card."""

    card: str
    """The name torch gives the card, or `ANY`."""
    capability: str | None
    """Its compute capability, "9.0"."""
    measured: Mapping[str, str] | None
    """The versions the figures belong to; None if nothing was measured."""
    operations: Mapping[str, Mapping[str, Mapping[str, Configuration]]]
    """Operation, sizes "D/V" (or `ANY`), kernel -> configuration."""

    def choose(self, operation: str, size: int, value_size: int) -> Mapping[str, Configuration]:
        """The configurations for these sizes: the largest listed ones that are not larger in either, else `ANY`."""
        listed = self.operations[operation]
        fitting = []
        for sizes in listed:
            if sizes != ANY:
                key, value = map(int, sizes.split("/"))
                if key <= size and value <= value_size:
                    fitting.append((key * value, key, sizes))
        return listed[max(fitting)[2] if fitting else ANY]


def card_file(card: str) -> str:
    """The name of the file of a card."""
    return re.sub(r"[^0-9a-z]+", "_", card.lower()).strip("_") + ".json"


def parse_table(text: str) -> Table:
    """A table from the text of its file. Raises ValueError for another schema."""
    found = json.loads(text)
    if found.get("schema") != SCHEMA:
        raise ValueError(f"a file of configurations must have the schema {SCHEMA}, got {found.get('schema')!r}")
    return Table(found["card"], found["capability"], found["measured"], found["operations"])


@functools.cache
def tables() -> dict[str, Table]:
    """Every table of the package, by the name of its file, in the order of the names."""
    folder = importlib.resources.files("ccq.ops").joinpath("configurations")
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".json"))
    return {name: parse_table(folder.joinpath(name).read_text(encoding="utf-8")) for name in names}


def table_for(card: str, capability: str) -> Table:
    """The table of a card: its own, else that of a card of the same compute capability, else the one for any card."""
    known = tables()
    if (own := known.get(card_file(card))) is not None:
        return own
    return next((table for table in known.values() if table.capability == capability), known[f"{ANY}.json"])


@functools.cache
def table_of_device(index: int) -> Table:
    """The table for GPU number `index`."""
    major, minor = torch.cuda.get_device_capability(index)
    return table_for(torch.cuda.get_device_name(index), f"{major}.{minor}")


def _table_for_tensor(x: Tensor) -> Table:
    return table_of_device(x.device.index) if x.is_cuda else tables()[f"{ANY}.json"]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """3.7.1+git -> (3, 7, 1)"""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


@functools.cache
def _reason_against(operation: str, capability: tuple[int, int] | None) -> str:
    """Why the kernels of an operation cannot be used on a card; empty if they can."""
    # Its operators are the distribution fla-core, which the layers and models of the full package build on.
    installed, triton = _version("fla-core"), _version("triton")
    if installed is None or triton is None or importlib.util.find_spec("fla") is None:
        return f"{PACKAGE} is not installed; pip install 'ccq-attention[gpu]'"
    if _release(installed)[:2] != _release(SERIES):
        return f"{PACKAGE} {installed} is installed, but {SERIES}.x is needed; pip install 'ccq-attention[gpu]'"
    hopper = capability is not None and capability[0] == 9
    if operation in ("gated_delta_rule", "ssd") and hopper and (3, 4, 0) <= _release(triton) < (3, 7, 1):
        return f"Triton {triton} compiles wrong gradients of this rule on Hopper cards; install Triton 3.7.1 or newer"
    return ""


def _constant_while_compiling(function: Callable[P, R]) -> Callable[P, R]:
    """Called, not traced, by torch's compiler: `torch.compiler.assume_constant_result`, which would import the compiler
    for seconds to set this one attribute.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant_while_compiling
def reason_against(operation: str, index: int | None) -> str:
    """Why the kernels of an operation cannot be used on GPU number `index` (None: on no GPU); empty if they can."""
    return _reason_against(operation, None if index is None else torch.cuda.get_device_capability(index))


_warned: set[str] = set()


@_constant_while_compiling
def _warn_once(rule: str, reason: str) -> bool:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"{rule}: the write rule runs in PyTorch, several times slower and with more memory, because {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    return True


def takes(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels are used for such q and v.

    In float32 they multiply in tf32, which has the mantissa of float16, where this library promises float32.
    """
    size, value_size = q.shape[-1], v.shape[-1]
    sizes = size % MULTIPLE == 0 and value_size % MULTIPLE == 0 and 0 < size <= MAX_SIZE and value_size > 0
    return sizes and q.dtype in (torch.float16, torch.bfloat16)


def is_chosen(rule: str, q: Tensor, v: Tensor) -> bool:
    """Whether "auto" means these kernels; one warning says why if they are missing or refused on a GPU."""
    if not q.is_cuda or not takes(q, v):
        return False
    reason = reason_against(rule, q.device.index)
    if reason:
        _warn_once(rule, reason)
    return not reason


def check_usable(rule: str, q: Tensor, v: Tensor) -> None:
    """Refuse what the kernels do not take, when they were asked for by name."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"backend 'fla' takes float16 or bfloat16, got {str(q.dtype).removeprefix('torch.')}; it would multiply in "
            "tf32; take backend='torch'"
        )
    if not takes(q, v):
        raise ValueError(
            f"backend 'fla' takes multiples of {MULTIPLE} for D (up to {MAX_SIZE}) and V, got D {q.shape[-1]} and V "
            f"{v.shape[-1]}; take backend='torch'"
        )
    if not q.is_cuda:
        raise RuntimeError(f"backend 'fla' needs tensors on a GPU, got {q.device}; take backend='torch'")
    reason = reason_against(rule, q.device.index)
    if reason:
        raise ImportError(f"backend 'fla' cannot be used: {reason}; or take backend='torch'")


class Packing(NamedTuple):
    """Packed documents as the package's functions want them; all None for dense rows."""

    cu_seqlens: Tensor | None
    chunk_indices: Tensor | None
    """[chunks, 2], the document of each chunk and its place in it."""


@functools.lru_cache(maxsize=8)
def _packing(boundaries: tuple[int, ...], device: torch.device) -> Packing:
    """Kept, because all layers of a model ask for the same, and the package caches what it derives by identity."""
    ends = torch.tensor(boundaries)
    counts = (ends.diff() + CHUNK - 1) // CHUNK
    document = torch.repeat_interleave(torch.arange(len(counts)), counts)
    place = torch.arange(len(document)) - (counts.cumsum(0) - counts)[document]
    return Packing(ends.to(device), torch.stack((document, place), 1).to(device))


def packing(boundaries: Sequence[int] | None, x: Tensor) -> Packing:
    """For the documents between `boundaries` in the row x."""
    return Packing(None, None) if boundaries is None else _packing(tuple(boundaries), x.device)


class Launcher:
    """What the autotuners of the package do inside `launching`: take a configuration from a table."""

    def __init__(self, configurations: Mapping[str, Configuration]) -> None:
        self.configurations = configurations

    def launch(self, autotuner: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
        """One launch of the kernel behind `autotuner`, `arguments` being those by name, with grid and warmup."""
        return autotuner.fn.run(*args, **arguments, **self.configuration(autotuner, args, arguments))

    def configuration(self, autotuner: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> Configuration:
        """The entry of the table; for a kernel that is not in it, the first that the package itself would try."""
        chosen = self.configurations.get(autotuner.base_fn.__name__)
        return first_candidate(autotuner, args, arguments) if chosen is None else chosen


def candidates(autotuner: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> list[dict[str, int]]:
    """The configurations that the package would try for this launch."""
    found = autotuner.configs
    if autotuner.early_config_prune is not None:
        found = autotuner.early_config_prune(found, dict(zip(autotuner.arg_names, args, strict=False)), **arguments)
    return [{**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages} for config in found]


def first_candidate(autotuner: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> dict[str, int]:
    return candidates(autotuner, args, arguments)[0]


# Backward passes run in threads of their own.
_active = threading.local()
_shared: list[Mapping[str, Configuration]] = []


def _redirect(autotuner: Any) -> None:
    """Let an autotuner ask the launcher of its thread, or the table of all threads, before it tunes."""
    tune_and_run = autotuner.run

    def run(*args: Any, **arguments: Any) -> Any:
        launcher: Launcher | None = getattr(_active, "launcher", None)
        if launcher is not None:
            return launcher.launch(autotuner, args, arguments)
        if _shared and autotuner.base_fn.__name__ in _shared[-1]:
            return Launcher(_shared[-1]).launch(autotuner, args, arguments)
        return tune_and_run(*args, **arguments)

    autotuner.run = run


def _autotuners() -> Iterator[Any]:
    """Every autotuner in the package's modules that are loaded."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import KernelInterface

    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            for value in list(vars(module).values()):
                # Decorators stand around each other: heuristics, autotuner, kernel.
                while isinstance(value, KernelInterface) and not isinstance(value, Autotuner):
                    value = getattr(value, "fn", None)
                if isinstance(value, Autotuner):
                    yield value


@functools.cache
def redirect_autotuners() -> None:
    """Redirect all autotuners that the functions of all operations can reach."""
    with warnings.catch_warnings():
        # The package warns of optional packages for layers that are not used here.
        warnings.simplefilter("ignore", ImportWarning)
        import fla.modules.activations.ops
        import fla.modules.norm.fused_norm_gate
        import fla.modules.norm.l2norm
        import fla.ops.common.fused_recurrent
        import fla.ops.gated_delta_rule.chunk
        import fla.ops.gated_delta_rule.fused_recurrent
        import fla.ops.gla.chunk  # noqa: F401

    for autotuner in {id(found): found for found in _autotuners()}.values():
        _redirect(autotuner)


@contextlib.contextmanager
def using(launcher: Launcher) -> Iterator[None]:
    """In this thread, the package's kernels are launched by `launcher`, unless another is in use already."""
    if getattr(_active, "launcher", None) is not None:
        yield
        return
    redirect_autotuners()
    _active.launcher = launcher
    try:
        yield
    finally:
        _active.launcher = None


@contextlib.contextmanager
def sharing(rule: str, device: torch.device, size: int, value_size: int) -> Iterator[None]:
    """In all threads, whoever calls the package's kernels of a rule, or of the norm behind it, gets them in the
    configurations for these sizes.

    For benchmarks: the package's own layers run in tuned configurations and need not tune for minutes. Its other
    kernels tune as ever.
    """
    redirect_autotuners()
    table = tables()[f"{ANY}.json"] if device.type != "cuda" else table_of_device(torch.cuda.current_device())
    norm = table.choose("rms_norm_gated", value_size, value_size)
    _shared.append({**table.choose(rule, size, value_size), **norm})
    try:
        yield
    finally:
        _shared.pop()


@contextlib.contextmanager
def launching(operation: str, q: Tensor, v: Tensor) -> Iterator[None]:
    """In this thread, on the device of q, the package's kernels run in the configurations for these sizes."""
    launcher = Launcher(_table_for_tensor(q).choose(operation, q.shape[-1], v.shape[-1]))
    with torch.cuda.device_of(q), using(launcher):
        yield


@contextlib.contextmanager
def launching_fixed(configurations: Mapping[str, Configuration], x: Tensor) -> Iterator[None]:
    """In this thread, on the device of x, the package's kernels run in these configurations."""
    with torch.cuda.device_of(x), using(Launcher(configurations)):
        yield
