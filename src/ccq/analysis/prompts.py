"""Prompts of the alignment diagnostic: one fact among many everyday sentences, and a question for it at the end.

The protocol is that of arXiv:2606.01294 (first version, appendix H); sentences, codes and template are this library's
own. The needles of `ccq.data` are three tokens of a trained vocabulary; these are words, for any model and tokenizer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ccq.data.corpora import read_text

RARE = 2
"""A token is unique if its id occurs at most so often in the whole prompt."""

_SECRETS = (
    "secret password",
    "access code of the vault",
    "magic word",
    "phrase for the courier",
    "number of the parcel",
)
_WORDS = """
    ANCHOR BADGER CACTUS DOLPHIN EMBER FALCON GRANITE HARBOR INDIGO JASMINE KESTREL LANTERN MAGNET NECTAR ORCHID PEBBLE
    QUIVER RAVINE SAFFRON TURBINE UMBRELLA VELVET WALNUT XENON YONDER ZEPHYR
""".split()
_SENTENCES = """
    The baker opens her shop before the first bus arrives.
    A grey cat sleeps on the wall behind the post office.
    Most of the gardens along the road have apple trees.
    The river runs slowly in summer and floods in spring.
    My neighbour repairs old clocks in his kitchen at night.
    The library moved into a larger building last autumn.
    Rain is expected in the hills later this afternoon.
    Two children were drawing boats with chalk on the pavement.
    The train to the coast stops at every small station.
    She keeps her letters in a wooden box under the stairs.
    Fresh bread and cheese make a good meal on a walk.
    The museum is closed on Mondays and on public holidays.
    He painted the fence green because the paint was cheap.
    The lake freezes over when the winter is long enough.
    A narrow path leads from the church down to the mill.
    The teacher asked everyone to bring a plant to class.
    Farmers sell their vegetables in the square each weekend.
    The lamp in the hallway flickers when it is windy.
    We took the ferry because the bridge was being repaired.
    An orchestra from the next town played in the park.
    The soup needs a little more salt and some pepper.
    Her brother works on a ship that carries timber north.
    The old mine has been turned into a place for concerts.
    Snow covered the roofs and the streets were very quiet.
    They planted beans between the rows of young maize.
    The dentist moved her practice to the second floor.
    A postcard from the mountains hung above the desk.
    The tailor measured the sleeves and wrote nothing down.
    Bees visit the lavender from early morning until dusk.
    The committee will meet again after the summer break.
    His bicycle has a basket that holds a week of shopping.
    The hotel serves breakfast on a terrace facing the sea.
    Fishermen mend their nets while the tide is out.
    The village has one shop, one school and three bakeries.
    An engineer checked the dam and found it in good order.
    The theatre sells cheap tickets an hour before the show.
    Wild geese rest on the meadow during their journey south.
    The kettle whistled just as the guests were arriving.
    She learned to swim in the cold pool behind the factory.
    The map on the wall shows how the town used to look.
    A carpenter built the shelves from the planks of a barn.
    The doctor advised him to walk a little every day.
    Tomatoes ripen faster on the southern side of the house.
    The choir rehearses in a hall with a leaking ceiling.
    Nobody remembers who carved the names into the bench.
    The pharmacy at the corner stays open until late.
    A light wind moved the curtains of the empty room.
    The students measured the height of the tower by its shadow.
    Her grandmother taught her how to knit warm socks.
    The market hall smells of coffee, oranges and fresh fish.
    An early frost damaged the blossoms of the cherry trees.
    The mayor opened the new playground with a short speech.
    He reads the newspaper from the last page to the first.
    The owl in the barn comes out when the moon is bright.
    Several shops in the harbour rent out small sailing boats.
    The plumber found the leak behind a cupboard full of jars.
    A long queue had formed in front of the ticket office.
    The meadow is mown twice a year to protect the flowers.
    They sat by the fire and talked about distant countries.
    The painter waits for cloudy days to work on portraits.
""".strip().splitlines()
SENTENCES = tuple(sentence.strip() for sentence in _SENTENCES)
"""The built-in pool of sentences that surround a needle."""


class TokenKind(IntEnum):
    """What a token of a prompt belongs to."""

    TEXT = 0
    NEEDLE = 1
    QUESTION = 2
    SPECIAL = 3
    """Of the tokenizer, such as the token before a text."""


@dataclass(frozen=True)
class NeedlePrompt:
    """One prompt as text.

    Attributes:
        text: sentences, the needle in their middle, and the question, which ends where the answer would begin.
        needle: the characters [start, end) of the needle's sentence.
        question: the first character of the question; it goes on to the end.
        code: the answer.
    """

    text: str
    needle: tuple[int, int]
    question: int
    code: str


@dataclass(frozen=True)
class TokenizedPrompt:
    """One prompt as tokens.

    Attributes:
        tokens: int64 [T].
        kinds: int64 [T], a `TokenKind` each. A token with a character of the needle or the question belongs to it.
        rare: bool [T]: the id occurs at most `RARE` times in the prompt.
    """

    tokens: Tensor
    kinds: Tensor
    rare: Tensor


def needle_prompts(
    count: int, *, seed: int = 0, fillers: int = 120, sentences: Sequence[str] = SENTENCES
) -> list[NeedlePrompt]:
    """Prompts of `fillers` sentences with one needle in the middle, asked at the end.

    Prompt n does not depend on `count`. The five kinds of secret take turns; where in the pool a prompt's sentences
    begin, and the code, are drawn.

    Args:
        seed: in 0 ... 2**64 - 1.
        fillers: sentences around the needle, at least 2; the pool is gone through again where it is shorter.
        sentences: the pool.
    """
    if count < 1 or fillers < 2:
        raise ValueError(f"at least 1 prompt with 2 sentences around its needle is needed, got {count} with {fillers}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}; give a number from 0 to 2**64 - 1")
    if not sentences:
        raise ValueError("the pool of sentences is empty")
    prompts = []
    for n in range(count):
        generator = np.random.Generator(np.random.Philox(key=np.array([seed, n], dtype=np.uint64)))
        start = int(generator.integers(len(sentences)))
        code = f"{_WORDS[generator.integers(len(_WORDS))]}{generator.integers(10, 100)}"
        secret = _SECRETS[n % len(_SECRETS)]
        around = [sentences[(start + i) % len(sentences)] for i in range(fillers)]
        before, after = (" ".join(part) for part in (around[: fillers // 2], around[fillers // 2 :]))
        needle = f"Keep this in mind, it will be needed later: the {secret} is {code}."
        text = f"{before} {needle} {after}"
        end = len(before) + 1 + len(needle)
        question = f"\nQuestion: What is the {secret}? Answer: The {secret} is"
        prompts.append(NeedlePrompt(text + question, (len(before) + 1, end), len(text), code))
    return prompts


def sentences_of(folder: Path) -> list[str]:
    """The sentences of 4 to 40 words in the text files below a folder, in the order of their names.

    Raises:
        ValueError: the folder is missing, a file in it is not UTF-8 text, or there is no such sentence.
    """
    if not folder.is_dir():
        raise ValueError(f"text folder {folder} does not exist or is a file; give a folder of UTF-8 text files")
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            pieces = re.split(r"(?<=[.!?])\s+", " ".join((read_text(path) or "").split()))
            found += [piece for piece in pieces if 4 <= piece.count(" ") + 1 <= 40]
    if not found:
        raise ValueError(f"text folder {folder} holds no sentence of 4 to 40 words; give a folder with running text")
    return found


def tokenize_prompt(prompt: NeedlePrompt, tokenizer: Any) -> TokenizedPrompt:
    """Tokens of a prompt with the part that each belongs to. `tokenizer` is one of transformers, of the fast kind.

    Raises:
        ValueError: the tokenizer cannot say which characters a token stands for, or no token of the needle is unique.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} cannot say which characters its tokens stand for; save it as tokenizer.json, "
            "which transformers then reads with a fast tokenizer"
        )
    encoded = tokenizer(prompt.text, return_offsets_mapping=True, return_special_tokens_mask=True)
    tokens, kinds = encoded["input_ids"], []
    start, end = prompt.needle
    for special, (first, last) in zip(encoded["special_tokens_mask"], encoded["offset_mapping"], strict=True):
        last = max(last, first + 1)  # some tokenizers leave white space out, and with it the whole of a line break
        if special:
            kinds.append(TokenKind.SPECIAL)
        elif last > prompt.question:
            kinds.append(TokenKind.QUESTION)
        else:
            kinds.append(TokenKind.NEEDLE if first < end and last > start else TokenKind.TEXT)
    counts = Counter(tokens)
    result = TokenizedPrompt(
        torch.tensor(tokens), torch.tensor(kinds), torch.tensor([counts[token] <= RARE for token in tokens])
    )
    for kind in (TokenKind.TEXT, TokenKind.NEEDLE, TokenKind.QUESTION):
        if not (result.kinds == kind).any():
            raise ValueError(f"the tokenizer leaves no {kind.name.lower()} of a prompt; is it the model's own?")
    if not (result.rare & (result.kinds == TokenKind.NEEDLE)).any():
        raise ValueError(
            f"no token of the needle with {prompt.code} occurs at most {RARE} times in its prompt, so there is nothing "
            "to compare; take fewer sentences (--fillers) or other text"
        )
    return result
