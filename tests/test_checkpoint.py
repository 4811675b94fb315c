"""Laws of checkpoints: complete or absent, never backwards, everything of one commit, damage named."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from saves import FILES, assert_whole, contents, save, write_files
from torch import Tensor

from ray_muloco import presets
from ray_muloco.config import TrainConfig
from ray_muloco.errors import ConfigError, RunError
from ray_muloco.training import checkpoint, locations
from ray_muloco.training.checkpoint import CheckpointRef, CheckpointStore, FileRecord, export_weights, load_weights, open_checkpoint, write_tensors
from ray_muloco.training.storage import join, list_names
from ray_muloco.training.tensorfile import read_tensor_file, write_tensor_stream


@pytest.fixture(params=["directory", "file", "fsspec-file", "fsspec-memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    """A store of two checkpoints on a directory, and on everything else that needs no network."""
    prefix = {"directory": "", "file": "file://", "fsspec-file": "fsspec+file://", "fsspec-memory": "fsspec+memory://"}[request.param]
    return CheckpointStore(f"{prefix}{tmp_path}/run/checkpoints", staging_dir=str(tmp_path / "staging"), keep=2)


@pytest.fixture
def local(tmp_path: Path) -> CheckpointStore:
    """A store of two checkpoints on a directory."""
    return CheckpointStore(str(tmp_path / "run" / "checkpoints"), staging_dir=str(tmp_path / "staging"), keep=2)


# ---- tensor files


def written(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> tuple[bytes, FileRecord]:
    stream = io.BytesIO()
    record = write_tensor_stream(stream, "x.safetensors", tensors, metadata or {})
    return stream.getvalue(), record


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(
    st.dictionaries(st.text(min_size=1, max_size=8).filter(lambda key: key != "__metadata__"), st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6),
    st.integers(0, 2**31),
)
def test_the_safetensors_library_reads_what_is_written_bit_for_bit(description: dict[str, tuple[torch.dtype, tuple[int, ...]]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)
        for name, (dtype, shape) in description.items()
    }
    data, record = written(tensors, {"b": "2", "a": "Δ"})
    assert record == FileRecord("x.safetensors", len(data), hashlib.sha256(data).hexdigest())
    loaded = safetensors.torch.load(data)
    assert {name: (t.dtype, t.shape) for name, t in loaded.items()} == {name: (t.dtype, t.shape) for name, t in tensors.items()}
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_equal_state_gives_equal_bytes_whatever_the_order_it_is_given_in() -> None:
    tensors = {"b": torch.arange(3), "a": torch.ones((), dtype=torch.bfloat16), "c": torch.zeros(0)}
    first, _ = written(tensors, {"x": "1", "y": "2"})
    second, _ = written(dict(reversed(tensors.items())), {"y": "2", "x": "1"})
    assert first == second


def test_views_strides_and_large_tensors_are_written_as_they_look(tmp_path: Path) -> None:
    flat = torch.arange(3_000_000, dtype=torch.float32)  # 12 MB: several chunks
    tensors = {
        "view": flat[2:8].view(2, 3),
        "transposed": flat[:6].view(2, 3).T,
        "strided": flat[::1000],
        "all": flat,
        "grad": flat[:3].clone().requires_grad_(),
    }
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as stream:
        write_tensor_stream(stream, path.name, tensors, {})
    loaded = read_tensor_file(path)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)
    assert np.array_equal(safetensors.numpy.load_file(path)["all"], flat.numpy())


# ---- one checkpoint


def test_a_checkpoint_exists_from_the_moment_its_manifest_does(store: CheckpointStore) -> None:
    assert store.latest() is None
    assert store.all() == []
    name = store.begin(1)
    records = write_files(store, name, 1)
    assert store.latest() is None
    ref = store.commit(name, {"cursor": 10}, records)
    assert name == "round-000001"
    assert_whole(ref)
    assert store.all() == [ref] == [store.latest()]
    assert ref.files == {record.name: record for record in records}
    assert not os.path.exists(store.staging_dir) or os.listdir(store.staging_dir) == []


def test_what_the_manifest_was_given_comes_back_and_a_reference_travels_between_processes(store: CheckpointStore) -> None:
    name = store.begin(3)
    manifest = {"cursor": 2**62, "lr": 0.1, "loss": math.inf, "returned_ranges": [(1, 2, 0)], "replicas": [0, 3], "mlflow_run_id": None, "text": "Δ"}
    store.commit(name, manifest, write_files(store, name, 3))
    found = CheckpointStore(store.location, staging_dir=store.staging_dir, keep=1).latest()
    assert found is not None
    assert {key: found.manifest[key] for key in manifest} == {**manifest, "returned_ranges": [[1, 2, 0]]}
    assert (found.round, found.manifest["round"], found.name, found.manifest["name"]) == (3, 3, name, name)
    assert pickle.loads(pickle.dumps(found)).read_tensors("replica-3.safetensors")["steps"].item() == 3


def test_tensors_read_stay_readable_when_their_checkpoint_is_gone(store: CheckpointStore) -> None:
    tensors = save(store, 1).read_tensors("model.safetensors")
    for round_number in range(2, 5):
        save(store, round_number)
    assert store.all()[0].round == 3
    assert bool((tensors["weight"] == 1).all())


def test_keep_2_of_4_replicas_after_10_saves_leaves_2_whole_sets_and_nothing_else(store: CheckpointStore) -> None:
    """K02: per-replica files were never purged."""
    for round_number in range(1, 11):
        save(store, round_number)
        assert [ref.round for ref in store.all()] == [*range(max(1, round_number - 1), round_number + 1)]
    for ref in store.all():
        assert_whole(ref)
        assert sorted(list_names(ref.path)) == sorted([*FILES, "manifest.json"])
    assert list_names(store.location) == ["round-000009", "round-000010", "writer.json"]


def test_keep_1_leaves_the_newest_and_never_none(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), staging_dir=str(tmp_path / "staging"), keep=1)
    for round_number in (1, 2, 30, 999_999, 1_000_000):
        save(store, round_number)
        assert [ref.round for ref in store.all()] == [round_number]
    with pytest.raises(ConfigError, match=r"checkpoint\.keep"):
        CheckpointStore(str(tmp_path), staging_dir=str(tmp_path), keep=0)


# ---- unfinished saves


def test_a_crash_between_the_writes_resumes_model_and_data_position_from_one_commit(store: CheckpointStore) -> None:
    """P07: the model of step 500 with the data of step 501, because each had a newest of its own."""
    save(store, 5)
    name = store.begin(6)
    for count in range(len(FILES) + 1):  # killed after `count` files of round 6, all of them included
        for file in FILES[:count]:
            write_tensors(store.location, name, file, contents(6), {}, store.staging_dir)
        found = CheckpointStore(store.location, staging_dir=store.staging_dir, keep=2).latest()
        assert found is not None
        assert found.round == 5
        assert_whole(found)


def test_beginning_and_committing_remove_what_unfinished_saves_left(store: CheckpointStore) -> None:
    save(store, 1)
    for round_number in (2, 3):
        write_files(store, CheckpointStore(store.location, staging_dir=store.staging_dir, keep=2).begin(round_number), round_number)
    again = CheckpointStore(store.location, staging_dir=store.staging_dir, keep=2)
    name = again.begin(3)
    assert set(list_names(store.location)) <= {"round-000001", name, "writer.json"}
    again.commit(name, {"cursor": 30}, write_files(again, name, 3))
    assert [ref.round for ref in again.all()] == [1, 3]
    assert_whole(again.all()[-1])


def test_a_save_on_its_way_is_not_debris_to_the_one_that_begins_after_it(store: CheckpointStore) -> None:
    first = store.begin(1)
    records = write_files(store, first, 1)
    save(store, 2)
    assert_whole(store.commit(first, {"cursor": 10}, records))


def test_a_replica_still_writing_for_a_save_that_was_given_up_cannot_touch_the_next(store: CheckpointStore) -> None:
    abandoned = store.begin(4)
    name = store.begin(4)
    assert name != abandoned
    records = write_files(store, name, 4)
    with contextlib.suppress(RunError):  # a directory that is gone; object stores have none to miss
        write_tensors(store.location, abandoned, FILES[-1], contents(99), {}, store.staging_dir)
    assert_whole(store.commit(name, {"cursor": 40}, records))
    save(store, 5)
    assert [ref.name for ref in store.all()] == [name, "round-000005"]


def test_a_replica_that_dies_in_a_write_leaves_no_part_of_a_file(local: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    name = local.begin(1)

    def full_disk(stream: io.BufferedWriter, *_: object) -> FileRecord:
        stream.write(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensor_stream", full_disk)
    with pytest.raises(RunError, match="No space left"):
        write_tensors(local.location, name, FILES[0], contents(1), {}, local.staging_dir)
    assert list_names(join(local.location, name)) == []


def test_a_commit_refuses_files_that_the_coordinator_does_not_see(store: CheckpointStore) -> None:
    """A storage path that is a different disk on each node looks like this."""
    name = store.begin(1)
    records = write_files(store, name, 1)
    for record in (FileRecord("replica-9.safetensors", 10, "0" * 64), FileRecord(FILES[0], records[0].num_bytes + 1, "0" * 64)):
        with pytest.raises(RunError, match=rf"^storage: {record.name} .*as seen from the coordinator"):
            store.commit(name, {}, [record])
    assert store.latest() is None


def test_a_writer_that_was_taken_over_can_no_longer_commit(store: CheckpointStore) -> None:
    """Object stores have no locks: two machines may believe they write one run. The one that began last does."""
    save(store, 1)
    name = store.begin(2)
    other = CheckpointStore(store.location, staging_dir=store.staging_dir, keep=2)
    save(other, 2)
    with pytest.raises(RunError, match=rf"^fenced: .*taken over by process {os.getpid()} on "):
        store.commit(name, {"cursor": 0}, [])
    with pytest.raises(RunError, match=r"^fenced"):
        store.begin(3)  # which would clear away what the other is writing
    assert [ref.round for ref in other.all()] == [1, 2]
    name = other.begin(3)
    locations.open_storage(other.location).delete_file("writer.json")
    with pytest.raises(RunError, match=r"^fenced: .*writer\.json.* is gone"):
        other.commit(name, {}, [])


# ---- damage


def damage(ref: CheckpointRef, file: str, change: Callable[[bytes], bytes]) -> None:
    storage = locations.open_storage(ref.path)
    storage.write_bytes(file, change(storage.read_bytes(file) or b""))


def flip(data: bytes) -> bytes:
    """One bit of the last byte, which is tensor data."""
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("change", [flip, lambda data: data[:-1], lambda data: data + b"\0", lambda data: b""], ids=["flipped", "shorter", "longer", "empty"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_taken(
    store: CheckpointStore, change: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    for round_number in (1, 2):
        ref = save(store, round_number)
    damage(ref, "replica-2.safetensors", change)
    with pytest.raises(RunError, match=r"^checkpoint: .*replica-2\.safetensors.* is damaged") as caught:
        ref.read_tensors("replica-2.safetensors")
    assert caught.value.reason == "checkpoint"
    assert ref.read_tensors("model.safetensors")["steps"].item() == 2
    resumed = CheckpointStore(store.location, staging_dir=store.staging_dir, keep=2)
    found = resumed.latest()
    assert found is not None
    assert_whole(found)
    assert found.round == 1
    assert "replica-2.safetensors" in caplog.text
    # The run goes on from round 1, and its history replaces the damaged one.
    again = save(resumed, 2)
    assert [r.name for r in resumed.all()] == ["round-000001", again.name]
    assert_whole(again)
    save(resumed, 3)
    assert [r.name for r in resumed.all()] == [again.name, "round-000003"]


def test_a_missing_file_is_damage_and_a_file_never_written_is_named_with_those_there_are(store: CheckpointStore) -> None:
    ref = save(store, 1)
    locations.open_storage(ref.path).delete_file("outer.safetensors")
    with pytest.raises(RunError, match=r"outer\.safetensors.* is missing"):
        ref.read_tensors("outer.safetensors")
    with pytest.raises(RunError, match=r"has no file replica-7\.safetensors; it has model"):
        ref.read_tensors("replica-7.safetensors")


def test_when_every_checkpoint_is_damaged_the_run_is_not_begun_anew(store: CheckpointStore) -> None:
    for round_number in (1, 2):
        damage(save(store, round_number), "model.safetensors", flip)
    fresh = CheckpointStore(store.location, staging_dir=store.staging_dir, keep=2)
    with pytest.raises(RunError, match=r"no checkpoint at .* can be read; .*model\.safetensors"):
        fresh.latest()
    for ref in store.all():
        damage(ref, "manifest.json", lambda data: data[:-9])
    with pytest.raises(RunError, match=r"no checkpoint at .* can be read; .*manifest\.json"):
        fresh.latest()
    with pytest.raises(RunError, match=r"manifest\.json is damaged"):
        open_checkpoint(ref.path)


@pytest.mark.parametrize(
    "change",
    [lambda d: d[: len(d) // 2], lambda d: d.replace(b'"cursor": 20', b'"cursor": 21'), lambda d: b"[]", lambda d: b""],
    ids=["torn", "changed", "other", "empty"],
)
def test_a_damaged_manifest_is_told_and_passed_over(store: CheckpointStore, change: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture) -> None:
    for round_number in (1, 2):
        ref = save(store, round_number)
    damage(ref, "manifest.json", change)
    found = CheckpointStore(store.location, staging_dir=store.staging_dir, keep=2).latest()
    assert found is not None
    assert found.round == 1
    assert "manifest.json" in caplog.text
    save(store, 3)
    assert list_names(store.location) == ["round-000001", "round-000003", "writer.json"]


def test_old_checkpoints_that_cannot_be_deleted_are_told_and_do_not_stop_the_run(
    local: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for round_number in (1, 2):
        save(local, round_number)

    def refuse(self: object, name: str) -> None:
        raise RunError("storage", f"cannot delete {name}: Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(locations.DirectoryStorage, "delete_tree", refuse)
        save(local, 3)
    assert "Device or resource busy" in caplog.text
    assert [ref.round for ref in local.all()] == [2, 3]  # its manifest went first
    save(local, 4)
    assert list_names(local.location) == ["round-000003", "round-000004", "writer.json"]


# ---- opening by location


def test_a_checkpoint_opens_by_its_own_directory_its_run_or_the_runs_checkpoints(store: CheckpointStore) -> None:
    for round_number in (1, 2):
        ref = save(store, round_number)
    run = store.location.rpartition("/")[0]
    for location in (ref.path, ref.path + "/", store.location, run, run + "/"):
        found = open_checkpoint(location)
        assert (found.round, found.name) == (2, ref.name)
        assert_whole(found)
    assert open_checkpoint(store.all()[0].path).round == 1


def test_a_location_without_a_complete_checkpoint_is_refused_in_one_line(store: CheckpointStore, tmp_path: Path) -> None:
    unfinished = join(store.location, store.begin(1))
    write_tensors(store.location, "round-000001", FILES[0], contents(1), {}, store.staging_dir)
    for location in (unfinished, store.location, str(tmp_path / "nothing"), "s3://", "foo://x"):
        with pytest.raises(ConfigError, match=r"^init-from is ") as caught:
            open_checkpoint(location, field="init-from")
        assert "\n" not in str(caught.value)


# ---- weights alone


def test_exported_weights_and_configuration_come_back_exactly(store: CheckpointStore, tmp_path: Path) -> None:
    config = presets.tiny(method="muloco", replicas=2)
    name = store.begin(7)
    ref = store.commit(name, {"config": config.to_dict()}, write_files(store, name, 7))
    output = join(store.location.rpartition("/")[0], "exported")
    export_weights(ref, output)
    export_weights(ref, output)
    loaded_config, tensors = load_weights(output)
    assert TrainConfig.from_dict(loaded_config) == config
    assert {key: value.tolist() for key, value in tensors.items()} == {key: value.tolist() for key, value in contents(7).items()}
    assert list_names(output) == ["config.json", "model.safetensors"]
    with pytest.raises(ConfigError, match=r"^weights is "):
        load_weights(ref.path)


def test_a_truncated_export_is_refused_by_name(local: CheckpointStore, tmp_path: Path) -> None:
    output = tmp_path / "exported"
    export_weights(save(local, 1), str(output))
    weights = output / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(RunError, match=r"model\.safetensors cannot be read"):
        load_weights(str(output))
