"""Whether all members are about to exchange the same thing, decided from what each says it is about to exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor


def pack(description: str, num_bytes: int) -> Tensor:
    """A description as uint8 [num_bytes], padded with zeros; longer ones are a ValueError."""
    encoded = description.encode()
    if len(encoded) > num_bytes:
        raise ValueError(f"a description takes at most {num_bytes} bytes: {description!r}")
    return torch.frombuffer(bytearray(encoded.ljust(num_bytes, b"\0")), dtype=torch.uint8)


def unpack(row: Tensor) -> str:
    """The description in a packed row."""
    return bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")


def disagreement(descriptions: Sequence[str]) -> str:
    """A sentence naming the ranks that say something else than most (rank 0 in a tie), or nothing when all agree."""
    counts = Counter(descriptions)
    if len(counts) <= 1:
        return ""
    most = max(counts.values())
    truth = next(said for said in descriptions if counts[said] == most)
    odd = [f"rank {rank} has {said!r}" for rank, said in enumerate(descriptions) if said != truth]
    return f"{' and '.join(odd)} where the others have {truth!r}"
