"""A model's trainable parameters as one flat fp32 buffer, and the bookkeeping to find each of them in it.

Pseudogradient, outer momentum and parameters are all flat buffers of this one layout, so an exchange is a walk over
slices, whatever the tensors inside them.

Legend: P trainable parameters, counted once each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

_DIGEST_CHUNK_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Where each trainable parameter lies in a flat buffer [P]: name, shape and first element, in order, without gaps."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    numel: int

    @classmethod
    def of(cls, model: nn.Module) -> FlatLayout:
        """The layout of a model: frozen parameters are left out, tied ones counted once, under their first name."""
        named = _trainable(model)
        ends = list(accumulate((parameter.numel() for _, parameter in named), initial=0))
        return cls(
            names=tuple(name for name, _ in named),
            shapes=tuple(parameter.shape for _, parameter in named),
            offsets=tuple(ends[:-1]),
            numel=ends[-1],
        )

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters' parts of a buffer [P], each in its own shape: views, so writing to one writes to the buffer."""
        if flat.shape != (self.numel,):
            raise ValueError(f"a buffer of shape {tuple(flat.shape)} does not fit a layout of {self.numel} elements in one dimension")
        return {name: flat[offset : offset + shape.numel()].view(shape) for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True)}

    def buckets(self, max_elements: int) -> Iterator[slice]:
        """Slices of at most `max_elements` that cover [0, P) exactly once, in order, whatever the parameters' boundaries."""
        if max_elements < 1:
            raise ValueError(f"max_elements is {max_elements}: must be at least 1")
        for begin in range(0, self.numel, max_elements):
            yield slice(begin, min(begin + max_elements, self.numel))


def flatten_parameters_(model: nn.Module) -> tuple[FlatLayout, Tensor]:
    """Move the trainable parameters into one contiguous fp32 buffer [P]; every `p.data` becomes a view of it.

    The buffer *is* the model afterwards: an in-place step on one is a step on the other. A model without trainable
    parameters gives an empty buffer.
    """
    layout = FlatLayout.of(model)
    named = _trainable(model)
    device = named[0][1].device if named else torch.device("cpu")
    flat = torch.empty(layout.numel, dtype=torch.float32, device=device)
    views = layout.views(flat)
    with torch.no_grad():
        for name, parameter in named:
            views[name].copy_(parameter)
            parameter.data = views[name]
    return layout, flat


def digest(flat: Tensor) -> int:
    """The sum of a buffer's fp32 bit patterns, read as int32, modulo 2^64 (as a signed 64-bit integer).

    Equal buffers have equal digests on every device, whatever the order of summation; a single changed bit changes it.
    It tells replicas apart that drifted; it is no defence against forgery.
    """
    if flat.dtype is not torch.float32:
        raise ValueError(f"a digest is taken over fp32 elements, not {flat.dtype}")
    bits = flat.detach().reshape(-1).view(torch.int32)
    # chunks: summing int32 in int64 first widens its input, which must not cost twice the model's memory
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, bits.numel(), _DIGEST_CHUNK_ELEMENTS):
        total += bits[begin : begin + _DIGEST_CHUNK_ELEMENTS].sum(dtype=torch.int64)
    return int(total)


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
