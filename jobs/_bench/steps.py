"""Single-process cases: the Muon step and the whole inner step, one thread on each side."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from _bench.measure import Effort, Figure, at_least, compare, rate
from _bench.plain import check_same_model, plain_batches, plain_optimizers, plain_step, plain_twin
from ray_muloco import presets
from ray_muloco.config import InnerConfig, TrainConfig
from ray_muloco.core.labels import label_parameters
from ray_muloco.core.model import build_model
from ray_muloco.core.muon import InnerOptimizer
from ray_muloco.core.precision import native_bf16
from ray_muloco.data.dataset import Dataset, open_dataset
from ray_muloco.data.tokenizer import ByteTokenizer
from ray_muloco.training.plan import SampleRange, SegmentPlan
from ray_muloco.training.replica import Replica

# this program's momentum and torch.optim.Muon's coefficients and scaling, so that both sides compute the same update
TORCH_MUON = InnerConfig(lr=0.02, coefficients="jordan", scaling="original")


def muon(effort: Effort) -> Iterator[Figure]:
    """One Muon step on the hidden matrices of three models against torch.optim.Muon."""
    torch.set_num_threads(1)
    scales = {"tiny": presets.tiny().model, "small": presets.small().model}
    if not effort.quick:
        published = presets.published("416M").model
        scales["block of 416M"] = dataclasses.replace(published, num_layers=1, vocab_size=2)
    for name, model in scales.items():
        decoder = build_model(model, seed=0, separator_id=None)
        labels = label_parameters(decoder)
        matrices = [p.detach().clone() for n, p in decoder.named_parameters() if labels[n] == "muon"]
        del decoder
        steps = max(1, int(2e7 / sum(m.numel() for m in matrices)))
        ours, baseline = _muon_sides(matrices)
        yield compare(
            name,
            lambda run=ours, steps=steps: rate(lambda: [run() for _ in range(steps)], steps),
            lambda run=baseline, steps=steps: rate(lambda: [run() for _ in range(steps)], steps),
            "steps/s",
            effort.repeats,
            at_least(2.0) if name == "tiny" else at_least(1.0),
        )


def _muon_sides(matrices: list[Tensor]) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step of ours and one of torch's on equal parameters and gradients, after one of each has agreed."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(m.shape, generator=generator) for m in matrices]
    sides = [[nn.Parameter(m.clone()) for m in matrices] for _ in range(2)]
    for side in sides:
        for parameter, gradient in zip(side, gradients, strict=True):
            parameter.grad = gradient.clone()
    mine, theirs = sides
    names = [f"matrix{i}" for i in range(len(mine))]
    compute_dtype = torch.bfloat16 if native_bf16() else torch.float32
    ours = InnerOptimizer(zip(names, mine, strict=True), dict.fromkeys(names, "muon"), TORCH_MUON, compute_dtype=compute_dtype)
    baseline = torch.optim.Muon(theirs, lr=TORCH_MUON.lr, weight_decay=0.0, momentum=TORCH_MUON.momentum, nesterov=TORCH_MUON.nesterov)
    ours.step(TORCH_MUON.lr)
    baseline.step()
    for before, a, b in zip(matrices, mine, theirs, strict=True):
        cosine = torch.cosine_similarity((a.detach() - before).flatten(), (b.detach() - before).flatten(), dim=0)
        if cosine < 0.99:  # bf16 products of five steps leave a few thousandths
            raise AssertionError(f"the two Muon steps differ on a {tuple(a.shape)} matrix: cosine {float(cosine):.4f}")
    return lambda: ours.step(TORCH_MUON.lr), lambda: baseline.step()


def inner(effort: Effort) -> Iterator[Figure]:
    """A replica's inner step against the plain fp32 loop: same model, batch, optimizers and thread."""
    torch.set_num_threads(1)
    native = native_bf16()
    with tempfile.TemporaryDirectory() as cache:
        for name in ("tiny",) if effort.quick else ("tiny", "small"):
            config = presets.get(name, "muloco", 1).override({"compute_dtype": "bf16" if native else "fp32"})
            dataset = open_dataset(config.data, sequence_length=config.model.sequence_length, vocab_size=config.model.vocab_size, cache_dir=cache)
            steps = 2 if effort.quick or name == "small" else 10
            ours, baseline = replica_loop(config, dataset), plain_loop(config, dataset)
            tokens = steps * config.batch_sequences * config.model.sequence_length
            ours(1)
            baseline(1)
            target = at_least(2.0 if name == "small" and native else 1.0)
            yield compare(
                name,
                lambda run=ours, steps=steps, tokens=tokens: rate(lambda: run(steps), tokens),
                lambda run=baseline, steps=steps, tokens=tokens: rate(lambda: run(steps), tokens),
                "tokens/s",
                effort.repeats,
                target,
            )


def replica_loop(config: TrainConfig, dataset: Dataset, replica_id: int = 0) -> Callable[[int], None]:
    """A function that takes so many inner steps of a replica in this process."""
    replica = Replica(config, replica_id, dataset)
    samples = config.replica_batch_sequences
    position = replica_id * (1 << 20)

    def run(num_steps: int) -> None:
        nonlocal position
        ranges = (SampleRange(position, position + num_steps * samples),)
        position += num_steps * samples
        replica.run_inner(
            SegmentPlan(
                round_number=1,
                generation=1,
                replica_id=replica_id,
                ranges=ranges,
                num_steps=num_steps,
                batch_sequences=samples,
                progress_start=0.2,
                progress_per_step=1e-4,
            )
        )

    return run


def plain_loop(config: TrainConfig, dataset: Dataset) -> Callable[[int], None]:
    """A function that takes so many steps of the plain loop, from data that lies in memory."""
    separator = ByteTokenizer().separator_id
    decoder = build_model(config.model, seed=config.seed, separator_id=separator)
    model = plain_twin(decoder, config.model, separator)
    tokens = np.array(dataset.train.tokens(0, min(dataset.train.num_tokens, 1 << 24)))
    batches = plain_batches(tokens, config.model.sequence_length, config.replica_batch_sequences, seed=0)
    check_same_model(decoder, model, next(batches))
    optimizers = plain_optimizers(model, config)

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            plain_step(model, model, optimizers, next(batches), config.inner.clip_norm)

    return run
