"""The order in which sequences are read: a function of integers, and nothing else.

Sample index i lies in epoch e = i // n at place j = i % n; the sequence read is π(j), where π is a permutation of
[0, n) keyed by (seed, e). Membership, prefetching and resuming hold integers only, so none of them can change what is read.
π is a Feistel network over the bits of j (Luby and Rackoff 1988), walked along its cycle until it falls inside [0, n)
(Black and Rogaway 2002): O(1) memory, and integer arithmetic that gives the same answer on every platform.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
# places permuted at once: a batch asks for neighbours, and NumPy takes as long for few numbers as for many
_BLOCK, _KEPT_BLOCKS = 4096, 4
_Words = NDArray[np.unsignedinteger[Any]]


class SampleOrder:
    """Maps sample indices to sequence numbers: every epoch a complete permutation, epochs in different orders.

    The same (seed, num_sequences, index) gives the same sequence wherever and in whatever company it is asked for.
    Raises ValueError if num_sequences is below 1 or an index is negative.
    """

    def __init__(self, seed: int, num_sequences: int) -> None:
        if num_sequences < 1:
            raise ValueError(f"num_sequences is {num_sequences}: an order needs at least one sequence")
        self.seed, self.num_sequences = seed, num_sequences
        self._kept: dict[tuple[int, int], NDArray[np.int64]] = {}

    def sequence_indices(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sequence numbers, in [0, num_sequences), of sample indices i >= 0 of any epochs; shapes are equal."""
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size == 0:
            return indices.copy()
        low, high = int(indices.min()), int(indices.max())
        if low < 0:
            raise ValueError(f"sample index {low} is negative")
        first, last = low // self.num_sequences, high // self.num_sequences
        if first == last:
            places = indices - first * self.num_sequences
            block, end = (low - first * self.num_sequences) // _BLOCK, (high - first * self.num_sequences) // _BLOCK
            if end == block:
                return self._block(first, block)[places - block * _BLOCK]
            if end == block + 1:
                return np.concatenate([self._block(first, block), self._block(first, end)])[places - block * _BLOCK]
            return self._permute(places, first)
        epochs, places = np.divmod(indices, self.num_sequences)
        result = np.empty_like(indices)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            result[chosen] = self._permute(places[chosen], epoch)
        return result

    def _block(self, epoch: int, block: int) -> NDArray[np.int64]:
        """The permuted places of a block, kept for the calls that follow."""
        if (epoch, block) not in self._kept:
            while len(self._kept) >= _KEPT_BLOCKS:
                del self._kept[next(iter(self._kept))]
            start = block * _BLOCK
            self._kept[epoch, block] = self._permute(np.arange(start, min(start + _BLOCK, self.num_sequences)), epoch)
        return self._kept[epoch, block]

    def _permute(self, places: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        bits = max(2, (self.num_sequences - 1).bit_length())
        # narrow words are several times as fast; which are taken depends on the number of sequences alone
        width = np.uint32 if bits <= 32 else np.uint64
        keys = _keys(self.seed, epoch, np.dtype(width).itemsize)
        values = _feistel(places.astype(width), bits, keys)
        last = width(self.num_sequences - 1)
        outside = np.flatnonzero(values > last)
        while outside.size:  # the domain is below 2n, so each walk leaves less than half of them outside
            walked = _feistel(values.flat[outside], bits, keys)
            values.flat[outside] = walked
            outside = outside[walked > last]
        return values.astype(np.int64)


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int, word_bytes: int) -> tuple[np.unsignedinteger[Any], ...]:
    """One word a round, from a hash of (seed, epoch)."""
    digest = hashlib.blake2b(f"sample order {seed} {epoch}".encode(), digest_size=_ROUNDS * word_bytes).digest()
    return tuple(np.frombuffer(digest, dtype=f"<u{word_bytes}").astype(f"u{word_bytes}"))


def _feistel(values: _Words, bits: int, keys: tuple[np.unsignedinteger[Any], ...]) -> _Words:
    """A keyed permutation of [0, 2^bits). Each round changes one half by a hash of the other, so it can be undone.

    The halves hold bits // 2 and bits - bits // 2 bits and take turns, so odd numbers of bits need no padding.
    """
    word = values.dtype.type
    right_bits = bits // 2
    left_bits = bits - right_bits
    left_mask, right_mask = word((1 << left_bits) - 1), word((1 << right_bits) - 1)
    left, right = values >> word(right_bits), values & right_mask
    for number, key in enumerate(keys):
        if number % 2 == 0:
            left ^= _hash(right, key) & left_mask
        else:
            right ^= _hash(left, key) & right_mask
    left <<= word(right_bits)
    return left | right


_MULTIPLIERS = {4: (0x9E3779B1, 0x85EBCA77), 8: (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)}


def _hash(values: _Words, key: np.unsignedinteger[Any]) -> _Words:
    """A mixing function of (value, key) whose low bits depend on all of them; multiplications wrap."""
    word = values.dtype.type
    shift = word(4 * values.dtype.itemsize)
    mixed = values ^ key
    for multiplier in _MULTIPLIERS[values.dtype.itemsize]:
        mixed *= word(multiplier)
        mixed ^= mixed >> shift
    return mixed
