"""The engine in all its settings, to draw from."""

from hypothesis import strategies as st

from lightning_osdp.core.plans.plan import PREFETCH_CHOICES
from lightning_osdp.planner.engine import FSDP2

ENGINES = st.builds(
    FSDP2,
    backward_prefetch=st.sampled_from(PREFETCH_CHOICES),
    forward_prefetch=st.booleans(),
    asynchronous_unshard=st.booleans(),
)
