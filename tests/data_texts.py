"""Small corpora that the data tests write, and the readers they compare with: written anew, without the package's own reading."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from ray_muloco.data.shards import ShardRecord, TokenShards, token_dtype, write_shard

SEPARATOR = 256


def sentences(count: int, seed: int = 0, words: int = 12) -> list[str]:
    """Different texts of ordinary looking words, some of them outside ASCII."""
    rng = np.random.default_rng(seed)
    known = np.array(["the", "quick", "brown", "fox", "jumps", "over", "été", "naïve", "日本", "dog", "and", "\n", "42", "ß"])
    return [f"{i}: " + " ".join(rng.choice(known, size=words)) for i in range(count)]


def write_texts(directory: Path, texts: Iterable[str]) -> Path:
    """One .txt file a text."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (directory / f"{number:04d}.txt").write_text(text, encoding="utf-8", newline="")
    return directory


def write_jsonl(path: Path, texts: Iterable[str | None], key: str = "text") -> Path:
    """One JSON line a text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": number, key: text}) + "\n" for number, text in enumerate(texts)), encoding="utf-8")
    return path


def write_parquet(path: Path, column: pa.Array | Sequence[str | None], row_group_size: int = 7, name: str = "text") -> Path:
    """One Parquet file with an id column beside the text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = column if isinstance(column, pa.Array | pa.ChunkedArray) else pa.array(column, pa.string())
    pq.write_table(pa.table({"id": pa.array(range(len(values))), name: values}), path, row_group_size=row_group_size)
    return path


def write_shards(directory: Path, cuts: Sequence[Sequence[int]], vocab_size: int = 257) -> TokenShards:
    """Shards with just these tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    records = []
    for number, tokens in enumerate(cuts):
        path = directory / f"train-{number:05d}-000.arrow"
        with pa.OSFile(str(path), "wb") as sink:
            write_shard(np.array(tokens, dtype=token_dtype(vocab_size)), sink)
        records.append(ShardRecord(file=path.name, num_tokens=len(tokens), num_bytes=path.stat().st_size, sha256=f"{number}"))
    return TokenShards(directory, records, vocab_size)


def documents(shards: TokenShards) -> list[str]:
    """The texts of a stream of byte tokens, in order."""
    tokens = shards.tokens(0, shards.num_tokens).tolist()
    texts: list[bytearray] = []
    for token in tokens:
        if token == SEPARATOR:
            texts.append(bytearray())
        else:
            texts[-1].append(token)
    return [bytes(text).decode() for text in texts]


def open_files() -> int:
    """File descriptors of this process."""
    return psutil.Process().num_fds()
