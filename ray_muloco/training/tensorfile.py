"""Named tensors as safetensors files, written in one pass in bounded memory, hashed on the way.

The format (https://huggingface.co/docs/safetensors): 8 bytes of header length, little-endian; a JSON header that gives
each tensor's dtype, shape and byte range; the bytes. The library reads these files; it does not write them here, because
its writer needs a second pass for the hash, orders metadata at random (the same state would have another hash each time)
and makes files that only their owner may read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ray_muloco.errors import RunError

_CHUNK_BYTES = 4 << 20
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a manifest knows of a file: enough to tell whether it is whole."""

    name: str
    num_bytes: int
    sha256: str


def write_tensor_stream(stream: BinaryIO, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write named tensors of any device, shape and layout; equal input gives equal bytes. `name` goes into the record.

    Copies at most one tensor at a time, and that only if it is not contiguous in CPU memory.
    """
    names = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))  # wide types first keeps all of them aligned
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for key in names:
        tensor = tensors[key]
        end = offset + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # data begins at a multiple of 8 bytes
    hasher = hashlib.sha256()
    num_bytes = _write(stream, hasher, memoryview(len(text).to_bytes(8, "little") + text))
    for key in names:
        if tensors[key].numel():
            flat = tensors[key].detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
            num_bytes += _write(stream, hasher, flat.numpy().data)
    return FileRecord(name, num_bytes, hasher.hexdigest())


def _write(stream: BinaryIO, hasher: hashlib._Hash, data: memoryview) -> int:
    for start in range(0, len(data), _CHUNK_BYTES):
        chunk = data[start : start + _CHUNK_BYTES]
        stream.write(chunk)
        hasher.update(chunk)
    return len(data)


def hash_stream(source: BinaryIO, name: str, copy_to: BinaryIO | None = None) -> FileRecord:
    """Size and hash of what a stream holds from here on, copied on the way if a target is given."""
    hasher, num_bytes = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK_BYTES):
        hasher.update(chunk)
        num_bytes += len(chunk)
        if copy_to is not None:
            copy_to.write(chunk)
    return FileRecord(name, num_bytes, hasher.hexdigest())


def read_tensor_file(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a local safetensors file, mapped from it: pages are read when they are used.

    Raises RunError `checkpoint` for a file that is truncated or something else.
    """
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise RunError("checkpoint", f"{os.fspath(path)} cannot be read: {error}") from error
