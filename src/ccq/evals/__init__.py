"""Measurements of trained models, and the one schema their results are written in."""

from ccq.evals.needle import NeedleOutcome, evaluate_needles, summarize_by_depth, summarize_by_length
from ccq.evals.perplexity import EvaluatedModel, evaluate_perplexity
from ccq.evals.recall import evaluate_recall
from ccq.evals.results import CompareResults, paired_differences, read_results, write_results

__all__ = [
    "CompareResults",
    "EvaluatedModel",
    "NeedleOutcome",
    "evaluate_needles",
    "evaluate_perplexity",
    "evaluate_recall",
    "paired_differences",
    "read_results",
    "summarize_by_depth",
    "summarize_by_length",
    "write_results",
]
