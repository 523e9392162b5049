"""Predictions of a corpus of random steps, kept from one version to the next: a change of structure changes none.

Where a change is meant to predict otherwise, `python tests/test_predictions.py` writes them anew.
"""

import json
import random
from pathlib import Path

import pytest

from lightning_osdp.core.axes import NAMED_MODES, modes_of
from lightning_osdp.core.units import partition
from lightning_osdp.planner.assign import Setting, block_units
from lightning_osdp.planner.cost import TERMS
from lightning_osdp.planner.simulation import simulate_step
from tests.support import corpus

KEPT = Path(__file__).parent / "fixtures" / "predictions.json"
NUM_STEPS = 40


def drawn(seed):
    """A setting, and two choices of modes of its units, as far as these have the choice."""
    draw = random.Random(seed)
    profile, cluster, workload = corpus.draw_profile(draw), corpus.draw_cluster(draw), corpus.draw_workload(draw)
    units = partition(profile, min_unit_bytes=draw.choice([0, 50_000]))
    setting = Setting(
        profile=profile,
        units=units,
        cluster=cluster,
        workload=workload,
        modes=modes_of([*NAMED_MODES]),
        engine=corpus.draw_engine(draw, [unit.name for unit in units]),
    )
    by_block = block_units(setting, ("keep", "recompute", "offload"))
    if by_block and draw.random() < 0.7:
        setting = by_block[draw.randrange(len(by_block))]
    return setting, [tuple(drawn_mode(draw, setting, unit) for unit in setting.units) for _ in range(2)]


def drawn_mode(draw, setting, unit):
    """A mode that the unit may take."""
    name = draw.choice(["ZDP", "DP", "hpZ", "HSDP", "HDP"] if setting.cluster.has_nodes else ["ZDP", "DP"])
    if unit.is_root:
        return NAMED_MODES["HDP" if name in {"HSDP", "HDP"} else "DP"]
    if name == "hpZ" and unit.last < unit.trained_from:
        name = "ZDP"
    waits = setting.workload.num_micro_batches > 1 and setting.cluster.world_size > 1 and len(unit.calls) == 1
    syncs = ["every", "last", "node"] if name in {"HSDP", "HDP"} else ["every", "last"]
    saves = unit.block is not None and len(setting.activations) > 1
    return NAMED_MODES[name].but(
        sync=draw.choice(syncs) if waits else "every",
        saves=draw.choice(["keep", "recompute", "offload"]) if saves else "keep",
    )


def predicted(seed):
    """Numbers of both: of the simulated step, of its clock, of the closed forms and of each unit's terms."""
    setting, choices = drawn(seed)
    costs, found = setting.costs, []
    for modes in choices:
        step = simulate_step(setting, modes, engine=setting.engine)
        found.append(
            {
                "seconds": [step.time_s, step.compute_s, step.communication_s, step.overhead_s, step.contention_s],
                "clock": costs.clock.step(modes).time_s,
                "terms": [costs.unit_s(unit, mode, *TERMS) for unit, mode in zip(setting.units, modes, strict=True)],
                "bytes": [
                    step.peak.peak_bytes,
                    step.reserved_bytes,
                    step.evaluation_bytes,
                    *step.saving_bytes.values(),
                ],
                "moments": sum(moment.num_bytes for _, moment in step.moments) / len(step.moments),
                "peak": f"{step.peak.phase} {step.peak.operator}",
                "closed form": costs.peak(modes).peak_bytes,
                "kept": costs.memory.kept_bytes(modes),
            }
        )
    return found


@pytest.mark.parametrize("seed", range(NUM_STEPS))
def test_predictions_are_as_they_were(seed):
    for now, before in zip(predicted(seed), json.loads(KEPT.read_text())[seed], strict=True):
        assert now.keys() == before.keys()
        for name, expected in before.items():
            exact = isinstance(expected, str)
            assert now[name] == (expected if exact else pytest.approx(expected, rel=1e-12, abs=1e-12)), name


if __name__ == "__main__":
    rows = (json.dumps(predicted(seed)) for seed in range(NUM_STEPS))
    KEPT.write_text("[\n" + ",\n".join(rows) + "\n]\n")
