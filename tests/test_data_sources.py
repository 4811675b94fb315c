"""Sources: whatever the files are and however they are cut into pieces, the same documents come out, or one line that names the file."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_texts import sentences, write_jsonl, write_parquet, write_texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import fs

from ray_muloco.data import corpus
from ray_muloco.data import documents as documents_module
from ray_muloco.data import readers as readers_module
from ray_muloco.data.corpus import SourceFile, find_files, plan_units, source_fingerprint
from ray_muloco.data.documents import SKIPPED, Split
from ray_muloco.data.locations import Location, OutputDirectory, resolve
from ray_muloco.data.readers import passages
from ray_muloco.errors import ConfigError

ALL = Split(mode="train")


def read(source: str | Iterable[SourceFile], split: Split = ALL, column: str = "text", unit_bytes: int = 0) -> tuple[list[str], list[str], int]:
    """Training documents, validation documents, and how many were skipped."""
    files = find_files(source) if isinstance(source, str) else list(source)
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    skipped = 0
    for unit in plan_units(files, column, unit_bytes):
        for piece in unit.pieces:
            for passage in passages(piece, split, column):
                if passage is SKIPPED:
                    skipped += 1
                elif passage.opens:
                    sides[passage.validation].append(passage.text)
                else:
                    sides[passage.validation][-1] += passage.text
    return [text.decode() for text in sides[0]], [text.decode() for text in sides[1]], skipped


# ---- one stream, whatever the files


@pytest.mark.parametrize("unit_bytes", [0, 1, 300, 5000])
def test_text_jsonl_and_parquet_give_the_same_documents(tmp_path: Path, unit_bytes: int) -> None:
    texts = sentences(40)
    sources = [
        write_texts(tmp_path / "texts", texts),
        write_jsonl(tmp_path / "a.jsonl", texts),
        write_parquet(tmp_path / "a.parquet", texts),
    ]
    assert [read(str(source), unit_bytes=unit_bytes) for source in sources] == [(texts, [], 0)] * 3


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    text=st.text(st.sampled_from("ab \n\réß日𝄞"), min_size=1, max_size=400),
    unit_bytes=st.integers(1, 150),
    block=st.integers(8, 64),
    mode=st.sampled_from(["train", "tail", "hash"]),
)
def test_a_text_file_is_one_document_however_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, unit_bytes: int, block: int, mode) -> None:
    """Pieces and blocks end after lines, or else between characters; each side is opened once."""
    monkeypatch.setattr(documents_module, "BLOCK_BYTES", block)
    monkeypatch.setattr(readers_module, "_NEWLINE_REACH_BYTES", 16)
    path = tmp_path / "one.txt"
    path.write_text(text, encoding="utf-8", newline="")
    train, validation, _ = read(str(path), Split(mode=mode, fraction=0.3), unit_bytes=unit_bytes)
    assert "".join(train + validation) == text.removeprefix("\ufeff")
    assert len(train) <= 1 >= len(validation)
    if mode == "tail" and len(text) > 20:
        assert len(validation[0].encode()) == pytest.approx(0.3 * len(text.encode()), abs=5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    texts=st.lists(st.one_of(st.none(), st.text(max_size=30)), max_size=25),
    unit_bytes=st.integers(1, 200),
    block=st.integers(8, 64),
    last=st.booleans(),
)
def test_json_lines_are_documents_however_the_file_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str | None], unit_bytes: int, block: int, last: bool
) -> None:
    monkeypatch.setattr(documents_module, "BLOCK_BYTES", block)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    if not last:
        path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    train, _, skipped = read(str(path), unit_bytes=unit_bytes)
    assert train == [text for text in texts if text]
    assert skipped == sum(not text for text in texts)


def test_columns_of_every_text_type_make_one_stream(tmp_path: Path) -> None:
    """P04: string, large_string, string_view, dictionary, nulls and a column of nulls alone."""
    texts = [*sentences(9), None, ""]
    columns = {
        "a": pa.array(texts, pa.string()),
        "b": pa.array(texts, pa.large_string()),
        "c": pa.array(texts, pa.string()).dictionary_encode(),
        "d": pa.array(texts, pa.large_string()).dictionary_encode(),
        "e": pa.nulls(len(texts)),
        "f": pa.array(texts, pa.string_view()),
    }
    for name, column in columns.items():
        write_parquet(tmp_path / f"{name}.parquet", column, row_group_size=4)
    train, _, skipped = read(str(tmp_path))
    assert train == 5 * [text for text in texts if text]
    assert skipped == 5 * 2 + len(texts)


def test_a_file_without_the_column_is_named_with_the_columns_it_has(tmp_path: Path) -> None:
    """P04: among files that have it."""
    write_parquet(tmp_path / "a.parquet", sentences(3))
    write_parquet(tmp_path / "b.parquet", sentences(3), name="body")
    with pytest.raises(ConfigError, match=r"data\.text-column is 'text'.*b\.parquet.*id, body.*--data\.text-column"):
        read(str(tmp_path))
    assert read(str(tmp_path / "b.parquet"), column="body")[0] == sentences(3)


@pytest.mark.parametrize("column", [pa.array([1, 2, 3]), pa.array([["a"], ["b"], []]), pa.array([b"a", b"b", b"c"])], ids=["numbers", "lists", "bytes"])
def test_a_column_that_is_no_text_is_named_with_its_type(tmp_path: Path, column: pa.Array) -> None:
    write_parquet(tmp_path / "a.parquet", column)
    with pytest.raises(ConfigError, match=r"must hold text, and holds (int64|list|binary).*a\.parquet"):
        read(str(tmp_path))


def test_gzip_and_a_byte_order_mark_are_no_part_of_the_text(tmp_path: Path) -> None:
    texts = sentences(20)
    plain = write_jsonl(tmp_path / "plain.jsonl", texts).read_bytes()
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(plain))
    (tmp_path / "marked.jsonl").write_bytes(b"\xef\xbb\xbf" + plain)
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbf" + texts[0].encode())
    assert read(str(tmp_path / "packed.jsonl.gz"), unit_bytes=100)[0] == texts
    assert read(str(tmp_path / "marked.jsonl"), unit_bytes=100)[0] == texts
    assert read(str(tmp_path / "marked.txt"))[0] == [texts[0]]


# ---- which files


def test_directories_are_read_in_order_without_hidden_and_unknown_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b/c.py", "B.TXT", ".hidden.txt", ".git/x.txt", "image.png", "config.json", "a/._b.txt"):
        write_texts(tmp_path / Path(name).parent, [])
        (tmp_path / name).write_text(name)
    assert read(str(tmp_path))[0] == ["B.TXT", "a/b/c.py", "a/z.md", "b.txt"]


def test_a_file_named_outright_is_text_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("a text")
    write_jsonl(tmp_path / "lines.json", ["a line"])
    assert read(str(tmp_path / "README"))[0] == ["a text"]
    assert read(str(tmp_path / "lines.json"))[0] == ["a line"]


def test_the_embedded_corpus_is_the_standard_library_and_nothing_else() -> None:
    files = find_files("embedded")
    names = [file.name for file in files]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or "/test" in name or "__pycache__" in name or not name.endswith(".py")]
    train, validation, _ = read(files, Split(mode="hash", fraction=0.05))
    assert len(train) > 10 * len(validation) > 0
    assert sum(map(len, train)) > 5_000_000
    assert Path(corpus.embedded_root(), "os.py").read_text(encoding="utf-8") in train + validation


def test_a_plan_and_a_fingerprint_are_functions_of_the_files(tmp_path: Path) -> None:
    """P03: nothing but names and sizes decides where a corpus is cut."""
    write_texts(tmp_path / "a", sentences(30))
    write_parquet(tmp_path / "a" / "p.parquet", sentences(50))
    units = plan_units(find_files(str(tmp_path / "a")), "text", 500)
    assert [unit.number for unit in units] == list(range(len(units)))
    assert len(units) > 3
    assert all(unit.weight <= 500 or len(unit.pieces) == 1 for unit in units)
    assert units == plan_units(find_files(str(tmp_path / "a")), "text", 500)
    before = source_fingerprint(find_files(str(tmp_path / "a")))
    (tmp_path / "a" / "0003.txt").write_text("changed")
    assert source_fingerprint(find_files(str(tmp_path / "a"))) != before


# ---- the split


def test_documents_are_split_by_their_content(tmp_path: Path) -> None:
    """The same document goes to the same side in any file of any format, and about the fraction goes to validation."""
    texts, split = sentences(2000), Split(mode="hash", fraction=0.2)
    train, validation, _ = read(str(write_jsonl(tmp_path / "a.jsonl", texts)), split)
    assert sorted(train + validation) == sorted(texts)
    assert len(validation) == pytest.approx(400, abs=72), "4 standard deviations"
    again = read(str(write_parquet(tmp_path / "a.parquet", texts[::-1])), split)
    assert (again[0][::-1], again[1][::-1]) == (train, validation)
    few = read(str(write_texts(tmp_path / "texts", texts[:50])), split)
    assert set(few[1]) == set(texts[:50]) & set(validation)


def test_a_file_is_on_the_same_side_whole_or_in_pieces(tmp_path: Path) -> None:
    for number, text in enumerate(sentences(12, words=60)):
        path = tmp_path / f"{number}.txt"
        path.write_text(text, encoding="utf-8", newline="")
        whole, pieces = (read(str(path), Split(mode="hash", fraction=0.5), unit_bytes=size) for size in (0, 64))
        assert whole == pieces


def test_tails_are_cut_off_for_validation(tmp_path: Path) -> None:
    texts = sentences(10, words=40)
    train, validation, _ = read(str(write_jsonl(tmp_path / "a.jsonl", texts)), Split(mode="tail", fraction=0.25))
    assert [head + tail for head, tail in zip(train, validation, strict=True)] == texts
    for text, tail in zip(texts, validation, strict=True):
        assert len(tail.encode()) == pytest.approx(len(text.encode()) / 4, abs=5)


# ---- what is wrong, by name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG\r\n\x1a\n\x00\x00", r"is not UTF-8 text \(byte 0\)"),
        (b"text\x00text", r"is not UTF-8 text \(byte 4\)"),
        ("déjà".encode("latin-1"), r"is not UTF-8 text \(byte 1\)"),
        ("text".encode("utf-16"), r"is not UTF-8 text"),
    ],
)
@pytest.mark.parametrize("unit_bytes", [0, 2])
def test_what_is_not_text_is_named(tmp_path: Path, content: bytes, message: str, unit_bytes: int) -> None:
    (tmp_path / "junk.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"junk\.txt': {message}"):
        read(str(tmp_path), unit_bytes=unit_bytes)


@pytest.mark.parametrize("unit_bytes", [0, 40])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken", "not a line of JSON"),
        (b"[1, 2]", "must be a JSON object"),
        (b'{"body": "x"}', "has no key 'text', only body; pass --data.text-column"),
        (b'{"text": 7}', "holds int"),
        (b'{"text": "\xff"}', "not a line of JSON"),
        (b"[" * 100_000, "not a line of JSON"),
    ],
)
def test_a_bad_json_line_is_named_by_file_and_number(tmp_path: Path, unit_bytes: int, line: bytes, message: str) -> None:
    lines = [b'{"text": "a"}'] * 9 + [b"", line] + [b'{"text": "b"}'] * 5
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigError, match=rf"a\.jsonl:11': .*{message}"):
        read(str(tmp_path), unit_bytes=unit_bytes)


@pytest.mark.parametrize("damage", ["empty", "magic alone", "junk", "truncated", "no rows", "half a page"])
def test_a_broken_parquet_file_is_named(tmp_path: Path, damage: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", sentences(50))
    content = bytearray(path.read_bytes())
    if damage == "no rows":
        write_parquet(path, [])
    elif damage == "half a page":
        content[200:260] = b"\xff" * 60
        path.write_bytes(content)
    else:
        path.write_bytes({"empty": b"", "magic alone": b"PAR1 this is not parquet", "junk": b"\0" * 500, "truncated": content[:-80]}[damage])
    with pytest.raises(ConfigError, match=r"data\.source is .*a\.parquet"):
        read(str(path))


def test_a_truncated_gzip_file_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", sentences(200))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes())[:-200])
    with pytest.raises(ConfigError, match=r"b\.jsonl\.gz"):
        read(str(tmp_path / "b.jsonl.gz"))


def test_places_that_do_not_exist_or_hold_nothing_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source, message in ((tmp_path / "nowhere", "does not exist"), (tmp_path / "empty", "holds no text, JSONL or Parquet")):
        with pytest.raises(ConfigError, match=message):
            find_files(str(source))


@pytest.mark.parametrize("uri", ["foo://bucket/x", "http://host/x", "file://host/x", "hdfs://nowhere/x"])
def test_an_address_that_leads_nowhere_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.source is '{uri}'"):
        find_files(uri)


def test_credentials_in_an_address_are_not_repeated() -> None:
    with pytest.raises(ConfigError) as refused:
        find_files("foo://key:hidden-word@bucket/x?token=hidden-word")
    assert "hidden-word" not in str(refused.value)


def test_a_service_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from ray_muloco.data import locations

    release = threading.Event()
    monkeypatch.setattr(locations, "_from_uri", lambda uri: release.wait(60))
    monkeypatch.setattr(locations._within_deadline, "__defaults__", (0.1, False))
    try:
        with pytest.raises(ConfigError, match="did not answer within"):
            find_files("s3://bucket/x")
    finally:
        release.set()


# ---- through pyarrow's file systems


def test_a_uri_and_a_mounted_subtree_are_read_like_the_directory(tmp_path: Path) -> None:
    texts = sentences(25)
    write_texts(tmp_path / "a", texts)
    write_parquet(tmp_path / "a" / "p.parquet", texts)
    expected = read(str(tmp_path / "a"))
    assert read((tmp_path / "a").as_uri()) == expected
    subtree = Location(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "a", "subtree:a")
    assert read(corpus.files_at(subtree), unit_bytes=400) == expected


def test_an_object_store_is_read_like_a_directory(tmp_path: Path) -> None:
    """pyarrow's own in-memory store stands in for s3:// and gs://."""
    texts = sentences(10)
    store = OutputDirectory(resolve("mock://store/corpus"))
    for name, text in zip("abcdefghij", texts, strict=True):
        store.write(f"deep/{name}.txt", text.encode())
    store.write("deep/.hidden/x.txt", b"hidden")
    assert read("mock://store/corpus") == (texts, [], 0)
    with pytest.raises(ConfigError, match="does not exist"):
        read("mock://store/elsewhere")


# ---- memory


def _growth(tmp_path: Path, source: Path) -> int:
    """Bytes by which a fresh process grows while it streams a source."""
    program = f"""
import psutil
from ray_muloco.data.corpus import find_files, plan_units
from ray_muloco.data.documents import Split
from ray_muloco.data.readers import passages
process, highest, count = psutil.Process(), 0, 0
units = plan_units(find_files({str(source)!r}), "text")
before = process.memory_info().rss
for unit in units:
    for piece in unit.pieces:
        for _ in passages(piece, Split(mode="train"), "text"):
            count += 1
            if count % 200 == 0:
                highest = max(highest, process.memory_info().rss)
print(highest - before)
"""
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True).stdout)


def test_parquet_streams_in_the_memory_of_a_few_row_groups(tmp_path: Path) -> None:
    """P01: 200 row groups of 1 MB; holding all of them, or their buffers, would take 200 MB."""
    group = pa.table({"text": [f"{i} " + "x" * 3990 for i in range(250)]})
    with pq.ParquetWriter(tmp_path / "a.parquet", group.schema, compression="none", use_dictionary=False) as writer:
        for _ in range(200):
            writer.write_table(group)
    assert (tmp_path / "a.parquet").stat().st_size > 200e6
    assert _growth(tmp_path, tmp_path / "a.parquet") < 30e6


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_text_and_json_lines_stream_in_the_memory_of_a_few_blocks(tmp_path: Path, name: str) -> None:
    """P01: 64 MB in blocks of 1 MB."""
    line = b'{"text": "' + b"x" * 500 + b'"}\n'
    (tmp_path / name).write_bytes(line * (64_000_000 // len(line)))
    assert _growth(tmp_path, tmp_path / name) < 16e6
