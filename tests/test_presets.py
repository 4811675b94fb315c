"""The presets are the shapes they say, to the unit, and valid for every method and number of replicas."""

from __future__ import annotations

import math

import pytest

from ray_muloco import presets
from ray_muloco.config import METHODS
from ray_muloco.core.model import build_model
from ray_muloco.errors import ConfigError

# name: d_model, layers, heads, head_dim, ffn_dim, parameters, tokens (arXiv 2505.23725)
PUBLISHED = {
    "150M": (512, 6, 4, 128, 1408, 150_616_064, 3_019_898_880),
    "416M": (1024, 12, 8, 128, 2816, 416_862_208, 8_556_380_160),
    "914M": (1536, 18, 12, 128, 4224, 914_343_936, 18_371_051_520),
    "1.76B": (2048, 24, 16, 128, 5632, 1_758_666_752, 35_232_153_600),
    "3.1B": (2560, 30, 20, 128, 7040, 3_065_436_160, 61_404_610_560),
    "15B": (4608, 54, 36, 128, 12672, 15_229_089_792, 304_758_128_640),
}
BYTE_LEVEL_MILLIONS = {"nano": 0.1, "tiny": 0.5, "mini": 2, "small": 10}


def count_on_meta(name: str) -> int:
    model = build_model(presets.get(name).model, seed=0, separator_id=256, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_presets_have_the_published_shape_and_count_to_the_unit(name: str):
    width, layers, heads, head_dim, ffn, num_params, tokens = PUBLISHED[name]
    config = presets.get(name)
    model = config.model
    assert (model.d_model, model.num_layers, model.num_heads, model.head_dim, model.ffn_dim) == (width, layers, heads, head_dim, ffn)
    assert (model.vocab_size, model.sequence_length, model.tie_embeddings) == (128_256, 2048, False)
    assert presets.num_params(model) == num_params
    assert count_on_meta(name) == num_params
    assert config.budget_tokens == tokens


@pytest.mark.parametrize("name", BYTE_LEVEL_MILLIONS)
def test_byte_level_presets_count_what_num_params_says(name: str):
    config = presets.get(name)
    assert count_on_meta(name) == presets.num_params(config.model)
    assert presets.num_params(config.model) / 1e6 == pytest.approx(BYTE_LEVEL_MILLIONS[name], rel=0.15)
    assert config.model.vocab_size == 257
    assert config.budget_tokens == 20 * presets.num_params(config.model)


def test_tiny_has_the_shape_the_command_line_promises():
    model = presets.tiny().model
    assert (model.d_model, model.num_layers, model.num_heads, model.head_dim, model.sequence_length) == (96, 4, 3, 32, 128)


def test_a_tied_head_is_counted_once():
    config = presets.nano().override({"model.tie_embeddings": True}).model
    model = build_model(config, seed=0, separator_id=256, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == presets.num_params(config)
    assert presets.num_params(presets.nano().model) - presets.num_params(config) == 257 * config.d_model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8, 16])
def test_every_preset_is_valid_for_every_method_and_number_of_replicas(method: str, replicas: int):
    for name in ("nano", "tiny", "mini", "small"):
        config = presets.get(name, method, replicas)
        assert config.scaling.num_replicas == replicas
        assert config.replica_batch_sequences * replicas == config.batch_sequences
        assert (config.preset, config.method) == (name, method)


def test_published_weight_decay_follows_its_rule():
    """λ = λ_base (B / 512) / K; K is 1 for the data-parallel baselines."""
    assert presets.get("416M", "muloco", 8).inner.weight_decay == pytest.approx(0.00125)
    assert presets.get("416M", "muon-dp", 8).inner.weight_decay == pytest.approx(0.01)
    assert presets.get("150M", "diloco", 4).inner.weight_decay == pytest.approx(0.001 / 4)


def test_published_warmup_is_500_steps():
    config = presets.get("3.1B")
    steps = config.budget_tokens / (config.batch_sequences * config.model.sequence_length)
    assert steps == 58_560
    assert math.isclose(config.inner.warmup_fraction * steps, 500)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [(("huge",), "PRESET"), (("tiny", "sgd"), "method"), (("tiny", "muloco", 0), "scaling.num-replicas")],
)
def test_what_there_is_no_preset_for_is_named(arguments: tuple, field: str):
    with pytest.raises(ConfigError) as caught:
        presets.get(*arguments)
    assert caught.value.field == field
