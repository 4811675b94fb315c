"""Documents: on which side of the split they are, and how long ones are cut into passages. No files here.

Documents are split into train and validation by a hash of their content, or each document's tail is cut off for validation.
A passage is at most BLOCK_BYTES of one document on one side; the first passage of a document on a side opens it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

BLOCK_BYTES = 1 << 20
HEAD_BYTES = 64 << 10


class Passage(NamedTuple):
    """UTF-8 text of one document on one side; `opens` says that it is the document's first there."""

    text: bytes
    opens: bool
    validation: bool


SKIPPED = Passage(b"", False, False)  # a document without text: counted, not written


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How documents are shared out: by hash, by cutting off every tail, or all to one side; `fraction` is validation's share."""

    mode: Literal["hash", "tail", "train", "validation"]
    fraction: float = 0.0

    def is_validation(self, key: bytes) -> bool:
        """The side of a document, from a hash of its key."""
        if self.mode != "hash":
            return self.mode == "validation"
        number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return number < self.fraction * 2**64

    def cut(self, num_bytes: int) -> int:
        """Where the tail of a document of so many bytes begins."""
        return num_bytes - max(1, int(num_bytes * self.fraction))


def document_key(head: bytes, num_bytes: int) -> bytes:
    """What a document is hashed by: its first 64 KiB and its length, so that a file of any size is placed by reading its head."""
    return num_bytes.to_bytes(8, "little") + head[:HEAD_BYTES]


def cut_document(text: bytes, split: Split, key: bytes | None = None) -> Iterator[Passage]:
    """Passages of a document that is in memory as valid UTF-8."""
    if not text:
        yield SKIPPED
    elif split.mode == "tail":
        cut = _character_start(text, split.cut(len(text)))
        yield from _blocks(text[:cut], validation=False)
        yield from _blocks(text[cut:], validation=True)
    else:
        yield from _blocks(text, split.is_validation(document_key(text, len(text)) if key is None else key))


def _blocks(text: bytes, validation: bool) -> Iterator[Passage]:
    start = 0
    while start < len(text):
        stop = len(text) if len(text) - start <= BLOCK_BYTES else _last_line_end(text, start, start + BLOCK_BYTES)
        yield Passage(text[start:stop], start == 0, validation)
        start = stop


def _last_line_end(text: bytes, start: int, stop: int) -> int:
    """The last place in (start, stop] after a newline, or else before a character."""
    newline = text.rfind(b"\n", start, stop)
    return newline + 1 if newline >= 0 else max(_character_start(text, stop), start + 1)


def _character_start(text: bytes, position: int) -> int:
    """The last place at or before `position` where a UTF-8 character begins."""
    while 0 < position < len(text) and text[position] & 0xC0 == 0x80:
        position -= 1
    return position
