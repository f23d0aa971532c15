"""A machine as the cost model sees it: peak arithmetic, memory bandwidth, links, and how long a collective takes."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshplan.mesh.spec import MeshSpec
from meshplan.mesh.topology import Topology, link_use
from meshplan.runtime.recorder import wire_bytes


@dataclass(frozen=True)
class Machine:
    """Figures of one GPU and its links. All times that come of it are modelled.

    Attributes:
        flops: dense bf16 multiply-adds count as two, a second. 989e12: NVIDIA H100 SXM datasheet, without sparsity.
        memory: bytes/s of device memory. 3.35e12: same datasheet.
        topology: ranks a node and bytes/s a rank sends inside and across nodes.
        latency: seconds until a small collective of a node is done, base and for each further rank. 4.3 us and 3.7 us, which
            is 8 us at 2 ranks and 30 us at 8: what meta-pytorch/autoparallel fitted to nccl-tests on H100 nodes (its
            collective cost tables, 2026).
        latency_across: seconds for each further node. 14 us: a hop's network latency under the Simple protocol in NCCL's
            tuning model (src/graph/tuning.cc).
    """

    flops: float = 989e12
    memory: float = 3.35e12
    topology: Topology = field(default_factory=Topology)
    latency: tuple[float, float] = (4.3e-6, 3.7e-6)
    latency_across: float = 14e-6

    def link(self, spec: MeshSpec, axis: str) -> Link:
        """The link that the groups of `axis` run on."""
        use = link_use(spec, self.topology, axis)
        n = spec.degree(axis)
        far = use.nodes - 1
        steps = self.latency[1] * (n - 1 - far) + self.latency_across * far
        rate = self.topology.across if use.across else self.topology.inside
        return Link(n, rate, self.latency[0] + steps)


@dataclass(frozen=True)
class Link:
    """What one axis' collectives run on: `ranks` a group, bytes/s one rank sends, seconds a collective takes at least."""

    ranks: int
    rate: float
    latency: float

    def seconds(self, op: str, nbytes: int) -> float:
        """How long `op` on a full tensor of `nbytes` takes: latency, then the ring's bytes (`wire_bytes`) at full rate."""
        return self.cost(op, nbytes).seconds

    def cost(self, op: str, nbytes: int) -> Cost:
        """`seconds`, and the bytes that a rank sends."""
        sent = wire_bytes(op, nbytes, self.ranks)
        return Cost(self.latency + sent / self.rate, sent, self.latency) if sent else FREE


@dataclass(frozen=True)
class Cost:
    """Seconds and wire bytes a rank, forward and backward together; `latency` is the part of the seconds that collectives take
    however small they are. Costs add up."""

    seconds: float = 0.0
    wire: float = 0.0
    latency: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.wire + other.wire, self.latency + other.latency)

    def __mul__(self, times: float) -> Cost:
        return Cost(self.seconds * times, self.wire * times, self.latency * times)


FREE = Cost()
