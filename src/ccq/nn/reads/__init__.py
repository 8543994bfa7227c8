"""Every read step by its name in an arm: what it does to the query, where it comes from, and how it is made.

y is the query that reads the memory, q the query before (a unit vector unless its length is kept), k the unit key of
the token, Sigma and mu covariance and mean of the unit keys so far, t how many they are, D the key size of a head,
lambda the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from ccq.nn.read import CurvatureConditionedQuery, ReadStep
from ccq.nn.reads.comba import CombaRead
from ccq.nn.reads.decay import DecayRead
from ccq.nn.reads.fixed import FixedRead
from ccq.nn.reads.mesa import MesaRead
from ccq.nn.reads.normalize import NormalizeRead
from ccq.nn.reads.operators import (
    ExactRead,
    ExponentialRead,
    MeanRead,
    OperatorReadStep,
    RawRead,
    RichardsonRead,
    TraceRead,
)
from ccq.nn.reads.query_weighted import QueryWeightedRead
from ccq.nn.reads.random_covariance import RandomRead
from ccq.nn.reads.strength import StrengthRead
from ccq.nn.reads.two_reads import TwoReads

__all__ = [
    "READS",
    "CombaRead",
    "DecayRead",
    "ExactRead",
    "ExponentialRead",
    "FixedRead",
    "MeanRead",
    "MesaRead",
    "NormalizeRead",
    "OperatorReadStep",
    "QueryWeightedRead",
    "RandomRead",
    "RawRead",
    "ReadKind",
    "RichardsonRead",
    "StrengthRead",
    "TraceRead",
    "TwoReads",
    "describe_reads",
]


class ReadKind(NamedTuple):
    """A read step as `READS` lists it."""

    make: Callable[..., ReadStep] | None
    """(num_heads, head_dim, the keywords that `takes` and `options` name) -> the module; None where there is none."""
    formula: str
    summary: str
    source: str
    takes: tuple[str, ...] = ("gate", "keep_length")
    """Which of gate, centred and keep_length it has; the others mean nothing to it."""
    options: Mapping[str, Any] = {}
    """Options of its own, with their defaults."""


_PAPER = "arXiv:2606.01294"

READS: dict[str, ReadKind] = {
    "none": ReadKind(None, "y = q as it is", "the backbone without a read step", "the backbone", ()),
    "normalize": ReadKind(NormalizeRead, "y = q", "unit queries, no correction", "control", ()),
    "ccq": ReadKind(
        CurvatureConditionedQuery,
        "y = q - lambda Sigma q",
        "the Curvature-Conditioned Query",
        f"{_PAPER}, equation 9",
        ("gate", "centred", "keep_length"),
    ),
    "ccq-uncentred": ReadKind(
        partial(CurvatureConditionedQuery, centred=False),
        "y = q - lambda (Sigma + mu mu^T) q",
        "second moment in place of the covariance",
        f"{_PAPER}, second version, appendix E",
    ),
    "ccq-mean": ReadKind(
        MeanRead, "y = q - lambda mu (mu . q)", "the direction of the mean key alone", "control: what centring leaves"
    ),
    "ccq-fixed": ReadKind(
        FixedRead,
        "y = q - lambda Sigma q, lambda = 0.1",
        "one lambda for all, no parameters; gate may give another number",
        f"{_PAPER}, second version, appendix E",
    ),
    "ccq-strength": ReadKind(
        StrengthRead, "y = q - lambda D Sigma q", "D times the correction", "control: is the correction too weak?"
    ),
    "ccq-trace": ReadKind(
        TraceRead,
        "y = q - lambda Sigma q / max(tr Sigma, 0.001)",
        "the covariance over its trace",
        "control: is the correction too weak?",
    ),
    "ccq-decay": ReadKind(
        DecayRead,
        "M <- alpha M + k k^T, m <- alpha m + k, n <- alpha n + 1, y = q - lambda Sigma q",
        "statistics that forget as the memory does, alpha one number a head",
        f"{_PAPER}, second version, appendix J: follow-up",
    ),
    "ccq-raw": ReadKind(
        RawRead, "y = q - lambda t Sigma q", "the sum over the keys, not their mean", f"{_PAPER}, section 3.3: unstable"
    ),
    "ccq-two-reads": ReadKind(
        TwoReads, "o = S q - S (lambda Sigma q)", "ccq with the memory S read twice, for its rounding", "ours"
    ),
    "richardson": ReadKind(
        RichardsonRead,
        "x <- q - lambda Sigma x, K times from x = q",
        "K steps towards exact; one is ccq",
        "L. F. Richardson, 1911",
        options={"steps": 3},
    ),
    "exact": ReadKind(
        ExactRead,
        "y = (I + lambda Sigma)^-1 q",
        "the ridge solution, by conjugate gradients",
        "Hestenes and Stiefel, 1952",
    ),
    "exponential": ReadKind(
        ExponentialRead,
        "y = exp(-lambda Sigma) q",
        "the gradient flow of which ccq is a step",
        f"{_PAPER}, second version",
    ),
    "mesa": ReadKind(
        MesaRead,
        "H <- alpha H + k k^T, y = (H + Lambda)^-1 q",
        "MesaNet's read, by conjugate gradients, with the backbone's decay",
        "arXiv:2506.05233",
        ("keep_length",),
        {"steps": 30},
    ),
    "comba": ReadKind(
        CombaRead, "y = q - d k", "the key of the same token, d learned", "arXiv:2506.02475", ("keep_length",)
    ),
    "query-weighted": ReadKind(
        QueryWeightedRead,
        "y = q - lambda Cov_p(q) q",
        "covariance of R landmarks under softmax weights at the query",
        f"ours; {_PAPER}, second version, appendix J: follow-up",
        options={"landmarks": 8},
    ),
    "random": ReadKind(
        RandomRead,
        "y = q - lambda R Sigma R^T q",
        "the covariance turned by a fixed random rotation R",
        "control: do the directions matter?",
    ),
}
"""The read step of every arm BACKBONE+NAME."""


def describe_reads(num_heads: int = 6, head_dim: int = 256) -> list[dict[str, Any]]:
    """`READS` as rows of a table: name, formula, summary, source, takes, options, and for one layer of this size (the
    paper's by default) parameters, state_bytes of one sequence, and operations_per_token.
    """
    rows = []
    for name, kind in READS.items():
        with torch.device("meta"):
            read = None if kind.make is None else kind.make(num_heads, head_dim)
        figures = {
            "parameters": 0 if read is None else sum(parameter.numel() for parameter in read.parameters()),
            "state_bytes": 0 if read is None else read.state_bytes,
            "operations_per_token": 0 if read is None else read.operations_per_token,
        }
        text = {"formula": kind.formula, "summary": kind.summary, "source": kind.source}
        rows.append({"name": name, **text, "takes": list(kind.takes), "options": dict(kind.options), **figures})
    return rows
