"""How fast `ccq eval needle` answers long prompts on this machine's GPU, and what share of reading speed that is.

    python benchmarks/answers.py --out FILE.json [--arm ARM] [--scale SCALE]

What is timed is the loop of the evaluation, `ccq.evals.decoding.greedy_answers`, on prompts of random tokens for a
model with random weights, in bfloat16: speed depends on neither. Each answer has as many tokens as a number or a UUID
takes. "apart" are prompts without a common beginning, each read whole; "together" are prompts that differ from a place
on, as a needle in one haystack makes them, which the evaluation reads along one trunk. Reading speed is that of one
call of as many rows and tokens as the evaluation reads at a time. The long prompt is read in pieces; its peak memory
stands beside that of a short one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ccq.bench.machine import environment, gpu_environment
from ccq.evals.decoding import PREFILL_TOKENS, greedy_answers
from ccq.files import write_json_atomically
from ccq.models import CCQForCausalLM, preset

SHORT = 8192
"""Tokens of the prompt whose memory the long one's is compared with."""


def seconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--arm", default="gla+ccq")
    parser.add_argument("--scale", default="1.3b")
    parser.add_argument("--length", type=int, default=4096, metavar="N", help="tokens of a prompt")
    parser.add_argument("--samples", type=int, default=96, metavar="N")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N")
    parser.add_argument("--answer-tokens", type=int, default=20, metavar="N")
    parser.add_argument("--long", type=int, default=131_072, metavar="N", help="tokens of the long prompt")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures on a GPU, and torch finds none")

    config = preset(f"{given.arm}-{given.scale}")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = CCQForCausalLM(config).to(torch.bfloat16).eval()
    random = torch.Generator().manual_seed(0)

    def prompts(samples: int, length: int) -> list[list[int]]:
        drawn: list[list[int]] = torch.randint(config.vocab_size, (samples, length), generator=random).tolist()
        return drawn

    def answer(these: list[list[int]], batch_size: int = given.batch_size) -> None:
        greedy_answers(model, these, max_new_tokens=given.answer_tokens, batch_size=batch_size)

    apart = prompts(given.samples, given.length)
    haystack, ends = apart[0], prompts(given.samples, given.length)
    places = [given.length * i // given.samples for i in range(given.samples)]
    together = [[*haystack[:place], *end[place:]] for place, end in zip(places, ends, strict=True)]
    block = torch.tensor(prompts(PREFILL_TOKENS // given.length, given.length)).cuda()

    def read() -> None:
        with torch.inference_mode():
            model(block, use_cache=True, logits_to_keep=1)

    figures: dict[str, Any] = {
        "schema": "ccq-bench-answers/1",
        "settings": {name: value for name, value in vars(given).items() if name != "out"},
        "environment": environment(threads=torch.get_num_threads(), device="cuda"),
        "gpu": gpu_environment(),
    }

    def save() -> None:
        write_json_atomically(given.out, figures)

    read()
    figures["reading_tokens_per_second"] = block.numel() / statistics.median(seconds(read) for _ in range(5))
    print(f"reading: {figures['reading_tokens_per_second']:,.0f} tokens/s", flush=True)
    save()
    answer(apart[: given.batch_size])  # compiles
    for name, these in (("apart", apart), ("together", together)):
        found = min(seconds(lambda these=these: answer(these)) for _ in range(2))  # type: ignore[misc]
        speed = len(these) * given.length / found
        figures[name] = {
            "seconds": found,
            "samples_per_second": len(these) / found,
            "prompt_tokens_per_second": speed,
            "share_of_reading": speed / figures["reading_tokens_per_second"],
        }
        print(
            f"{name}: {len(these) / found:.1f} samples/s, {speed:,.0f} prompt tokens/s, "
            f"{speed / figures['reading_tokens_per_second']:.0%} of reading",
            flush=True,
        )
        save()
    figures["long"] = []
    for length in (SHORT, given.long):
        (prompt,) = prompts(1, length)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        taken = seconds(lambda prompt=prompt: answer([prompt], 1))  # type: ignore[misc]
        peak = torch.cuda.max_memory_allocated()
        figures["long"].append({"tokens": length, "seconds": taken, "peak_bytes": peak})
        print(f"one prompt of {length:,} tokens: {taken:.2f} s, peak {peak / 2**30:.2f} GiB", flush=True)
        save()


if __name__ == "__main__":
    main()
