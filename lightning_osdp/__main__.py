"""``python -m lightning_osdp`` is ``lightning-osdp``."""

from __future__ import annotations

import sys

from lightning_osdp.cli import main

sys.exit(main())
