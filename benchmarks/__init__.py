"""Programs that measure lightning_osdp."""
