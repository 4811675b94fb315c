"""Laws of the inner optimizer: one plain rule a group, stacked or not, in place, with all of its state in the open.

U07 (a hang when 18 rows are cut over 8 ranks) cannot exist here: a replica holds whole matrices and orthogonalises them
itself; no matrix is cut over processes, so there is no exchange inside a step.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_muloco.config import InnerConfig, ModelConfig
from ray_muloco.core import muon
from ray_muloco.core.labels import label_parameters
from ray_muloco.core.model import build_model
from ray_muloco.core.muon import InnerOptimizer, build_inner_optimizer, update_scale
from ray_muloco.core.newton_schulz import newton_schulz
from ray_muloco.core.params import flatten_parameters_
from ray_muloco.core.schedules import lr_factor
from ray_muloco.errors import ConfigError

FP32, BF16 = torch.float32, torch.bfloat16


def toy_model(seed: int = 0, tie_embeddings: bool = False) -> nn.Module:
    shape = ModelConfig(d_model=16, num_layers=2, num_heads=2, head_dim=8, ffn_dim=44, vocab_size=50, tie_embeddings=tie_embeddings)
    return build_model(shape, seed=seed, separator_id=None)


def fill_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def optimizer_of(model: nn.Module, *, compute_dtype: torch.dtype = FP32, **inner: Any) -> InnerOptimizer:
    return build_inner_optimizer(model, uses_muon=True, inner=InnerConfig(**inner), compute_dtype=compute_dtype)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("scaling", ["spectral_norm", "rms_norm", "original"])
def test_muon_follows_the_rule_written_plainly(scaling: str, nesterov: bool):
    """Momentum, orthogonalisation, decay, then the scaled update, in this order, each matrix by itself."""
    model, lr, decay, mu = toy_model(), 0.1, 0.5, 0.9
    optimizer = optimizer_of(model, scaling=scaling, nesterov=nesterov, weight_decay=decay, momentum=mu)
    names = [name for name, label in label_parameters(model).items() if label == "muon"]
    weights = {name: values(model)[name] for name in names}
    momenta = {name: torch.zeros_like(weights[name]) for name in names}
    for step in range(3):
        fill_gradients(model, seed=step)
        for name in names:
            gradient, (fan_out, fan_in) = model.get_parameter(name).grad, weights[name].shape
            momenta[name] = mu * momenta[name] + gradient
            direction = newton_schulz(gradient + mu * momenta[name] if nesterov else momenta[name], "muloco", FP32)
            weights[name] = (1 - lr * decay) * weights[name]
            weights[name] = weights[name] - lr * update_scale(scaling, fan_out, fan_in) * direction
        optimizer.step(lr)
        for name in names:
            # fp32 rounding of the momentum through the slope of the polynomial
            torch.testing.assert_close(model.get_parameter(name).detach(), weights[name], atol=1e-4, rtol=0.0)


def test_updates_of_hidden_matrices_are_orthogonal_and_each_matrix_is_orthogonalised_once(monkeypatch: pytest.MonkeyPatch):
    """U01: singular values of every hidden matrix's update within [0.5, 1.5] of its scale; as many calls as matrices."""
    model, lr = toy_model(), 0.02
    stacks: list[int] = []
    original = muon.orthogonalize

    def counting(matrices: Tensor, *rest: Any) -> Tensor:
        stacks.append(len(matrices))
        return original(matrices, *rest)

    monkeypatch.setattr(muon, "orthogonalize", counting)
    before = values(model)
    fill_gradients(model, seed=1)
    optimizer_of(model).step(lr)
    labels = label_parameters(model)
    hidden = [name for name, label in labels.items() if label == "muon"]
    for name in hidden:
        update = (before[name] - model.get_parameter(name).detach()).double()
        singular = torch.linalg.svdvals(update) / (lr * update_scale("spectral_norm", *update.shape))
        assert float(singular.min()) > 0.5
        assert float(singular.max()) < 1.5
    assert sum(stacks) == len(hidden) == 14


def test_scales_follow_the_table():
    """U04: wide, square and tall, under each rule; a rate of one rule becomes another's by the ratio of scales."""
    table = {
        (1024, 4096): {"spectral_norm": 0.5, "rms_norm": 12.8, "original": 1.0},
        (1024, 1024): {"spectral_norm": 1.0, "rms_norm": 6.4, "original": 1.0},
        (4096, 1024): {"spectral_norm": 2.0, "rms_norm": 12.8, "original": 2.0},
    }
    for (fan_out, fan_in), row in table.items():
        for scaling, expected in row.items():
            assert update_scale(scaling, fan_out, fan_in) == pytest.approx(expected)
    with pytest.raises(ConfigError, match=r"inner\.scaling"):
        update_scale("none", 4, 4)


@pytest.mark.parametrize("shape", [(32, 128), (64, 64), (128, 32)])
def test_a_rate_converted_by_the_table_gives_the_same_step(shape: tuple[int, int]):
    """U04."""
    steps: list[Tensor] = []
    for scaling in ("spectral_norm", "rms_norm", "original"):
        model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
        nn.init.zeros_(model[0].weight)
        fill_gradients(model, seed=3)
        lr = 0.02 * update_scale("spectral_norm", *shape) / update_scale(scaling, *shape)
        optimizer_of(model, scaling=scaling).step(lr)
        steps.append(model[0].weight.detach().clone())
    torch.testing.assert_close(steps[0], steps[1])
    torch.testing.assert_close(steps[0], steps[2])


@pytest.mark.parametrize("layer", [nn.Conv1d(4, 6, 5, bias=False), nn.Conv2d(4, 6, (3, 2), bias=False)])
def test_convolution_is_stepped_as_its_matrix(layer: nn.Module):
    """U04: weights of three and four dimensions are reshaped before the scale is computed."""
    model = nn.Sequential(copy.deepcopy(layer))
    rows = model[0].weight.shape[0]
    flat = nn.Sequential(nn.Linear(model[0].weight.numel() // rows, rows, bias=False))
    flat[0].weight.data.copy_(model[0].weight.detach().reshape(rows, -1))
    one, other = optimizer_of(model, weight_decay=0.1), optimizer_of(flat, weight_decay=0.1)
    for step in range(2):
        fill_gradients(model, seed=step)
        flat[0].weight.grad = model[0].weight.grad.reshape(rows, -1)
        one.step(0.1)
        other.step(0.1)
    assert torch.equal(model[0].weight.detach().reshape(rows, -1), flat[0].weight.detach())
    assert one.state_tensors()["muon.momentum.0.weight"].shape == model[0].weight.shape


def test_step_leaves_gradients_as_they_were():
    """U05: the gradient norm may be logged after the step."""
    for nesterov in (False, True):
        model = toy_model()
        fill_gradients(model, seed=2)
        before = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer_of(model, nesterov=nesterov, weight_decay=0.1).step(0.1)
        assert_same_bits(before, {name: p.grad for name, p in model.named_parameters()})


def test_parameter_without_gradient_is_left_alone_and_the_others_step_as_if_it_were_not_there():
    """U05: no decay, no momentum, no step count for weights a batch did not use, in the middle of a stack."""
    model, whole = toy_model(), toy_model()
    partial_optimizer, optimizer = optimizer_of(model, weight_decay=0.5), optimizer_of(whole, weight_decay=0.5)
    start = values(model)
    unused = ["blocks.0.attention.wk.weight", "blocks.1.attention.wq.weight", "blocks.0.ffn.w1.weight", "embedding.weight", "final_norm.weight"]
    for seed in range(2):
        fill_gradients(model, seed)
        fill_gradients(whole, seed)
        for name in unused:
            model.get_parameter(name).grad = None
        partial_optimizer.step(0.1)
        optimizer.step(0.1)
    for name, value in values(model).items():
        if name in unused:
            assert torch.equal(value, start[name])
        else:  # a smaller batch of the same products: fp32 rounding
            torch.testing.assert_close(value, whole.get_parameter(name).detach(), atol=1e-4, rtol=0.0)
    assert not any(tensor.any() for name, tensor in partial_optimizer.state_tensors().items() if name.split(".", 2)[2] in unused)


@pytest.mark.parametrize("compute_dtype", [FP32, BF16])
def test_zero_gradient_makes_a_finite_zero_update(compute_dtype: torch.dtype):
    """U05."""
    model = toy_model()
    start = values(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer_of(model, compute_dtype=compute_dtype).step(0.1)
    assert_same_bits(values(model), start)


@pytest.mark.parametrize("compute_dtype", [FP32, BF16])
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_extreme_and_rank_one_gradients_make_finite_updates_of_the_usual_size(scale: float, compute_dtype: torch.dtype):
    """U10."""
    model = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 66, bias=False))
    start = values(model)
    for parameter in model.parameters():
        parameter.grad = torch.outer(torch.ones(parameter.shape[0]), torch.linspace(-1, 1, parameter.shape[1])) * scale
    optimizer_of(model, compute_dtype=compute_dtype).step(1.0)
    for name, value in values(model).items():
        step = torch.linalg.matrix_norm(value - start[name], 2) / update_scale("spectral_norm", *value.shape)
        assert 0.85 < float(step) < 1.2


def test_steps_in_bf16_point_where_steps_in_fp32_do():
    """U10: cosine of the whole update above 0.99, after momentum has built up; parameters and state stay fp32."""
    updates: list[Tensor] = []
    for compute_dtype in (FP32, BF16):
        model = toy_model()
        start, optimizer = values(model), optimizer_of(model, compute_dtype=compute_dtype)
        for seed in range(3):
            fill_gradients(model, seed)
            optimizer.step(0.02)
        muon_names = [name for name, label in label_parameters(model).items() if label == "muon"]
        updates.append(torch.cat([(start[name] - values(model)[name]).flatten() for name in muon_names]))
        assert all(tensor.dtype is FP32 for tensor in (*optimizer.state_tensors().values(), *model.parameters()))
    assert float(torch.cosine_similarity(updates[0], updates[1], dim=0)) > 0.99


def test_both_groups_follow_the_schedule_and_adamw_has_a_rate_of_its_own():
    """U08: with constant gradients AdamW moves by its rate each step; Muon's update has the norm of its rate."""
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8, bias=False))
    optimizer = optimizer_of(model, adamw_lr_factor=0.25, momentum=0.0)
    fill_gradients(model, seed=0)
    moved: list[tuple[float, float]] = []
    rates = [0.04 * lr_factor(n / 10, warmup_fraction=0.3, final_fraction=0.1) for n in range(1, 11)]
    for lr in rates:
        start = values(model)
        optimizer.step(lr)
        end = values(model)
        moved.append((float((start["0.weight"] - end["0.weight"]).abs().max()), float((start["1.weight"] - end["1.weight"]).norm())))
    for (embedding, matrix), lr in zip(moved, rates, strict=True):
        assert embedding == pytest.approx(0.25 * lr, rel=1e-3)
        assert matrix == pytest.approx(moved[0][1] * lr / rates[0], rel=1e-3)
    assert moved[0][1] == pytest.approx(math.sqrt(8) * rates[0], rel=0.15)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_matches_torch_adamw_to_rounding(decay: float):
    """The embedding, head and gains of Muon runs, and everything in diloco and adamw-dp."""
    model, reference = toy_model(), toy_model()
    inner = InnerConfig(weight_decay=decay, adamw_lr_factor=0.25)
    optimizer = build_inner_optimizer(model, uses_muon=False, inner=inner, compute_dtype=FP32)
    torch_adamw = torch.optim.AdamW(reference.parameters(), lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=decay, foreach=False)
    for seed in range(10):
        fill_gradients(model, seed)
        fill_gradients(reference, seed)
        optimizer.step(0.01)  # the factor belongs to Muon runs
        torch_adamw.step()
    assert not optimizer.muon
    for name, value in values(model).items():
        torch.testing.assert_close(value, reference.get_parameter(name).detach(), atol=1e-6, rtol=1e-6)


def test_state_is_complete_at_construction_and_covers_every_parameter_once():
    """E10: nothing appears at the first step; U02: nor twice for a tied tensor."""
    model = toy_model(tie_embeddings=True)
    optimizer = optimizer_of(model)
    state = optimizer.state_tensors()
    before = {name: (tensor.shape, tensor.data_ptr()) for name, tensor in state.items()}
    expected: set[str] = set()
    for name, label in label_parameters(model).items():
        kinds = ["muon.momentum"] if label == "muon" else ["adamw.first_moment", "adamw.second_moment", "adamw.step"]
        expected |= {f"{kind}.{name}" for kind in kinds}
    assert state.keys() == expected
    assert not any(tensor.any() for tensor in state.values())
    fill_gradients(model, seed=0)
    optimizer.step(0.1)
    assert {name: (tensor.shape, tensor.data_ptr()) for name, tensor in optimizer.state_tensors().items()} == before
    assert all(tensor.any() for tensor in state.values())


@pytest.mark.parametrize("uses_muon", [True, False])
def test_state_round_trips_exactly_and_training_goes_on_bit_for_bit(uses_muon: bool):
    model = toy_model()
    make = {"uses_muon": uses_muon, "inner": InnerConfig(weight_decay=0.1), "compute_dtype": BF16}
    optimizer = build_inner_optimizer(model, **make)
    for seed in range(3):
        fill_gradients(model, seed)
        optimizer.step(0.05)
    saved = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    twin = copy.deepcopy(model)
    fresh = build_inner_optimizer(twin, **make)
    fresh.load_state_tensors(saved)
    assert_same_bits(fresh.state_tensors(), saved)
    for seed in range(3, 5):
        for one, its_optimizer in ((model, optimizer), (twin, fresh)):
            fill_gradients(one, seed)
            its_optimizer.step(0.05)
    assert_same_bits(values(model), values(twin))
    assert_same_bits(optimizer.state_tensors(), fresh.state_tensors())
    fresh.reset()
    assert not any(tensor.any() for tensor in fresh.state_tensors().values())


def test_state_that_does_not_fit_is_refused_before_anything_is_copied():
    optimizer = optimizer_of(toy_model())
    saved = {name: torch.ones_like(tensor) for name, tensor in optimizer.state_tensors().items()}
    missing = {name: tensor for name, tensor in saved.items() if name != "adamw.step.head.weight"}
    with pytest.raises(ValueError, match=r"adamw\.step\.head\.weight"):
        optimizer.load_state_tensors(missing)
    with pytest.raises(ValueError, match=r"muon\.momentum\.blocks\.1\.ffn\.w3\.weight has shape \[3\]"):
        optimizer.load_state_tensors({**saved, "muon.momentum.blocks.1.ffn.w3.weight": torch.ones(3)})
    assert not any(tensor.any() for tensor in optimizer.state_tensors().values())


def test_chunks_of_a_stack_change_nothing(monkeypatch: pytest.MonkeyPatch):
    """One matrix at a time, three at a time, all at once."""
    results: list[dict[str, Tensor]] = []
    for chunk_elements in (1, 3 * 16 * 16, 1 << 18):
        monkeypatch.setattr(muon, "CHUNK_ELEMENTS_CPU", chunk_elements)
        model = toy_model()
        optimizer = optimizer_of(model, nesterov=True)
        for seed in range(2):
            fill_gradients(model, seed)
            optimizer.step(0.1)
        results.append(values(model))
    for name in results[0]:
        for other in results[1:]:  # fp32 rounding: a batch of another size may be multiplied in another order
            torch.testing.assert_close(results[0][name], other[name], atol=1e-4, rtol=0.0)


def test_step_changes_the_flat_buffer_in_place_and_zero_grad_drops_gradients():
    model = toy_model()
    layout, flat = flatten_parameters_(model)
    optimizer = optimizer_of(model)
    before = flat.clone()
    fill_gradients(model, seed=0)
    optimizer.step(0.1)
    assert not torch.equal(before, flat)
    assert_same_bits(layout.views(flat), values(model))
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parameters_listed_twice_unlabelled_or_in_half_precision_are_refused():
    """U02: a tied parameter listed under both names would be stepped twice."""
    weight = nn.Parameter(torch.zeros(4, 4))
    labels: dict[str, Any] = {"a": "muon", "b": "muon"}
    make = {"labels": labels, "inner": InnerConfig(), "compute_dtype": FP32}
    with pytest.raises(ValueError, match="b is listed twice"):
        InnerOptimizer([("a", weight), ("b", weight)], **make)
    with pytest.raises(ValueError, match="c has no label"):
        InnerOptimizer([("c", weight)], **make)
    with pytest.raises(ValueError, match=r"a is torch\.bfloat16"):
        InnerOptimizer([("a", nn.Parameter(torch.zeros(4, 4, dtype=BF16)))], **make)
    frozen = nn.Parameter(torch.zeros(4, 4, dtype=BF16), requires_grad=False)
    assert InnerOptimizer([("c", frozen)], **make).state_tensors() == {}
