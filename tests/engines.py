"""Engines in all their settings, to draw from."""

from hypothesis import strategies as st

from lightning_osdp.engine import FSDP1, FSDP2

FSDP1S = st.builds(FSDP1, backward_prefetch=st.sampled_from(FSDP1.prefetches), forward_prefetch=st.booleans())
FSDP2S = st.builds(
    FSDP2,
    backward_prefetch=st.sampled_from(FSDP2.prefetches),
    forward_prefetch=st.booleans(),
    asynchronous_unshard=st.booleans(),
)
ENGINES = FSDP1S | FSDP2S
