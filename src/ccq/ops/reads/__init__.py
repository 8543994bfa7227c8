"""Read steps beside the Curvature-Conditioned Query, for comparison: other functions of the keys so far.

Every one is a small file with its formula, written out as a loop over tokens (backend "reference") and as a form for
all tokens at once. All take q, k, a gate lambda, and `ReadOptions`, and return a `QueryResult`.
"""

from ccq.ops.reads.comba import comba_query
from ccq.ops.reads.common import QueryResult, ReadOptions
from ccq.ops.reads.decay import DecayedKeyStatistics, decay_query
from ccq.ops.reads.exact import exact_query
from ccq.ops.reads.exponential import exponential_query
from ccq.ops.reads.mean import KeyMean, mean_query
from ccq.ops.reads.mesa import DecayedSecondMoment, mesa_query
from ccq.ops.reads.query_weighted import LandmarkStatistics, query_weighted_query
from ccq.ops.reads.raw import raw_query
from ccq.ops.reads.richardson import richardson_query
from ccq.ops.reads.trace import trace_query
from ccq.ops.reads.two_parts import QueryParts, query_in_parts

__all__ = [
    "DecayedKeyStatistics",
    "DecayedSecondMoment",
    "KeyMean",
    "LandmarkStatistics",
    "QueryParts",
    "QueryResult",
    "ReadOptions",
    "comba_query",
    "decay_query",
    "exact_query",
    "exponential_query",
    "mean_query",
    "mesa_query",
    "query_in_parts",
    "query_weighted_query",
    "raw_query",
    "richardson_query",
    "trace_query",
]
