"""Communicators of one group, and the topologies of their processes."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

from . import errors
from .calls import Kind
from .comm import Comm, Intra, Topological
from .constants import INTEGERS
from .forms import add_forms
from .groups import Group
from .info import INFO_NULL, Info
from .messages import handle, integer_of
from .neighbors import Neighbors
from .ops import SUM, Op
from .refused import refuse_methods

_PROC_NULL = INTEGERS["PROC_NULL"]


def _integers(values: Any) -> list[int]:
    """Return integers of Python for a sequence of integers, such as an array; none for None."""
    return [] if values is None else [operator.index(value) for value in values]


class Cartesian:
    """A grid of ranks, numbered in row-major order."""

    kind = INTEGERS["CART"]

    def __init__(self, dims: Sequence[int], periods: Sequence[bool], rank: int) -> None:
        self.dims, self.periods, self.rank = list(dims), [bool(period) for period in periods], rank

    def coords_of(self, rank: int) -> list[int]:
        """Return the coordinates of a rank."""
        coords = []
        for extent in reversed(self.dims):
            rank, at = divmod(rank, extent)
            coords.append(at)
        return coords[::-1]

    def rank_of(self, coords: Sequence[int]) -> int:
        """Return the rank at coordinates; PROC_NULL outside the grid."""
        rank = 0
        for at, extent, is_periodic in zip(coords, self.dims, self.periods, strict=True):
            if not is_periodic and not 0 <= at < extent:
                return _PROC_NULL
            rank = rank * extent + at % extent
        return rank

    def shifted(self, direction: int, disp: int) -> tuple[int, int]:
        """Return the ranks from which and to which a shift along a dimension goes."""
        coords = self.coords_of(self.rank)
        found = []
        for step in (-disp, disp):
            moved = [*coords]
            moved[direction] += step
            found.append(self.rank_of(moved))
        return found[0], found[1]

    def edges(self) -> tuple[list[int], list[int]]:
        """Return the ranks from which and to which messages among neighbours go."""
        pairs = [self.shifted(direction, 1) for direction in range(len(self.dims))]
        both = [rank for pair in pairs for rank in pair]
        return both, both

    def tag_to(self, edge: int) -> int:
        """Return the tag of the message along an out-edge: two edges may lead to one rank."""
        return edge

    def tag_from(self, edge: int) -> int:
        """Return the tag of the message along an in-edge: it was sent in the opposite direction."""
        return edge ^ 1


class _ByOrder:
    """A topology whose edges between two ranks are told apart by their order."""

    def tag_to(self, edge: int) -> int:
        """Return the tag of the message along an out-edge."""
        return 0

    tag_from = tag_to


class Graph(_ByOrder):
    """A graph of ranks, which all of them know."""

    kind = INTEGERS["GRAPH"]

    def __init__(self, index: Sequence[int], edges: Sequence[int], rank: int) -> None:
        self.index, self.all_edges, self.rank = _integers(index), _integers(edges), rank

    def neighbors_of(self, rank: int) -> list[int]:
        """Return the neighbours of a rank."""
        return self.all_edges[self.index[rank - 1] if rank else 0 : self.index[rank]]

    def edges(self) -> tuple[list[int], list[int]]:
        """Return the ranks from which and to which messages among neighbours go."""
        found = self.neighbors_of(self.rank)
        return found, found


class DistGraph(_ByOrder):
    """A graph of ranks, of which each rank knows its own edges."""

    kind = INTEGERS["DIST_GRAPH"]

    def __init__(
        self, sources: Sequence[int], destinations: Sequence[int], weights: tuple[list[int], list[int]] | None
    ) -> None:
        self.sources, self.destinations, self.weights = list(sources), list(destinations), weights

    def edges(self) -> tuple[list[int], list[int]]:
        """Return the ranks from which and to which messages among neighbours go."""
        return list(self.sources), list(self.destinations)


@add_forms
class Intracomm(Comm):
    """A communicator of one group."""

    def Create_group(self, group: Group, tag: int = 0) -> Any:
        """Return the communicator of a group; only its processes call this."""
        context, members = self._comm(), group._members().processes
        new = self._null()
        if context.processes[context.rank] in members:
            new._ref = context.group_child(members, integer_of(tag))
        return new

    @classmethod
    def Create_from_group(
        cls, group: Group, stringtag: str = "org.mpi4py", info: Info = INFO_NULL, errhandler: Any = None
    ) -> Any:
        """Return the communicator of a group; only its processes call this."""
        members, new = group._members().processes, handle(cls, None)
        if Intra.world._ref.process in members:
            new._ref = Intra.world._ref.group_child(members, stringtag)
            if errhandler is not None:
                new._ref.errhandler = errhandler._ref
        return new

    def _prepare_Scan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Any:
        """Combine the messages of rank 0 to this rank."""
        return self._collective(Kind.scan, sendbuf, recvbuf, op)

    def _prepare_Exscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Any:
        """Combine the messages of the ranks below this one; rank 0 gets nothing."""
        return self._collective(Kind.exscan, sendbuf, recvbuf, op)

    def scan(self, sendobj: Any, op: Any = SUM) -> Any:
        """Combine the objects of rank 0 to this rank."""
        return self._combined(self.allgather(sendobj)[: self.Get_rank() + 1], op)

    def exscan(self, sendobj: Any, op: Any = SUM) -> Any:
        """Combine the objects of the ranks below this one; rank 0 gets None."""
        objects = self.allgather(sendobj)[: self.Get_rank()]
        return self._combined(objects, op) if objects else None

    def Create_cart(
        self, dims: Sequence[int], periods: Sequence[bool] | None = None, reorder: bool = False
    ) -> Any:
        """Return the communicator of a grid; a null one to the ranks that the grid does not need."""
        extents, wraps = self._refusing("barrier", self._grid_of, dims, periods)
        return self._arranged(
            Cartcomm, math.prod(extents), lambda: Cartesian(extents, wraps, self.Get_rank())
        )

    def _grid_of(self, dims: Any, periods: Any) -> tuple[list[int], list[bool]]:
        dims = [operator.index(dim) for dim in (dims if hasattr(dims, "__len__") else [dims])]
        if periods is None or not hasattr(periods, "__len__"):
            periods = [bool(periods)] * len(dims)
        if len(periods) != len(dims):
            raise ValueError(f"{len(periods)} periods are given for {len(dims)} dimensions")
        if any(extent < 1 for extent in dims) or math.prod(dims) > self.Get_size():
            raise self._comm().failure(
                errors.ERR_DIMS, f"a grid of {dims} does not fit {self.Get_size()} ranks"
            )
        return dims, list(periods)

    def _arranged(self, cls: Any, count: int, topology: Any) -> Any:
        """Return the communicator of the first `count` ranks, with a topology."""
        color = 0 if self.Get_rank() < count else None
        new, arranged = handle(cls, None), None if color is None else topology()
        new._ref = self._made(lambda comm: comm.split(color, 0), "arrange")
        if new._ref is not None:
            new._ref.topology = arranged
        return new

    def Create_graph(self, index: Sequence[int], edges: Sequence[int], reorder: bool = False) -> Any:
        """Return the communicator of a graph. Rank r's edges end at index[r]; a leading 0 is accepted."""
        index, edges = self._refusing("barrier", self._graph_of, index, edges)
        return self._arranged(Graphcomm, len(index), lambda: Graph(index, edges, self.Get_rank()))

    def _graph_of(self, index: Any, edges: Any) -> tuple[list[int], list[int]]:
        index, edges = _nodes_and_edges(index, edges)
        reason = ""
        if len(index) > self.Get_size():
            reason = f"a graph of {len(index)} nodes does not fit {self.Get_size()} ranks"
        elif any(end < begin for begin, end in itertools.pairwise([0, *index])):
            reason = f"the ends of the nodes' edges are {index}; they must not decrease"
        elif index and index[-1] > len(edges):
            reason = f"{len(edges)} edges are given, and the nodes have {index[-1]}"
        else:
            edges = edges[: index[-1] if index else 0]
            if any(not 0 <= node < len(index) for node in edges):
                reason = f"the edges lead to {edges}; the nodes are 0 to {len(index) - 1}"
        if reason:
            raise self._comm().failure(errors.ERR_ARG, reason)
        return index, edges

    def Create_dist_graph_adjacent(
        self,
        sources: Sequence[int] | None,
        destinations: Sequence[int] | None,
        sourceweights: Any = None,
        destweights: Any = None,
        info: Info = INFO_NULL,
        reorder: bool = False,
    ) -> Any:
        """Return the communicator of a graph of which each rank gives its own edges."""
        given = sources, destinations, sourceweights, destweights
        graph = self._refusing("barrier", self._own_graph, *given)
        return self._arranged(Distgraphcomm, self.Get_size(), lambda: graph)

    def _own_graph(self, sources: Any, destinations: Any, sourceweights: Any, destweights: Any) -> DistGraph:
        """Return the graph of the edges that this rank gives of itself."""
        sources, destinations = self._nodes(sources), self._nodes(destinations)
        weights = _weights(sourceweights, len(sources)), _weights(destweights, len(destinations))
        both = None if weights[0] is None or weights[1] is None else (weights[0], weights[1])
        return DistGraph(sources, destinations, both)

    def _nodes(self, values: Any) -> list[int]:
        """Return the ranks at one end of edges, as a list."""
        nodes, size = _integers(values), self.Get_size()
        if any(not 0 <= rank < size for rank in nodes):
            raise self._comm().failure(errors.ERR_RANK, f"edges have {nodes}; the ranks are 0 to {size - 1}")
        return nodes

    def Create_dist_graph(
        self,
        sources: Sequence[int],
        degrees: Sequence[int],
        destinations: Sequence[int],
        weights: Any = None,
        info: Info = INFO_NULL,
        reorder: bool = False,
    ) -> Any:
        """Return the communicator of a graph of which each rank gives any edges."""
        given = sources, degrees, destinations, weights
        edges, is_weighted = self._refusing("all_gather", self._edges_of, *given)
        return self._ref.comm.run_steps(self._arranged_by_edges, edges, is_weighted)

    def _arranged_by_edges(self, edges: list[Any], is_weighted: bool) -> Any:
        everything = [edge for part in self.allgather(edges) for edge in part]
        rank = self.Get_rank()
        ins = [edge for edge in everything if edge[1] == rank]
        outs = [edge for edge in everything if edge[0] == rank]
        both = ([edge[2] for edge in ins], [edge[2] for edge in outs]) if is_weighted else None
        graph = DistGraph([edge[0] for edge in ins], [edge[1] for edge in outs], both)
        return self._arranged(Distgraphcomm, self.Get_size(), lambda: graph)

    def _edges_of(
        self, sources: Any, degrees: Any, destinations: Any, weights: Any
    ) -> tuple[list[Any], bool]:
        """Return the edges that this rank gives (source, destination, weight), and if they have weights."""
        sources, degrees, destinations = self._nodes(sources), _integers(degrees), self._nodes(destinations)
        if sum(degrees) != len(destinations) or min(degrees, default=0) < 0:
            raise ValueError(f"the degrees are {degrees}, and there are {len(destinations)} destinations")
        edges, at = [], 0
        given = _weights(weights, len(destinations))
        for source, degree in zip(sources, degrees, strict=True):
            for place in range(at, at + degree):
                edges.append((source, destinations[place], None if given is None else given[place]))
            at += degree
        return edges, given is not None

    def Cart_map(self, dims: Sequence[int], periods: Sequence[bool] | None = None) -> int:
        """Return this process' rank in a grid; UNDEFINED if the grid does not need it."""
        extents, _ = self._grid_of(dims, False)
        return self.Get_rank() if self.Get_rank() < math.prod(extents) else INTEGERS["UNDEFINED"]

    def Graph_map(self, index: Sequence[int], edges: Sequence[int]) -> int:
        """Return this process' rank in a graph; UNDEFINED if the graph does not need it."""
        nodes, _ = _nodes_and_edges(index, edges)
        return self.Get_rank() if self.Get_rank() < len(nodes) else INTEGERS["UNDEFINED"]


refuse_methods(
    Intracomm, "Spawn Spawn_multiple", "spawned processes", "start all processes as ranks with shmrun -n"
)
refuse_methods(Intracomm, "Accept Connect", "connections between jobs", "start all processes as one job")
refuse_methods(Intracomm, "Create_intercomm", "intercommunicators", "use one communicator of both groups")


def _nodes_and_edges(index: Any, edges: Any) -> tuple[list[int], list[int]]:
    """Return the ends of all nodes' edges, without a 0 at the front, and the edges."""
    index, edges = _integers(index), _integers(edges)
    has_begin = len(index) > 1 and index[0] == 0 and index[-1] == len(edges)
    return index[1:] if has_begin else index, edges


def _weights(weights: Any, count: int) -> list[int] | None:
    if weights is None or (isinstance(weights, int) and weights == INTEGERS["UNWEIGHTED"]):
        return None
    if isinstance(weights, int):
        weights = []
    if len(weights) != count:
        raise ValueError(f"{len(weights)} weights are given for {count} edges")
    return _integers(weights)


class Topocomm(Topological, Neighbors, Intracomm):
    """A communicator whose ranks have a topology."""

    _topologies: tuple[type, ...] = (Cartesian, Graph, DistGraph)

    @classmethod
    def _check_ref(cls, ref: Any) -> None:
        if ref is not None and not isinstance(ref.topology, cls._topologies):
            raise TypeError(f"the communicator has no topology for {cls.__name__}")

    def _topology(self) -> Any:
        topology = self._comm().topology
        if topology is None:
            raise self._comm().failure(errors.ERR_TOPOLOGY, "the communicator has no topology")
        return topology

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.Get_size():
            raise self._comm().failure(errors.ERR_RANK, f"{rank} is not a rank of the communicator")

    @property
    def inoutedges(self) -> tuple[list[int], list[int]]:
        """The ranks from which and to which messages among neighbours go."""
        return self._topology().edges()

    @property
    def inedges(self) -> list[int]:
        """The ranks from which messages of neighbours come."""
        return self.inoutedges[0]

    @property
    def outedges(self) -> list[int]:
        """The ranks to which messages of neighbours go."""
        return self.inoutedges[1]

    @property
    def degrees(self) -> tuple[int, int]:
        """The numbers of edges to this rank and from it."""
        return len(self.inedges), len(self.outedges)

    @property
    def indegree(self) -> int:
        """The number of edges to this rank."""
        return len(self.inedges)

    @property
    def outdegree(self) -> int:
        """The number of edges from this rank."""
        return len(self.outedges)


class Cartcomm(Topocomm):
    """A communicator whose ranks form a grid."""

    _topologies = (Cartesian,)

    def Get_dim(self) -> int:
        """Return the number of dimensions."""
        return len(self._topology().dims)

    dim = property(Get_dim)
    ndim = property(Get_dim)

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        """Return the extents, whether each dimension is periodic, and this rank's coordinates."""
        grid = self._topology()
        return list(grid.dims), [int(period) for period in grid.periods], grid.coords_of(self.Get_rank())

    topo = property(Get_topo)
    dims = property(lambda self: self.Get_topo()[0])
    periods = property(lambda self: self.Get_topo()[1])
    coords = property(lambda self: self.Get_topo()[2])

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        """Return the rank at coordinates."""
        grid, coords = self._topology(), _integers(coords)
        if len(coords) != len(grid.dims):
            raise ValueError(f"{len(coords)} coordinates are given for {len(grid.dims)} dimensions")
        rank: int = grid.rank_of(coords)
        if rank == _PROC_NULL:
            raise self._comm().failure(errors.ERR_ARG, f"{coords} is outside the grid {grid.dims}")
        return rank

    def Get_coords(self, rank: int) -> list[int]:
        """Return the coordinates of a rank."""
        self._check_rank(rank)
        return self._topology().coords_of(integer_of(rank))

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """Return the ranks from which and to which a shift along a dimension goes."""
        grid = self._topology()
        direction = integer_of(direction)
        if not 0 <= direction < len(grid.dims):
            raise self._comm().failure(errors.ERR_DIMS, f"there is no dimension {direction}")
        return grid.shifted(direction, integer_of(disp))

    def Sub(self, remain_dims: Sequence[bool]) -> Any:
        """Return the communicator of this rank's slice along the dimensions that remain."""
        grid = self._topology()
        remain = [bool(remain_dims)] * len(grid.dims) if isinstance(remain_dims, bool) else list(remain_dims)
        if len(remain) != len(grid.dims):
            raise ValueError(f"{len(remain)} flags are given for {len(grid.dims)} dimensions")
        coords, color = grid.coords_of(self.Get_rank()), 0
        for at, extent, remains in zip(coords, grid.dims, remain, strict=True):
            color = color if remains else color * extent + at
        kept = [place for place, remains in enumerate(remain) if remains]
        dims, periods = [grid.dims[place] for place in kept], [grid.periods[place] for place in kept]
        new, topology = handle(Cartcomm, None), Cartesian(dims, periods, 0)
        new._ref = child = self._made(lambda comm: comm.split(color, self.Get_rank()), "sub")
        assert child is not None
        topology.rank, child.topology = child.rank, topology
        return new


class Graphcomm(Topocomm):
    """A communicator whose ranks form a graph, which all of them know."""

    _topologies = (Graph,)

    def Get_dims(self) -> tuple[int, int]:
        """Return the numbers of nodes and of edges."""
        return len(self._topology().index), len(self._topology().all_edges)

    dims = property(Get_dims)
    nnodes = property(lambda self: self.Get_dims()[0])
    nedges = property(lambda self: self.Get_dims()[1])

    def Get_topo(self) -> tuple[list[int], list[int]]:
        """Return the index and the edges."""
        return list(self._topology().index), list(self._topology().all_edges)

    topo = property(Get_topo)
    index = property(lambda self: self.Get_topo()[0])
    edges = property(lambda self: self.Get_topo()[1])

    def Get_neighbors(self, rank: int) -> list[int]:
        """Return the neighbours of a rank."""
        self._check_rank(rank)
        return self._topology().neighbors_of(integer_of(rank))

    def Get_neighbors_count(self, rank: int) -> int:
        """Return the number of neighbours of a rank."""
        return len(self.Get_neighbors(rank))

    neighbors = property(lambda self: self.Get_neighbors(self.Get_rank()))
    nneighbors = property(lambda self: len(self.neighbors))


class Distgraphcomm(Topocomm):
    """A communicator whose ranks form a graph, of which each knows its own edges."""

    _topologies = (DistGraph,)

    def Get_dist_neighbors_count(self) -> tuple[int, int, bool]:
        """Return the numbers of edges to this rank and from it, and whether they have weights."""
        return (*self.degrees, self._topology().weights is not None)

    def Get_dist_neighbors(self) -> tuple[list[int], list[int], tuple[list[int], list[int]] | None]:
        """Return the ranks of the edges to this rank and from it, and the weights, if there are any."""
        graph = self._topology()
        return list(graph.sources), list(graph.destinations), graph.weights


Intra.cls = Intracomm
