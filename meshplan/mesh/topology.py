"""Which links a mesh's groups run on: inside a node or across nodes, and what to be warned of."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec

NVLINK = "NVLink"
NETWORK = "network"


@dataclass(frozen=True)
class Topology:
    """Nodes of `node_size` consecutive ranks, with one link inside a node and one between nodes.

    Attributes:
        node_size: ranks a node.
        inside: bytes/s one rank sends inside a node. 450 GB/s: 4th generation NVLink, 900 GB/s both directions together
            (NVIDIA H100 Tensor Core GPU datasheet; the same for H200).
        across: bytes/s one rank sends to another node. 50 GB/s: one 400 Gb/s network adapter a GPU (NVIDIA DGX H100
            user guide, 8 ConnectX-7 for 8 GPUs).
    """

    node_size: int = 8
    inside: float = 450e9
    across: float = 50e9

    def __post_init__(self) -> None:
        if self.node_size < 1:
            raise PlanError(
                f"a node of {self.node_size} ranks holds nothing", code="bad-degree", legal="a node size of at least 1"
            )


@dataclass(frozen=True)
class LinkUse:
    """The links of one axis' groups, each seen as a ring in which position i sends to i + 1 and the last to the first.

    Attributes:
        axes: the axes, flattened in mesh order.
        size: ranks a group.
        nodes: nodes the most spread group touches.
        inside: neighbour pairs inside a node, in the group that crosses most.
        across: neighbour pairs on different nodes, in that group. A ring is as slow as its slowest pair.
        uneven: whether some groups cross more than others do.
    """

    axes: tuple[str, ...]
    size: int
    nodes: int
    inside: int
    across: int
    uneven: bool

    @property
    def link(self) -> str | None:
        """The link that bounds the group, `NVLink` or `network`; None where a rank is alone."""
        if self.size == 1:
            return None
        return NETWORK if self.across else NVLINK


@dataclass(frozen=True)
class MeshWarning:
    """A legal mesh that is likely not meant: a stable `code`, the axis, and one or two sentences."""

    code: str
    axis: str
    message: str


def link_use(spec: MeshSpec, topology: Topology, *axes: str) -> LinkUse:
    """The links of the groups over `axes`.

    A group is its first rank plus fixed offsets, so what it crosses depends only on the first rank's place within its
    node: at most `node_size` cases are looked at, whatever the world.
    """
    offsets, node = spec.offsets(*axes), topology.node_size
    cases = [_crossing([at + offset for offset in offsets], node) for at in sorted(_places(spec, axes, node))]
    across, nodes = max(across for across, _ in cases), max(nodes for _, nodes in cases)
    pairs = _pairs(len(offsets))
    return LinkUse(spec.leaves(*axes) or axes, len(offsets), nodes, pairs - across, across, len(set(cases)) > 1)


def warnings(spec: MeshSpec, topology: Topology) -> tuple[MeshWarning, ...]:
    """What to be warned of: `tp-across-nodes`, `hsdp-across-nodes` and `degree-splits-node`."""
    found = []
    tp = link_use(spec, topology, "tp")
    if tp.across:
        factor = tp_layer_factor(tp.size)
        found.append(
            MeshWarning(
                "tp-across-nodes",
                "tp",
                f"tp {tp.size} spans {tp.nodes} nodes. A transformer layer moves {factor:.3g} x batch x sequence x "
                f"hidden x itemsize bytes a rank and step over tp (forward and backward, batch and sequence of one "
                f"data rank), now at {topology.across / 1e9:.0f} GB/s instead of {topology.inside / 1e9:.0f}: "
                f"{topology.inside / topology.across:.3g} times as long.",
            )
        )
    shard = link_use(spec, topology, "dp_shard", "cp")
    if spec.degree("dp_replicate") > 1 and shard.across:
        name = "+".join(shard.axes)
        found.append(
            MeshWarning(
                "hsdp-across-nodes",
                name,
                f"the sharded group {name} ({shard.size} ranks) spans {shard.nodes} nodes, so parameters are gathered "
                f"over the network, which dp_replicate is there to avoid.",
            )
        )
    return (*found, *_splits_node(spec, topology))


def tp_layer_factor(degree: int) -> float:
    """Wire bytes one rank sends over `tp` in a transformer layer's forward and backward, in units of
    batch x sequence x hidden x itemsize.

    Attention and MLP each gather their input and reduce-scatter their output (or all-reduce it, which is the same
    bytes), and backward mirrors forward: 8 collectives of (n - 1) / n each on a ring (Korthikanti et al. 2022,
    "Reducing Activation Recomputation in Large Transformer Models", section 4.2).
    """
    return 8 * (degree - 1) / degree


def _splits_node(spec: MeshSpec, topology: Topology) -> list[MeshWarning]:
    """The innermost axis whose blocks of ranks do not tile nodes; the axes outside it only inherit that."""
    node = topology.node_size
    if spec.world_size <= node:
        return []
    for name, degree in reversed(spec.axes):
        block = degree * spec.stride(name)
        if degree > 1 and node % block and block % node:
            inner = [d for axis, d in reversed(spec.axes) if spec.stride(axis) < spec.stride(name) and d > 1]
            sizes = f"{name} {degree}" + (f" over {spec.stride(name)} inner ranks" if inner else "")
            return [
                MeshWarning(
                    "degree-splits-node",
                    name,
                    f"{sizes} makes blocks of {block} ranks, which do not tile nodes of {node}: its groups lie "
                    f"on nodes unevenly, and all wait for the slowest.",
                )
            ]
    return []


def _places(spec: MeshSpec, axes: tuple[str, ...], node: int) -> set[int]:
    """Places within a node at which groups over `axes` begin."""
    leaves, places = spec.leaves(*axes), {0}
    for name, degree in spec.axes:
        if name not in leaves:
            stride = spec.stride(name)
            # Multiples of a stride repeat modulo the node after at most `node` of them.
            places = {(place + i * stride) % node for place in places for i in range(min(degree, node))}
    return places


def _crossing(ranks: list[int], node: int) -> tuple[int, int]:
    """(neighbour pairs on different nodes, nodes touched) of a ring over `ranks`."""
    on = [rank // node for rank in ranks]
    return sum(on[i] != on[(i + 1) % len(on)] for i in range(_pairs(len(on)))), len(set(on))


def _pairs(size: int) -> int:
    # Two ranks are one pair and not two: i + 1 and i - 1 are the same neighbour.
    return size if size > 2 else size - 1


def shown_axes(spec: MeshSpec) -> tuple[tuple[str, ...], ...]:
    """The groups worth listing, innermost first: each axis of more than one rank (split axes whole, then their parts)
    and dp_shard x cp, over which parameters shard, where both are."""
    shown: list[tuple[str, ...]] = []
    for name, degree in reversed(spec.axes):
        top = name
        while spec.parent(top) != top:
            top = spec.parent(top)
        if top != name and spec.degree(top) > 1 and (top,) not in shown:
            shown.append((top,))
        if degree > 1:
            shown.append((name,))
    if spec.degree("dp_shard") > 1 and spec.degree("cp") > 1:
        shown.append(("dp_shard", "cp"))
    return tuple(shown)
