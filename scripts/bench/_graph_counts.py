"""Count what compiled layers launch and move: nodes of the graphs that torch's partitioner makes.

A compiler makes kernels of what is no product, attention or dequantization; those are called as they are. Fused groups
are found as a scheduler may make them: operators that are connected, with no such call between them, each as late as
its readers allow. A group reads every tensor of others once, and writes what others read.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Interpreter, Node

from hfscale._compat.torch import tree_leaves

FUSED = "fused groups"
Kind = Callable[[Any, list[Tensor]], str | None]
"""Returns the kind of an operator that is called as it is, ``""`` for one that moves nothing, ``None`` for others."""


class GraphCounts:
    """Add up the launches and bytes, by kind, of the graphs that run."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.forget()

    def __enter__(self) -> None:
        """Graphs count themselves."""

    def __exit__(self, *raised: object) -> None:
        """See above."""

    def forget(self) -> None:
        """Begin again."""
        self.launches = Counter[str]()
        self.bytes = Counter[str]()
        self.wide_copies = self.dequantized = 0  # not told apart

    def backend(self) -> Any:
        """Return a backend for ``torch.compile`` that counts each graph as it runs, and interprets it."""
        return aot_autograd(
            fw_compiler=self._compiled,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )

    def _compiled(self, graph: GraphModule, _: Any) -> Any:
        launches, moved = count_graph(graph, self._kind)

        def run(*args: Any) -> Any:
            self.launches.update(launches)
            self.bytes.update(moved)
            return _OnCPU(graph).run(*args)

        return make_boxed_func(run)


class _OnCPU(Interpreter):
    """Run a graph, with products that CPUs have no kernel for in float32."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.mm.dtype:
            return args[0].float().mm(args[1].float())
        return super().call_function(target, args, kwargs)


def count_graph(graph: GraphModule, kind: Kind) -> tuple[Counter[str], Counter[str]]:
    """Return the launches of a graph and the bytes that they move, by kind."""
    kinds = {
        node: kind(node.target, [*_tensors(node.args), *_tensors(node)])
        for node in graph.graph.nodes
        if node.op == "call_function"
    }
    called = {node for node, each in kinds.items() if each}
    levels = _levels(list(kinds), kinds)
    groups = _groups([node for node, each in kinds.items() if each is None], levels, kinds)
    launches = Counter(kinds[node] or "" for node in called)
    moved = Counter[str]()
    for node in called:
        moved[kinds[node] or ""] += sum(map(_size, [*_tensors(node.args), *_tensors(node)]))
    for group in groups:
        size = _bytes_of(group, kinds)
        launches[FUSED] += size > 0
        moved[FUSED] += size
    return launches, moved


def _levels(nodes: list[Node], kinds: dict[Node, str | None]) -> dict[Node, int]:
    """Return for each node after how many calls it runs: as late as its readers allow, if it can be fused."""
    levels: dict[Node, int] = {}
    for node in nodes:
        before = [
            levels[each] + bool(kinds[each]) for each in node.all_input_nodes if each in kinds
        ]
        levels[node] = max(before, default=0)
    for node in reversed(nodes):
        readers = [levels[each] for each in node.users if each in kinds]
        if not kinds[node] and readers and len(readers) == len(node.users):
            levels[node] = max(levels[node], min(readers))
    return levels


def _groups(
    fused: list[Node], levels: dict[Node, int], kinds: dict[Node, str | None]
) -> list[set[Node]]:
    """Return the connected operators of each level."""
    group_of: dict[Node, set[Node]] = {}
    for node in fused:
        joined = {node}
        for source in _sources(node, kinds):
            if source in group_of and levels[source] == levels[node]:
                joined |= group_of[source]
        for each in joined:
            group_of[each] = joined
    return list({id(group): group for group in group_of.values()}.values())


def _past_views(
    node: Node, kinds: dict[Node, str | None], neighbours: Callable[[Node], Iterable[Node]]
) -> Iterator[Node]:
    """Yield a node's neighbours (inputs or readers), and in place of a view the neighbours of the view."""
    for each in neighbours(node):
        if kinds.get(each) == "":
            yield from _past_views(each, kinds, neighbours)
        else:
            yield each


def _sources(node: Node, kinds: dict[Node, str | None]) -> Iterator[Node]:
    """Yield the nodes whose memory a node reads, behind views."""
    return _past_views(node, kinds, lambda each: each.all_input_nodes)


def _bytes_of(group: set[Node], kinds: dict[Node, str | None]) -> int:
    read: dict[Node, int] = {}
    for node in group:
        for each in node.all_input_nodes:
            for source in [each] if kinds.get(each) != "" else _sources(each, kinds):
                if source not in group:
                    whole = sum(map(_size, _tensors(source)))
                    seen = min(whole, sum(map(_size, _tensors(each))))
                    read[source] = max(read.get(source, 0), seen)
    written = [node for node in group if any(each not in group for each in _readers(node, kinds))]
    return sum(read.values()) + sum(_size(each) for node in written for each in _tensors(node))


def _readers(node: Node, kinds: dict[Node, str | None]) -> Iterator[Node]:
    return _past_views(node, kinds, lambda each: each.users)


def _tensors(held: Any) -> list[Tensor]:
    leaves = tree_leaves(held.meta.get("val") if isinstance(held, Node) else held)
    found = []
    for leaf in leaves:
        if isinstance(leaf, Node):
            found += _tensors(leaf)
        elif isinstance(leaf, Tensor):
            found.append(leaf)
    return found


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
