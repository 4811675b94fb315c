"""Who is in which group, generation by generation: the coordinator's side of links.py."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import ray

from ray_muloco.config import TrainConfig
from ray_muloco.errors import ConfigError
from ray_muloco.runtime.collectives import GLOO, NCCL, RAY_NCCL, Membership, StoreServer
from ray_muloco.runtime.links import Wiring

FABRIC_BACKENDS = {"nccl": NCCL, "ray-nccl": RAY_NCCL}


def choose_fabric(collective: str, gpus_per_replica: float, hosts: Sequence[str], most_replicas: int) -> str:
    """Backend of the replicas' own exchange group, or nothing for the Gloo star. hosts: of each replica that is placed.

    auto: NCCL when every replica has a GPU of its own and all that the run may grow to sit in one host, which is one fabric
    for certain; for several hosts the user says nccl if a fast network joins them. Raises ConfigError for nccl without GPUs.
    """
    if collective in FABRIC_BACKENDS:
        if gpus_per_replica < 1:
            raise ConfigError(
                "scaling.collective", collective, "needs a GPU for each replica", "set --scaling.gpus-per-replica 1, or --scaling.collective gloo"
            )
        return FABRIC_BACKENDS[collective]
    together = len(set(hosts)) == 1 and len(hosts) == most_replicas
    return NCCL if collective == "auto" and gpus_per_replica >= 1 and together else ""


def refusal(fabric: str, collective: str, hosts: Collection[str], facts: Mapping[str, Any]) -> str:
    """Why a replica with these facts cannot join a run whose exchange group uses this backend; empty when it can.

    hosts: where the run's other replicas are; one host's fabric ends there, unless the user said so.
    """
    if reason := facts["unavailable"].get(fabric, ""):
        return reason
    if fabric == NCCL and collective == "auto" and hosts and facts["host"] not in hosts:
        return f"it is on {facts['host']}, and the others exchange over NCCL within {', '.join(sorted(hosts))}; --scaling.collective nccl or gloo takes in several hosts"
    return ""


class Wirer:
    """Makes the memberships of each generation; hosts the run's rendezvous store."""

    def __init__(self, config: TrainConfig, hardware: Mapping[int, Mapping[str, Any]], fabric: str | None = None) -> None:
        """fabric: backend of the replicas' own exchange group; None chooses it from the configuration."""
        self.config = config
        scaling = config.scaling
        hosts = [h["host"] for h in hardware.values()]
        self.fabric = choose_fabric(scaling.collective, scaling.gpus_per_replica, hosts, scaling.most_replicas) if fabric is None else fabric
        for k, facts in sorted(hardware.items()):
            reason = facts["unavailable"].get(self.fabric, "")
            if reason:
                raise ConfigError("scaling.collective", scaling.collective, f"cannot be used by replica {k} on {facts['host']}: {reason}")
        self.store = StoreServer(ray.util.get_node_ip_address())
        self.run_id = f"muloco-{secrets.token_hex(6)}"

    def wire(self, generation: int, replicas: Sequence[int], timeout: float) -> tuple[Membership, dict[int, Wiring]]:
        """The coordinator's membership in a generation, and the wiring of each replica.

        replicas: ids, ascending; timeout: deadline in seconds of the formation and of each collective.
        """
        in_main = list(replicas[:1]) if self.fabric else list(replicas)
        backend = self.fabric or GLOO
        need_peers = bool(self.fabric) or (self.config.is_data_parallel and len(replicas) > 1)

        def main(rank: int) -> Membership:
            return Membership(self.store.address, self.run_id, generation, len(in_main) + 1, rank, timeout, GLOO)

        def peers(rank: int) -> Membership:
            # data-parallel replicas meet once a step, after computing: a usual exchange says nothing of that wait
            patience = self.config.scaling.collective_timeout_seconds if self.config.is_data_parallel else timeout
            return Membership(self.store.address, f"{self.run_id}-peers", generation, len(replicas), rank, patience, backend)

        wirings = {
            k: Wiring(
                generation=generation,
                main=main(in_main.index(k) + 1) if k in in_main else None,
                peers=peers(rank) if need_peers else None,
                fabric=bool(self.fabric),
            )
            for rank, k in enumerate(replicas)
        }
        return main(0), wirings

    def give_up(self, wirings: Iterable[Wiring], reason: str) -> None:
        """End a formation of peers that can no longer succeed; the coordinator's own group knows by itself."""
        for wiring in wirings:
            if wiring.peers is not None:
                self.store.give_up(wiring.peers, reason)

    def close(self) -> None:
        """Stop the rendezvous store."""
        self.store.close()
