"""Text in, token windows out: corpora, the tokenizer, and the needle generator."""

from ccq.data.corpora import Corpus, read_corpus
from ccq.data.needles import NeedleBatch, NeedleWindows, evaluation_windows, training_batch
from ccq.data.tokenizer import NeedleVocabulary, TokenizedCorpus, Tokenizer, tokenize, train_tokenizer

__all__ = [
    "Corpus",
    "NeedleBatch",
    "NeedleVocabulary",
    "NeedleWindows",
    "TokenizedCorpus",
    "Tokenizer",
    "evaluation_windows",
    "read_corpus",
    "tokenize",
    "train_tokenizer",
    "training_batch",
]
