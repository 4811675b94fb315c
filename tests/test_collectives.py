"""What of the collectives needs no cluster: records that pickle, the rule of agreement, NCCL's arguments, light imports."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ray_muloco.errors import CollectiveError
from ray_muloco.runtime import nccl_backend
from ray_muloco.runtime.agreement import disagreement, pack, unpack
from ray_muloco.runtime.collectives import NCCL, Membership
from ray_muloco.runtime.gloo_backend import Transport
from ray_muloco.runtime.rendezvous import sentence
from ray_muloco.runtime.shared_board import BOARD_BYTES, LARGEST_SLOT_BYTES, NUM_TURNS, Board, Offer, map_all, slot_bytes
from ray_muloco.runtime.wiring import choose_fabric, refusal


def test_a_driver_does_not_pay_for_torch() -> None:
    """Importing the collectives imports neither torch nor ray.util.collective, which imports torch."""
    code = "import sys, ray_muloco.runtime.collectives; print([m for m in ('torch', 'ray.util.collective') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_memberships_and_failures_cross_processes() -> None:
    place = Membership("10.0.0.1:1234", "run", 3, 4, 1, 60.0)
    assert pickle.loads(pickle.dumps(place)) == place
    failure = pickle.loads(pickle.dumps(CollectiveError(place.name, "reduce", 1.5, "closed")))
    assert (failure.group, failure.operation, failure.seconds, failure.cause) == ("run/3/MULOCO_GLOO", "reduce", 1.5, "closed")


def test_names_differ_by_run_generation_and_backend() -> None:
    places = [
        Membership("a:1", run, generation, 1, 0, 1.0, backend) for run in ("r", "s") for generation in (1, 11) for backend in ("MULOCO_GLOO", "MULOCO_NCCL")
    ]
    assert len({place.name for place in places}) == 8


@pytest.mark.parametrize(
    ("said", "odd"),
    [
        (["a"], ""),
        (["a", "a", "a"], ""),
        (["a", "a", "b", "a"], "rank 2 has 'b' where the others have 'a'"),
        (["b", "a", "a"], "rank 0 has 'b' where the others have 'a'"),
        (["a", "b"], "rank 1 has 'b' where the others have 'a'"),
        (["a", "b", "c", "a"], "rank 1 has 'b' and rank 2 has 'c' where the others have 'a'"),
    ],
)
def test_the_odd_ranks_are_those_that_differ_from_most_and_from_rank_0_in_a_tie(said: list[str], odd: str) -> None:
    assert disagreement(said) == odd


def test_descriptions_survive_the_wire_and_too_long_ones_are_refused() -> None:
    assert unpack(pack("Σ: 100 float32", 32)) == "Σ: 100 float32"
    with pytest.raises(ValueError, match="at most 8 bytes"):
        pack("123456789", 8)


def test_errors_of_gloo_are_told_without_its_source_file() -> None:
    error = RuntimeError("[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:62144. This is typically caused by …\nmore")
    assert sentence(error) == "RuntimeError: Connection closed by peer [10.0.0.2]:62144"
    assert sentence(KeyError()) == "KeyError"


class RecordingGroup:
    """Stands in for a torch process group: notes what it was asked, and fails when told to."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.blocking = arguments, os.environ.get(nccl_backend.BLOCKING_WAIT)
        self.calls: list[str] = []
        self.failing = False

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> Any:
            self.calls.append(name)
            if self.failing and name != "abort":
                raise RuntimeError("timed out")
            return SimpleNamespace(wait=lambda: None)

        return call


@pytest.fixture
def fake_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that has CUDA and NCCL in name."""

    class ProcessGroupNCCL(RecordingGroup):
        class Options:
            def __init__(self, is_high_priority_stream: bool) -> None:
                self.is_high_priority_stream = is_high_priority_stream

    monkeypatch.setattr(dist, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    monkeypatch.setattr(nccl_backend, "why_unavailable", lambda: "")


@pytest.mark.usefixtures("fake_nccl")
@pytest.mark.parametrize("before", [None, "0"])
def test_nccl_gets_its_timeout_and_waits_so_that_errors_reach_the_caller(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    """The switch is on while the group is made, and as it was afterwards."""
    if before is None:
        monkeypatch.delenv(nccl_backend.BLOCKING_WAIT, raising=False)
    else:
        monkeypatch.setenv(nccl_backend.BLOCKING_WAIT, before)
    transport = nccl_backend.NcclTransport("store", rank=1, world_size=3, timeout_seconds=7.0)
    group: Any = transport._group
    store, rank, world_size, options = group.arguments
    assert (store, rank, world_size, options._timeout) == ("store", 1, 3, timedelta(seconds=7))
    assert group.blocking == "1"
    assert os.environ.get(nccl_backend.BLOCKING_WAIT) == before


@pytest.mark.usefixtures("fake_nccl")
def test_a_failing_nccl_group_is_aborted_once_and_stays_closed() -> None:
    transport = nccl_backend.NcclTransport("store", rank=0, world_size=2, timeout_seconds=7.0)
    group: Any = transport._group
    transport.allreduce(torch.zeros(1), "SUM")
    group.failing = True
    with pytest.raises(RuntimeError, match="timed out"):
        transport.reduce(torch.zeros(1), 0, "SUM")
    transport.close()
    assert transport.closed
    assert group.calls == ["allreduce", "reduce", "abort"]
    with pytest.raises(RuntimeError, match="closed"):
        transport.barrier()


def test_a_failed_transport_lets_go_of_its_group_while_the_error_still_lives() -> None:
    """What frees the peers is the closed sockets, and a traceback must not keep them open."""

    class FailingGroup:
        def barrier(self, options: Any) -> None:
            raise RuntimeError("timed out")

    group = FailingGroup()
    transport, alive = Transport(group), weakref.ref(group)
    del group
    try:
        transport.barrier()
    except RuntimeError as error:
        kept = error
    assert alive() is None
    assert "timed out" in str(kept)


def test_nccl_says_what_is_missing_and_what_to_do() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(RuntimeError, match=r"CUDA .* --scaling\.collective gloo"):
        nccl_backend.NcclTransport("store", rank=0, world_size=1, timeout_seconds=7.0)


# ---- common memory


@pytest.mark.parametrize("world_size", [1, 2, 5, 9, 64, 1000])
def test_slots_hold_whole_elements_and_a_board_stays_small(world_size: int) -> None:
    """However many members: within the bound while slots of a useful size allow it."""
    size = slot_bytes(world_size)
    assert size % 4096 == 0
    assert 64 << 10 <= size <= LARGEST_SLOT_BYTES
    assert NUM_TURNS * size * world_size <= max(BOARD_BYTES, world_size * NUM_TURNS * (64 << 10))


def offered(changes: dict[str, str], world_size: int = 2) -> tuple[dict[str, str], list[Offer]]:
    """A store with the offers of all ranks of this process, some of them replaced."""
    store: dict[str, str] = {}
    writer = SimpleNamespace(set=store.__setitem__)
    offers = [Offer(writer, rank, world_size, through_memory=True) for rank in range(world_size)]
    return store | changes, offers


def boards(store: dict[str, str], world_size: int = 2, timeout_seconds: float = 5.0) -> list[Board | None]:
    reader = SimpleNamespace(get=lambda key: store[key].encode())
    return [map_all(reader, rank, world_size, timeout_seconds) for rank in range(world_size)]


@pytest.mark.parametrize(
    "offer",
    ["", f"{2**22 - 1} 3 {'0' * 32}", f"{os.getpid()} 999999 {'0' * 32}", f"{os.getpid()} 0 {'0' * 32}"],
    ids=["none made", "no such process", "no such descriptor", "another file"],
)
def test_memory_out_of_sight_means_sockets(offer: str) -> None:
    """Another machine, another container, another process under the same number: nobody maps what is not the member's."""
    before = len(os.listdir("/proc/self/fd"))
    store, offers = offered({"board/1": offer})
    assert boards(store) == [None, None]
    for one in offers:
        one.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_meeting_names_who_is_late() -> None:
    store, offers = offered({}, world_size=3)
    first, second, _ = boards(store, world_size=3, timeout_seconds=0.2)
    assert first is not None
    assert second is not None
    with pytest.raises(RuntimeError, match=r"rank 1 did not come within 0\.2 s"):
        first.meet()
    second.close()
    with pytest.raises(RuntimeError, match="rank 1 left the group"):
        first.meet()
    for one in offers:
        one.close()


@pytest.mark.parametrize("num_elements", [0, 1, LARGEST_SLOT_BYTES // 4, LARGEST_SLOT_BYTES // 2 + 3])
def test_a_walk_covers_every_element_once_and_takes_turns(num_elements: int) -> None:
    store, offers = offered({})
    board, _ = boards(store)
    assert board is not None
    flat = torch.arange(num_elements, dtype=torch.float32)
    pieces, homes = [], []
    for piece, slots in board.walk(flat):
        pieces.append(piece)
        homes.append(slots[0].data_ptr() if len(slots[0]) else 0)
        assert [slot.shape for slot in slots] == [piece.shape] * 2
    assert torch.equal(torch.cat(pieces) if pieces else flat, flat)
    assert all(home != after for home, after in itertools.pairwise(homes))
    for one in offers:
        one.close()


def test_a_board_that_cannot_be_made_leaves_no_descriptor() -> None:
    """A member that died before it offered its segment cost each survivor one pidfd for every member before it."""

    class Store(dict[str, bytes]):
        def set(self, key: str, value: str) -> None:
            self[key] = value.encode()

        def get(self, key: str) -> bytes:  # type: ignore[override]
            if key not in self:
                raise RuntimeError("wait timeout")
            return self[key]

    store = Store()
    offer = Offer(store, 0, 2, through_memory=True)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(RuntimeError, match="timeout"):
        map_all(store, 0, 2, 1.0)
    store.set("board/1", "")  # sits on another machine
    assert map_all(store, 0, 2, 1.0) is None
    assert len(os.listdir("/proc/self/fd")) == len(before)
    offer.close()


def test_a_joiner_beyond_the_fabric_is_refused_by_name() -> None:
    """`auto` chose NCCL because all replicas sat in one host; a replacement on another would have hung in the first collective, or crossed a slow link."""
    near, far = ({"host": host, "unavailable": {}} for host in ("10.0.0.1", "10.0.0.2"))
    assert refusal(NCCL, "auto", {"10.0.0.1"}, near) == ""
    assert "10.0.0.2" in refusal(NCCL, "auto", {"10.0.0.1"}, far)
    assert refusal(NCCL, "nccl", {"10.0.0.1"}, far) == "", "the user says that one fabric joins them"
    assert refusal("", "auto", {"10.0.0.1"}, far) == "", "the Gloo star goes anywhere"
    assert refusal(NCCL, "nccl", {"10.0.0.1"}, {**near, "unavailable": {NCCL: "it has no GPU"}}) == "it has no GPU"


def test_auto_is_nccl_only_when_all_that_may_come_are_there() -> None:
    """One host was seen because only one replica was placed yet: everyone who came later, on other nodes, would have been refused."""
    assert choose_fabric("auto", 1, ["a", "a"], 2) == NCCL
    assert choose_fabric("auto", 1, ["a"], 4) == ""
    assert choose_fabric("auto", 1, ["a", "b"], 2) == ""
    assert choose_fabric("auto", 0, ["a", "a"], 2) == ""
    assert refusal(NCCL, "auto", set(), {"host": "b", "unavailable": {}}) == "", "nobody is left where they were"
