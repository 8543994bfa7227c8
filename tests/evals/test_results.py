"""The results schema: what passes, what is refused in which words, and paired differences against scipy."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ccq.evals.results import paired_differences, read_results, write_results


def run(arm: str, seed: int, accuracy: float = 0.5, loss: float = 3.0) -> dict[str, Any]:
    has_read = arm.endswith("+ccq")
    by_length: list[dict[str, Any]] = [
        {
            "length": length,
            "multiple": length / 256,
            "asked": 100,
            "correct": 50,
            "accuracy": accuracy + length / 1e6,
            "low": 0.4,
            "high": 0.6,
        }
        for length in (256, 512)
    ]
    point = {"step": 1, "tokens": 64, "length": 64, "loss": 5.0, "text_loss": 4.0, "answer_loss": 2.7}
    return {
        "arm": arm,
        "seed": seed,
        "parameters": 10,
        "read_parameters": 2 if has_read else 0,
        "state_bytes": 64,
        "training": {
            "steps": 1,
            "tokens": 64,
            "seconds": 0.5,
            "tokens_per_second": 128.0,
            "curve": [point | {"gradient_norm": 0.8, "gate_mean": 0.01 if has_read else None}],
        },
        "perplexity": [
            {
                "length": length,
                "multiple": 1,
                "tokens": 512,
                "windows": 512 // length,
                "loss": loss + length / 1e6,
                "standard_error": None if length == 512 else 0.1,
                "perplexity": math.exp(loss + length / 1e6),
            }
            for length in (256, 512)
        ],
        "needle": [
            {
                "length": 256,
                "depth_from": 0.0,
                "depth_to": 1.0,
                "asked": 2,
                "correct": 1,
                "accuracy": 0.5,
                "low": 0.1,
                "high": 0.9,
            }
        ],
        "needle_by_length": by_length,
        "needle_read_off": [dict(entry) for entry in by_length] if has_read else None,
        "gate": {
            "mean": 0.2,
            "by_layer": [0.2],
            "by_layer_and_head": [[0.1, 0.3]],
            "histogram": {"edges": [0.0, 1.0], "counts": [2]},
        }
        if has_read
        else None,
        "correction": {"relative_size": 0.01, "by_layer": [0.01]} if has_read else None,
        "decode": {"batch_size": 1, "tokens": 64, "tokens_per_second": 420.0, "milliseconds_per_token": 2.4},
    }


def results() -> dict[str, Any]:
    return {
        "schema": "ccq-results/1",
        "kind": "compare",
        "name": "demo",
        "created": "2026-11-30T12:00:00+00:00",
        "settings": {"preset": "tiny", "seeds": 1, "arms": ["gla", "gla+ccq"], "nested": {"anything": None}},
        "environment": {
            "ccq": "0.1.0",
            "python": "3.11.7",
            "torch": "2.13.0",
            "platform": "Linux",
            "processor": "x",
            "cores": 2,
            "threads_per_run": 1,
            "device": "cpu",
        },
        "corpus": {
            "source": "Python 3.11.7 standard library",
            "files": 7,
            "held_out_files": 1,
            "characters": 1,
            "train_tokens": 1,
            "held_out_tokens": 1,
            "sha256": "0",
        },
        "tokenizer": {"vocabulary": 512, "sha256": "0"},
        "needle_task": {
            "keys": 32,
            "values": 16,
            "needles_per_window": 4,
            "chance": 0.0625,
            "chance_among_seen": 0.25,
            "description": "",
        },
        "training_length": 256,
        "runs": [run("gla", 0), run("gla+ccq", 0)],
        "pairs": [
            {
                "backbone": "gla",
                "arm": "gla+ccq",
                "metric": "needle accuracy at 256",
                "differences": [0.02],
                "mean": 0.02,
                "standard_deviation": None,
                "low": None,
                "high": None,
            }
        ],
    }


def field_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field of the sample, settings aside: what is inside is free."""
    if path == ("settings",):
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        if isinstance(name, str):
            yield (*path, name)
        yield from field_paths(inner, (*path, name))


def spelled(path: tuple[Any, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def parent_of(value: Any, path: tuple[Any, ...]) -> Any:
    for part in path[:-1]:
        value = value[part]
    return value


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_results(path, results())
    assert read_results(path) == results() == json.loads(path.read_text())
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_unknown_fields_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    extended = results()
    extended["runs"][0]["later"] = [1]
    path.write_text(json.dumps(extended))
    assert read_results(path) == extended


def test_every_missing_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    paths = list(field_paths(results()))
    assert len(paths) > 100
    for field in paths:
        broken = results()
        del parent_of(broken, field)[field[-1]]
        path.write_text(json.dumps(broken))
        expected = "has no schema field" if field == ("schema",) else f"field {spelled(field)} is missing"
        with pytest.raises(ValueError, match=re.escape(expected)) as caught:
            read_results(path)
        assert str(path) in str(caught.value)
        assert 'accepted is a results file of schema "ccq-results/1"' in str(caught.value)


def test_no_field_takes_a_value_of_another_type(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for field in field_paths(results()):
        broken = results()
        value = parent_of(broken, field)[field[-1]]
        parent_of(broken, field)[field[-1]] = [[True]] if isinstance(value, list) else True
        path.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
            read_results(path)
        if field != ("schema",):
            assert f"field {spelled(field)}" in str(caught.value)
        with pytest.raises(ValueError, match="nothing was written"):
            write_results(tmp_path / "other.json", broken)
    assert not (tmp_path / "other.json").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"is not JSON \(Expecting property name"),
        ('{"schema": NaN}', r"is not JSON \(NaN is no JSON number\)"),
        ("[]", r"holds a list; accepted"),
        ("3", r"holds 3 \(int\); accepted"),
        ('{"schema": "ccq-results/9"}', r"has schema 'ccq-results/9'; .*run the comparison again"),
        ("{}", r"has no schema field; accepted"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"results\.json {message}"):
        read_results(path)


def test_what_decay_alone_would_do_may_be_missing_and_is_checked_where_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    given = results()
    (point,) = given["runs"][1]["training"]["curve"]
    for value in (0.02, None):
        point["gate_by_decay_alone"] = value
        write_results(path, given)  # type: ignore[arg-type]
        assert read_results(path) == given
    point["gate_by_decay_alone"] = "high"
    message = r"field runs\[1\]\.training\.curve\[0\]\.gate_by_decay_alone is 'high' \(str\)"
    with pytest.raises(ValueError, match=message):
        write_results(path, given)  # type: ignore[arg-type]


def test_types_are_described(tmp_path: Path) -> None:
    broken = results()
    broken["runs"][1]["gate"]["mean"] = "high"
    with pytest.raises(ValueError, match=r"field runs\[1\]\.gate\.mean is 'high' \(str\), but must be a finite number"):
        write_results(tmp_path / "r.json", broken)
    broken = results()
    broken["kind"] = "train"
    with pytest.raises(ValueError, match=r"field kind is 'train' \(str\), but must be 'compare'"):
        write_results(tmp_path / "r.json", broken)
    broken = results()
    broken["runs"][0]["decode"]["tokens_per_second"] = math.nan
    with pytest.raises(ValueError, match=r"decode\.tokens_per_second is nan \(float\), but must be a finite number"):
        write_results(tmp_path / "r.json", broken)
    broken = results()
    broken["runs"][0]["decode"] = None
    with pytest.raises(ValueError, match=r"field runs\[0\]\.decode is None \(NoneType\), but must be an object"):
        write_results(tmp_path / "r.json", broken)


def test_one_seed_has_a_difference_and_no_interval() -> None:
    runs = [run("gla", 3, accuracy=0.25), run("gla+ccq", 3, accuracy=0.75), run("gated-deltanet", 4)]
    assert paired_differences(runs, "gla", "gla+ccq", "needle accuracy at 256") == {
        "backbone": "gla",
        "arm": "gla+ccq",
        "metric": "needle accuracy at 256",
        "differences": [0.5],
        "mean": 0.5,
        "standard_deviation": None,
        "low": None,
        "high": None,
    }


@given(st.lists(st.tuples(st.floats(0, 0.9), st.floats(0, 0.9)), min_size=2, max_size=8), st.randoms())
def test_many_seeds_agree_with_scipy(values: list[tuple[float, float]], random: Any) -> None:
    runs = [run("gla", seed, accuracy=a) for seed, (a, _) in enumerate(values)]
    runs += [run("gla+ccq", seed, accuracy=b) for seed, (_, b) in enumerate(values)]
    random.shuffle(runs)
    pair = paired_differences(runs, "gla", "gla+ccq", "needle accuracy at 512")
    before, after = (np.array(column) + 512 / 1e6 for column in zip(*values, strict=True))
    np.testing.assert_allclose(pair["differences"], after - before, atol=1e-12)
    assert pair["mean"] == pytest.approx(np.mean(after - before), abs=1e-12)
    assert pair["standard_deviation"] == pytest.approx(np.std(after - before, ddof=1), abs=1e-12)
    if np.std(after - before) > 1e-6:
        interval = stats.ttest_rel(after, before).confidence_interval(0.95)
        assert (pair["low"], pair["high"]) == pytest.approx((interval.low, interval.high), abs=1e-9)
    else:
        assert (pair["low"], pair["high"]) == pytest.approx((pair["mean"], pair["mean"]), abs=1e-4)


def test_two_seeds_by_hand() -> None:
    # Differences of the loss 1 and 3: mean 2, deviation sqrt(2), half width t(0.975, 1) = 12.706.
    runs = [run("gla", 0, loss=1), run("gla+ccq", 0, loss=2), run("gla+ccq", 7, loss=4), run("gla", 7, loss=1)]
    pair = paired_differences(runs, "gla", "gla+ccq", "loss at 512")
    assert pair["differences"] == pytest.approx([1, 3])
    assert pair["standard_deviation"] == pytest.approx(math.sqrt(2))
    assert (pair["low"], pair["high"]) == pytest.approx((2 - 12.706205, 2 + 12.706205))
    perplexity = paired_differences(runs, "gla", "gla+ccq", "perplexity at 256")
    factor = math.exp(256 / 1e6)
    assert perplexity["differences"] == pytest.approx(
        [factor * (math.exp(2) - math.exp(1)), factor * (math.exp(4) - math.exp(1))]
    )


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("speed", r"metric is 'speed'; accepted are \"needle accuracy at LENGTH\", \"perplexity at LENGTH\", \"loss"),
        ("loss at 100", r"metric is 'loss at 100', but 'gla' with seed 0 was evaluated at lengths: 256, 512"),
    ],
)
def test_unknown_metrics_are_refused(metric: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_differences([run("gla", 0), run("gla+ccq", 0)], "gla", "gla+ccq", metric)


def test_runs_that_do_not_pair_are_refused() -> None:
    metric = "loss at 256"
    with pytest.raises(ValueError, match=r"seeds \[1, 2\] were run for only one of 'gla' and 'gla\+ccq'"):
        paired_differences(
            [run("gla", 0), run("gla", 1), run("gla+ccq", 2), run("gla+ccq", 0)], "gla", "gla+ccq", metric
        )
    with pytest.raises(ValueError, match="arm 'gla' with seed 0 twice"):
        paired_differences([run("gla", 0), run("gla", 0), run("gla+ccq", 0)], "gla", "gla+ccq", metric)
    with pytest.raises(ValueError, match=r"runs hold no arm 'gla\+ccq'; they hold: gla"):
        paired_differences([run("gla", 0)], "gla", "gla+ccq", metric)
