"""Random models, clusters and settings, drawn by a seed: the corpus whose predictions are kept beside the tests."""

import collections
import dataclasses

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.cluster import UNIT_PARTS, Cluster, Contention, Link, Links, UnitOverhead
from lightning_osdp.core.exchange import Exchange
from lightning_osdp.core.profile import (
    BlockProfile,
    Cut,
    ModelProfile,
    OperatorProfile,
    OptimizerProfile,
    ParameterProfile,
    Segment,
)
from lightning_osdp.core.step import Workload
from lightning_osdp.planner.engine import FSDP2

KIB = 1024


def _operator(draw, name, position, features, outputs, *, frozen, half):
    itemsize, gathered = 4, 2 if half else 4
    parameters = tuple(
        ParameterProfile(
            position=2 * position + index,
            num_elements=size,
            itemsize=itemsize,
            gathered_itemsize=gathered,
            reduced_itemsize=4 if half and draw.random() < 0.5 else None,
            num_rows=rows,
            is_trainable=not frozen,
            state_bytes_per_element=8.0,
            place=2 * position + index,
        )
        for index, (size, rows) in enumerate(((features * outputs, outputs), (outputs, outputs)))
    )
    elements = features * outputs + outputs
    trained = 0 if frozen else elements
    path = name.split(".")
    return OperatorProfile(
        name=name,
        kind="Linear",
        enclosing=(*(".".join(path[:length]) for length in range(len(path), 0, -1)), ""),
        parameter_bytes=itemsize * elements,
        num_trainable=trained,
        gathered_bytes=gathered * elements,
        trainable_bytes=itemsize * trained,
        gradient_bytes=gathered * trained,
        optimizer_bytes=8 * trained,
        parameters=parameters,
        signature=f"Linear {features} {outputs}",
        cut=Cut(
            num_features=features,
            is_cut=(True, False),
            input_bytes=Affine(0.0, 4.0 * features),
            input_gradient_bytes=Affine(0.0, 4.0 * features),
            output_bytes=Affine(0.0, 4.0 * outputs),
        ),
    )


def _segment(draw, name, scale):
    per_sample = [round(draw.uniform(0.0, 64.0 * scale)) * KIB for _ in range(4)]
    forward_s = draw.choice([0.0, 1e-4, 3e-4]) * scale
    return Segment(
        operator=name,
        forward_s=Affine(draw.choice([0.0, 2e-5]), forward_s),
        backward_s=Affine(draw.choice([0.0, 2e-5]), 2 * forward_s),
        saved_bytes=Affine(0.0, float(per_sample[0])),
        forward_workspace_bytes=Affine(1024.0, float(per_sample[1])),
        handed_bytes=Affine(0.0, float(per_sample[1] // 2)),
        backward_workspace_bytes=Affine(0.0, float(per_sample[2])),
        evaluation_bytes=Affine(0.0, float(per_sample[3])),
    )


def _block(draw, profile, name):
    ((first, last),) = profile.spans[name]
    own = profile.segments[first : last + 1]
    saved = sum((segment.saved_bytes for segment in own), Affine())

    def saving(border):
        return tuple(
            dataclasses.replace(
                segment,
                saved_bytes=Affine(0.0, 0.0 if index else border),
                backward_workspace_bytes=segment.backward_workspace_bytes + saved,
            )
            for index, segment in enumerate(own)
        )

    return BlockProfile(
        name=name,
        span=(first, last),
        segments={"recompute": saving(8.0 * KIB), "offload": saving(0.0), "recompute_offload": saving(0.0)},
        rerun_s=sum((segment.forward_s for segment in own), Affine()),
        reruns_early=draw.random() < 0.3,
        copied_bytes={"offload": saved, "recompute_offload": Affine(0.0, 8.0 * KIB)},
    )


def draw_profile(draw, *, most_blocks=4):
    """A model of blocks of a few linear layers each, with some outside; some frozen, some called twice."""
    half, width = draw.random() < 0.3, draw.choice([64, 96, 128])
    operators, names = [], []
    is_lora = draw.random() < 0.2
    names.append("embedding")
    for block in range(draw.randint(1, most_blocks)):
        names += [f"h.{block}.{index}" for index in range(draw.randint(1, 3))]
    names += ["norm", "head"][draw.randint(0, 1) :]
    for position, name in enumerate(names):
        frozen = (is_lora and position % 2 == 0) or (position == 0 and draw.random() < 0.3)
        outputs = width * draw.choice([1, 1, 2, 4]) - draw.choice([0, 0, 1])
        operators.append(_operator(draw, name, position, width, outputs, frozen=frozen, half=half))
    scale = draw.choice([0.2, 1.0, 4.0])
    segments = {name: _segment(draw, name, scale) for name in names}
    segments[""] = dataclasses.replace(_segment(draw, "", scale), operator="")
    profile = ModelProfile.in_turn(
        operators,
        segments,
        optimizer=OptimizerProfile(
            s_per_element=1e-9, fixed_s=1e-4, temporaries=((0.0, 2.0), (1.0, 1.0)), foreach_temporaries=2.0
        ),
        buffer_bytes=4096,
        batch_bytes=Affine(0.0, 512.0),
    )
    if draw.random() < 0.25:  # the last block is called again
        name = [each for each in names if each.startswith("h.")][-1]
        again = [*profile.segments[:-1], dataclasses.replace(segments[name]), profile.segments[-1]]
        place = len(again) - 2
        spans = dict(profile.spans)
        spans[name] = (*spans[name], (place, place))
        return dataclasses.replace(profile, segments=tuple(again), spans=spans)
    blocks = dict.fromkeys(".".join(name.split(".")[:2]) for name in names if name.startswith("h."))
    return dataclasses.replace(profile, blocks=tuple(_block(draw, profile, name) for name in blocks))


def with_exchanges(draw, profile):
    """The profile in which most of the operators that are trained and called once may move activations."""
    calls = collections.Counter(segment.operator for segment in profile.segments)
    found = []
    for operator in profile:
        rows = draw.choice([0.25, 1.0, 8.0])
        if operator.num_trainable and operator.cut and calls[operator.name] == 1 and draw.random() < 0.8:
            needs = draw.random() < 0.8
            found.append(
                Exchange(
                    draw.choice(["column", "row", "embedding"]),
                    (operator.name,),
                    input_bytes=operator.cut.input_bytes * rows,
                    input_gradient_bytes=operator.cut.input_gradient_bytes * (rows if needs else 0.0),
                    output_bytes=operator.cut.output_bytes * rows,
                    saved_bytes=operator.cut.input_bytes * (rows if draw.random() < 0.5 else 0.0),
                )
            )
    return dataclasses.replace(profile, exchanges=tuple(found))


def draw_cluster(draw):
    """Draws one node or several, on links that block or overlap."""

    def link(rate):
        return Link(latency_s=draw.choice([1e-6, 2e-5]), seconds_per_byte=draw.choice([1, 3]) / rate)

    def links(rate):
        return Links(all_gather=link(rate), reduce_scatter=link(rate), all_reduce=link(rate))

    world_size = draw.choice([1, 2, 4, 8, 8])
    node_size = draw.choice([None, 2, 4]) if world_size == 8 else None
    overlaps = draw.random() < 0.5
    overhead = {
        part: UnitOverhead(fixed_s=draw.choice([0.0, 1e-5]), seconds_per_byte=1e-11, seconds_per_tensor=1e-6)
        for part in UNIT_PARTS
        if part != "stay"
    }
    overhead["stay"] = overhead["flatten"]  # a draw of its own would shift all later ones
    return Cluster(
        world_size=world_size,
        node_size=node_size,
        all_gather=link(1e9),
        reduce_scatter=link(1e9),
        within_node=links(8e9) if node_size and draw.random() < 0.8 else None,
        between_nodes=links(1e9) if node_size and draw.random() < 0.5 else None,
        unit_overhead=overhead if draw.random() < 0.7 else {},
        overlaps=overlaps,
        contention=Contention(computing=1.2, collectives=1.5) if overlaps and draw.random() < 0.3 else Contention(),
        reduce_scatter_copies=draw.random() < 0.5,
        host_copy_s_per_byte=draw.choice([1e-10, 1e-9]),
        host_copies_overlap=overlaps,
        library_workspace_bytes=draw.choice([0, 10_000]),
    )


def draw_workload(draw):
    return Workload(micro_batch_size=draw.randint(1, 4), num_micro_batches=draw.choice([1, 1, 2, 3, 5]))


def draw_engine(draw, names):
    late = [tuple(name for name in names if name and draw.random() < 0.2) for _ in range(2)]
    return FSDP2(
        backward_prefetch=draw.choice(["pre", "pre", "none"]),
        forward_prefetch=draw.random() < 0.4,
        asynchronous_unshard=draw.random() < 0.7,
        late_forward=late[0] if draw.random() < 0.3 else (),
        late_backward=late[1] if draw.random() < 0.3 else (),
    )
