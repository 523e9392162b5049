"""The closed form against small profiles with every phase worked out by hand.

Most cases take three units of P = 40, 80, 120 bytes under Adam on two ranks, and two samples that save 10, 20, 30
bytes each in them and 5 in the loss. So, whatever the modes:

    base = 120 (shards) + 240 (Adam) = 360        s = 20, 40, 60 reduced        A_i = 20, 60, 120, and 130 with the loss
"""

from dataclasses import replace

import pytest

from lightning_osdp.core.cluster import Cluster, Link
from lightning_osdp.core.modes import DP, ZDP
from lightning_osdp.core.profile import OptimizerProfile
from lightning_osdp.core.units import partition
from lightning_osdp.cost import Workload, step_memory
from lightning_osdp.engine import FSDP1, leaving_order
from lightning_osdp.simulation import simulate_step


@pytest.fixture
def three(model, operator):
    """The model of most cases; fields by position of the operator, and of the model."""

    def build(*, fields=None, **model_fields):
        operators = [
            operator(f"m{i}", size, **{"activation_bytes_per_sample": saved, **(fields or {}).get(i, {})})
            for i, (size, saved) in enumerate([(40, 10), (80, 20), (120, 30)])
        ]
        return model(*operators, **{"loss_activation_bytes_per_sample": 5, **model_fields})

    return build


def peak(profile, modes, *, world_size=2, samples=2, num_micro_batches=1, **prefetch):
    """Peak with modes such as "DZD" for the units after the root, and where it is."""
    units = partition(profile, min_unit_bytes=0)
    workload = Workload(micro_batch_size=samples, num_micro_batches=num_micro_batches)
    chosen = [DP, *({"D": DP, "Z": ZDP}[letter] for letter in modes)]
    return step_memory(profile, units, world_size=world_size, workload=workload, engine=FSDP1(**prefetch)).peak(chosen)


def seen(found):
    return found.peak_bytes, found.phase, found.operator


# forward   fwd(0) 360+120 +40     +20 = 540     fwd(1) 480 +80 +60 = 620     fwd(2) 480 +120 +120 = 720     loss 610
# backward  bwd(2) 360     +120+80 +120+120 +120      = 920     P_2, P_1 prefetched, S_2 twice, A_2
#           rs(2)  360     +80     +120+60  +120      = 740     P_2 freed, S_2 once, s_2
#           bwd(1) 360+60  +80+40  +80+80   +60       = 760
#           bwd(0) 360+100 +40     +40+40   +20       = 600     opt 360+120 = 480
@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        ("ZZZ", (920, "backward", "m2")),
        ("DDD", (960, "backward", "m2")),  # and P_0; P_1 is there anyway
        ("DZZ", (960, "backward", "m2")),
        ("ZDZ", (920, "backward", "m2")),  # bwd(2) would prefetch it
        ("ZDD", (920, "backward", "m2")),  # the loss: 610 + 80 + 120
    ],
)
def test_backward_prefetch_holds_two_units(three, modes, expected):
    assert seen(peak(three(), modes)) == expected


# bwd(2) 360 +120 +120+120 +120 = 840     bwd(1) 360+60 +80 +80+80 +60 = 720
@pytest.mark.parametrize(("modes", "expected"), [("ZZZ", 840), ("DZZ", 880), ("ZDZ", 920), ("DDD", 960)])
def test_without_backward_prefetch_one_unit_is_held(three, modes, expected):
    assert seen(peak(three(), modes, backward_prefetch="none")) == (expected, "backward", "m2")


# rs(2)  360 +80 +120+120+60 +120 = 860: P_1 is there already, and S_2 is copied for sending
@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        ("ZZZ", (860, "reduce-scatter", "m2")),
        ("DZZ", (900, "reduce-scatter", "m2")),
        ("ZDZ", (920, "backward", "m2")),  # as without prefetch
        ("DDD", (960, "backward", "m2")),
    ],
)
def test_post_prefetch_holds_the_next_unit_while_gradients_are_reduced(three, modes, expected):
    assert seen(peak(three(), modes, backward_prefetch="post")) == expected


def test_post_prefetches_before_gradients_are_reduced(model, operator):
    # 200 frozen and 40 trainable: base 120 + 40 = 160, s = 20
    # none: fwd(0) = 160+20 +200 = 380, bwd(1) = 160 +40 +40+40 = 280
    # post: rs(1) = 160 +200 (prefetched) +40+40 (what is sent is copied) +20 = 460
    profile = model(operator("a", 200, frozen=True), operator("b", 40))
    assert seen(peak(profile, "ZZ", backward_prefetch="none")) == (380, "forward", "a")
    assert seen(peak(profile, "ZZ", backward_prefetch="post")) == (460, "reduce-scatter", "b")


def test_forward_carries_the_reduced_gradients_of_the_last_step(three):
    # fwd(1) with a workspace of 2 * 200: 620 + 400
    profile = three(fields={1: {"forward_workspace_bytes_per_sample": 200}})
    found = peak(profile, "ZZZ")
    assert seen(found) == (1020, "forward", "m1")
    assert found.parts["reduced gradients"] == 120
    assert found.parts["workspace"] == 400


def test_forward_prefetch_holds_the_next_unit(three):
    profile = three(fields={1: {"forward_workspace_bytes_per_sample": 200}})
    assert seen(peak(profile, "ZZZ", forward_prefetch=True)) == (1140, "forward", "m1")  # and P_2
    profile = three(fields={2: {"forward_workspace_bytes_per_sample": 200}})
    assert peak(profile, "ZZZ", forward_prefetch=True).peak_bytes == 720 + 400  # none comes after it


def test_forward_prefetch_lets_backward_be_through_with_a_unit_one_later(three):
    # bwd(1) 360 +120+80+40 (P_0 is prefetched) +120 (single), 120 (flat) and 80 +60 = 980; without: 760
    assert seen(peak(three(), "ZZZ", forward_prefetch=True)) == (980, "backward", "m2")
    assert seen(peak(three(), "DDD", forward_prefetch=True)) == (980, "backward", "m2")
    # P_0 is not there; and a unit that is frozen has no gradient to wait for
    assert seen(peak(three(), "ZZZ", forward_prefetch=True, backward_prefetch="none")) == (940, "backward", "m2")
    frozen = three(fields={2: {"frozen": True}})
    # at m0: 240 + 60 (shards, Adam) +80+40 +80+40 (single), 80 (flat) +20 - the frozen 120 is gone
    assert seen(peak(frozen, "ZZZ", forward_prefetch=True, backward_prefetch="none")) == (580, "backward", "m1")


def test_accumulating_keeps_the_reduced_gradients_through_backward(three):
    # bwd(2) 920 + 120
    assert seen(peak(three(), "ZZZ", num_micro_batches=2)) == (1040, "backward", "m2")
    assert seen(peak(three(), "DDD", num_micro_batches=5)) == (1080, "backward", "m2")


def accumulating(three, modes, *, num_micro_batches, **options):
    """Exact peak and closed form on two ranks with modes such as "DzD": capitals reduce in every micro-batch."""
    profile = three()
    units = partition(profile, min_unit_bytes=0)
    letters = {"D": DP, "Z": ZDP, "d": replace(DP, sync="last"), "z": replace(ZDP, sync="last")}
    chosen = [DP, *(letters[letter] for letter in modes)]
    workload = Workload(micro_batch_size=2, num_micro_batches=num_micro_batches)
    ring = Link(latency_s=0.0, seconds_per_byte=0.0)
    cluster = Cluster(world_size=2, all_gather=ring, reduce_scatter=ring)
    exact = simulate_step(profile, units, chosen, cluster, workload, **options).peak
    bound = step_memory(profile, units, world_size=2, workload=workload, **options).peak(chosen)
    return exact, bound


# at bwd(2) of a steady micro-batch the others' gradients are whole, too, and what was kept is still gathered
@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        ("ZZZ", 920 + 120),  # 120 reduced
        ("ZZz", 920 + 60 + 120),  # S_2 in place of s_2
        ("zzz", 920 + 240),
        ("DDd", 960 + 60 + 120),  # P_2 and P_1 are gathered anyway
        ("ddd", 960 + 240),
        ("dZZ", 920 + 40 + 40 + 100),  # P_0, S_0
    ],
)
@pytest.mark.parametrize("num_micro_batches", [3, 5])
def test_a_unit_that_accumulates_holds_its_gradient_whole(three, modes, expected, num_micro_batches):
    exact, bound = accumulating(three, modes, num_micro_batches=num_micro_batches)
    assert (exact.peak_bytes, exact.phase, exact.operator) == (expected, "backward", "m2")
    twice = 80 + 120 if "d" in modes else 0  # what runs at the peak is counted as gathered, and as held
    assert expected <= bound.peak_bytes <= expected + twice


def test_with_two_micro_batches_the_second_begins_with_all_gradients_whole(three):
    exact, bound = accumulating(three, "zzz", num_micro_batches=2)
    assert exact.peak_bytes == bound.peak_bytes == 920 + 240
    assert exact.parts["accumulated gradients"] == 240


def test_more_samples_save_more(three):
    # 1000 samples: fwd loss 480 + 65 * 1000 and all of DP; the loss' own 5 * 1000 are gone by bwd(2)
    assert seen(peak(three(), "ZZZ", samples=1000)) == (65480, "forward", "")
    assert seen(peak(three(), "DDD", samples=1000)) == (65480 + 240, "forward", "")


def test_one_rank_gathers_nothing_and_keeps_its_gradients(three):
    # base 240 + 480 = 720; loss 720+240 +130 = 1090; bwd(2) 720 +120+120 +120 = 1080, bwd(1) 720 +200+80 +60 = 1060
    for modes in ("ZZZ", "DDD"):
        assert seen(peak(three(), modes, world_size=1)) == (1090, "forward", "")


def test_the_optimizer_takes_temporaries_of_one_tensor_or_of_all(three):
    # 360+120 + 20 * 60 for the largest shard, 20 * 120 for all
    one = peak(three(optimizer=OptimizerProfile(temporaries=((0.0, 20.0),))), "DDD")
    assert seen(one) == (480 + 1200, "optimizer step", "")
    assert one.parts == {"parameter shards": 120, "optimizer state": 240, "reduced gradients": 120, "workspace": 1200}
    every = peak(three(optimizer=OptimizerProfile(is_foreach=True, foreach_temporaries=20.0)), "ZZZ")
    assert seen(every) == (480 + 2400, "optimizer step", "")


def test_the_loss_has_its_own_workspaces(three):
    # fwd: 610 + 2 * 500; bwd: the last step's 120 are gone, and nothing is prefetched by a root without parameters
    assert seen(peak(three(loss_forward_workspace_bytes_per_sample=500), "ZZZ")) == (1610, "forward", "")
    found = peak(three(loss_backward_workspace_bytes_per_sample=500), "ZZZ")
    assert seen(found) == (360 + 130 + 1000, "backward", "")
    assert peak(three(loss_backward_workspace_bytes_per_sample=500), "DDD").peak_bytes == 1490 + 240


def test_backward_workspaces_buffers_and_the_batch_count(three):
    # bwd(0): 360+100 +40 +40 +20 and a workspace of 2 * 300, before the gradient's flat copy
    profile = three(
        fields={0: {"backward_workspace_bytes_per_sample": 300}}, buffer_bytes=7, batch_bytes_per_sample=3.5
    )
    found = peak(profile, "ZZZ")
    assert seen(found) == (560 + 600 + 7 + 7, "backward", "m0")
    assert (found.parts["buffers"], found.parts["batch"]) == (7, 7)


def test_frozen_units_have_no_gradient(three):
    # base 120 + (80 + 240) / 2 = 280; bwd(2) = 280 +120+80 +120+120 +120 = 840; fwd(2) = 280+80 +120 +120 = 600
    frozen = {"num_trainable": 0, "trainable_bytes": 0, "gradient_bytes": 0, "optimizer_bytes": 0}
    assert seen(peak(three(fields={1: frozen}), "ZZZ")) == (840, "backward", "m2")
    # with the last one frozen: base 120 + 120 = 240; bwd(2) = 240 +120+80 +120 = 560; bwd(1) = 240 +80+40 +80+80 +60
    assert seen(peak(three(fields={2: frozen}), "ZZZ")) == (580, "backward", "m1")


def test_a_partly_frozen_unit_has_a_flat_gradient_of_all_its_parameters(model, operator):
    # base 50 + 20 = 70; bwd = 70 +100 +100 (as produced, zeros for what is frozen) +100 (flat); rs = 70 +100+100 +50
    profile = model(operator("m", 100, trainable_bytes=20, gradient_bytes=20, optimizer_bytes=40))
    assert seen(peak(profile, "Z", samples=1)) == (370, "backward", "m")


def test_the_root_is_always_gathered(model, operator):
    # P = 40 in the root. bwd(2) = 360 +40 +120+80 +120+120 = 840 and the loss in backward prefetches m2
    profile = model(operator("", 40), operator("m1", 80), operator("m2", 120))
    assert seen(peak(profile, "ZZ", samples=1)) == (840, "backward", "m2")
    assert seen(peak(profile, "DD", samples=1)) == (840, "backward", "m2")  # m1 would be prefetched
    waiting = model(*profile.operators, loss_backward_workspace_bytes_per_sample=500)
    assert peak(waiting, "ZZ", samples=1).peak_bytes == 360 + 40 + 120 + 500
    assert peak(waiting, "ZZ", samples=1, backward_prefetch="none").peak_bytes == 360 + 40 + 500
    assert peak(waiting, "DZ", samples=1).peak_bytes == 360 + 40 + 120 + 500 + 80


def test_gradients_of_the_root_stay_unsharded_to_the_end(model, operator):
    # the same with an operator of the root unit last: its 40 bytes of gradient live at bwd(m1) = 840 + 40
    profile = model(operator("m0", 80), operator("m1", 120), operator("norm", 40, enclosing=("",)))
    assert seen(peak(profile, "ZZ", samples=1)) == (880, "backward", "m1")


def test_a_container_is_gathered_around_what_runs_inside_it(model, operator):
    # P = 40 in a, 80 in a.x, 120 in a.y, 20 in z: base 390; s = 20, 40, 60, 10
    # fwd(a.y) = 390+130 +40+120 = 680
    # bwd(z)   = 390 +20+40 +20+20 = 490       a.y is prefetched by a only
    # bwd(a.y) = 390+10 +40+120+80 +120+120 = 880
    # bwd(a.x) = 390+70 +40+80 +80+80 = 740     bwd(a) = 390+110 +40 +40+40 = 620
    profile = model(operator("a", 40), operator("a.x", 80), operator("a.y", 120), operator("z", 20))
    assert seen(peak(profile, "ZZZZ", samples=1)) == (880, "backward", "a.y")
    # at bwd(z) a.x and a.y are freed, at bwd(a.y) none of them
    waiting = model(*profile.operators[:3], operator("z", 20, backward_workspace_bytes_per_sample=900))
    assert peak(waiting, "ZZZZ", samples=1).peak_bytes == 470 + 900
    assert peak(waiting, "DZZZ", samples=1).peak_bytes == 470 + 900  # a is prefetched
    assert peak(waiting, "ZDDZ", samples=1).peak_bytes == 470 + 900 + 200
    assert [
        partition(profile, min_unit_bytes=0)[u].name for u in leaving_order(partition(profile, min_unit_bytes=0))
    ] == [
        "a.x",
        "a.y",
        "a",
        "z",
    ]


def test_half_precision_gathers_and_makes_gradients_of_half_the_bytes(three):
    # bwd(2) = 360 +60+40 +60+60 +120
    halves = {i: {"gathered_bytes": size // 2, "gradient_bytes": size // 2} for i, size in enumerate((40, 80, 120))}
    assert seen(peak(three(fields=halves), "ZZZ")) == (720 - 20, "backward", "m2")


def test_a_model_without_operators_is_its_batch(model):
    profile = model(batch_bytes_per_sample=10.0, buffer_bytes=3, loss_activation_bytes_per_sample=1.0)
    assert seen(peak(profile, "", samples=2)) == (25, "forward", "")


def test_a_fraction_of_a_byte_is_rounded_up(model, operator):
    profile = model(operator("m", 0), batch_bytes_per_sample=0.25)
    assert [peak(profile, "Z", samples=samples).peak_bytes for samples in (1, 3, 4, 5)] == [1, 1, 1, 2]


def test_rooms_are_what_the_first_units_may_keep(three):
    # the largest moments at which k units are freed: bwd(1) 760, bwd(2) 920, fwd(2) 720, and the loss 610
    profile = three()
    memory = step_memory(
        profile, partition(profile, min_unit_bytes=0), world_size=2, workload=Workload(micro_batch_size=2)
    )
    assert [memory.moments[k].num_bytes for k in range(4)] == [760, 920, 720, 610]
    # at a limit of 1000: 240, 80, 280, 390 bytes, and no first units may keep more than the first k > them
    assert [round(room) for room in memory.room_bytes(1000)] == [80, 80, 280, 390]
    assert memory.kept_bytes([DP, DP, ZDP, DP]) == [0, 40, 40, 160]
