"""Which optimizer trains which parameter, decided by what a parameter is and never by what it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, cast

from torch import Tensor, nn

Label: TypeAlias = Literal["muon", "adamw"]


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(fan_out, fan_in) of a weight of two or more dimensions: the first dimension, and all others as one.

    That is how linear [out, in] and convolution [out, in / groups, *kernel] weights act on their inputs.
    """
    fan_out, fan_in = shape[0], 1
    for size in shape[1:]:
        fan_in *= size
    return fan_out, fan_in


def label_parameters(model: nn.Module) -> dict[str, Label]:
    """Label every trainable parameter exactly once, in `named_parameters()` order.

    Rule: "muon" for every hidden matrix; "adamw" for embeddings, the output head, and whatever is a vector or a scalar,
    shapes such as [1, D] included. A tied tensor carries one label under its first name, and being an embedding or a head
    wherever it is used makes it "adamw".

    Embeddings are found by type. The output head is the model's `head` attribute, or what `get_output_embeddings()` returns;
    a model that declares neither has as its head the last `nn.Linear` that is as wide as one of its embeddings is long.
    """
    apart = {id(parameter) for module in _apart(model) for parameter in module.parameters()}
    return {
        name: "adamw" if id(parameter) in apart or _is_vector(parameter) else "muon" for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def _is_vector(parameter: Tensor) -> bool:
    return parameter.ndim < 2 or min(matrix_shape(tuple(parameter.shape))) <= 1


def _apart(model: nn.Module) -> list[nn.Module]:
    """Modules whose matrices are no hidden matrices."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    head = _head(model, {module.num_embeddings for module in embeddings})
    return [*embeddings] if head is None else [*embeddings, head]


def _head(model: nn.Module, vocabulary_sizes: set[int]) -> nn.Module | None:
    declared = getattr(model, "head", None)
    if isinstance(declared, nn.Module):
        return declared
    get_output_embeddings = getattr(model, "get_output_embeddings", None)
    if callable(get_output_embeddings):
        return cast(Callable[[], nn.Module | None], get_output_embeddings)()
    wide = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features in vocabulary_sizes]
    return wide[-1] if wide else None
