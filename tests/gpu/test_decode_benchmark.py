"""What `ccq bench decode` replays on a GPU is the decoding that it runs eagerly."""

from __future__ import annotations

import pytest
import torch

from ccq.bench.decode import Decoder
from ccq.bench.measure import Card
from ccq.models import CCQForCausalLM, preset

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("arm", ["gla", "gla+ccq", "gated-deltanet+ccq", "mamba2+ccq"])
def test_a_replayed_step_decodes_as_an_eager_one(arm: str) -> None:
    torch.manual_seed(0)
    model = CCQForCausalLM(preset(f"{arm}-tiny", vocab_size=23, initializer_range=0.3)).eval().cuda()
    text = torch.randint(23, (2, 70)).cuda()
    eager, replayed = Decoder(model, text), Decoder(model, text)
    replay = Card().capture(replayed.step)
    for _ in range(3):  # as often as the step ran before it was captured
        eager.step()
    for _ in range(12):
        eager.step()
        replay()
        assert torch.equal(replayed.token, eager.token)
    assert replayed.cache.get_seq_length() == eager.cache.get_seq_length() == 85
