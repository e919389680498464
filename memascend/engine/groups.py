"""An optimizer's parameter groups, looked up at each use, since `load_state_dict` of torch replaces them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Group = dict[str, Any]
# Like torch.optim's `param_groups`, or a function that returns the current ones.
Groups = Sequence[Group] | Callable[[], Sequence[Group]]


class GroupsNow:
    """Finds the group that a parameter is in now. Only its number is kept, as long as all `params` are the same."""

    def __init__(self, groups: Groups, names: Mapping[Any, str]) -> None:
        self.now: Callable[[], Sequence[Group]] = groups if callable(groups) else lambda: groups
        self._names = names
        self._found: tuple[list[tuple[Any, int]], dict[str, int]] = [], {}

    def __contains__(self, name: str) -> bool:
        return name in self._numbers(self.now())

    def of(self, name: str) -> Group:
        """Return the parameter's group. Raises RuntimeError if the parameter was taken out of its group."""
        groups = self.now()
        number = self._numbers(groups).get(name)
        if number is None:
            raise RuntimeError(
                f"{name} is no longer in any param group of the optimizer: put it back into optimizer.param_groups (to "
                "leave a parameter as it is, give its group lr=0 and weight_decay=0)"
            )
        return groups[number]

    def _numbers(self, groups: Sequence[Group]) -> dict[str, int]:
        """Return the number of each parameter's group, by the parameter's name."""
        members, numbers = self._found
        now = [(group["params"], len(group["params"])) for group in groups]
        if len(now) != len(members) or any(a is not b or m != n for (a, m), (b, n) in zip(now, members, strict=True)):
            numbers = {
                self._names[p]: number
                for number, group in enumerate(groups)
                for p in group["params"]
                if p in self._names
            }
            self._found = now, numbers
        return numbers
