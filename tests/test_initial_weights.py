"""What a process begins with: the same weights everywhere, the compute type of its hardware, its memory."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from ray_muloco import presets
from ray_muloco.core.model import build_model
from ray_muloco.core.params import digest, flatten_parameters_
from ray_muloco.core.precision import native_bf16

SEPARATOR = 256
NANO = presets.nano().model
# Drawn in fp64 and rounded, so it holds for every instruction set; it changes only with torch's own generator.
NANO_SEED_0 = -6068336156624


def test_initial_weights_have_the_documented_spread():
    """Within five standard errors of the standard deviation, std / sqrt(2 n)."""
    config = presets.tiny().model
    model = build_model(config, seed=3, separator_id=SEPARATOR)

    def check(weight: Tensor, std: float) -> None:
        weight = weight.detach()
        assert abs(float(weight.std()) / std - 1) < 5 / math.sqrt(2 * weight.numel())
        assert abs(float(weight.mean())) < 5 * std / math.sqrt(weight.numel())

    check(model.embedding.weight, 1.0)
    for depth, block in enumerate(model.blocks):
        for linear in (block.attention.wq, block.attention.wk, block.attention.wv, block.ffn.w1):
            check(linear.weight, 0.02)
        for linear in (block.attention.wo, block.ffn.w2, block.ffn.w3):
            check(linear.weight, 0.02 / math.sqrt(2 * (depth + 1)))
    gains = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    assert len(gains) == 6 * config.num_layers + 1
    assert all(bool((gain == 1).all()) for gain in gains)


def test_the_head_is_cut_at_three_standard_deviations():
    """A normal law cut at 3σ keeps 0.98658 of its σ; uncut, 24,672 draws pass 3σ some 67 times."""
    config = presets.tiny().model
    head = build_model(config, seed=0, separator_id=SEPARATOR).head.weight.detach() * math.sqrt(config.d_model)
    assert 2.9 < float(head.abs().max()) <= 3.0
    assert float(head.std()) == pytest.approx(0.98658, abs=5 / math.sqrt(2 * head.numel()))


def test_weights_are_a_function_of_the_seed_alone():
    """D10: every process draws the same θ, whatever was drawn before and however many threads compute."""
    digests: list[int] = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.manual_seed(count)
            digests.append(digest(flatten_parameters_(build_model(NANO, seed=0, separator_id=SEPARATOR))[1]))
    finally:
        torch.set_num_threads(threads)
    assert set(digests) == {NANO_SEED_0}
    assert digest(flatten_parameters_(build_model(NANO, seed=1, separator_id=SEPARATOR))[1]) != NANO_SEED_0


def test_building_a_model_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    build_model(NANO, seed=0, separator_id=SEPARATOR)
    assert torch.equal(before, torch.get_rng_state())


def test_a_new_model_predicts_bytes_near_chance():
    """ln 257 = 5.55 nats and half the variance of logits of unit size."""
    tokens = torch.randint(0, 256, (8, 129), generator=torch.Generator().manual_seed(0))
    nll = build_model(NANO, seed=0, separator_id=SEPARATOR).sequence_nll(tokens).mean() / 128
    assert 5.5 < float(nll.detach()) < 6.6


def test_bf16_is_native_only_where_the_hardware_says_so():
    assert native_bf16("cpu") == any(torch.cpu.get_capabilities().get(name, False) for name in ("avx512_bf16", "amx_bf16", "arm_bf16", "bf16"))
    assert native_bf16("meta") is False


def test_keeping_freed_memory_spares_page_faults():
    """In a fresh interpreter, where a loop of large allocations faults its pages in once instead of every time."""
    code = """
import resource, sys
from ray_muloco.core.memory import keep_freed_memory
told = sys.argv[1] == "keep" and keep_freed_memory()
def step():
    return len([bytearray(b"x") * (1 << 22) for _ in range(8)])
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(int(told), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    faults: dict[str, int] = {}
    told = 0
    for mode in ("default", "keep"):
        out = subprocess.run([sys.executable, "-c", code, mode], capture_output=True, text=True, timeout=120, check=True).stdout
        told, faults[mode] = (int(word) for word in out.split())
    if told:
        assert faults["keep"] < 0.1 * faults["default"]
    else:  # another C library: it was told nothing and does what it did
        assert faults["keep"] <= 1.5 * faults["default"] + 100
