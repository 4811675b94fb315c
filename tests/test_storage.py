"""Laws of locations, small files, probes, metrics files and the lock of a run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pyarrow import fs

from ray_muloco.errors import ConfigError, RunError
from ray_muloco.training import locations, storage
from ray_muloco.training.locations import DirectoryStorage, RemoteStorage, Storage, staged_path
from ray_muloco.training.storage import RunLock, append_metrics, read_metrics, truncate_metrics

# ---- locations


def test_a_plain_path_and_a_file_uri_name_the_same_absolute_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file_system, path = storage.resolve("runs")
    assert isinstance(file_system, fs.LocalFileSystem)
    assert path == str(tmp_path / "runs") == storage.resolve(f"file://{tmp_path}/runs")[1]
    assert storage.local_path("runs") == storage.local_path(f"file://{tmp_path}/runs") == path


def test_an_object_store_uri_resolves_to_bucket_and_key_without_a_connection() -> None:
    file_system, path = storage.resolve("s3://bucket/runs/x?endpoint_override=127.0.0.1:9&scheme=http&region=us-east-1")
    assert (file_system.type_name, path) == ("s3", "bucket/runs/x")
    assert storage.local_path("s3://bucket/runs?region=us-east-1") is None


def test_google_storage_gives_up_after_a_minute_unless_the_uri_says_otherwise() -> None:
    """Its own default retries for fifteen minutes, which a user sees as a hang."""
    assert storage.resolve("gs://bucket/x")[0] == fs.FileSystem.from_uri("gs://bucket/x?retry_limit_seconds=60")[0]
    assert storage.resolve("gs://bucket/x?retry_limit_seconds=5")[0] == fs.FileSystem.from_uri("gs://bucket/x?retry_limit_seconds=5")[0]


@pytest.mark.parametrize("location", ["s3://", "s3:///x", "gs:///x", "s3:/bucket/x", "foo://bucket/x", "fsspec+nosuch://x", "s3://b/with space", "", "  "])
def test_an_unknown_scheme_or_missing_bucket_is_refused_in_one_line(location: str) -> None:
    with pytest.raises(ConfigError) as caught:
        storage.resolve(location)
    assert caught.value.field == "run.storage-path"
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"^data\.source is"):
        storage.resolve(location, field="data.source")


@pytest.mark.parametrize("location", ["/runs/a", "runs/a", "file:///runs/a", "s3://bucket/a?region=us-east-1&scheme=http"])
def test_split_undoes_join_and_the_query_of_a_uri_stays_at_its_end(location: str) -> None:
    joined = storage.join(location, "b", "c.json")
    assert joined.partition("?")[2] == location.partition("?")[2]
    assert storage.split(joined) == (os.path.abspath(os.path.join(location, "b")) if "://" not in location else storage.join(location, "b"), "c.json")


def test_a_uri_has_one_local_directory_and_what_is_below_it_lies_below() -> None:
    parent = "s3://bucket/runs?region=us-east-1"
    assert storage.local_directory(storage.join(parent, "x")) == os.path.join(storage.local_directory(parent), "x")
    assert storage.local_directory(parent) != storage.local_directory("gs://bucket/runs")
    assert os.path.basename(storage.local_directory("s3://bucket/../../runs/x?region=us-east-1")) == "x"
    assert ".." not in storage.local_directory("s3://bucket/../../runs/x?region=us-east-1")


# ---- one interface, every kind of storage


def make_storage(kind: str, root: Path) -> Storage:
    """A storage of each kind that needs no network; the root itself does not exist yet."""
    if kind == "subtree":
        return RemoteStorage("subtree://x", fs.SubTreeFileSystem(str(root), fs.LocalFileSystem()), "below")
    if kind == "mock":
        return RemoteStorage("mock://x", fs._MockFileSystem(), "below")
    prefix = {"directory": "", "file": "file://", "fsspec-file": "fsspec+file://", "fsspec-memory": "fsspec+memory://"}[kind]
    return storage.open_storage(f"{prefix}{root}/below")


@pytest.fixture(params=["directory", "file", "subtree", "mock", "fsspec-file", "fsspec-memory"])
def any_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return make_storage(request.param, tmp_path)


def test_a_file_has_nothing_below_it(any_storage: Storage) -> None:
    """Where a file is in the way there is no checkpoint, which is for the caller to say, and no failure of the storage."""
    any_storage.make_directory("")
    any_storage.write_bytes("a", b"")
    for storage_below in (storage_at(any_storage, "a"), storage_at(any_storage, "a/b")):
        assert storage_below.list_names() == []
        assert storage_below.read_bytes("x") is None


def storage_at(parent: Storage, name: str) -> Storage:
    """The storage of something below another's location."""
    if isinstance(parent, RemoteStorage):
        return RemoteStorage(f"{parent.location}/{name}", parent._fs, parent._path(name))
    return DirectoryStorage(os.path.join(parent.location, name))


@pytest.mark.parametrize("scheme", ["", "file://", "fsspec+file://"])
def test_that_a_place_can_be_written_is_found_out_without_a_trace(tmp_path: Path, scheme: str) -> None:
    (tmp_path / "file").write_text("in the way")
    for place in ("", "/not/yet"):
        storage.require_writable(f"{scheme}{tmp_path}{place}")
    for place in ("/file", "/file/runs"):
        with pytest.raises(ConfigError, match=r"^output is '.*': (must be a directory, and .*file is a file|cannot be used; .*Not a directory)"):
            storage.require_writable(f"{scheme}{tmp_path}{place}", field="output")
    with pytest.raises(ConfigError, match=r"^run\.storage-path is '.*/proc/runs': cannot be used"):
        storage.require_writable(f"{scheme}/proc/runs")
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


def test_an_object_store_is_tried_where_the_runs_will_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permission often ends at a prefix of the bucket, so what lies above it must not be tried."""
    written: list[str] = []

    class Store:
        type_name = "s3"

    class Recorder(RemoteStorage):
        def write_bytes(self, name: str, data: bytes) -> None:
            written.append(self._path(name))

        def delete_file(self, name: str) -> None:
            written.remove(self._path(name))
            written.append("deleted")

    monkeypatch.setattr(storage, "resolve", lambda location, field: (Store(), "bucket/team/runs"))
    monkeypatch.setattr(storage, "open_storage", lambda location, field: Recorder(location, fs.LocalFileSystem(), "bucket/team/runs"))
    storage.require_writable("s3://bucket/team/runs")
    assert written == ["deleted"]


def test_what_is_written_is_read_listed_measured_and_deleted(any_storage: Storage, tmp_path: Path) -> None:
    assert any_storage.list_names() == []
    assert any_storage.read_bytes("a.json") is None
    assert any_storage.size("a.json") is None
    any_storage.make_directory("deep/er")
    any_storage.write_bytes("a.json", b"one")
    any_storage.write_bytes("a.json", b"two!")
    written = any_storage.create("deep/er/b.bin", lambda stream: stream.write(b"x" * 10), str(tmp_path / "staging"))
    assert (any_storage.read_bytes("a.json"), any_storage.size("a.json"), written, any_storage.size("deep/er/b.bin")) == (b"two!", 4, 10, 10)
    assert any_storage.list_names() == ["a.json", "deep"]
    assert any_storage.size("deep") is None
    with any_storage.open("deep/er/b.bin") as stream:
        assert stream.read(4) + stream.read() == b"x" * 10
    for _ in range(2):  # what is gone already is no error
        any_storage.delete_file("a.json")
        any_storage.delete_tree("deep")
    assert any_storage.list_names() == []


def test_a_write_that_fails_leaves_nothing_behind(any_storage: Storage, tmp_path: Path) -> None:
    any_storage.make_directory("")

    def half(stream: object) -> None:
        stream.write(b"half of it")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"^storage: cannot write .*b\.bin.*No space left") as caught:
        any_storage.create("b.bin", half, str(tmp_path / "staging"))
    assert caught.value.reason == "storage"
    assert any_storage.list_names() == []
    assert not (tmp_path / "staging").exists() or os.listdir(tmp_path / "staging") == []


def test_a_directory_that_a_node_does_not_see_is_not_made_but_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="every node must see"):
        DirectoryStorage(str(tmp_path)).create("absent/b.bin", lambda stream: stream.write(b"x"), "")
    assert os.listdir(tmp_path) == []


def test_files_are_readable_by_whoever_the_umask_allows(tmp_path: Path) -> None:
    """Shared storage has other readers than the writer."""
    before = os.umask(0o022)
    try:
        storage.atomic_write_text(str(tmp_path / "a.json"), "x")
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o644


def test_staged_files_of_dead_processes_are_swept_and_of_living_ones_left(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = locations.socket.gethostname()
    for pid in (dead.pid, os.getppid()):
        (tmp_path / f"ray_muloco-{host}-{pid}-ab.stage").touch()
    (tmp_path / "other.stage").touch()
    with staged_path(str(tmp_path)) as path:
        Path(path).touch()
        assert sorted(os.listdir(tmp_path)) == sorted([os.path.basename(path), "other.stage", f"ray_muloco-{host}-{os.getppid()}-ab.stage"])
    assert not os.path.exists(path)


# ---- small files


def test_a_reader_of_a_file_being_replaced_sees_old_or_new_never_a_part(tmp_path: Path) -> None:
    path = str(tmp_path / "result.json")
    texts = {letter * 300_000 for letter in "ab"}
    storage.atomic_write_text(path, "a" * 300_000)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for text in texts:
                storage.atomic_write_text(path, text)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert {storage.read_text(path) for _ in range(150)} <= texts
    finally:
        stop.set()
        writer.join()
    assert os.listdir(tmp_path) == ["result.json"]


@pytest.mark.parametrize("scheme", ["", "file://", "fsspec+memory://"])
def test_small_files_go_to_a_location_and_come_back(scheme: str, tmp_path: Path) -> None:
    location, here, back = f"{scheme}{tmp_path}/run", str(tmp_path / "here"), str(tmp_path / "back")
    names = ("config.json", "metrics.jsonl", "result.json")
    storage.atomic_write_text(storage.join(here, "config.json"), "{}")
    storage.atomic_write_text(storage.join(here, "metrics.jsonl"), "Δ\n")
    storage.upload(here, location, names)
    storage.atomic_write_text(storage.join(back, "result.json"), "mine")
    storage.download(location, back, names)
    assert [storage.read_text(storage.join(back, name)) for name in names] == ["{}", "Δ\n", "mine"]
    storage.upload(here, storage.local_path(here) or "", names)
    assert storage.list_names(location) == ["config.json", "metrics.jsonl"]
    for _ in range(2):
        storage.remove(storage.join(location, "config.json"))
    assert storage.list_names(location) == ["metrics.jsonl"]
    assert storage.read_text(storage.join(location, "config.json")) is None


@pytest.mark.parametrize("scheme", ["", "file://", "fsspec+memory://"])
def test_a_probe_is_seen_where_it_was_written_and_nowhere_else(scheme: str, tmp_path: Path) -> None:
    location = f"{scheme}{tmp_path}/shared"
    token = storage.write_probe(location)
    assert storage.check_probe(location, token)
    assert not storage.check_probe(f"{scheme}{tmp_path}/private", token)
    assert not storage.check_probe(location, "0" * 16)
    storage.remove_probe(location, token)
    assert not storage.check_probe(location, token)
    assert storage.list_names(location) == []


def test_a_location_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for use in (storage.write_probe, lambda location: RunLock(location, 0.0)):
        with pytest.raises(ConfigError, match=r"^run\.storage-path is .*writable"):
            use(str(tmp_path / "file" / "runs"))


# ---- metrics.jsonl


def test_a_resumed_run_keeps_the_lines_of_its_checkpoint_and_drops_later_and_torn_ones(tmp_path: Path) -> None:
    path = str(tmp_path / "metrics.jsonl")
    assert truncate_metrics(path, 3) == 0
    assert read_metrics(path) == []
    for round_number in range(1, 6):
        append_metrics(path, {"round": round_number, "train_loss": 5.0 / round_number})
    with open(path, "a") as stream:
        stream.write('{"round": 2, "tra')  # killed in the middle of a line
    assert [record["round"] for record in read_metrics(path)] == [1, 2, 3, 4, 5]
    assert truncate_metrics(path, 3) == 3
    append_metrics(path, {"round": 4})
    with open(path) as stream:
        assert [json.loads(line)["round"] for line in stream] == [1, 2, 3, 4]
    assert truncate_metrics(path, 0) == 0
    assert os.path.getsize(path) == 0


def test_numbers_that_json_cannot_say_become_null(tmp_path: Path) -> None:
    path = str(tmp_path / "metrics.jsonl")
    append_metrics(path, {"round": 1, "train_loss": float("nan"), "norms": (1.0, float("inf")), "deep": {"x": float("-inf")}, "reasons": ["Δ\n"]})
    with open(path) as stream:
        lines = stream.readlines()
    assert len(lines) == 1
    assert json.loads(lines[0], parse_constant=pytest.fail) == {"round": 1, "train_loss": None, "norms": [1.0, None], "deep": {"x": None}, "reasons": ["Δ\n"]}


# ---- the lock

_HOLDER = "import sys, time; from ray_muloco.training.storage import RunLock; lock = RunLock(sys.argv[1], 30.0); print(lock.token, flush=True); time.sleep(60)"


def test_a_second_writer_in_the_same_process_is_told_who_holds_the_lock_and_gives_up(tmp_path: Path) -> None:
    messages: list[str] = []
    with RunLock(str(tmp_path), 0.0) as lock:
        with pytest.raises(RunError, match=f"process {os.getpid()} on .*; waited 0.3 s") as caught:
            RunLock(str(tmp_path), 0.3, on_wait=messages.append)
        lock.check()
    assert caught.value.reason == "locked"
    assert len(messages) == 1
    assert f"process {os.getpid()} " in messages[0]
    RunLock(str(tmp_path), 0.0).release()


def test_a_waiting_writer_gets_the_lock_when_it_is_released(tmp_path: Path) -> None:
    first = RunLock(str(tmp_path), 0.0)
    waiting = threading.Event()
    releaser = threading.Thread(target=lambda: (waiting.wait(), first.release()))
    releaser.start()
    with RunLock(str(tmp_path), 30.0, on_wait=lambda message: waiting.set()) as second:
        assert second.token == first.token + 1
        second.check()
        with pytest.raises(RunError, match=r"^fenced"):
            first.check()
    releaser.join()


def test_the_lock_of_a_killed_process_is_free_and_the_token_only_grows(tmp_path: Path) -> None:
    tokens = [0]
    for _ in range(2):
        holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        tokens.append(int(holder.stdout.readline()))
        with pytest.raises(RunError, match=f"process {holder.pid} "):
            RunLock(str(tmp_path), 0.0)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
        with RunLock(str(tmp_path), 0.0) as lock:
            tokens.append(lock.token)
    assert tokens == [0, 1, 2, 3, 4]


def test_of_many_writers_one_at_a_time_holds_the_lock(tmp_path: Path) -> None:
    holders: list[int] = []
    tokens: list[int] = []

    def write(seed: int) -> None:
        for _ in range(3):
            with RunLock(str(tmp_path), 60.0) as lock:
                holders.append(seed)
                threading.Event().wait(random.Random(seed).uniform(0, 0.002))
                assert holders == [seed]
                holders.clear()
                tokens.append(lock.token)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokens == list(range(1, 13))


def test_a_writer_whose_lock_file_was_deleted_or_taken_over_is_fenced(tmp_path: Path) -> None:
    """A deleted run directory and a network file system that lost the lock: two processes believe they write."""
    first = RunLock(str(tmp_path / "a"), 0.0)
    os.unlink(first.path)
    with pytest.raises(RunError, match=r"^fenced: .*deleted"):
        first.check()
    second = RunLock(str(tmp_path / "a"), 0.0)
    with pytest.raises(RunError, match=r"^fenced"):
        first.check()
    second.check()
    record = json.loads(Path(second.path).read_text()) | {"token": 7, "pid": 1, "host": "elsewhere"}
    Path(second.path).write_text(json.dumps(record))
    with pytest.raises(RunError, match=r"^fenced: .* process 1 on elsewhere"):
        second.check()
    second.release()
    assert RunLock(str(tmp_path / "a"), 0.0).token == 8


def test_a_release_lets_the_next_writer_in_even_if_a_forked_child_still_lives(tmp_path: Path) -> None:
    lock = RunLock(str(tmp_path), 0.0)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:  # lives until the pipe closes, with a copy of every descriptor
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    lock.release()
    lock.release()
    try:
        RunLock(str(tmp_path), 0.0).release()
    finally:
        os.close(write_end)
        os.close(read_end)
        os.waitpid(child, 0)
