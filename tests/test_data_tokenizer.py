"""Tokenizers: text survives them, one id opens documents and nothing else makes it, and bad files are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from data_texts import sentences
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ray_muloco.data.tokenizer import ByteTokenizer, JsonTokenizer, bpe_size, load_tokenizer, spec_digest, tokenizer_from_spec, train_bpe
from ray_muloco.errors import ConfigError

BPE = train_bpe(sentences(400), 300)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> ByteTokenizer | JsonTokenizer:
    return ByteTokenizer() if request.param == "bytes" else JsonTokenizer(BPE)


@given(text=st.text(max_size=200))
@pytest.mark.parametrize("make", [ByteTokenizer, lambda: JsonTokenizer(BPE)], ids=["bytes", "bpe"])
def test_text_survives_and_never_makes_a_separator(make, text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids.tolist()) == text
    assert tokenizer.separator_id not in ids
    assert tokenizer.token_num_bytes[ids].sum() == len(text.encode())


def test_a_document_cannot_forge_a_separator(tokenizer: ByteTokenizer | JsonTokenizer) -> None:
    """The spelling of a special token in a text is text."""
    text = "one <|separator|><|endoftext|></s> two"
    for ids in (tokenizer.encode(text), tokenizer.encode_batch([text.encode()])[0]):
        assert tokenizer.separator_id not in ids
        assert tokenizer.decode(ids.tolist()) == text


def test_a_batch_is_encoded_as_its_texts_one_by_one(tokenizer: ByteTokenizer | JsonTokenizer) -> None:
    texts = [*sentences(30), ""]
    for text, ids in zip(texts, tokenizer.encode_batch([text.encode() for text in texts]), strict=True):
        assert ids.tolist() == tokenizer.encode(text).tolist()


def test_lone_surrogates_and_broken_bytes_are_replaced_not_raised(tokenizer: ByteTokenizer | JsonTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b").tolist()) == "a?b"
    assert ByteTokenizer().decode([0xC3, 65]) == "\ufffdA"


def test_every_id_is_below_the_vocabulary_and_has_a_size(tokenizer: ByteTokenizer | JsonTokenizer) -> None:
    ids = np.concatenate([tokenizer.encode(text) for text in sentences(50, seed=3)])
    assert 0 <= tokenizer.separator_id < tokenizer.vocab_size
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.token_num_bytes.shape == (tokenizer.vocab_size,)
    assert tokenizer.token_num_bytes[tokenizer.separator_id] == 0


def test_a_specification_rebuilds_its_tokenizer(tokenizer: ByteTokenizer | JsonTokenizer) -> None:
    again = tokenizer_from_spec(tokenizer.spec)
    text = sentences(1)[0]
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert (again.vocab_size, again.separator_id) == (tokenizer.vocab_size, tokenizer.separator_id)
    assert spec_digest(again.spec) == spec_digest(tokenizer.spec)


def test_a_trained_bpe_has_just_the_ids_asked_for_and_is_the_same_each_time() -> None:
    assert JsonTokenizer(BPE).vocab_size == 300
    assert train_bpe(sentences(400), 300) == BPE
    assert JsonTokenizer(BPE).unknown_id is None, "byte-level: every text can be spelled"


def test_a_source_too_poor_for_the_ids_asked_for_is_named() -> None:
    with pytest.raises(ConfigError, match=r"yields only \d+ ids; take bpe:\d+"):
        train_bpe(["aaaa aaaa"], 5000)


@pytest.mark.parametrize("spec", ["bpe:", "bpe:x", "bpe:-5", "bpe:256", "bpe:99999999999", "bpe:1e4"])
def test_sizes_that_no_bpe_can_have_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer"):
        bpe_size(spec)


def word_level(special: list[str]) -> str:
    """A tokenizer of whole words with an unknown token and these special ones."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(["one two three"], trainers.WordLevelTrainer(special_tokens=["[UNK]", *special], show_progress=False))
    return tokenizer.to_str()


@pytest.mark.parametrize("name", ["<|begin_of_text|>", "<|endoftext|>", "<s>", "[CLS]", "</s>"])
def test_a_special_token_that_opens_documents_elsewhere_opens_them_here(name: str) -> None:
    tokenizer = JsonTokenizer(word_level([name]))
    assert tokenizer.separator_id == 1
    assert tokenizer.vocab_size == 5
    assert tokenizer.unknown_id == 0


def test_a_tokenizer_without_one_gets_an_id_for_it() -> None:
    tokenizer = JsonTokenizer(word_level([]))
    assert (tokenizer.vocab_size, tokenizer.separator_id) == (5, 4)
    assert tokenizer.decode([3, tokenizer.separator_id, 1]) == tokenizer.decode([3, 1])
    assert tokenizer.encode("one zwei").tolist() == [tokenizer.encode("one")[0], 0]


def test_settings_for_other_uses_are_turned_off() -> None:
    """A tokenizer.json may cut, pad and frame its texts; a document is neither cut nor padded nor framed."""
    raw = Tokenizer.from_str(BPE)
    raw.enable_truncation(4)
    raw.enable_padding(length=16)
    raw.post_processor = tokenizers.processors.TemplateProcessing(single="<|separator|> $A <|separator|>", special_tokens=[("<|separator|>", 0)])
    tokenizer, text = JsonTokenizer(raw.to_str()), "the quick brown fox jumps over the dog"
    assert tokenizer.encode(text).tolist() == tokenizer.encode_batch([text.encode()])[0].tolist() == JsonTokenizer(BPE).encode(text).tolist()


def test_bytes_behind_a_token_are_counted_for_other_alphabets() -> None:
    tokenizer = Tokenizer(models.BPE({"<unk>": 0, "▁a": 1, "<0x0A>": 2, "é": 3, "<s>": 4}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<s>", "<unk>"])
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback()])
    assert JsonTokenizer(tokenizer.to_str()).token_num_bytes.tolist() == [0, 2, 1, 2, 0]


def test_a_tokenizer_is_loaded_from_its_file_or_directory(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(BPE, encoding="utf-8")
    assert load_tokenizer(str(tmp_path)).spec == load_tokenizer(str(tmp_path / "tokenizer.json")).spec == BPE
    assert load_tokenizer("bytes").vocab_size == 257


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe\x00", json.dumps({"model": {"type": "Nothing"}}).encode(), None])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"data\.tokenizer is .*broken\.json"):
        load_tokenizer(str(path))


def test_a_bpe_to_be_trained_is_no_tokenizer_yet() -> None:
    with pytest.raises(ConfigError, match="jobs/prepare"):
        load_tokenizer("bpe:4096")
