"""A rehearsal before the first step of every fit, and the plan that is in use after it."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import override

from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.strategy.dry_run.fallback import plan_that_fits
from lightning_osdp.strategy.options import Options
from lightning_osdp.strategy.sharding.shard import UnitsStrategy


class RehearsingStrategy(UnitsStrategy):
    """Training over the units of a plan, which give up what they keep where memory runs out before the first step.

    Args:
        options: what the plan may be.
        rehearse: whether each rank takes a step alone before the first one; ``"auto"``: on GPUs.
        **kwargs: of `UnitsStrategy`.

    Raises:
        ConfigurationError: ``rehearse`` is something else.
    """

    def __init__(self, options: Options, *, rehearse: bool | Literal["auto"], **kwargs: Any) -> None:
        if not isinstance(rehearse, bool) and rehearse != "auto":
            raise ConfigurationError(f"rehearse must be True, False or 'auto', got {rehearse!r}.")
        self._rehearse = rehearse
        super().__init__(options, **kwargs)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        rehearses = self.root_device.type != "cpu" if self._rehearse == "auto" else self._rehearse
        assert self.lightning_module is not None
        # in manual optimization training_step updates weights and states itself: to rehearse it would be to train
        if rehearses and self.plan is not None and self.lightning_module.automatic_optimization:
            plan_that_fits(self.lightning_module.trainer, self._sharded, self.plan, self._division, self._use)

    def _use(self, plan: Plan) -> None:
        """Changes to a plan with the same units."""
        assert self._wrapping is not None
        assert self._wrapping.plan is not None
        given_up = self._wrapping.plan
        self._sharded.use(plan, may_divide=True)
        self._wrapping.given_up.append(given_up)
