"""Graphs whose kernels overlap, with a driver that has as much as a graph needs."""

import pytest
from gpu_marks import needs_package


class Driver:
    """As much of CUDA's driver as a graph of three kernels needs."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.edges, self.called = refuses, [("a", "b", None), ("b", "c", None)], list[str]()

    class CUgraphEdgeData:
        type = from_port = 0

    class CUgraphDependencyType:
        CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC = 1

    CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC = 1

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments):
            self.called.append(name)
            return (_Error(name == self.refuses), *(getattr(self, "_" + name, lambda *arguments: ())(*arguments)))

        return call

    def _cuGraphClone(self, graph):
        return (f"copy of {graph}",)

    def _cuGraphGetEdges(self, graph, count=0):
        before, after, data = zip(*self.edges, strict=True)
        return list(before[:count]), list(after[:count]), list(data[:count]), len(self.edges)

    def _cuGraphRemoveDependencies(self, graph, before, after, data, count):
        self.edges = [edge for edge in self.edges if edge[:2] not in list(zip(before, after, strict=True))]
        return ()

    def _cuGraphAddDependencies(self, graph, before, after, data, count):
        self.edges += zip(before, after, data, strict=True)
        return ()

    def _cuGraphInstantiate(self, graph, flags):
        return (f"launchable {graph}",)


class _Error(int):
    name = "CUDA_ERROR_NOT_SUPPORTED"


@needs_package
def test_kernels_of_a_graph_begin_before_those_before_them_have_ended():
    from bitnet_np.gpu import graph

    driver = Driver()
    assert graph._overlapping(driver, "graph") == "launchable copy of graph"
    assert [edge[:2] for edge in driver.edges] == [("a", "b"), ("b", "c")]
    assert all(edge.type == edge.from_port == 1 for *_, edge in driver.edges)
    assert driver.called[-1] == "cuGraphDestroy"  # of the copy: what is launchable is another


@needs_package
@pytest.mark.parametrize("refuses", ["cuGraphGetEdges", "cuGraphAddDependencies", "cuGraphInstantiate"])
def test_where_kernels_cannot_overlap_a_graph_is_as_it_was(refuses):
    from bitnet_np.gpu import graph

    driver = Driver(refuses)
    assert graph._overlapping(driver, "graph") is None
    assert driver.called[-1] == "cuGraphDestroy"
