"""Answers on a GPU: tokens that are replayed from a CUDA graph are those of the eager steps."""

from __future__ import annotations

import pytest
import torch

from ccq.evals import decoding
from ccq.evals.decoding import greedy_answers
from ccq.models import CCQForCausalLM, preset

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("arm", ["gla+ccq", "gated-deltanet+ccq", "mamba2+ccq", "transformer"])
def test_replayed_answers_are_the_eager_ones(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = CCQForCausalLM(preset(f"{arm}-tiny", vocab_size=300, initializer_range=0.3)).bfloat16().cuda()
    beginning = torch.randint(300, (90,)).tolist()
    prompts = [[*beginning[:place], 7, number, *beginning[place:]] for number, place in enumerate((20, 60, 41, 60, 5))]
    recorded: list[object] = []
    record = decoding._RecordedStep.__init__

    def count(self: object, *arguments: object) -> None:
        record(self, *arguments)  # type: ignore[arg-type]
        recorded.append(self)

    monkeypatch.setattr(decoding._RecordedStep, "__init__", count)
    replayed = greedy_answers(model, prompts, max_new_tokens=20, batch_size=2)
    assert len(recorded) == (arm != "transformer")
    monkeypatch.setattr(decoding, "_can_be_recorded", lambda cache: False)
    assert [each.tokens for each in replayed] == [
        each.tokens for each in greedy_answers(model, prompts, max_new_tokens=20, batch_size=2)
    ]
