"""The laws of a round, on a model of a few thousand parameters in one process."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from toy import LENGTH, Harness, toy_config, toy_dataset

from ray_muloco.core.model import build_model
from ray_muloco.data.dataset import Dataset
from ray_muloco.training.replica import sample_indices


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return toy_dataset()


class PlainSgd:
    """Stands in for the inner optimizer: w <- w - lr g, no state."""

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float) -> None:
        self.parameters, self.lr = parameters, lr

    @torch.no_grad()
    def step(self, _scheduled: float) -> None:
        for parameter in self.parameters:
            parameter.add_(parameter.grad, alpha=-self.lr)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {}


def batches(harness: Harness, dataset: Dataset, plan, step: int) -> torch.Tensor:
    """The sequences [B, T+1] that a plan reads at a step."""
    replica = harness.group.replicas[plan.replica_id]
    numbers = replica.order.sequence_indices(sample_indices(plan.ranges))[step * plan.batch_sequences : (step + 1) * plan.batch_sequences]
    return torch.from_numpy(dataset.train.batch(numbers, LENGTH))


def reference_newton_schulz(g: torch.Tensor) -> torch.Tensor:
    """ALGORITHM's five steps, written again from the text, in fp32."""
    coefficients = [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)]
    x = g / g.abs().max()
    x = x / (x.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class ReferenceMuloco:
    """K = 1 MuLoCo in plain PyTorch: Muon and AdamW inside, one torch.optim.SGD with Nesterov outside."""

    def __init__(self, config, separator_id: int) -> None:
        self.config = config
        self.model = build_model(config.model, seed=config.seed, separator_id=separator_id)
        hidden = {id(p) for block in self.model.blocks for p in block.parameters() if p.ndim == 2}
        self.hidden = [p for p in self.model.parameters() if id(p) in hidden]
        self.other = [p for p in self.model.parameters() if id(p) not in hidden]
        self.momentum = [torch.zeros_like(p) for p in self.hidden]
        inner = config.inner
        self.adamw = torch.optim.AdamW(self.other, betas=(inner.adamw_beta1, inner.adamw_beta2), eps=inner.adamw_epsilon, weight_decay=inner.weight_decay)
        self.theta = [p.detach().clone() for p in self.model.parameters()]
        self.outer = torch.optim.SGD(self.theta, lr=config.outer.lr, momentum=config.outer.momentum, nesterov=True)

    def inner_step(self, sequences: torch.Tensor, lr: float) -> None:
        inner = self.config.inner
        self.model.zero_grad()
        logits = self.model(sequences[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), inner.clip_norm)
        with torch.no_grad():
            for parameter, momentum in zip(self.hidden, self.momentum, strict=True):
                momentum.mul_(inner.momentum).add_(parameter.grad)
                step = reference_newton_schulz(momentum) * math.sqrt(parameter.shape[0] / parameter.shape[1])
                parameter.mul_(1 - lr * inner.weight_decay).sub_(lr * step)
        for group in self.adamw.param_groups:
            group["lr"] = lr * inner.adamw_lr_factor
        self.adamw.step()

    def outer_step(self) -> None:
        for theta, parameter in zip(self.theta, self.model.parameters(), strict=True):
            theta.grad = theta - parameter.detach()
        self.outer.step()
        with torch.no_grad():
            for theta, parameter in zip(self.theta, self.model.parameters(), strict=True):
                parameter.copy_(theta)


def test_one_replica_equals_an_independent_muloco(dataset: Dataset) -> None:
    """D11: K = 1 follows a reference written again from ALGORITHM in plain PyTorch, to 1e-6 of the parameters over 3 rounds."""
    config = toy_config(scaling__num_replicas=1, inner__weight_decay=0.1, inner__adamw_lr_factor=0.5, budget_tokens=9 * 8 * LENGTH)
    harness = Harness(config, dataset)
    reference = ReferenceMuloco(config, dataset.tokenizer.separator_id)
    total_steps, warmup = 9, 0.05
    for number in range(3):
        plan = harness.coordinator.plan((0,))[0]
        for step in range(plan.num_steps):
            progress = (number * 3 + step + 1) / total_steps
            cosine = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))
            reference.inner_step(batches(harness, dataset, plan, step), config.inner.lr * min(progress / warmup, cosine))
        reference.outer_step()
        harness.round()
        ours = harness.coordinator.theta
        theirs = torch.cat([t.detach().flatten() for t in reference.theta])
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm(), f"round {number + 1}"
    assert harness.coordinator.finished


def test_one_replica_that_remains_of_two_still_learns(dataset: Dataset) -> None:
    """D11: K drops from 2 to 1 in mid-run: with nobody to average with, the pseudogradient is the replica's own, not zero."""
    harness = Harness(toy_config(scaling__min_replicas=1), dataset)
    harness.round()
    harness.group.eject([1])
    before = harness.coordinator.theta.clone()
    reports, committed = harness.round()
    assert set(reports) == {0}
    assert committed.pseudogradient_norm == pytest.approx(math.sqrt(reports[0].squared_norm), rel=1e-6)
    assert not torch.equal(before, harness.coordinator.theta)


def test_the_outer_step_is_nothing_when_rounds_are_one_step_and_rates_are_plain(dataset: Dataset) -> None:
    """K=1, H=1, η_out=1, μ=0 is the inner optimizer alone."""
    config = toy_config(scaling__num_replicas=1, sync_interval=1, outer__lr=1.0, outer__momentum=0.0)
    harness, alone = Harness(config, dataset), Harness(config.override({"sync_interval": 12}), dataset)
    (plan,) = alone.coordinator.plan((0,)).values()
    alone.group.replicas[0].run_inner(plan)
    harness.run()
    # θ - (θ - θ_k) rounds where θ_k does not
    torch.testing.assert_close(harness.coordinator.theta, alone.group.replicas[0].flat, rtol=0, atol=2e-6)


def test_one_step_rounds_of_plain_sgd_are_data_parallel_sgd(dataset: Dataset) -> None:
    """H=1, plain SGD inside, no clipping, η_out=1, μ=0: two replicas are one with both batches."""
    config = toy_config(sync_interval=1, outer__lr=1.0, outer__momentum=0.0, inner__clip_norm=0.0)
    harness = Harness(config, dataset)
    model = build_model(config.model, seed=config.seed, separator_id=dataset.tokenizer.separator_id)
    for replica in harness.group.replicas.values():
        replica.optimizer = PlainSgd(replica.parameters, 0.05)  # type: ignore[assignment]
    for _ in range(4):
        plans = harness.coordinator.plan((0, 1))
        both = torch.cat([batches(harness, dataset, plans[k], 0) for k in (0, 1)])
        model.zero_grad()
        (model.sequence_nll(both).sum() / (len(both) * LENGTH)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-0.05)
        harness.round()
    theirs = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(harness.coordinator.theta, theirs, rtol=0, atol=2e-6)  # sums in another order


def test_identical_replicas_on_identical_data_are_one_replica(dataset: Dataset) -> None:
    """K replicas that read the same samples commit what one does, to the rounding of a mean of equal numbers."""
    three = Harness(toy_config(scaling__num_replicas=4, batch_sequences=16, budget_tokens=12 * 16 * LENGTH), dataset)
    one = Harness(toy_config(scaling__num_replicas=1, batch_sequences=4, budget_tokens=12 * 4 * LENGTH), dataset)
    for _ in range(3):
        (plan,) = one.coordinator.plan((0,)).values()
        three.round({k: dataclasses.replace(plan, replica_id=k) for k in range(4)})
        one.round()
        assert torch.equal(three.coordinator.theta, one.coordinator.theta)  # a mean of four equal fp32 numbers is exact


@pytest.mark.parametrize("method", ["muloco", "diloco", "muon-dp", "adamw-dp"])
def test_a_commit_leaves_inner_state_alone(dataset: Dataset, method: str) -> None:
    harness = Harness(toy_config(method=method), dataset)
    harness.round()
    replica = harness.group.replicas[1]
    replica.run_inner(harness.coordinator.plan((0, 1))[1], (lambda gradient: None) if replica.flat_grad is not None else None)
    before = replica.state_tensors()
    harness.group.publish(harness.coordinator.theta)
    assert all(torch.equal(tensor, before[name]) for name, tensor in replica.state_tensors().items())
    assert any(tensor.abs().sum() > 0 for tensor in before.values())


@pytest.mark.parametrize("method", ["muloco", "diloco", "muon-dp", "adamw-dp"])
def test_every_method_learns_and_all_replicas_end_with_the_same_bits(dataset: Dataset, method: str) -> None:
    """D10, D13: one θ from the first round to the last; the tail is committed, and what is held is what was evaluated."""
    harness = Harness(toy_config(method=method, budget_tokens=40 * 8 * LENGTH), dataset)
    first, _ = harness.round()
    harness.run()
    digests = harness.group.publish(harness.coordinator.theta).digests
    assert set(digests.values()) == {harness.coordinator.digest()}
    held_out = harness.group.evaluate({0: [0, 1], 1: [2, 3]})
    assert sum(nats for nats, _ in held_out.values()) / (4 * LENGTH) < first[0].train_loss
    assert harness.coordinator.progress.tokens == 40 * 8 * LENGTH


def test_data_parallel_replicas_are_one_with_the_whole_batch(dataset: Dataset) -> None:
    """muon-dp with K=2 equals K=1 on the same batches, to the rounding of sums taken in two parts."""
    two, one = Harness(toy_config(method="muon-dp"), dataset), Harness(toy_config(method="muon-dp", scaling__num_replicas=1), dataset)
    plans = two.coordinator.plan((0, 1))
    (whole,) = one.coordinator.plan((0,)).values()
    interleaved = [r for step in range(3) for k in (0, 1) for r in split(plans[k].ranges, step, plans[k].batch_sequences)]
    one.round({0: dataclasses.replace(whole, ranges=tuple(interleaved))})
    two.round(plans)
    # Newton-Schulz amplifies rounding where singular values are tiny
    torch.testing.assert_close(two.coordinator.theta, one.coordinator.theta, rtol=0, atol=2e-5)


def split(ranges, step: int, batch: int):
    """The part of a single range that a step reads."""
    (only,) = ranges
    return (dataclasses.replace(only, start=only.start + step * batch, stop=only.start + (step + 1) * batch),)


def test_gradient_accumulation_and_activation_checkpointing_change_nothing_but_rounding(dataset: Dataset) -> None:
    plain, accumulated = Harness(toy_config(), dataset), Harness(toy_config(micro_batch_sequences=2, activation_checkpointing=True), dataset)
    plain.round()
    accumulated.round()
    # AdamW divides by the root of a moment that may be tiny: rounding of the gradient is amplified, not more
    torch.testing.assert_close(plain.coordinator.theta, accumulated.coordinator.theta, rtol=0, atol=1e-4)


def test_a_replica_without_inner_steps_has_an_exactly_zero_pseudogradient(dataset: Dataset) -> None:
    """D07: what a joiner measures against is the committed θ, so having done nothing it contributes nothing."""
    harness = Harness(toy_config(), dataset)
    harness.round()
    harness.group.exchange({1: 1.0}, harness.coordinator.merged)
    assert torch.count_nonzero(harness.coordinator.merged) == 0


def test_token_weights_make_a_weighted_mean(dataset: Dataset) -> None:
    """D04: Ψ is Σ w Δ / Σ w over those merged, not over those planned."""
    harness = Harness(
        toy_config(scaling__num_replicas=3, batch_sequences=9, budget_tokens=900 * LENGTH, scaling__min_replicas=1, outer__momentum=0.0, outer__lr=1.0), dataset
    )
    plans = harness.coordinator.plan((0, 1, 2))
    inner = harness.group.run_inner(plans)
    reports = {k: dataclasses.replace(inner.reports[k], tokens=t) for k, t in ((0, 30), (2, 10))}
    deltas = {k: harness.group.replicas[k].theta - harness.group.replicas[k].flat for k in (0, 2)}
    before = harness.coordinator.theta.clone()
    decision = harness.coordinator.decide(plans, reports, {1: "gone"})
    harness.group.exchange(harness.coordinator.weights(decision.participants, reports), harness.coordinator.merged)
    harness.coordinator.commit(plans, reports, decision)
    expected = before - (30 * deltas[0] + 10 * deltas[2]) / 40
    torch.testing.assert_close(harness.coordinator.theta, expected, rtol=0, atol=1e-6)


def test_a_spoilt_replica_sits_out_and_its_samples_are_tried_elsewhere(dataset: Dataset) -> None:
    """D20: NaN in one replica is named, not merged; the others commit, and its range returns to the pool."""
    harness = Harness(toy_config(scaling__min_replicas=1), dataset)
    plans = harness.coordinator.plan((0, 1))
    inner = harness.group.run_inner(plans)
    harness.group.replicas[1].flat[5] = math.nan
    reports = {0: inner.reports[0], 1: dataclasses.replace(inner.reports[1], squared_norm=math.nan)}
    decision = harness.coordinator.decide(plans, reports, {})
    assert decision.participants == (0,)
    harness.group.exchange(harness.coordinator.weights(decision.participants, reports), harness.coordinator.merged)
    harness.coordinator.commit(plans, reports, decision)
    assert torch.isfinite(harness.coordinator.theta).all()
    assert harness.coordinator.progress.tokens == inner.reports[0].tokens
    next_plans = harness.coordinator.plan((0, 1))
    assert next_plans[0].ranges[0].start == plans[1].ranges[0].start
    assert next_plans[0].ranges[0].attempts == 1


def test_data_parallel_replicas_that_drifted_do_not_commit(dataset: Dataset) -> None:
    """Replicas that average every step must end with one θ; if they do not, the round is run again, and in the end given up."""
    harness = Harness(toy_config(method="muon-dp"), dataset)
    plans = harness.coordinator.plan((0, 1))
    reports = dict(harness.group.run_inner(plans).reports)
    assert harness.coordinator.decide(plans, reports, {}).action == "commit"
    reports[1] = dataclasses.replace(reports[1], digest=1)
    for _ in range(2):
        decision = harness.coordinator.decide(plans, reports, {})
        assert decision.action == "retry"
        harness.coordinator.retry(plans, decision, {})
    assert harness.coordinator.decide(plans, reports, {}).abort_reason == "replicas drifted"


def test_a_state_on_its_way_to_a_file_or_a_joiner_is_of_its_own_moment(dataset: Dataset) -> None:
    """C, E10: training goes on while a state is written or sent; one that shared memory with the optimizer would be of several rounds at once."""
    harness = Harness(toy_config(), dataset)
    harness.round()
    replica = harness.group.replicas[0]
    taken, files = replica.state_tensors(), harness.coordinator.snapshot()
    then = {name: tensor.clone() for name, tensor in (*taken.items(), *((f"{f}/{n}", t) for f, part in files.items() for n, t in part.items()))}
    harness.round()
    now = {**taken, **{f"{f}/{n}": t for f, part in files.items() for n, t in part.items()}}
    assert all(torch.equal(now[name], then[name]) for name in then)
    assert any(not torch.equal(tensor, then[name]) for name, tensor in replica.state_tensors().items()), "the round changed nothing: the test shows nothing"
