"""Configuration: what is allowed, how it is varied, and how it survives a file."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import pickle
from typing import Any

import pytest

from ray_muloco import config, presets, sections
from ray_muloco.config import TrainConfig, flatten
from ray_muloco.errors import CollectiveError, ConfigError, ReplicaLostError, RunError

TINY = presets.tiny(method="muloco", replicas=4)
NAN, INFINITY = float("nan"), float("inf")

# field as `override` knows it, bad value, field as the message names it
BAD_VALUES: list[tuple[str, Any, str]] = [
    ("model.d_model", 0, "model.d-model"),
    ("model.d_model", 1.5, "model.d-model"),
    ("model.num_layers", -1, "model.num-layers"),
    ("model.num_heads", 0, "model.num-heads"),
    ("model.head_dim", 0, "model.head-dim"),
    ("model.head_dim", 31, "model.head-dim"),
    ("model.ffn_dim", 0, "model.ffn-dim"),
    ("model.vocab_size", 1, "model.vocab-size"),
    ("model.sequence_length", 0, "model.sequence-length"),
    ("model.rope_theta", 1.0, "model.rope-theta"),
    ("model.rope_theta", INFINITY, "model.rope-theta"),
    ("model.norm_epsilon", 0.0, "model.norm-epsilon"),
    ("inner.lr", -1.0, "inner.lr"),
    ("inner.lr", 0.0, "inner.lr"),
    ("inner.lr", NAN, "inner.lr"),
    ("inner.lr", INFINITY, "inner.lr"),
    ("inner.weight_decay", -0.1, "inner.weight-decay"),
    ("inner.weight_decay", NAN, "inner.weight-decay"),
    ("inner.warmup_fraction", 1.0, "inner.warmup-fraction"),
    ("inner.warmup_fraction", -0.1, "inner.warmup-fraction"),
    ("inner.warmup_fraction", NAN, "inner.warmup-fraction"),
    ("inner.final_lr_fraction", 1.1, "inner.final-lr-fraction"),
    ("inner.clip_norm", -1.0, "inner.clip-norm"),
    ("inner.clip_norm", INFINITY, "inner.clip-norm"),
    ("inner.momentum", 1.0, "inner.momentum"),
    ("inner.momentum", -0.1, "inner.momentum"),
    ("inner.adamw_lr_factor", 0.0, "inner.adamw-lr-factor"),
    ("inner.adamw_beta1", 1.0, "inner.adamw-beta1"),
    ("inner.adamw_beta2", 1.0, "inner.adamw-beta2"),
    ("inner.adamw_epsilon", 0.0, "inner.adamw-epsilon"),
    ("outer.lr", 0.0, "outer.lr"),
    ("outer.lr", NAN, "outer.lr"),
    ("outer.momentum", 1.5, "outer.momentum"),
    ("outer.momentum", 1.0, "outer.momentum"),
    ("outer.momentum", -0.1, "outer.momentum"),
    ("data.source", " ", "data.source"),
    ("data.validation_fraction", 0.0, "data.validation-fraction"),
    ("data.validation_fraction", 1.0, "data.validation-fraction"),
    ("data.tokenizer", "", "data.tokenizer"),
    ("scaling.num_replicas", 0, "scaling.num-replicas"),
    ("scaling.num_replicas", -2, "scaling.num-replicas"),
    ("scaling.min_replicas", 5, "scaling.min-replicas"),
    ("scaling.min_replicas", -1, "scaling.min-replicas"),
    ("scaling.threads_per_replica", -1, "scaling.threads-per-replica"),
    ("scaling.gpus_per_replica", -0.5, "scaling.gpus-per-replica"),
    ("scaling.placement_timeout_seconds", 0.0, "scaling.placement-timeout-seconds"),
    ("scaling.hang_floor_seconds", -1.0, "scaling.hang-floor-seconds"),
    ("scaling.hang_factor", NAN, "scaling.hang-factor"),
    ("scaling.first_round_seconds", INFINITY, "scaling.first-round-seconds"),
    ("scaling.collective_timeout_seconds", 0.0, "scaling.collective-timeout-seconds"),
    ("checkpoint.every_rounds", 0, "checkpoint.every-rounds"),
    ("checkpoint.keep", 0, "checkpoint.keep"),
    ("run.name", "../evil", "run.name"),
    ("run.name", "a/b", "run.name"),
    ("run.name", ".hidden", "run.name"),
    ("run.name", "two words", "run.name"),
    ("run.name", "x" * 101, "run.name"),
    ("run.name", "line\nbreak", "run.name"),
    ("run.storage_path", "", "run.storage-path"),
    ("run.lock_wait_seconds", -1.0, "run.lock-wait-seconds"),
    ("method", "sgd", "method"),
    ("budget_tokens", 0, "budget-tokens"),
    ("budget_tokens", 1e6, "budget-tokens"),
    ("batch_sequences", 0, "batch-sequences"),
    ("batch_sequences", 7, "batch-sequences"),
    ("sync_interval", 0, "sync-interval"),
    ("micro_batch_sequences", 3, "micro-batch-sequences"),
    ("micro_batch_sequences", -1, "micro-batch-sequences"),
    ("seed", -1, "seed"),
    ("seed", 2**63, "seed"),
    ("seed", 1.5, "seed"),
    ("seed", True, "seed"),
    ("seed", None, "seed"),
    ("eval_every_rounds", 0, "eval-every-rounds"),
    ("validation_tokens", 0, "validation-tokens"),
    ("inner.scaling", "spectral", "inner.scaling"),
    ("inner.coefficients", "magic", "inner.coefficients"),
    ("inner.nesterov", 1, "inner.nesterov"),
    ("inner.momentum", "0.9", "inner.momentum"),
    ("inner.lr", True, "inner.lr"),
    ("data.source", 3, "data.source"),
    ("scaling.num_replicas", 2.0, "scaling.num-replicas"),
    ("scaling.collective", "mpi", "scaling.collective"),
    ("scaling.max_replicas", -1, "scaling.max-replicas"),
    ("scaling.join_inner_state", "coordinator", "scaling.join-inner-state"),
    ("scaling.equal_time_rounds", "yes", "scaling.equal-time-rounds"),
    ("scaling.grace_seconds", 2.0, "scaling.grace-seconds"),
    ("scaling.start_grace_seconds", -1.0, "scaling.start-grace-seconds"),
    ("scaling.rejoin_timeout_seconds", -1.0, "scaling.rejoin-timeout-seconds"),
    ("run.tracker", "wandb", "run.tracker"),
    ("compute_dtype", "fp16", "compute-dtype"),
    ("compile", "yes", "compile"),
    ("activation_checkpointing", "no", "activation-checkpointing"),
    ("model", {"d_model": 3}, "model"),
    ("init_from", 1, "init-from"),
    ("preset", 1, "preset"),
    ("data.validation_source", 1, "data.validation-source"),
    ("data.text_column", 1, "data.text-column"),
    ("model.tie_embeddings", "yes", "model.tie-embeddings"),
]


@pytest.mark.parametrize(("field", "value", "named"), BAD_VALUES, ids=[f"{field}={str(value)[:20]!r}" for field, value, _ in BAD_VALUES])
def test_a_bad_value_earns_one_line_with_field_value_and_what_is_allowed(field: str, value: Any, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TINY.override({field: value})
    error = caught.value
    assert error.field == named
    assert error.value == value or (isinstance(value, float) and value != value)  # NaN differs from itself
    assert error.allowed
    line = str(error)
    assert "\n" not in line
    assert line.startswith(f"{named} is ")


def test_every_field_has_a_value_it_refuses() -> None:
    covered = {field for field, _, _ in BAD_VALUES}
    assert set(flatten(TINY.to_dict())) - covered == set()


def test_a_batch_the_replicas_cannot_share_is_refused_with_one_they_can() -> None:
    with pytest.raises(ConfigError) as caught:
        TINY.override({"batch_sequences": 30})
    assert "take 32" in str(caught.value)
    assert TINY.override({"batch_sequences": 32}).replica_batch_sequences == 8


@pytest.mark.parametrize("field", ["nonsense", "inner.nonsense", "outer.lr.deeper", "seed.deeper"])
def test_an_unknown_field_is_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TINY.override({field: 1})
    assert caught.value.field.startswith(field.rpartition(".")[0])


def test_override_changes_what_it_names_and_nothing_else() -> None:
    changed = TINY.override({"outer.lr": 0.5, "outer.momentum": 0.1, "seed": 1})
    assert TINY.differences(changed) == {
        "outer.lr": (TINY.outer.lr, 0.5),
        "outer.momentum": (TINY.outer.momentum, 0.1),
        "seed": (TINY.seed, 1),
    }
    assert changed.override({"outer.lr": TINY.outer.lr, "outer.momentum": TINY.outer.momentum, "seed": TINY.seed}) == TINY


def test_override_takes_names_as_flags_spell_them() -> None:
    assert TINY.override({"sync-interval": 3, "checkpoint.every-rounds": 2}) == TINY.override({"sync_interval": 3, "checkpoint.every_rounds": 2})


def test_override_of_two_bound_fields_is_validated_together() -> None:
    """A batch of 6 suits 3 replicas, though neither change alone would be valid."""
    changed = TINY.override({"scaling.num_replicas": 3, "batch_sequences": 6})
    assert changed.replica_batch_sequences == 2


def test_configurations_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TINY.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", list(presets.PRESETS))
@pytest.mark.parametrize("method", ["muloco", "diloco", "muon-dp", "adamw-dp"])
def test_every_preset_survives_json_and_pickling(name: str, method: Any) -> None:
    config = presets.get(name, method, 2)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.differences(config) == {}


def test_a_file_with_a_field_of_another_version_is_refused_by_name() -> None:
    values = TINY.to_dict()
    values["outer"]["damping"] = 0.1
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_dict(values)
    assert caught.value.field == "outer.damping"


def test_every_field_has_a_docstring() -> None:
    """A flag's help is the string under its field; a field without one would be a flag without help."""
    bodies = [node for module in (config, sections) for node in ast.parse(inspect.getsource(module)).body]
    records = [node for node in bodies if isinstance(node, ast.ClassDef) and node.name.endswith("Config")]
    bare = [
        f"{record.name}.{ast.unparse(node.target)}"
        for record in records
        for node, following in itertools.pairwise([*record.body, ast.Pass()])
        if isinstance(node, ast.AnnAssign) and not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant))
    ]
    assert len(records) == 8
    assert bare == []


def test_flattened_names_are_those_override_takes() -> None:
    flat = flatten(TINY.to_dict())
    assert "outer.momentum" in flat
    assert TINY.override(flat) == TINY


def test_an_unknown_preset_is_refused_with_the_presets_there_are() -> None:
    with pytest.raises(ConfigError, match="nano, tiny, mini, small, 150M"):
        presets.get("huge")


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("outer.lr", -1.0, "must be above 0", "0.7 is a good start"),
        RunError("diverged", "three rounds without a finite pseudogradient", "runs/x/checkpoints/round-000003"),
        ReplicaLostError(3, 2.5, "actor died"),
        CollectiveError("run-7", "broadcast", 60.0, "timed out"),
    ],
)
def test_an_error_says_the_same_on_the_other_side_of_a_process_boundary(error: Exception) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error)
    assert str(there) == str(error)
    assert vars(there) == vars(error)
