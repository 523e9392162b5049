"""Writes docs/research/measured/lifecycle.md: `python tests/distributed/lifecycle/lifecycle_table.py`."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.distributed.support import lifecycle, ranks

PAGE = Path(__file__).parents[3] / "docs" / "research" / "measured" / "lifecycle.md"
HEAD = """# Features of the Trainer

Each feature was run on two gloo ranks under `OSDPStrategy`, with a plan of ZDP and DP units, and under Lightning's
`FSDPStrategy`, which was changed only to run on CPU, and there with a model that has no scalar parameter, which FSDP1
refuses.
"equal" means that losses, metrics and learning rates are those under `DDPStrategy`, within 1e-4; for low precisions,
that losses are within 5% of float32's; for "max_time is over", that all ranks end at the same step.
Any other text is the first error or difference.
`python tests/distributed/lifecycle/lifecycle_table.py` makes this table; CI checks the column of `OSDPStrategy`.

| feature | `OSDPStrategy` | `FSDPStrategy` |
|---|---|---|
"""


def column(kind):
    """Outcome of each feature; a pool that hangs or dies is replaced."""
    pool, found = None, {}
    for feature in lifecycle.FEATURES:
        pool = ranks.RankPool(2) if pool is None or not pool.is_alive else pool
        try:
            texts = pool.run(lifecycle.outcome, feature=feature, kind=kind)
            found[feature] = next((text for text in texts if text), "equal")
        except (AssertionError, EOFError, ConnectionError):
            pool.close()
            found[feature] = "hangs or crashes"
        sys.stdout.write(f"{kind}: {feature}: {found[feature]}\n")
    pool.close()
    return found


def main():
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ranks.TIMEOUT_S = 60
    ours, plain = column("osdp"), column("fsdp")
    rows = [f"| {feature} | {ours[feature][:120]} | {plain[feature][:120]} |\n" for feature in ours]
    PAGE.write_text(HEAD + "".join(rows))


if __name__ == "__main__":
    main()
