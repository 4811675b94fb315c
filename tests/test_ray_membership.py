"""Replicas on Ray on their way in: placed late, silent, healed slowly, or needed while the run waits."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from test_ray_fit import Killer, long, replica_processes
from test_resume import Notes, config_for, records, source  # noqa: F401 - `source` is a fixture

from ray_muloco import fit
from ray_muloco.errors import ReplicaLostError, RunError, StoppedError
from ray_muloco.runtime import roster
from ray_muloco.runtime.actors import replica_actor
from ray_muloco.runtime.answers import collect
from ray_muloco.runtime.drill import KILL, Drill, Fault
from ray_muloco.training import preflight

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@ray.remote(num_cpus=0)
class Donor:
    """Gives an inner state, or dies over it."""

    def give(self, state: dict[str, Any] | None) -> dict[str, Any]:
        if state is None:
            os._exit(1)
        return state


def test_a_donors_death_is_not_its_receivers(source: Path) -> None:  # noqa: F811
    """The receiver says whose death it was and takes the state of the next donor; it was called dead itself."""
    receiver = replica_actor(1, 0).remote(3)
    dead = receiver.load_state.remote([Donor.remote().give.remote(None)], 7, 60.0)
    answers, lost = collect({3: dead}, 60)
    assert (answers, lost) == ({}, {}), "it lives"
    with pytest.raises(ReplicaLostError, match="replica 7 was lost"):
        ray.get(dead)
    ray.kill(receiver)


def test_a_placed_replica_that_never_answers_is_let_go(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """One stopped while it said what it computes with looked like one without a place: it kept its seat for ever, and was reported as demand."""

    @ray.remote(num_cpus=1)
    class Mute:
        def __init__(self, replica_id: int) -> None:
            pass

        def hardware(self) -> None:
            time.sleep(600)

    monkeypatch.setattr(roster, "replica_actor", lambda *_: Mute)
    monkeypatch.setattr(roster, "SAY_EVERY_SECONDS", 0.5)
    asked = roster.Roster(config_for(source, tmp_path, "mute", scaling__first_round_seconds=1.0), print)
    try:
        assert asked.pending() == 2
        failures: list[str] = []
        deadline = time.monotonic() + 60
        while len(failures) < 2 and time.monotonic() < deadline:
            failures += asked._poll(0.2)
        assert len(failures) == 2
        assert all("was silent while it got ready" in failure for failure in failures)
        assert not asked.recruits
    finally:
        asked.close()


def test_ray_never_restarts_a_replica() -> None:
    """E13: `max_restarts` would run the constructor again and leave an actor that looks alive and holds nothing."""
    assert replica_actor(1, 0)._default_options["max_restarts"] == 0


class Taken:
    """CPUs of the cluster that somebody else holds."""

    def __init__(self, num_cpus: int) -> None:
        self.actors = [Donor.options(num_cpus=1).remote() for _ in range(num_cpus)]
        ray.get([actor.give.remote({}) for actor in self.actors])

    def free(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []


def test_a_run_begins_with_who_is_placed_and_takes_in_the_others_as_room_comes(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """E16: elsewhere a run that wanted two nodes waited for ever on one. This one waits its grace, trains, and grows beyond num_replicas."""
    taken = Taken(15)

    class Freed(Notes):
        def round(self, record: dict[str, Any]) -> None:
            super().round(record)
            if record["round"] == 3:
                taken.free()

    config = long(config_for(source, tmp_path, "growing", scaling__num_replicas=2, scaling__min_replicas=1, scaling__max_replicas=3, batch_sequences=6))
    heard = Freed()
    try:
        result = fit(config.override({"scaling.start_grace_seconds": 1.0}), listener=heard)
    finally:
        taken.free()
    alive = [record["alive"] for record in result.metrics]
    assert alive[0] == 1
    assert result.metrics[0]["pending"] == 2
    assert alive[-1] == 3
    joined = {int(reason.split()[1]): n for n, r in enumerate(result.metrics) for reason in r["reasons"] if reason.endswith("joins")}
    assert len(joined) == 2
    for k, n in joined.items():  # D06: planned from the very next round on
        assert result.metrics[n + 1]["participants"] == result.metrics[n + 1]["alive"] > result.metrics[n]["participants"], k


def test_a_cluster_without_room_is_given_up_in_time_and_a_stop_is_heard_before(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """E16: who is missing is named, exit code 4 in the end; asked to stop meanwhile nothing is lost, and it is no failure."""
    taken = Taken(15)
    config = config_for(source, tmp_path, "crowded", scaling__placement_timeout_seconds=3.0)
    try:
        with pytest.raises(RunError, match=r"replicas \[\d\] of 2 were not placed within 3 s") as caught:
            fit(config)
        assert not isinstance(caught.value, StoppedError)
        threading.Timer(4.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(StoppedError):
            fit(config.override({"scaling.placement_timeout_seconds": 120.0}))
    finally:
        taken.free()


@ray.remote
class SlowHealing:
    """A coordinator whose joiners take seconds to load a state; both sides note which one it was."""

    def run(self, config: Any, files: str, drill: Any) -> dict[str, Any]:
        import json  # all by value: the module of this class is not there for a worker
        import time
        from pathlib import Path

        import ray

        from ray_muloco.runtime import actors, roster
        from ray_muloco.runtime.fit import Silent
        from ray_muloco.runtime.setup import run_on_ray

        def note(name: str, tensors: Any, **more: Any) -> None:
            norms = {name: float(t.double().norm()) for name, t in tensors.items()}
            Path(f"{files}/{name}.json").write_text(json.dumps({"norms": norms, **more}))

        class Slow(actors.ReplicaActor):
            def load_state(self, states: Any, donor: int, timeout: float) -> int:
                time.sleep(3.0)
                num_bytes = actors.ReplicaActor.load_state(self, states, donor, timeout)
                note(f"joiner-{self.replica_id}", self.replica.state_tensors(), donor=donor)
                return num_bytes

            def keep_state(self) -> int:
                number = actors.ReplicaActor.keep_state(self)
                note(f"donor-{self.replica_id}", self._kept[number])
                return number

        groups = {actors.FILES: 1, actors.HEALING: 1, actors.CONTROL: 1}
        slow: Any = ray.remote(num_cpus=1, max_restarts=0, concurrency_groups=groups)(Slow)  # type: ignore[call-overload]
        roster.replica_actor = lambda *_: slow
        return run_on_ray(config, "", Silent(), lambda: False, drill)


def test_a_state_that_travels_longer_than_a_round_is_the_donors_all_the_same(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """E09, D08: the others train on for many rounds meanwhile, and the joiner is admitted with what its donor had at the boundary."""
    config = long(config_for(source, tmp_path, "slow-heal", scaling__num_replicas=3, batch_sequences=6, scaling__min_replicas=1))
    config = preflight.check(config).config
    fault = Fault(number=0, round=2, kind=KILL, phase="inner", moment=0.5, victim=0.0)
    actor = SlowHealing.options(num_cpus=0).remote()
    result = ray.get(actor.run.remote(config, str(tmp_path), Drill((fault,), str(tmp_path / "drill.jsonl"))), timeout=200)
    assert result["status"] == "finished"
    rounds = records(config)
    healing = [r["round"] for r in rounds if r["healing"]]
    assert len(healing) > 3, "the others trained on while it healed"
    assert rounds[-1]["participants"] == 3
    taken = json.loads((tmp_path / "joiner-3.json").read_text())
    given = json.loads((tmp_path / f"donor-{taken['donor']}.json").read_text())
    assert taken["norms"] == given["norms"]
    assert any(norm > 0 for norm in given["norms"].values())


def test_who_dies_while_the_run_waits_for_others_is_replaced_too(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """Nobody asks anything of the members meanwhile: a dead one was counted as alive and as the joiner's donor until the run gave up."""

    class Second(Killer):
        done = False

        def message(self, text: str) -> None:
            super().message(text)
            if "given up until there are more" in text and not self.done:
                self.done = True
                for process in replica_processes():
                    process.kill()

    config = long(config_for(source, tmp_path, "both"))
    second = Second(at_round=2, victim=0)
    result = fit(config, listener=second)
    assert second.done
    assert result.status == "finished"
    assert {r["participants"] for r in result.metrics} == {2}
