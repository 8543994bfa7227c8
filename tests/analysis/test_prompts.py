"""Needle prompts: what they say, and which token belongs to what."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.analysis.tokenizer import prompt_tokenizer
from transformers import PreTrainedTokenizerFast

from ccq.analysis.prompts import SENTENCES, TokenKind, needle_prompts, sentences_of, tokenize_prompt
from ccq.data.tokenizer import train_byte_level_bpe


def test_a_prompt_states_its_code_once_in_the_middle_and_asks_for_it_at_the_end() -> None:
    prompts = needle_prompts(7, seed=3, fillers=120)
    for prompt in prompts:
        needle, question = prompt.text[slice(*prompt.needle)], prompt.text[prompt.question :]
        assert prompt.text.count(prompt.code) == 1 and needle.endswith(f" is {prompt.code}.")
        secret = needle.split(": the ")[1].split(" is ")[0]
        assert question == f"\nQuestion: What is the {secret}? Answer: The {secret} is"
        before, after = prompt.text[: prompt.needle[0]], prompt.text[prompt.needle[1] : prompt.question]
        assert before.count(".") == after.count(".") == 60
        # The pool has 60 sentences, so each is there twice, in the order of the pool from some place on.
        first = SENTENCES.index(before.split(".")[0] + ".")
        assert after.strip() == before.strip() == " ".join(SENTENCES[first:] + SENTENCES[:first])
    assert len({prompt.text for prompt in prompts}) == 7
    assert len({prompt.text[prompt.question :] for prompt in prompts}) == 5


def test_a_prompt_depends_on_its_seed_and_number_alone() -> None:
    assert needle_prompts(2, seed=3) == needle_prompts(6, seed=3)[:2]
    assert needle_prompts(2, seed=3) != needle_prompts(2, seed=4)
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match=f"seed is {seed}; give a number from 0 to"):
            needle_prompts(2, seed=seed)
    with pytest.raises(ValueError, match="at least 1 prompt with 2 sentences"):
        needle_prompts(1, fillers=1)


@pytest.mark.parametrize("start", [None, "<s>"])
def test_tokens_belong_to_the_part_that_their_characters_are_in(start: str | None) -> None:
    tokenizer = prompt_tokenizer(start)
    for prompt in needle_prompts(5, seed=1, fillers=8):
        found = tokenize_prompt(prompt, tokenizer)
        pieces = [tokenizer.convert_tokens_to_string([tokenizer.convert_ids_to_tokens(int(i))]) for i in found.tokens]
        assert (found.kinds == TokenKind.SPECIAL).tolist() == [piece == start for piece in pieces]
        place = 0
        for piece, kind in zip(pieces, found.kinds.tolist(), strict=True):
            if kind == TokenKind.SPECIAL:
                continue
            touched = range(place, place + len(piece))
            place += len(piece)
            if any(i >= prompt.question for i in touched):
                expected = TokenKind.QUESTION
            elif any(prompt.needle[0] <= i < prompt.needle[1] for i in touched):
                expected = TokenKind.NEEDLE
            else:
                expected = TokenKind.TEXT
            assert kind == expected
        assert place == len(prompt.text)
        ids = found.tokens.tolist()
        assert found.rare.tolist() == [ids.count(i) <= 2 for i in ids]
        # The digits of the code stand nowhere else.
        assert any(prompt.code[-1] in piece for piece, rare in zip(pieces, found.rare, strict=True) if rare)


def test_white_space_that_a_tokenizer_trims_belongs_to_its_place() -> None:
    """Some fast tokenizers give a token of white space no characters at all."""
    prompt = needle_prompts(1, fillers=2)[0]
    offsets = [
        (0, 5),
        (prompt.needle[0], prompt.needle[1]),
        (prompt.question, prompt.question),
        (prompt.question + 1,) * 2,
    ]

    def tokenizer(text: str, **_: bool) -> dict[str, object]:
        return {"input_ids": [4, 5, 6, 7], "offset_mapping": offsets, "special_tokens_mask": [0] * 4}

    tokenizer.is_fast = True  # type: ignore[attr-defined]
    kinds = tokenize_prompt(prompt, tokenizer).kinds.tolist()
    assert kinds == [TokenKind.TEXT, TokenKind.NEEDLE, TokenKind.QUESTION, TokenKind.QUESTION]


def test_a_tokenizer_or_a_text_that_cannot_do_is_refused() -> None:
    prompt = needle_prompts(1, fillers=2)[0]
    with pytest.raises(ValueError, match="save it as tokenizer"):
        tokenize_prompt(prompt, SimpleNamespace(is_fast=False))
    everything = ["The quick brown fox jumps over the lazy dog, 0123456789: ABCDEFGHIJKLMNOPQRSTUVWXYZ."]
    crowded = needle_prompts(1, fillers=8, sentences=everything)[0]
    with pytest.raises(ValueError, match="occurs at most 2 times in its prompt"):
        tokenize_prompt(crowded, character_tokenizer())


def character_tokenizer() -> object:
    return PreTrainedTokenizerFast(tokenizer_object=train_byte_level_bpe([], 256))


def test_sentences_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("Short one. This sentence has six words only!\n\nAnd this has\nfive, too? No.")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.md").write_text("The first file by name comes first. " + "word " * 41 + ".")
    (tmp_path / ".hidden").write_text("This one is not read at all.")
    assert sentences_of(tmp_path) == [
        "The first file by name comes first.",
        "This sentence has six words only!",
        "And this has five, too?",
    ]
    with pytest.raises(ValueError, match="does not exist or is a file"):
        sentences_of(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no sentence"):
        sentences_of(tmp_path / "empty")
