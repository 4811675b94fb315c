"""Laws of the labelling: every trainable parameter once, by what it is and never by what it is called."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ray_muloco.config import ModelConfig
from ray_muloco.core.labels import label_parameters, matrix_shape
from ray_muloco.core.model import build_model


def tiny_decoder(tie_embeddings: bool) -> nn.Module:
    shape = ModelConfig(d_model=16, num_layers=2, num_heads=2, head_dim=8, ffn_dim=44, tie_embeddings=tie_embeddings)
    return build_model(shape, seed=0, separator_id=256)


@pytest.mark.parametrize("tied", [False, True])
def test_decoder_gives_muon_its_hidden_matrices_and_adamw_the_rest(tied: bool):
    """U02: tied and untied, each parameter once; embedding, head and gains on AdamW."""
    model = tiny_decoder(tied)
    labels = label_parameters(model)
    assert list(labels) == [name for name, _ in model.named_parameters()]
    muon = {name for name, label in labels.items() if label == "muon"}
    assert len(muon) == 2 * 7  # wq wk wv wo w1 w2 w3
    assert all(name.startswith("blocks.") and model.get_parameter(name).ndim == 2 for name in muon)
    assert sum(model.get_parameter(name).ndim == 2 for name in labels if name not in muon) == (1 if tied else 2)


class Misnamed(nn.Module):
    """Hidden matrices called like embeddings and heads, and the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Embedding(50, 8)
        self.embed_gate = nn.Linear(8, 8, bias=True)
        self.lm_head_mixer = nn.ModuleList([nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)])
        self.norm_matrix = nn.Linear(8, 8, bias=False)
        self.wq = nn.Linear(8, 50, bias=False)


def test_names_decide_nothing():
    """U02: no substring of a name makes a label."""
    assert label_parameters(Misnamed()) == {
        "w1.weight": "adamw",
        "embed_gate.weight": "muon",
        "embed_gate.bias": "adamw",
        "lm_head_mixer.0.weight": "muon",
        "lm_head_mixer.1.weight": "muon",
        "norm_matrix.weight": "muon",
        "wq.weight": "adamw",
    }


def test_tied_tensor_is_labelled_once_under_its_first_name_wherever_the_embedding_stands():
    """U02: the tie is found by identity, also when the linear layer comes first."""
    model = nn.Module()
    model.projection = nn.Linear(8, 50, bias=False)
    model.table = nn.Embedding(50, 8)
    model.table.weight = model.projection.weight
    model.hidden = nn.Linear(8, 8, bias=False)
    assert label_parameters(model) == {"projection.weight": "adamw", "hidden.weight": "muon"}


def test_matrix_shared_by_two_hidden_layers_is_one_muon_parameter():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert label_parameters(model) == {"0.weight": "muon"}


def test_declared_head_wins_over_the_guess_by_width():
    model = Misnamed()
    model.head = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 50, bias=False))
    labels = label_parameters(model)
    assert labels["head.0.weight"] == labels["head.1.weight"] == "adamw"
    assert labels["wq.weight"] == "muon"


def test_head_is_found_through_the_accessor_that_other_libraries_give_their_models():
    class Foreign(Misnamed):
        def get_output_embeddings(self) -> nn.Module:
            return self.norm_matrix

    labels = label_parameters(Foreign())
    assert labels["norm_matrix.weight"] == "adamw"
    assert labels["wq.weight"] == "muon"


def test_vectors_go_to_adamw_whatever_their_number_of_dimensions():
    """U02: a gain of shape [1, D] or [1, 1, D] is no matrix."""
    model = nn.Module()
    for name, shape in {"scalar": (), "gain": (8,), "row": (1, 8), "column": (8, 1), "cube": (1, 1, 8), "empty": (0, 8)}.items():
        model.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    assert set(label_parameters(model).values()) == {"adamw"}


def test_convolutions_go_to_muon_and_frozen_parameters_nowhere():
    model = nn.Sequential(nn.Conv1d(3, 6, 5), nn.Conv2d(6, 4, (3, 2)), nn.Linear(4, 4).requires_grad_(False))
    assert label_parameters(model) == {"0.weight": "muon", "0.bias": "adamw", "1.weight": "muon", "1.bias": "adamw"}


def test_weight_acts_on_its_inputs_as_a_matrix_of_its_first_dimension_by_all_others():
    assert matrix_shape((6, 4)) == (6, 4)
    assert matrix_shape((6, 4, 5)) == (6, 20)
    assert matrix_shape((6, 4, 3, 2)) == (6, 24)
