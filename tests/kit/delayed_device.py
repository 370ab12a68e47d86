"""A device that runs late: work waits in a queue, and a host that relies on it having run is found out.

Nothing runs before it must: more than ``late`` works wait, or somebody asks for a result. Works that touch nothing in
common may run in any order, and ``overtakes`` names pairs that may although they do: an ordering edge that is removed.
Each work moves as far forward as it may when it is enqueued, which is the worst that a device could do.
"""

from __future__ import annotations

from sglang_k3.mem.state_moves import DeviceWork

Edge = tuple[str, str]


class DelayedStream:
    """A forward stream.

    Args:
        late: how many works may wait.
        overtakes: names ``(first, second)``: a ``second`` may pass a ``first`` that it depends on.
    """

    def __init__(self, late: int = 0, overtakes: frozenset[Edge] = frozenset()) -> None:
        self.late, self.overtakes = late, overtakes
        self.dependencies: set[Edge] = set()
        self._queue: list[DeviceWork] = []

    def enqueue(self, work: DeviceWork) -> None:
        place = len(self._queue)
        while place and self._may_pass(self._queue[place - 1], work):
            place -= 1
        self._queue.insert(place, work)
        while len(self._queue) > self.late:
            self._queue.pop(0).run()

    def wait_for(self, work: DeviceWork) -> None:
        """As a host that reads a result: everything up to ``work`` has run."""
        while work in self._queue:
            self._queue.pop(0).run()

    def drain(self) -> None:
        while self._queue:
            self._queue.pop(0).run()

    def _may_pass(self, first: DeviceWork, second: DeviceWork) -> bool:
        if not (first.writes & (second.reads | second.writes) or first.reads & second.writes):
            return True
        self.dependencies.add((first.name, second.name))
        return (first.name, second.name) in self.overtakes
