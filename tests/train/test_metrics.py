"""metrics.jsonl under kills and full disks, and the read steps against the analysis of the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ccq.analysis.gate import measure_reads
from ccq.data.loader import TokenWindows
from ccq.data.shards import TokenArray
from ccq.models import preset
from ccq.train.config import OptimizerRecipe
from ccq.train.engine import Engine, TargetBatch, initial_model
from ccq.train.metrics import MetricsFile, memory_bytes, observe_window, read_metrics


def written(path: Path, steps: int) -> MetricsFile:
    metrics = MetricsFile(path)
    for step in range(1, steps + 1):
        metrics.add({"step": step, "loss": 1 / step})
    metrics.write(flush=True)
    return metrics


@pytest.mark.parametrize("torn", [b"", b'{"step": 6, "lo', b'{"step": 6}', b"\x00\x00\n", b'{"loss": 1}\n'])
@pytest.mark.parametrize("step", [0, 3, 5, 9])
def test_lines_behind_a_checkpoint_and_torn_ones_are_cut_off(tmp_path: Path, torn: bytes, step: int) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 5)
    with open(path, "ab") as file:
        file.write(torn)
    metrics = MetricsFile(path)
    metrics.cut_back(step)
    kept = min(step, 5)
    assert [line["step"] for line in read_metrics(path)] == list(range(1, kept + 1))
    metrics.add({"step": kept + 1})
    metrics.write()
    assert [line["step"] for line in read_metrics(path)] == list(range(1, kept + 2))


def test_without_a_file_there_is_nothing_to_cut(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "metrics.jsonl").cut_back(3)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_line_that_fits_in_part_is_taken_back_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real full disk writes what fits and fails on the rest."""
    from ccq.train import metrics as module

    path = tmp_path / "metrics.jsonl"
    metrics = written(path, 2)

    class Small:
        def __init__(self, *arguments: object, **options: object) -> None:
            self.file = open(*arguments, **options)  # type: ignore[call-overload]  # noqa: SIM115
            self.left = 7

        def write(self, data: bytes) -> int:
            if not self.left:
                raise OSError(28, "No space left on device")
            self.left, size = 0, self.file.write(data[: self.left])
            return int(size)

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def __enter__(self) -> Small:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

    monkeypatch.setattr(module, "open", Small, raising=False)
    metrics.add({"step": 3})
    with pytest.raises(OSError, match="No space left"):
        metrics.write()
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    monkeypatch.setattr(module, "open", open, raising=False)
    metrics.add({"step": 4})
    metrics.write()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        MetricsFile(tmp_path / "metrics.jsonl").add({"step": 1, "loss": float("nan")})


@pytest.mark.parametrize("arm", ["gla+ccq", "gated-deltanet+ccq"])
def test_gate_and_correction_are_those_of_the_analysis(arm: str) -> None:
    """Of the first window, in every layer; packed, of its first window with the documents in it."""
    config = preset(f"{arm}-tiny", vocab_size=50)
    engine = Engine(initial_model(config, 0), OptimizerRecipe(learning_rate=1e-3, warmup_steps=1))
    for number, read in enumerate(engine.model.read_steps()):
        read.gate_bias.data.fill_(number - 1.0)
    tokens = torch.randint(50, (3 * 40 + 1,)).numpy()
    windows = TokenWindows(TokenArray(tokens), 40)
    found = observe_window(engine, TargetBatch.of_tokens(windows.batch([0, 1, 2])), 40)
    expected = measure_reads(engine.model, torch.from_numpy(tokens[:40])[None])
    assert found is not None and expected is not None
    assert found.gate == pytest.approx(expected.gate["by_layer"], rel=1e-5)
    assert found.correction == pytest.approx(expected.correction["by_layer"], rel=1e-4)
    assert found.gate[0] < found.gate[1]

    # One document a window: packed windows are read as if alone.
    one_a_window = TokenWindows(TokenArray(tokens, [0, 40, 80]), 40)
    packed = observe_window(engine, TargetBatch.of_tokens(one_a_window.batch([0, 1, 2], pack_documents=True)), 40)
    assert packed is not None
    assert packed.gate == pytest.approx(found.gate, rel=1e-5)
    assert packed.correction == pytest.approx(found.correction, rel=1e-4)
    # Looking leaves no gradient and no observer behind.
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    assert all(read.observer is None for read in engine.model.read_steps())


def test_an_arm_without_a_read_step_has_nothing_to_observe() -> None:
    engine = Engine(initial_model(preset("gla-tiny"), 0), OptimizerRecipe(learning_rate=1e-3, warmup_steps=1))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    assert observe_window(engine, TargetBatch(tokens, tokens, {"loss": tokens == 0}), 8) is None


def test_memory_is_the_peak_that_the_system_counts() -> None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        pytest.skip("this system has no /proc")
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    assert memory_bytes(torch.device("cpu")) == pytest.approx(peak, rel=0.01)
