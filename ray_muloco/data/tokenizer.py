"""Text to ids and back: bytes, or any tokenizer.json of the tokenizers library; and training a byte-level BPE.

One id is the document separator. It opens a document: a document is written as [separator] + tokens, and it never comes
out of encoding text, so attention can be confined to documents by looking for it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ray_muloco.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

BYTES = "bytes"
SEPARATOR = "<|separator|>"
# special tokens that other tokenizers open (or part) documents with, the best first
_SEPARATORS = (SEPARATOR, "<|begin_of_text|>", "<|endoftext|>", "<|end_of_text|>", "<bos>", "<s>", "[BOS]", "<eos>", "</s>", "[CLS]", "[SEP]")
SMALLEST_BPE = 257  # 256 bytes and the separator
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer(Protocol):
    """What the rest of the program asks of a tokenizer. `spec` rebuilds it: "bytes", or the text of a tokenizer.json."""

    @property
    def spec(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def separator_id(self) -> int: ...
    @property
    def unknown_id(self) -> int | None: ...
    @property
    def token_num_bytes(self) -> NDArray[np.int32]: ...
    def encode(self, text: str) -> NDArray[np.uint32]: ...
    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[Any]]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8 text, 256 is the separator; nothing is unknown."""

    spec = BYTES
    vocab_size = 257
    separator_id = 256
    unknown_id = None

    @property
    def token_num_bytes(self) -> NDArray[np.int32]:
        """Bytes of text behind each id, [vocab_size]; the separator stands for none."""
        return np.array([1] * 256 + [0], dtype=np.int32)

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Ids of a text, without a separator."""
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.uint32)

    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[np.uint8]]:
        """Ids of several UTF-8 texts, without separators; no copy is made."""
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids: separators vanish, broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", "replace")


class JsonTokenizer:
    """A tokenizer of the tokenizers library, from the text of its tokenizer.json.

    The separator is its special token of that use, or one id above the highest if it has none. The literal spelling of a
    special token inside a text is encoded as ordinary text, so no document can forge a separator.
    Raises ConfigError, naming `name`, if the text is no tokenizer.
    """

    def __init__(self, text: str, name: str = "tokenizer.json") -> None:
        import tokenizers

        try:
            self._tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(text)
            self._settings: dict[str, Any] = json.loads(text)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError("data.tokenizer", name, f"is no tokenizer.json that the tokenizers library reads ({error})") from None
        self.spec = text
        self._num_bytes: NDArray[np.int32] | None = None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ConfigError("data.tokenizer", name, "has no tokens")
        special = {token["content"] for token in self._settings.get("added_tokens") or [] if token.get("special")}
        found = [token for token in _SEPARATORS if token in special and token in vocabulary]
        highest = max(vocabulary.values())
        self.separator_id: int = vocabulary[found[0]] if found else highest + 1
        self.vocab_size: int = highest + (1 if found else 2)
        unknown = self._settings.get("model", {}).get("unk_token")
        if unknown is None and (unknown_index := self._settings.get("model", {}).get("unk_id")) is not None:
            self.unknown_id: int | None = int(unknown_index)
        else:
            self.unknown_id = vocabulary.get(unknown) if unknown else None

    @property
    def token_num_bytes(self) -> NDArray[np.int32]:
        """Bytes of text behind each id, [vocab_size] (exact for byte-level vocabularies); special tokens stand for none."""
        if self._num_bytes is None:
            self._num_bytes = self._count_bytes()
        return self._num_bytes

    def _count_bytes(self) -> NDArray[np.int32]:
        byte_level = _mentions_byte_level(self._settings)
        special = {token["content"] for token in self._settings.get("added_tokens") or [] if token.get("special")}
        added = {token["content"] for token in self._settings.get("added_tokens") or []}
        counts = np.zeros(self.vocab_size, dtype=np.int32)
        for token, index in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if token in special:
                continue
            if _BYTE_TOKEN.fullmatch(token):
                counts[index] = 1
            elif byte_level and token not in added:
                counts[index] = len(token)  # a byte-level alphabet spells each byte with one character
            else:
                counts[index] = len(token.replace("▁", " ").removeprefix("##").encode())
        counts[self.separator_id] = 0
        return counts

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Ids of a text, without a separator or any other special token."""
        clean = text.encode("utf-8", "replace").decode()  # the library refuses lone surrogates
        return np.array(self._tokenizer.encode(clean, add_special_tokens=False).ids, dtype=np.uint32)

    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        """Ids of several UTF-8 texts; in parallel threads, unless TOKENIZERS_PARALLELISM says otherwise."""
        encodings = self._tokenizer.encode_batch_fast([text.decode("utf-8", "replace") for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special tokens vanish."""
        known = [int(i) for i in ids if 0 <= i < self.vocab_size and i != self.separator_id]
        return self._tokenizer.decode(known, skip_special_tokens=True)


def tokenizer_from_spec(spec: str, name: str = "tokenizer.json") -> Tokenizer:
    """The tokenizer whose `spec` this is."""
    return ByteTokenizer() if spec == BYTES else JsonTokenizer(spec, name)


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer of a configuration: `bytes`, or the path of a tokenizer.json (or of the directory that holds one).

    Raises ConfigError when there is no such file or it holds no tokenizer.
    """
    if spec == BYTES:
        return ByteTokenizer()
    if spec.startswith("bpe:"):
        raise ConfigError("data.tokenizer", spec, "is trained while preparing", "run jobs/prepare.py with it, then pass its --output as --data.source")
    path = Path(spec).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ConfigError("data.tokenizer", spec, f"must be 'bytes' or the path of a tokenizer.json ({reason})") from None
    return JsonTokenizer(text, spec)


def bpe_size(spec: str) -> int | None:
    """N of the specification `bpe:N`, None for any other; ConfigError when N is no usable number."""
    if not spec.startswith("bpe:"):
        return None
    digits = spec.removeprefix("bpe:")
    if not digits.isascii() or not digits.isdigit() or not SMALLEST_BPE <= int(digits) <= 2**24:
        raise ConfigError(
            "data.tokenizer", spec, f"bpe:N wants an integer N from {SMALLEST_BPE} (256 bytes and the separator) to {2**24}", "for example bpe:4096"
        )
    return int(digits)


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """The tokenizer.json of a byte-level BPE with `vocab_size` ids, separator included, trained on texts.

    Byte-level: every text can be encoded, nothing is unknown. Raises ConfigError if the texts are too few for so many merges.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[SEPARATOR], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    learned = tokenizer.get_vocab_size(with_added_tokens=True)
    if learned != vocab_size:
        raise ConfigError("data.tokenizer", f"bpe:{vocab_size}", f"the source yields only {learned} ids", f"take bpe:{learned} or less, or more text")
    return tokenizer.to_str()


def spec_digest(spec: str) -> str:
    """A short name of a tokenizer's specification, equal for equal tokenizers."""
    return spec if spec == BYTES else hashlib.sha256(spec.encode()).hexdigest()[:16]


def _mentions_byte_level(settings: dict[str, Any]) -> bool:
    return any('"ByteLevel"' in json.dumps(settings.get(part)) for part in ("pre_tokenizer", "decoder"))
