"""lm-eval's `hf` class takes the model as it is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from tests.models.small import make

from ccq.models import load_model, save_model
from ccq.models.text import load_tokenizer, save_tokenizer

pytest.importorskip("lm_eval")
LETTERS = "abcdefghijklmnopqrstuv"


@pytest.mark.filterwarnings("ignore")  # of lm-eval's own
def test_likelihoods_and_continuations(tmp_path: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    vocabulary = {letter: i for i, letter in enumerate([*LETTERS, "."])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    save_model(make("gated-deltanet+ccq", torch.float32, max_position_embeddings=16, eos_token_id=22), tmp_path)
    save_tokenizer(tokenizer, tmp_path, end=".")
    model = load_model(tmp_path)
    harness = HFLM(pretrained=str(tmp_path), tokenizer=str(tmp_path), device="cpu", batch_size=3)
    assert harness.max_length == 16
    encode = load_tokenizer(tmp_path)

    def request(*arguments: object) -> SimpleNamespace:
        return SimpleNamespace(args=arguments, arguments=arguments)

    # Different lengths in one batch: the harness pads on the right here, and on the left when it generates.
    pairs = [("abc", "d"), ("hello", "uv"), ("a", "bcdef"), ("kk", "kkkk")]
    scores = harness.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (score, is_greedy) in zip(pairs, scores, strict=True):
        ids = encode(context + continuation, return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, :-1]
        chosen = F.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[-len(continuation) :]
        assert abs(score - chosen.sum().item()) < 1e-4
        greedy = logits.argmax(-1)[-len(continuation) :]
        assert is_greedy == torch.equal(greedy, ids[0, -len(continuation) :])

    options = {"until": [], "max_gen_toks": 5, "do_sample": False}
    texts = harness.generate_until([request(context, dict(options)) for context, _ in pairs], disable_tqdm=True)
    for (context, _), text in zip(pairs, texts, strict=True):
        ids = encode(context, return_tensors="pt").input_ids
        expected = model.generate(ids, max_new_tokens=5)[0, ids.shape[1] :]
        assert text == encode.decode(expected, skip_special_tokens=True)
