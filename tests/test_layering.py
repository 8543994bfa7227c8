"""Calls go one way: ops <- nn <- models, data <- train, evals, analysis, bench <- report <- compare <- cli.

The check reads the imports of every module, also those inside functions and under TYPE_CHECKING, and runs nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "ccq"

# A room may import rooms of a lower level. Rooms of one level know nothing of each other.
LEVELS = {
    "ops": 0,
    "nn": 1,
    "models": 2,
    "data": 2,
    "train": 3,
    "evals": 3,
    "analysis": 3,
    "bench": 3,
    "report": 4,
    "compare": 5,
    "cli": 6,
    "__main__": 7,
}
# Modules that everybody may import, so they may import nobody.
FOUNDATIONS = ("cuda_graphs", "files", "processes")
# The schema of the results: the one module that rooms beside `evals` may import too.
SCHEMA = "ccq.evals.results"
# The read step and the write rules know nothing of each other: any of one goes with any of the other.
READ_STEPS = ("ccq.ops.query", "ccq.ops.reads")
WRITE_RULES = ("ccq.ops.write_rule", "ccq.ops.gla", "ccq.ops.gated_delta_rule", "ccq.ops.ssd")

# `ops` are functions on tensors. Of `os` they may use the environment variables, of `torch.nn` the functions.
FILE_MODULES = ("pathlib", "io", "shutil", "tempfile", "glob", "pickle", "safetensors", "ccq.files")
FILE_CALLS = ("open", "torch.save", "torch.load", "numpy.save", "numpy.load", "np.save", "np.load")
OS_ALLOWED = ("os.environ", "os.getenv")
IMPORT_CALLS = ("importlib.import_module", "import_module", "__import__")


def is_within(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


def dotted_name(node: ast.AST) -> str | None:
    """`a.b.c` as text, None for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        value = dotted_name(node.value)
        return None if value is None else f"{value}.{node.attr}"
    return None


def imported_names(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported; `from a import b` gives `a.b`, whether b is a module or not.

    `package` is the one that relative imports start from.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                above = package.split(".")
                above = above[: len(above) - (node.level - 1)]
                source = ".".join([*above, source] if source else above)
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and dotted_name(node.func) in IMPORT_CALLS and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def side_of(module: str) -> str | None:
    if any(is_within(module, step) for step in READ_STEPS):
        return "read step"
    return "write rule" if any(is_within(module, rule) for rule in WRITE_RULES) else None


def judge_direction(module: str, name: str) -> str | None:
    """Why `module` must not import `name`, or None."""
    if not is_within(name, "ccq"):
        if is_within(name, "transformers") and not is_within(module, "ccq.models"):
            return "only ccq.models may touch transformers"
        return None
    room, other = module.split(".")[1], name.removeprefix("ccq").removeprefix(".").split(".")[0]
    if room not in LEVELS:
        return f"{room}.py stands below everything" if room in FOUNDATIONS else f"give {room!r} a level in this test"
    if other in (room, *FOUNDATIONS, "__version__"):
        sides = {side_of(module), side_of(name)}
        if {"read step", "write rule"} <= sides:
            return "the read step and the write rules know nothing of each other"
        return None
    if other not in LEVELS:
        return "import it from the room it lives in, not from the package root"
    if LEVELS[other] < LEVELS[room] or (LEVELS[other] == LEVELS[room] and is_within(name, SCHEMA)):
        return None
    return f"{room} (level {LEVELS[room]}) must not import {other} (level {LEVELS[other]})"


def judge_operator_import(name: str) -> str | None:
    """Why a module of `ops` must not import `name`, or None."""
    if is_within(name, "torch.nn") and not is_within(name, "torch.nn.functional"):
        return "ops are functions: of torch.nn they may use torch.nn.functional only"
    if any(is_within(name, module) for module in FILE_MODULES) or name in FILE_CALLS:
        return "ops have no file access"
    if is_within(name, "os") and name != "os" and not any(is_within(name, allowed) for allowed in OS_ALLOWED):
        return "ops have no file access"
    return None


def operator_uses(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, name and reason of what a module of `ops` must not use and need not import: `torch.nn.Module`, `open()`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := dotted_name(node.func)) in FILE_CALLS:
            yield node.lineno, str(name), "ops have no file access"
        elif isinstance(node, ast.Attribute) and (name := dotted_name(node)) is not None:
            if name.count(".") == 1 and name.startswith("os.") and name not in OS_ALLOWED:
                yield node.lineno, name, "ops have no file access"
            elif name.count(".") == 2 and name.startswith("torch.nn.") and name != "torch.nn.functional":
                yield node.lineno, name, "ops are functions: of torch.nn they may use torch.nn.functional only"


def violations(root: Path) -> list[str]:
    """One line for each forbidden import or use in the package folder `root`, which plays `ccq` whatever its name."""
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(["ccq", *(parts[:-1] if is_package else parts)])
        if module == "ccq":
            continue  # it announces names of every room, lazily
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        package = module if is_package else module.rpartition(".")[0]
        for line, name in imported_names(tree, package):
            reason = judge_direction(module, name)
            if reason is None and is_within(module, "ccq.ops"):
                reason = judge_operator_import(name)
            if reason is not None:
                found.append(f"{module}:{line} imports {name}: {reason}")
        if is_within(module, "ccq.ops"):
            found += [f"{module}:{line} uses {name}: {reason}" for line, name, reason in operator_uses(tree)]
    return found


def test_calls_go_one_way() -> None:
    assert (PACKAGE / "ops").is_dir(), "the check must see the real package"
    assert violations(PACKAGE) == []


def check(tmp_path: Path, module: str, source: str) -> list[str]:
    """The violations of a package that holds `source` as its only module."""
    path = tmp_path.joinpath(*module.split("/"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
    return violations(tmp_path)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ops/query/chunked.py", "from ccq.nn.read import CurvatureConditionedQuery"),
        ("ops/query/chunked.py", "import ccq.nn.read as read"),
        ("ops/query/chunked.py", "from ccq import nn"),
        ("ops/query/chunked.py", "from ...nn import read"),
        ("ops/query/__init__.py", "from ...nn import read"),
        ("ops/query/chunked.py", "from ccq import curvature_conditioned_query"),
        ("ops/query/chunked.py", "from ..gla import gated_linear_attention"),
        ("ops/gla/__init__.py", "from ccq.ops.query import KeyStatistics"),
        ("ops/query/chunked.py", "import torch.nn"),
        ("ops/query/chunked.py", "from torch import nn"),
        ("ops/query/chunked.py", "from torch.nn import Module"),
        ("ops/query/chunked.py", "import torch\nclass A(torch.nn.Module): pass"),
        ("ops/query/chunked.py", "from pathlib import Path"),
        ("ops/query/chunked.py", "from ccq.files import write_bytes_atomically"),
        ("ops/query/chunked.py", "def f(path):\n    with open(path) as file: return file.read()"),
        ("ops/query/chunked.py", "import torch\ntorch.save({}, 'a')"),
        ("ops/query/chunked.py", "import os\nos.remove('a')"),
        ("ops/query/chunked.py", "from os import remove"),
        ("ops/query/chunked.py", "import transformers"),
        ("nn/read.py", "def f():\n    from ccq.models.modeling import CCQForCausalLM"),
        ("nn/read.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ccq.models import CCQConfig"),
        ("nn/read.py", "import importlib\nimportlib.import_module('ccq.train.loop')"),
        ("data/tokenizer.py", "from transformers import AutoTokenizer"),
        ("data/needles.py", "from ccq.models.presets import PRESETS"),
        ("models/presets.py", "from ccq.data.needles import NeedleTask"),
        ("train/loop.py", "from ccq.evals.perplexity import perplexity"),
        ("train/loop.py", "from ccq.evals import perplexity"),
        ("train/loop.py", "from ccq.evals import results_of_another_kind"),
        ("evals/needle.py", "from ccq.train.loop import train"),
        ("analysis/gate.py", "from ccq.bench.operator import measure"),
        ("report/html.py", "from ccq.compare.job import run"),
        ("compare/job.py", "import ccq.cli"),
        ("files.py", "from ccq.evals.results import Results"),
        ("processes.py", "from ccq.train.loop import train"),
        ("no_such_room/a.py", "from ccq.ops.query import KeyStatistics"),
    ],
)
def test_the_checker_catches(tmp_path: Path, module: str, source: str) -> None:
    assert len(check(tmp_path, module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("__init__.py", "from ccq.compare import compare"),
        (
            "ops/query/chunked.py",
            "from ccq.ops.layout import x\nfrom .statistics import KeyStatistics\nfrom ..checks import y",
        ),
        ("ops/query/chunked.py", "import torch.nn.functional as F\nimport torch\ntorch.nn.functional.silu"),
        ("ops/gla/chunked.py", "from ..write_rule import WriteRuleResult\nimport os\nos.environ.get('A')"),
        ("nn/read.py", "from torch import nn\nfrom ..ops.query import KeyStatistics"),
        ("models/cache.py", "def f():\n    import transformers"),
        (
            "train/loop.py",
            "from ccq.evals.results import Results\nfrom ccq.evals import results\nfrom ccq.files import z",
        ),
        ("report/html.py", "import pathlib\nfrom ccq import __version__\nfrom ccq.evals.results import Results"),
        ("cli/compare.py", "def _run(parsed):\n    from ccq.compare import compare"),
        ("files.py", "import json"),
        ("evals/harness.py", "from ccq.processes import Processes"),
    ],
)
def test_the_checker_allows(tmp_path: Path, module: str, source: str) -> None:
    assert check(tmp_path, module, source) == []
