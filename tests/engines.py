"""Engines in all their settings, to draw from."""

from hypothesis import strategies as st

from lightning_osdp.engine import FSDP1

FSDP1S = st.builds(FSDP1, backward_prefetch=st.sampled_from(FSDP1.prefetches), forward_prefetch=st.booleans())
ENGINES = FSDP1S
