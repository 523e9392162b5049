"""Programs that train with lightning_osdp."""
