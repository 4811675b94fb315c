"""Groups that outlive their members: formation, sums, failures, and what is left behind (nothing).

Every member is a Ray actor in a process of its own. Bounds of time are the group's own timeouts, never the machine's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from members import TIMEOUT_SECONDS, Cast, spawn

from ray_muloco.core.params import digest
from ray_muloco.runtime.collectives import NCCL, RAY_NCCL

pytestmark = pytest.mark.ray
SHORT_SECONDS = 3.0
wires = pytest.mark.parametrize("memory", [True, False], ids=["memory", "sockets"])


@pytest.fixture(scope="module")
def cast(ray_cluster: Any) -> Iterator[Cast]:
    """Six members, the first of which hosts the store: enough for five in a group and one to be lost."""
    cast = Cast.own(ray_cluster, 6, "test")
    cast.all([m.pid.remote() for m in cast.members])
    yield cast
    cast.end()


def sums(cast: Cast, members: list[Any]) -> list[float]:
    """All-reduce 1, 2, 4, … over these members; what each of them got."""
    refs = [m.call.remote("allreduce_", torch.full((5,), float(2**i))) for i, m in enumerate(members)]
    return [answer[0].item() for answer in cast.all(refs)]


def random_flats(num: int, num_elements: int, *, integers: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_elements)
    flats = [torch.randn(num_elements, generator=generator) * 10 for _ in range(num)]
    return [flat.round() for flat in flats] if integers else flats


def collected(cast: Cast, members: list[Any], start: torch.Tensor, ends: list[torch.Tensor], bucket_elements: int, scale: float = 1.0) -> torch.Tensor:
    """The coordinator's sum of start - end over the replicas."""
    refs = [m.exchange.remote("contribute", start=start, end=e, scale=scale, bucket_elements=bucket_elements) for m, e in zip(members[1:], ends, strict=True)]
    psi = members[0].exchange.remote("collect_", torch.full_like(start, torch.nan), bucket_elements)
    return cast.all([psi, *refs])[0]


# ---- what a group computes


@wires
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64], ids=str)
def test_every_type_is_summed_bounded_and_copied(cast: Cast, dtype: torch.dtype, memory: bool) -> None:
    """SUM, MIN, MAX and broadcast of small integers are exact in every type that travels."""
    members = cast.members[:3]
    cast.form(members, memory=memory)
    assert cast.all([m.shares_memory.remote() for m in members]) == [memory] * 3
    values = [torch.tensor([1, 5, 2], dtype=dtype), torch.tensor([4, 3, 2], dtype=dtype), torch.tensor([2, 2, 9], dtype=dtype)]
    for operation, expected in {"SUM": [7, 10, 13], "MIN": [1, 2, 2], "MAX": [4, 5, 9]}.items():
        for answer in cast.all([m.call.remote("allreduce_", v, operation) for m, v in zip(members, values, strict=True)]):
            assert answer.dtype is dtype
            assert answer.tolist() == expected
    for answer in cast.all([m.call.remote("broadcast_", v, 2) for m, v in zip(members, values, strict=True)]):
        assert answer.tolist() == [2, 2, 9]
    cast.leave(members)


@wires
def test_reduce_sums_at_its_root_alone_and_gather_keeps_the_order_of_ranks(cast: Cast, memory: bool) -> None:
    members = cast.members[:3]
    cast.form(members, memory=memory)
    answers = cast.all([m.call.remote("reduce_", torch.full((4,), float(i + 1)), 1) for i, m in enumerate(members)])
    assert answers[1].tolist() == [6.0] * 4
    for rows in cast.all([m.call.remote("allgather", torch.tensor([i])) for i, m in enumerate(members)]):
        assert [row.item() for row in rows] == [0, 1, 2]
    cast.all([m.call.remote("barrier") for m in members])
    cast.leave(members)


def test_send_and_receive_mean_the_ranks_of_their_group(cast: Cast) -> None:
    """The same processes in two groups with other ranks: a tensor goes to the rank in the group that is named (C01)."""
    a, b, c = cast.members[:3]
    cast.form([a, b, c], label="one")
    cast.form([c, a, b], label="two")
    sent = [a.call.remote("send", torch.tensor([7.0]), 2, label="one"), b.call.remote("send", torch.tensor([8.0]), 0, label="two")]
    first, second = c.call.remote("recv_", torch.zeros(1), 0, label="one"), c.call.remote("recv_", torch.zeros(1), 2, label="two")
    cast.all(sent)
    assert [x.item() for x in cast.all([first, second])] == [7.0, 8.0]
    cast.all([m.leave.remote(label) for m in (a, b, c) for label in ("one", "two")])


# ---- members that go and come


@pytest.mark.slow  # twenty processes have to start
def test_the_same_survivors_lose_and_gain_a_member_twenty_times(cast: Cast) -> None:
    """C01: four, kill one, three, add one, four: every sum is right, nobody waits for a timeout, no descriptor stays.

    In turns through memory and through sockets.
    """
    survivors, spares = cast.members[:3], [spawn(cast.ray) for _ in range(2)]
    descriptors = []
    for cycle in range(20):
        memory = cycle % 2 == 0
        joiner, spares = spares[0], [*spares[1:], spawn(cast.ray)]
        cast.all([joiner.pid.remote()])
        cast.form([*survivors, joiner], memory=memory)
        assert sums(cast, [*survivors, joiner]) == [15.0] * 4
        pending = [m.sum_forever.remote(1000) for m in survivors]
        joiner_sums = joiner.sum_forever.remote(1000)
        cast.ray.wait([joiner_sums], timeout=0.1)
        cast.ray.kill(joiner)
        for ref in pending:
            assert cast.failure(ref).seconds < TIMEOUT_SECONDS
        cast.form(survivors, memory=memory)
        assert sums(cast, survivors) == [7.0] * 3
        descriptors.append(sum(cast.all([m.num_file_descriptors.remote() for m in survivors])))
    cast.leave(survivors)
    for spare in spares:
        cast.ray.kill(spare)
    assert max(descriptors[-2:]) <= max(descriptors[:4])
    assert cast.all([cast.members[0].keys.remote()]) == [[]]


@pytest.mark.parametrize("through_roll_call", [False, True], ids=["before", "after the roll call"])
def test_a_member_lost_in_formation_costs_one_timeout_and_leaves_no_key(cast: Cast, through_roll_call: bool) -> None:
    """C02: the others fail within the timeout, are told who was missing, and the next generation forms."""
    members = cast.members[:3]
    places = cast.memberships(4, timeout_seconds=SHORT_SECONDS)
    if through_roll_call:  # dead, but still in the store: the sockets are what is missed
        cast.all([members[0].pretend_to_be_here.remote(places[3])])
    failures = [cast.failure(ref) for ref in [m.join.remote(p) for m, p in zip(members, places, strict=False)]]
    assert all(f.operation == "join" and f.seconds < 3 * SHORT_SECONDS for f in failures)
    if not through_roll_call:
        assert all("rank 3 of 4 did not come" in str(f) for f in failures)
    cast.form(members)
    assert sums(cast, members) == [7.0] * 3
    assert cast.all([members[0].keys.remote()]) == [[]]
    cast.leave(members)


def test_a_formation_known_to_be_hopeless_ends_at_once(cast: Cast) -> None:
    """Who hears of a death tells the members still waiting, who then need no timeout; late ones learn that it is over."""
    places = cast.memberships(3)
    waiting = cast.members[1].join.remote(places[1])
    cast.ray.wait([waiting], timeout=0.3)
    cast.all([cast.members[0].give_up.remote(places[0], "replica 7 died")])
    failure = cast.failure(waiting)
    assert "replica 7 died" in str(failure)
    assert failure.seconds < TIMEOUT_SECONDS
    assert "is over" in str(cast.failure(cast.members[2].join.remote(places[2])))


def test_the_next_job_may_use_the_names_of_one_that_crashed_in_formation(ray_cluster: Any, cast: Cast) -> None:
    """C03: the first job's processes are killed while they form a group; the second forms the same group."""
    first = Cast.own(ray_cluster, 2, "job")
    places = first.memberships(3)
    waiting = [m.join.remote(p) for m, p in zip(first.members, places, strict=False)]
    first.ray.wait(waiting, timeout=0.3)
    first.end()
    address = cast.all([cast.members[1].serve.remote()])[0]
    second = Cast(ray_cluster, cast.members, "job", address)
    second.form(cast.members[:3])
    assert sums(second, cast.members[:3]) == [7.0] * 3
    second.leave(cast.members[:3])


def test_ray_keeps_nothing_of_the_groups(ray_cluster: Any, cast: Cast) -> None:
    """No named actor and no key in Ray's own store after groups that formed, failed and were left."""
    from ray.experimental.internal_kv import _internal_kv_list

    cast.form(cast.members[:2])
    cast.leave(cast.members[:2])
    assert ray_cluster.util.list_named_actors(all_namespaces=True) == []
    assert _internal_kv_list("collective") == []


# ---- failures in the middle of an exchange


@pytest.mark.parametrize(("num_replicas", "memory"), [(3, False), (5, False), (4, True)], ids=["lanes", "ring", "memory"])
def test_a_replica_killed_in_an_exchange_frees_everyone_before_the_timeout(cast: Cast, num_replicas: int, memory: bool) -> None:
    """Coordinator and replicas alike get a CollectiveError; the survivors exchange afresh from the same Δ."""
    mortal = spawn(cast.ray)
    pid = cast.all([mortal.pid.remote()])[0]
    survivors = cast.members[:num_replicas]
    cast.form([*survivors, mortal], memory=memory)
    refs = [m.exchange_forever.remote(2_000_000, 100_000) for m in [*survivors, mortal]]
    cast.ray.wait(refs, timeout=0.5)
    os.kill(pid, signal.SIGKILL)
    for ref in refs[:-1]:
        assert cast.failure(ref).seconds < TIMEOUT_SECONDS
    cast.form(survivors, memory=memory)
    start = torch.full((100,), 3.0)
    psi = collected(cast, survivors, start, [start - 1] * (num_replicas - 1), bucket_elements=30)
    assert psi.tolist() == [num_replicas - 1.0] * 100
    cast.leave(survivors)


@pytest.mark.parametrize(("num_replicas", "memory"), [(3, False), (5, False), (4, True)], ids=["lanes", "ring", "memory"])
@pytest.mark.parametrize("own", [False, True], ids=["formation", "own"])
def test_a_stopped_replica_costs_the_others_one_timeout(cast: Cast, num_replicas: int, memory: bool, own: bool) -> None:
    """SIGSTOP is silence: nothing but the timeout tells. The stopped one, once it wakes, fails too and may join again.

    own: a hang in the first generation cost the formation's 60 s, though exchanges took a tenth of a second; each is bounded by
    what recent ones took, on all members: one that waits for the stopped one is freed by nobody's leaving.
    """
    members = cast.members[: num_replicas + 1]
    cast.form(members, timeout_seconds=TIMEOUT_SECONDS if own else SHORT_SECONDS, memory=memory)
    if own:
        cast.all([m.call.remote("set_timeout", SHORT_SECONDS) for m in members])
    pid = cast.all([members[2].pid.remote()])[0]
    refs = [m.exchange_forever.remote(2_000_000, 100_000) for m in members]
    cast.ray.wait(refs, timeout=0.5)
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    try:
        failures = [cast.failure(ref) for ref in refs[:2] + refs[3:]]
        assert time.monotonic() - begin < (TIMEOUT_SECONDS / 2 if own else 4 * SHORT_SECONDS)
        assert max(f.seconds for f in failures) >= 0.9 * SHORT_SECONDS
    finally:
        os.kill(pid, signal.SIGCONT)
    cast.failure(refs[2])
    cast.form(members, memory=memory)
    assert sums(cast, members) == [2.0 ** len(members) - 1] * len(members)
    cast.leave(members)


@wires
@pytest.mark.parametrize(
    ("changed", "sentence"), [({"numel": 5}, "101 float32"), ({"dtype": torch.float64}, "100 float64"), ({"bucket": 9}, "buckets of 9")], ids=str
)
def test_a_replica_with_another_shape_is_named_before_anything_is_summed(cast: Cast, changed: dict[str, Any], sentence: str, memory: bool) -> None:
    """C06: elements, type or bucket differ on rank 2 of four: every member is told so, and nobody hangs."""
    members = cast.members[:4]
    cast.form(members, memory=memory)
    odd = torch.zeros(101 if "numel" in changed else 100, dtype=changed.get("dtype", torch.float32))
    flats, sizes = [torch.zeros(100)] * 4, [30] * 4
    flats[2], sizes[2] = odd, changed.get("bucket", 30)
    psi = torch.zeros(100)
    refs = [members[0].exchange.remote("collect_", psi, 30)]
    refs += [m.exchange.remote("contribute", start=f, end=f, scale=1.0, bucket_elements=b) for m, f, b in list(zip(members, flats, sizes, strict=True))[1:]]
    for ref in refs:
        failure = cast.failure(ref)
        assert failure.cause.startswith("rank 2 has")
        assert sentence in failure.cause.split(" where ")[0]
        assert "rank 1 has" not in failure.cause


def test_who_left_is_named_to_those_who_wait_in_memory(cast: Cast) -> None:
    """A member that goes in good order, as after a failure of its own, frees the others at once."""
    members = cast.members[:3]
    cast.form(members)
    waiting = [m.call.remote("barrier") for m in members[:2]]
    cast.ray.wait(waiting, timeout=0.2)
    cast.leave(members[2:])
    for ref in waiting:
        failure = cast.failure(ref)
        assert "left the group" in failure.cause
        assert failure.seconds < TIMEOUT_SECONDS


def test_a_failed_group_repeats_its_first_failure(cast: Cast) -> None:
    """The first error wins over those it causes: later calls do not hide who was odd behind "no such group"."""
    members = cast.members[:2]
    cast.form(members)
    refs = [m.call.remote("agree", text) for m, text in zip(members, ["this", "that"], strict=True)]
    firsts = [cast.failure(ref).cause for ref in refs]
    assert firsts == ["rank 1 has 'that' where the others have 'this'"] * 2
    assert cast.failure(members[0].call.remote("barrier")).cause == firsts[0]


# ---- the exchange


@wires
@pytest.mark.parametrize("num_replicas", [1, 2, 4, 5])
@pytest.mark.parametrize("bucket_elements", [1, 7, 1000, 10**9])
def test_any_bucket_size_sums_every_element_once(cast: Cast, num_replicas: int, bucket_elements: int, memory: bool) -> None:
    """D03: exactly, for integer-valued tensors, at any number of replicas; an empty model is summed as well."""
    members = cast.members[: num_replicas + 1]
    cast.form(members, memory=memory)
    num_elements = 50 if bucket_elements == 1 else 2003
    start, *ends = random_flats(num_replicas + 1, num_elements, integers=True)
    expected = sum((start - end for end in ends), torch.zeros(num_elements))
    assert torch.equal(collected(cast, members, start, ends, bucket_elements), expected)
    assert collected(cast, members, start[:0], [end[:0] for end in ends], bucket_elements).numel() == 0
    cast.leave(members)


@pytest.mark.parametrize(("num_replicas", "memory"), [(1, False), (2, False), (3, False), (4, False), (1, True), (3, True), (5, True)])
def test_replicas_sum_in_rank_order_to_the_bit(cast: Cast, num_replicas: int, memory: bool) -> None:
    """Any number through memory and four through sockets, which makes a run on Ray equal to one in a single process, weights included."""
    members = cast.members[: num_replicas + 1]
    cast.form(members, memory=memory)
    start, *ends = random_flats(num_replicas + 1, 10_001)
    expected = torch.zeros_like(start)
    for end in ends:
        expected += (start - end) * (1 / 3)
    for bucket_elements in (64, 1 << 20):
        assert torch.equal(collected(cast, members, start, ends, bucket_elements, scale=1 / 3), expected)
    cast.leave(members)


def test_the_ring_gives_the_same_bits_to_the_same_members_every_time(cast: Cast) -> None:
    """Five replicas, through sockets: to rounding the sum in rank order, and in a new generation the same bits again."""
    members = cast.members[:6]
    start, *ends = random_flats(6, 10_001)
    results = []
    for _ in range(2):
        cast.form(members, memory=False)
        results += [collected(cast, members, start, ends, 4096) for _ in range(2)]
        cast.leave(members)
    assert all(torch.equal(results[0], other) for other in results[1:])
    expected = sum((start - end for end in ends), torch.zeros_like(start))
    # five fp32 additions of values near 10 in another order
    torch.testing.assert_close(results[0], expected, rtol=1e-6, atol=1e-5)


@wires
def test_a_weight_of_zero_adds_nothing_whatever_the_replica_holds(cast: Cast, memory: bool) -> None:
    """A replica that sits out with NaN takes part in the collective, and its NaN stays with it."""
    members = cast.members[:3]
    cast.form(members, memory=memory)
    start, good = torch.ones(10), torch.zeros(10)
    refs = [
        m.exchange.remote("contribute", start=start, end=e, scale=s, bucket_elements=4)
        for m, e, s in zip(members[1:], [good * torch.nan, good], [0.0, 1.0], strict=True)
    ]
    psi = cast.all([members[0].exchange.remote("collect_", torch.zeros(10), 4), *refs])[0]
    assert psi.tolist() == [1.0] * 10
    cast.leave(members)


@wires
@pytest.mark.parametrize("root", [0, 2])
def test_everyone_receives_theta_and_its_digest(cast: Cast, root: int, memory: bool) -> None:
    """From the coordinator after the outer step, or from the lowest replica: the digest is the one of the whole buffer."""
    members = cast.members[:4]
    cast.form(members, memory=memory)
    theta = random_flats(1, 1001)[0]
    roles = ["publish" if rank == root else "receive_" for rank in range(4)]
    flats = [theta if rank == root else torch.zeros_like(theta) for rank in range(4)]
    digests = cast.all([m.exchange.remote(role, flat, 300, root) for m, role, flat in zip(members, roles, flats, strict=True)])
    assert digests == [digest(theta)] * 4
    cast.leave(members)


@pytest.mark.parametrize("backend", [NCCL, RAY_NCCL])
def test_nccl_is_refused_without_a_gpu_by_saying_what_to_do(cast: Cast, backend: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    place = cast.memberships(1, backend=backend)[0]
    failure = cast.failure(cast.members[1].join.remote(place))
    assert "CUDA" in failure.cause
    assert "--scaling.collective gloo" in failure.cause
