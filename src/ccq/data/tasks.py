"""The synthetic tasks by name."""

from __future__ import annotations

from ccq.data.frequency import CommonWords, FrequentWords
from ccq.data.recall import AssociativeRecall, RecallTask
from ccq.data.statements import HiddenStatements

TASKS: dict[str, type[RecallTask]] = {
    "recall": AssociativeRecall,
    "statements": HiddenStatements,
    "frequent-words": FrequentWords,
    "common-words": CommonWords,
}
"""The kinds of synthetic tasks. The options of each are the fields of its class; the first paragraph of its docstring
says what it is.
"""
