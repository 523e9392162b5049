"""Small models whose links are about as busy as their devices, to draw from."""

from hypothesis import strategies as st

from lightning_osdp.core.axes import ALL_MODES, MODES, modes_of
from lightning_osdp.core.cluster import UNIT_PARTS, Cluster, Contention, Link, UnitOverhead
from lightning_osdp.core.units import partition
from lightning_osdp.planner.assign import Setting
from lightning_osdp.planner.cost import Workload
from tests.support.engines import ENGINES

_CONTENTIONS = (
    Contention(),
    Contention(),
    Contention(computing=1.25, collectives=1.5),
    Contention(computing=1.25, collectives=1.1, delay_s=0.4),
)


@st.composite
def overlapped(draw, most=7):
    """Fields of operators, and the rest of a `Setting` whose links are about as busy as its device."""
    num_micro_batches = draw(st.sampled_from([1, 1, 2, 5]))
    names = [""]
    for index in range(draw(st.integers(1, most if num_micro_batches == 1 else 3))):  # four modes each, not two
        names.append(f"{draw(st.sampled_from(['', *names]))}.{index}".strip("."))
    operators = [
        {
            "name": name,
            "parameter_bytes": draw(st.sampled_from([100, 100, 300, 37])),
            "frozen": draw(st.sampled_from([False, False, False, True])),
            "num_calls": draw(st.sampled_from([1, 1, 1, 2])),
            "forward_s_per_sample": draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
            "backward_s_per_sample": draw(st.sampled_from([0.0, 1.0, 2.0, 4.0])),
            "backward_fixed_s": draw(st.sampled_from([0.0, 1.0])),
            "activation_bytes_per_sample": draw(st.sampled_from([0, 50, 200])),
            "backward_workspace_bytes_per_sample": draw(st.sampled_from([0, 100])),
        }
        for name in names[1:]
    ]
    link = st.builds(Link, latency_s=st.sampled_from([0.0, 0.3]), seconds_per_byte=st.sampled_from([0.002, 0.01, 0.03]))
    overhead = st.builds(UnitOverhead, fixed_s=st.sampled_from([0.0, 0.2, 0.5]))
    cluster = Cluster(
        world_size=draw(st.sampled_from([2, 3, 8])),
        all_gather=draw(link),
        reduce_scatter=draw(link),
        unit_overhead=draw(st.fixed_dictionaries(dict.fromkeys(UNIT_PARTS, overhead)) | st.just({})),
        overlaps=True,
        contention=draw(st.sampled_from(_CONTENTIONS)),
    )
    return operators, {
        "modes": draw(st.sampled_from([ALL_MODES, modes_of((*MODES, "resident"))])),
        "cluster": cluster,
        "workload": Workload(micro_batch_size=draw(st.integers(1, 3)), num_micro_batches=num_micro_batches),
        "engine": draw(ENGINES),
    }


def made(model, operator, case):
    operators, fields = case
    profile = model(*(operator(**fields) for fields in operators), loss_activation_bytes_per_sample=30)
    return Setting(profile=profile, units=partition(profile, min_unit_bytes=0), **fields)


SHARES = st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0])
