"""The order in which sub-groups are updated, on which no result depends (MLP-Offload 3.2, cache-friendly order).

DeepSpeed's ``step`` counts its sub-groups upwards. The methods that it calls for each sub-group are overridden here to
map the index to another one, so that the loop stays DeepSpeed's. ``next_swappable_fp32_partitioned_groups``, by which
it reads ahead, is reordered with them.
"""

from __future__ import annotations

from typing import Any

from .stage3_settings import Stage3Settings


class OrderedUpdate:
    """Mixin for ``DeepSpeedZeroOptimizer_Stage3``, before all other mixins, with a ``CachedSubGroupSwapper``.

    The order is reversed after each update that was applied, but not after one skipped because of an overflow. The
    swapper then already has the sub-groups with which the next update begins.
    """

    settings: Stage3Settings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._descending = False
        self._update_order: list[int] | None = None  # set only within a step
        self._update_begun = False
        super().__init__(*args, **kwargs)

    def step(self, closure: Any = None) -> None:
        """Take DeepSpeed's step with the sub-groups in this update's order."""
        if not self.swap_optimizer:
            super().step(closure)
            return
        if self.settings.before_update is not None:
            self.settings.before_update()
        order = list(range(len(self.fp16_groups)))
        if self._descending:
            order.reverse()
        self._turn_read_ahead(order)
        self._update_order, self._update_begun = order, False
        try:
            super().step(closure)
        finally:
            self._update_order = None
        if self._update_begun:
            self.optimizer_swapper.end_update()
            if self.settings.tiers.sub_group_order == "alternating" and not getattr(self, "use_muon", False):
                self._descending = not self._descending
            if self.settings.end_of_update is not None:
                self.settings.end_of_update()

    def _turn_read_ahead(self, order: list[int]) -> None:
        """Make DeepSpeed read ahead in ``order``: link each sub-group to the swapped one that follows it."""
        following = None
        for index in reversed(order):
            self.next_swappable_fp32_partitioned_groups[index] = following
            if self._swappable_optimizer_subgroup(index):
                following = self.fp32_partitioned_groups_flat[index]

    def _in_order(self, sub_group_id: int) -> int:
        """Return the sub-group at a position of DeepSpeed's loop; outside of a step the index is unchanged."""
        return sub_group_id if self._update_order is None else self._update_order[sub_group_id]

    def _prepare_sub_group(self, sub_group_id: int, timer_names: set[str]) -> None:
        """Begin the update with the first sub-group; a step skipped because of an overflow never gets here."""
        if self._update_order is not None and not self._update_begun:
            self._update_begun = True
            swapped = filter(self._swappable_optimizer_subgroup, self._update_order)
            self.optimizer_swapper.begin_update([self.fp32_partitioned_groups_flat[index] for index in swapped])
        super()._prepare_sub_group(self._in_order(sub_group_id), timer_names)

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        super().unscale_and_clip_grads(self._in_order(sub_group_id), total_norm)

    def _optimizer_step(self, sub_group_id: int) -> None:
        super()._optimizer_step(self._in_order(sub_group_id))

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        super()._reassign_or_swap_out_partitioned_parameters(self._in_order(sub_group_id))

    def _release_sub_group(self, sub_group_id: int, timer_names: set[str]) -> None:
        super()._release_sub_group(self._in_order(sub_group_id), timer_names)

    # -- states are written to their paths before they are read from there ---------------------------------------------

    def _settle(self) -> None:
        if self.swap_optimizer:
            self.optimizer_swapper.settle()

    def settle_states(self) -> None:
        self._settle()
        super().settle_states()

    def export_swapped_states(self, folder: Any, **options: Any) -> Any:
        self._settle()
        return super().export_swapped_states(folder, **options)

    def _rigid_state_dict(self) -> dict[str, Any]:
        self._settle()
        return super()._rigid_state_dict()

    def _rigid_load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        self._settle()
        super()._rigid_load_state_dict(state_dict, load_optimizer_states)
