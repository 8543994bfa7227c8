"""Text in, token windows out: sources, shards, loader; and what `compare` uses: corpus, tokenizer, needles, tasks."""

from ccq.data.corpora import Corpus, read_corpus
from ccq.data.frequency import CommonWords, FrequentWords
from ccq.data.loader import IGNORE_INDEX, TokenBatch, TokenLoader, TokenWindows
from ccq.data.needles import NeedleBatch, NeedleWindows, evaluation_windows, training_batch
from ccq.data.prepare import TokenizerFile, prepare_shards, read_tokenizer
from ccq.data.recall import AssociativeRecall, RecallTask
from ccq.data.shards import TokenArray, TokenFolder, TokenPart, TokenStream
from ccq.data.sources import Source, dataset_source, embedded_source, file_source
from ccq.data.statements import HiddenStatements
from ccq.data.tasks import TASKS
from ccq.data.tokenizer import NeedleVocabulary, TokenizedCorpus, Tokenizer, tokenize, train_tokenizer

__all__ = [
    "IGNORE_INDEX",
    "TASKS",
    "AssociativeRecall",
    "CommonWords",
    "Corpus",
    "FrequentWords",
    "HiddenStatements",
    "NeedleBatch",
    "NeedleVocabulary",
    "NeedleWindows",
    "RecallTask",
    "Source",
    "TokenArray",
    "TokenBatch",
    "TokenFolder",
    "TokenLoader",
    "TokenPart",
    "TokenStream",
    "TokenWindows",
    "TokenizedCorpus",
    "Tokenizer",
    "TokenizerFile",
    "dataset_source",
    "embedded_source",
    "evaluation_windows",
    "file_source",
    "prepare_shards",
    "read_corpus",
    "read_tokenizer",
    "tokenize",
    "train_tokenizer",
    "training_batch",
]
