"""Importing the package is cheap, and what it announces exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import ccq

ROOT = Path(__file__).parents[1]
HEAVY = ("transformers", "triton", "matplotlib", "tokenizers", "scipy", "jinja2", "rich")


def test_import_loads_no_heavy_package() -> None:
    # A fresh interpreter: in this one, pytest and other tests may have loaded any of them.
    code = f"import sys, ccq; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_parsers_of_the_commands_load_no_heavy_package() -> None:
    heavy = ("torch", "numpy", "yaml", *HEAVY)
    code = (
        "import sys\nfrom ccq.cli import main\ntry:\n    main(['--help'])\n"
        f"finally:\n    print(*(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: ccq ")
    assert done.stderr.split() == []


def test_every_public_name_resolves() -> None:
    assert "curvature_conditioned_query" in ccq.__all__
    assert len(set(ccq.__all__)) == len(ccq.__all__)
    for name in ccq.__all__:
        assert getattr(ccq, name) is not None
    assert set(ccq.__all__) <= set(dir(ccq))


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(ccq, "no_such_name")


def test_version_is_that_of_the_project_file() -> None:
    stated = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert stated is not None
    assert ccq.__version__ == stated[1]
