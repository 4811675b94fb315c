"""The benchmarks measure what they say: equal functions on both sides, in turns, as ratios in the contract's shape."""

from __future__ import annotations

import bench
import pytest
import torch
from _bench.measure import Figure, at_least, at_most, compare, within
from _bench.plain import check_same_model, plain_optimizers, plain_step, plain_twin

from ray_muloco import presets
from ray_muloco.core.model import build_model

SEPARATOR = 256


def packed_batch(seed: int) -> torch.Tensor:
    """Sequences [4, 129] of bytes with a document border in some of them."""
    batch = torch.randint(0, 256, (4, 129), generator=torch.Generator().manual_seed(seed))
    batch[0, 40] = batch[2, 7] = SEPARATOR
    return batch


def test_the_plain_baseline_is_the_same_model() -> None:
    config = presets.tiny().model
    model = build_model(config, seed=0, separator_id=SEPARATOR)
    check_same_model(model, plain_twin(model, config, SEPARATOR), packed_batch(0))


def test_another_model_is_not_timed() -> None:
    config = presets.tiny().model
    model = build_model(config, seed=0, separator_id=SEPARATOR)
    other = plain_twin(build_model(config, seed=1, separator_id=SEPARATOR), config, SEPARATOR)
    with pytest.raises(AssertionError, match="another model"):
        check_same_model(model, other, packed_batch(0))


@pytest.mark.parametrize("method", ["muloco", "diloco"])
def test_the_plain_loop_learns(method: str) -> None:
    config = presets.get("nano", method, 1)  # type: ignore[arg-type]
    model = plain_twin(build_model(config.model, seed=0, separator_id=SEPARATOR), config.model, SEPARATOR)
    optimizers, batch = plain_optimizers(model, config), packed_batch(1)

    def loss() -> float:
        with torch.no_grad():
            return model(batch[:, :-1], batch[:, 1:]).item()

    before = loss()
    for _ in range(5):
        plain_step(model, model, optimizers, batch, config.inner.clip_norm)
    assert loss() < before - 0.1  # five steps on one batch: far more than noise


def test_sides_are_measured_in_turns_and_by_their_medians() -> None:
    order: list[str] = []
    seconds = {"A": iter([1.0, 9.0, 2.0]), "B": iter([4.0, 4.0, 100.0])}

    def side(name: str) -> float:
        order.append(name)
        return next(seconds[name])

    figure = compare("case", lambda: side("A"), lambda: side("B"), "s", 3, at_most(0.7))
    assert "".join(order) == "ABABAB"
    assert (figure.ours, figure.baseline, figure.ratio) == (2.0, 4.0, 0.5)


@pytest.mark.parametrize(("target", "good", "bad"), [(at_least(2.0), 2.0, 1.99), (at_most(1.25), 1.25, 1.26), (within(0.02), 0.981, 1.021)])
def test_a_target_has_a_side(target, good: float, bad: float) -> None:
    assert target.met(good)
    assert not target.met(bad)


def test_figures_are_written_in_the_contracts_shape() -> None:
    written = bench.as_json({"muon": [Figure("tiny", 3.0, 1.5, "steps/s", at_least(2.0)), Figure("small", 1.0, 1.0, "steps/s")]})
    assert written == {
        "muon": {
            "tiny": {"ours": 3.0, "baseline": 1.5, "ratio": 2.0, "unit": "steps/s"},
            "small": {"ours": 1.0, "baseline": 1.0, "ratio": 1.0, "unit": "steps/s"},
        }
    }


def test_every_case_has_a_function() -> None:
    for name, (module, function, repeats) in bench.CASES.items():
        source = (bench.Path(bench.__file__).parent / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert f"\ndef {function}(effort: Effort) -> Iterator[Figure]:" in source, name
        assert repeats >= 5, name
