"""The order in which sequences are read: a function of integers, and nothing else.

Sample index i lies in epoch e = i // n at place j = i % n; the sequence read is π(j), where π is a permutation of
[0, n) keyed by (seed, e). Membership, prefetching and resuming hold integers only, so none of them can change what is read.
π is a Feistel network (Luby and Rackoff 1988) on a rectangle that holds [0, n), walked along its cycle until it falls inside
(Black and Rogaway 2002): O(1) memory, and integer arithmetic that gives the same answer on every platform.
"""

from __future__ import annotations

import hashlib
import math
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
        # narrow words are several times as fast; which are taken depends on the number of sequences alone
        word = np.uint32 if self.num_sequences <= 1 << 32 else np.uint64
        keys = _keys(self.seed, epoch, np.dtype(word).itemsize)
        values = _feistel(places.astype(word).ravel(), self.num_sequences, keys)
        last = word(self.num_sequences - 1)
        outside = np.flatnonzero(values > last)
        while outside.size:
            walked = _feistel(values[outside], self.num_sequences, keys)
            values[outside] = walked
            outside = outside[walked > last]
        return values.astype(np.int64).reshape(places.shape)


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int, word_bytes: int) -> tuple[np.unsignedinteger[Any], ...]:
    """One word a round, from a hash of (seed, epoch)."""
    digest = hashlib.blake2b(f"sample order {seed} {epoch}".encode(), digest_size=_ROUNDS * word_bytes).digest()
    return tuple(np.frombuffer(digest, dtype=f"<u{word_bytes}").astype(f"u{word_bytes}"))


def _feistel(values: _Words, size: int, keys: tuple[np.unsignedinteger[Any], ...]) -> _Words:
    """A keyed permutation of [0, a b), the smallest rectangle of sides a >= b that holds `size` values.

    A value is written as x b + y. Each round adds a hash of one coordinate to the other, modulo its side, so it can be undone.
    Less than one value in sqrt(size) of the rectangle lies beyond `size`.
    """
    word = values.dtype.type
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    x = values // word(b)
    y = values - x * word(b)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            x = _add(x, _hash(y, key, a), a)
        else:
            y = _add(y, _hash(x, key, b), b)
    return x * word(b) + y


def _add(left: _Words, right: _Words, side: int) -> _Words:
    """left + right modulo `side`, both below it: the difference wraps to a huge number where there is nothing to subtract."""
    total = left + right
    return np.minimum(total, total - left.dtype.type(side))


_MULTIPLIERS = {4: (0x9E3779B1, 0x85EBCA77), 8: (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)}


def _hash(values: _Words, key: np.unsignedinteger[Any], side: int) -> _Words:
    """A number in [0, side) that depends on all bits of value and key: multiplications wrap, and the upper half of the word is scaled."""
    word = values.dtype.type
    half = word(4 * values.dtype.itemsize)
    first, second = _MULTIPLIERS[values.dtype.itemsize]
    mixed = (values ^ key) * word(first)
    mixed ^= mixed >> half
    mixed *= word(second)
    mixed >>= half
    mixed *= word(side)
    mixed >>= half
    return mixed
