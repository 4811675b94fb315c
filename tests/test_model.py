"""Laws of the decoder: the mathematics of its reference, documents apart, the same gradients however they are computed."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ray_muloco import presets
from ray_muloco.config import ModelConfig
from ray_muloco.core import attention
from ray_muloco.core.model import Decoder, build_model
from ray_muloco.core.params import flatten_parameters_

SEPARATOR = 256
NANO = presets.nano().model
SHORT = ModelConfig(d_model=24, num_layers=2, num_heads=3, head_dim=8, ffn_dim=66, sequence_length=32)


def decoder(config: ModelConfig = SHORT, *, seed: int = 0, **options: bool) -> Decoder:
    """A decoder with gains away from 1, so that a gain in the wrong place shows."""
    model = build_model(config, seed=seed, separator_id=SEPARATOR, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


def some_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def packed_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Tokens with documents opening at the start, in the middle, twice in a row and at the end."""
    tokens = some_tokens(batch, length, seed)
    tokens[0, [0, length // 2]] = SEPARATOR
    tokens[1 % batch, [3, 4, length - 1]] = SEPARATOR
    return tokens


def bf16():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def gradients(model: Decoder, sequences: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model.sequence_nll(sequences).mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


# ---- an independent reference: loops and plain formulas, autograd for the gradient


def reference_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * gain


def reference_rotation(x: Tensor, theta: float) -> Tensor:
    """x [B, H, T, C]: the pair (2j, 2j + 1) at time t is turned by t θ^(-2j / C)."""
    out = torch.empty_like(x)
    length, width = x.shape[-2:]
    for j in range(0, width, 2):
        angle = torch.arange(length, dtype=torch.float64) * theta ** (-j / width)
        cos, sin = angle.cos().float(), angle.sin().float()
        out[..., j] = x[..., j] * cos - x[..., j + 1] * sin
        out[..., j + 1] = x[..., j] * sin + x[..., j + 1] * cos
    return out


def reference_visible(tokens: Tensor) -> Tensor:
    """[B, T, T]: s sees t when t is not later and no separator lies in (t, s]."""
    batch, length = tokens.shape
    visible = torch.zeros(batch, length, length, dtype=torch.bool)
    for b in range(batch):
        for s in range(length):
            for t in range(s, -1, -1):
                visible[b, s, t] = True
                if tokens[b, t] == SEPARATOR:
                    break
    return visible


def reference_logits(config: ModelConfig, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    epsilon, heads = config.norm_epsilon, config.num_heads
    hidden = ~reference_visible(tokens).unsqueeze(1)
    x = weights["embedding.weight"][tokens]
    for depth in range(config.num_layers):
        w = {name.removeprefix(f"blocks.{depth}."): value for name, value in weights.items()}
        y = reference_norm(x, w["attention_pre_norm.weight"], epsilon)
        q, k, v = ((y @ w[f"attention.w{n}.weight"].T).unflatten(-1, (heads, -1)).transpose(1, 2) for n in "qkv")
        q = reference_rotation(reference_norm(q, w["attention.q_norm.weight"], epsilon), config.rope_theta)
        k = reference_rotation(reference_norm(k, w["attention.k_norm.weight"], epsilon), config.rope_theta)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(config.head_dim)).masked_fill(hidden, -math.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w["attention.wo.weight"].T
        x = x + reference_norm(y, w["attention_post_norm.weight"], epsilon)
        y = reference_norm(x, w["ffn_pre_norm.weight"], epsilon)
        gate = y @ w["ffn.w1.weight"].T
        y = (gate * torch.sigmoid(gate) * (y @ w["ffn.w2.weight"].T)) @ w["ffn.w3.weight"].T
        x = x + reference_norm(y, w["ffn_post_norm.weight"], epsilon)
    return reference_norm(x, weights["final_norm.weight"], epsilon) @ weights["head.weight"].T


@pytest.mark.parametrize("tokens", [some_tokens(2, 33), packed_tokens(2, 33)], ids=["one document", "packed"])
def test_fp32_logits_loss_and_gradients_match_the_plain_reference(tokens: Tensor):
    """1e-5 relative: both sides are fp32 and sum in different orders."""
    model = decoder()
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    expected = reference_logits(SHORT, weights, tokens[:, :-1])
    log_probs = expected.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    expected_nll = -log_probs.sum(1)
    torch.testing.assert_close(model(tokens[:, :-1]), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.sequence_nll(tokens), expected_nll, rtol=1e-5, atol=1e-4)
    expected_nll.mean().backward()
    for name, gradient in gradients(model, tokens).items():
        wanted = weights[name].grad
        assert wanted is not None
        assert float((gradient - wanted).norm() / wanted.norm()) < 1e-5, name


@pytest.mark.parametrize("tokens", [some_tokens(4, 129), packed_tokens(4, 129)], ids=["one document", "packed"])
def test_bf16_gradients_point_where_fp32_gradients_do(tokens: Tensor):
    """U10: cosine above 0.99 for every parameter, with fp32 gradients for fp32 weights."""
    model = decoder(NANO)
    exact = gradients(model, tokens)
    with bf16():
        fast = gradients(model, tokens)
    for name, gradient in fast.items():
        assert gradient.dtype is torch.float32
        assert float(F.cosine_similarity(gradient.flatten(), exact[name].flatten(), dim=0)) > 0.99, name
        assert float(gradient.norm() / exact[name].norm()) == pytest.approx(1, abs=0.05), name


def test_logits_and_loss_are_fp32_whatever_the_compute_type():
    model, tokens = decoder(), some_tokens(2, 33)
    with bf16():
        assert model(tokens).dtype is torch.float32
        nll = model.sequence_nll(tokens)
    assert nll.dtype is torch.float32
    assert nll.shape == (2,)
    torch.testing.assert_close(nll, model.sequence_nll(tokens), rtol=2e-3, atol=0)


# ---- documents


@pytest.mark.parametrize("fast", [False, True], ids=["fp32", "bf16"])
def test_a_token_changes_no_logits_of_another_document_and_none_before_it(fast: bool):
    """Bit for bit: a hidden position weighs exactly nothing. A visible one must weigh something."""
    model, length = decoder(), 32
    tokens = packed_tokens(2, length)
    document = (tokens == SEPARATOR).cumsum(1)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast):
        reference = model(tokens)
        for row in range(2):
            for position in range(length):
                if int(tokens[row, position]) == SEPARATOR:
                    continue
                changed = tokens.clone()
                changed[row, position] = (changed[row, position] + 1) % 256
                moved = (model(changed) != reference).any(-1)
                may_move = torch.zeros_like(moved)
                may_move[row, position:] = document[row, position:] == document[row, position]
                assert not bool((moved & ~may_move).any()), (row, position)
                assert bool(moved[row, position]), (row, position)
                assert bool(moved[may_move].float().mean() > 0.9), (row, position)


@pytest.mark.parametrize("fast", [False, True], ids=["fp32", "bf16"])
def test_a_packed_document_reads_as_it_does_alone(fast: bool):
    """Positions are relative, so a document's logits do not depend on where in the sequence it lies."""
    model, tokens = decoder(), some_tokens(1, 32)
    tokens[0, 20] = SEPARATOR
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast):
        torch.testing.assert_close(model(tokens)[:, 20:], model(tokens[:, 20:]), rtol=0, atol=0.1 if fast else 1e-5)


def test_the_causal_path_is_taken_exactly_when_no_document_opens_inside():
    tokens = some_tokens(3, 32)
    tokens[1, 0] = SEPARATOR
    assert attention.document_mask(tokens, SEPARATOR) is None
    assert attention.document_mask(packed_tokens(2, 32), None) is None
    for position in (1, 31):
        opened = tokens.clone()
        opened[2, position] = SEPARATOR
        mask = attention.document_mask(opened, SEPARATOR)
        assert mask is not None
        assert torch.equal(mask.squeeze(1), reference_visible(opened))


@pytest.mark.parametrize("fast", [False, True], ids=["fp32", "bf16"])
def test_the_masked_path_equals_the_causal_path_where_both_apply(fast: bool):
    """Rows of one document are the same beside a packed row, which sends the whole batch down the masked path."""
    model, tokens = decoder(), packed_tokens(2, 32)
    tokens[0] = some_tokens(1, 32)[0]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast):
        torch.testing.assert_close(model(tokens)[:1], model(tokens[:1]), rtol=0, atol=0.1 if fast else 1e-5)


# ---- hand-written backward passes


def test_the_explicit_attention_is_the_fused_one_and_its_backward_matches_finite_differences():
    """In fp64, where both are exact to 1e-6; fp32 training takes the fused form, bf16 on a CPU the explicit one."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 6, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3))
    mask = attention.document_mask(packed_tokens(2, 6), SEPARATOR)
    for visible in (mask, None):
        bias = attention.score_bias(visible, 6, 2, torch.float64)
        fused = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None, scale=1.0)
        torch.testing.assert_close(attention._Explicit.apply(q, k, v, bias), fused)
        assert torch.autograd.gradcheck(lambda *qkv, bias=bias: attention._Explicit.apply(*qkv, bias), (q, k, v))


def test_bf16_on_a_cpu_takes_the_explicit_attention_up_to_its_length():
    model = decoder()
    with bf16():
        assert model._positions(some_tokens(1, attention.EXPLICIT_MAX_LENGTH)).bias is not None
        assert model._positions(some_tokens(1, attention.EXPLICIT_MAX_LENGTH + 1)).bias is None
    assert model._positions(some_tokens(1, 32)).bias is None


def test_sequences_longer_than_the_model_was_configured_for_are_read():
    """Rotary positions go on; the first logits are the same."""
    model, tokens = decoder(), some_tokens(1, 3 * SHORT.sequence_length)
    with torch.inference_mode():
        longer = model(tokens)
        torch.testing.assert_close(longer[:, :32], model(tokens[:, :32]), rtol=0, atol=1e-5)
    assert gradients(model, tokens)


def test_a_second_derivative_is_refused_not_wrong():
    model = decoder()
    loss = model.sequence_nll(some_tokens(1, 9)).sum()
    (gradient,) = torch.autograd.grad(loss, [model.head.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("tokens", [some_tokens(2, 33), packed_tokens(2, 33)], ids=["one document", "packed"])
@pytest.mark.parametrize("fast", [False, True], ids=["fp32", "bf16"])
def test_activation_checkpointing_changes_no_bit(tokens: Tensor, fast: bool):
    plain, recomputing = decoder(), decoder(activation_checkpointing=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast):
        assert torch.equal(plain.sequence_nll(tokens), recomputing.sequence_nll(tokens))
        expected = gradients(plain, tokens)
        for name, gradient in gradients(recomputing, tokens).items():
            assert torch.equal(gradient, expected[name]), name


def test_activation_checkpointing_keeps_less():
    def bytes_saved(model: Decoder) -> int:
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model.sequence_nll(some_tokens(4, 33))
        return sum(saved.values())

    assert bytes_saved(decoder(activation_checkpointing=True)) < 0.5 * bytes_saved(decoder())


def test_gradients_accumulate_over_micro_batches():
    model, tokens = decoder(), packed_tokens(4, 33)
    whole = gradients(model, tokens)
    model.zero_grad()
    for half in tokens.chunk(2):
        (model.sequence_nll(half).sum() / len(tokens)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-4, atol=1e-5)


def test_frozen_parameters_get_no_gradient_and_stop_none():
    """E10, E11: training with frozen parameters works, also where the embedding is one of them."""
    model = decoder()
    frozen = {"embedding.weight", "blocks.0.attention.wk.weight", "blocks.1.ffn_pre_norm.weight"}
    expected = gradients(model, some_tokens(2, 33))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    found = gradients(model, some_tokens(2, 33))
    assert set(expected) - set(found) == frozen
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())


def test_the_gradient_reaches_the_flat_buffer():
    model = decoder()
    layout, flat = flatten_parameters_(model)
    shared = torch.zeros_like(flat)
    for name, view in layout.views(shared).items():
        model.get_parameter(name).grad = view
    model.sequence_nll(some_tokens(2, 33)).mean().backward()
    expected = gradients(decoder(), some_tokens(2, 33))
    assert all(torch.equal(view, expected[name]) for name, view in layout.views(shared).items())


def test_a_tied_head_is_the_embedding_and_gets_both_gradients():
    config = presets.nano().override({"model.tie_embeddings": True}).model
    tied = build_model(config, seed=0, separator_id=SEPARATOR)
    assert tied.head.weight is tied.embedding.weight
    assert float(tied.head.weight.detach().std()) == pytest.approx(0.98658 / math.sqrt(config.d_model), rel=0.05)
    loose = build_model(presets.nano().model, seed=0, separator_id=SEPARATOR)
    with torch.no_grad():
        for name, parameter in loose.named_parameters():
            parameter.copy_(tied.get_parameter(name.replace("head", "embedding")))
    tokens = some_tokens(2, 33)
    apart = gradients(loose, tokens)
    torch.testing.assert_close(gradients(tied, tokens)["embedding.weight"], apart["embedding.weight"] + apart["head.weight"])


COMPILED = """
import torch
from ray_muloco.config import ModelConfig
from ray_muloco.core.model import build_model

torch.set_num_threads(1)
config = ModelConfig(d_model=16, num_layers=1, num_heads=2, head_dim=8, ffn_dim=44, sequence_length=16)
plain, compiled = (build_model(config, seed=0, separator_id=256) for _ in range(2))
compiled.compile(backend="aot_eager", fullgraph=True)
tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))
packed = tokens.clone()
packed[0, 5] = 256
for sequences, fast in ((tokens, True), (packed, False)):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast):
        for model in (plain, compiled):
            model.zero_grad()
            model.sequence_nll(sequences).mean().backward()
    for mine, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-2 if fast else 1e-5)
"""


@pytest.mark.slow
def test_a_compiled_model_is_one_graph_and_computes_the_same():
    """Traced and differentiated by torch.compile, up to but not including the C++ compiler that users may lack.

    In a fresh interpreter: the type checks that tests put around core would be traced too, in ten times the time.
    """
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
