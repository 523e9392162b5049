"""Peaks of small profiles with every phase worked out by hand, and the closed form, which is no less.

Most cases take three units of P = 40, 80, 120 bytes under Adam on two ranks, and two samples that save 10, 20, 30
bytes each in them and 5 in the loss. So, whatever the modes:

    base = 120 (shards) + 240 (Adam) = 360        s = 20, 40, 60 reduced        A_i = 20, 60, 120, and 130 with the loss

A unit is gathered into a buffer of P bytes and copied out of it: 2 P for a moment. Each is one parameter, so that the
gradient that outlives its copy is all of it; to reduce the gradients of m2 takes

    what is sent 120, the last gradient 120, what comes back 60, and gloo's copy of what is sent 120 = 420
"""

from dataclasses import replace

import pytest

from lightning_osdp.core.axes import DP, RESIDENT, ZDP
from lightning_osdp.core.profile import OptimizerProfile, ParameterProfile
from lightning_osdp.core.units import partition
from lightning_osdp.planner.cost import exact_peak, step_memory
from lightning_osdp.planner.engine import FSDP2, leaving_order
from tests.support.steps import step_of

FROZEN = {"frozen": True, "num_trainable": 0, "trainable_bytes": 0, "gradient_bytes": 0, "optimizer_bytes": 0}
QUIET = {**FROZEN, "activation_bytes_per_sample": 0}
LETTERS = {"D": DP, "Z": ZDP, "d": DP.but(sync="last"), "z": ZDP.but(sync="last")}


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


def both(profile, modes, *, world_size=2, samples=2, num_micro_batches=1, copies=True, **settings):
    """Exact peak and closed form, with modes such as "DzD" for units after the root: capitals reduce every time."""
    step = step_of(
        profile,
        world_size=world_size,
        micro_batch_size=samples,
        num_micro_batches=num_micro_batches,
        reduce_scatter_copies=copies,
    )
    chosen, engine = [DP, *(LETTERS[letter] for letter in modes)], FSDP2(**settings)
    return exact_peak(step, chosen, engine=engine), step_memory(step, engine=engine).peak(chosen)


def peak(profile, modes, **options):
    """The exact peak; the closed form has the same bytes in these cases."""
    exact, bound = both(profile, modes, **options)
    assert exact.peak_bytes == bound.peak_bytes
    return exact


def seen(found):
    return found.peak_bytes, found.phase, found.operator


# forward   copy(2) 480 +2*120     +60  = 780      fwd(2) 480 +120 +120 = 720       loss 610
# backward  copy(2) 360 +2*120     +120 = 720
#           bwd(2)  360 +120+80 +120 +120 = 800    P_2, P_1 prefetched, S_2, A_2
#           rs(2)   360     +80 +420 +120 = 980    P_2 freed
#           copy(1) 360+60 +240 +2*80 +60 = 880    what m2 has sent and receives lives until m1 reduces
#           bwd(1)  360+60 +240 +80+40 +80 +60 = 920
#           rs(1)   360+60     +40 +280    +60 = 800
#           bwd(0)  360+100 +160 +40 +40   +20 = 720     opt 480
@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        ("ZZZ", 980),
        ("DDD", 980 + 40),  # and P_0; P_1 is there anyway
        ("DZZ", 980 + 40),
        ("ZDZ", 980),  # rs(2) would have it prefetched
        ("ZDD", 980),
    ],
)
def test_backward_prefetch_holds_the_next_unit_while_gradients_are_reduced(three, modes, expected):
    assert seen(peak(three(), modes)) == (expected, "reduce-scatter", "m2")


# rs(2) 360 +420 +120 = 900     rs(1) 360+60 +280 +60 = 760     copies as before
@pytest.mark.parametrize(("modes", "expected"), [("ZZZ", 900), ("DZZ", 940), ("ZDZ", 980), ("DDD", 1020)])
def test_without_backward_prefetch_one_unit_is_held(three, modes, expected):
    assert seen(peak(three(), modes, backward_prefetch="none")) == (expected, "reduce-scatter", "m2")


def test_a_backend_that_reduces_in_place_does_without_a_copy(three):
    # rs(2) 980 - 120
    assert seen(peak(three(), "ZZZ", copies=False)) == (860, "reduce-scatter", "m2")


def test_forward_carries_the_reduced_gradients_of_the_last_step(three):
    # fwd(1) 480 +80 +60 with a workspace of 2 * 200
    profile = three(fields={1: {"forward_workspace_bytes_per_sample": 200}})
    found = peak(profile, "ZZZ")
    assert seen(found) == (620 + 400, "forward", "m1")
    assert found.parts["reduced gradients"] == 120
    assert found.parts["workspace"] == 400


def test_forward_prefetch_holds_the_next_unit(three):
    profile = three(fields={1: {"forward_workspace_bytes_per_sample": 200}})
    assert seen(peak(profile, "ZZZ", forward_prefetch=True)) == (1020 + 120, "forward", "m1")  # and P_2
    profile = three(fields={2: {"forward_workspace_bytes_per_sample": 200}})
    assert peak(profile, "ZZZ", forward_prefetch=True).peak_bytes == 720 + 400  # none comes after it


def test_without_asynchronous_unsharding_a_buffer_lives_until_the_next_unit_is_copied_out(three):
    profile = three(fields={1: {"forward_workspace_bytes_per_sample": 200}})
    assert seen(peak(profile, "ZZZ", asynchronous_unshard=False)) == (1020 + 80, "forward", "m1")
    # in the loss that of m2 is still there, in backward none is left
    profile = three(loss_forward_workspace_bytes_per_sample=500)
    assert seen(peak(profile, "ZZZ", asynchronous_unshard=False)) == (610 + 1000 + 120, "forward", "")
    assert seen(peak(three(), "ZZZ", asynchronous_unshard=False)) == (980, "reduce-scatter", "m2")


def test_accumulating_keeps_the_reduced_gradients_through_backward(three):
    # rs(2) 980 + 120
    assert seen(peak(three(), "ZZZ", num_micro_batches=2)) == (1100, "reduce-scatter", "m2")
    assert seen(peak(three(), "DDD", num_micro_batches=5)) == (1140, "reduce-scatter", "m2")


# at rs(2) of the last micro-batch the others' gradients are whole where they wait, and what was kept is still gathered;
# the bound has S - s of all that wait, and P of those of them that are kept, besides 1100 and P_0 where it is kept
@pytest.mark.parametrize(
    ("modes", "expected", "most"),
    [
        ("ZZZ", 980 + 120, 1100),  # 120 reduced
        ("ZZz", 980 + 60, 1100 + 60),  # m2 has reduced nothing yet
        ("zzz", 980 + 120, 1100 + 120),  # S_0 + S_1 = s_0 + s_1 + s_2
        ("DDd", 1020 + 60, 1100 + 40 + 60 + 120),
        ("ddd", 1020 + 120, 1100 + 120 + 240),
        ("dZZ", 980 + 40 + 40 + 100, 1100 + 20 + 40),  # P_0, S_0
    ],
)
@pytest.mark.parametrize("num_micro_batches", [3, 5])
def test_a_unit_that_accumulates_holds_its_gradient_whole(three, modes, expected, most, num_micro_batches):
    exact, bound = both(three(), modes, num_micro_batches=num_micro_batches)
    assert (exact.peak_bytes, exact.phase, exact.operator) == (expected, "reduce-scatter", "m2")
    assert bound.peak_bytes == most >= expected


def test_with_two_micro_batches_the_second_begins_with_all_gradients_whole(three):
    exact, bound = both(three(), "zzz", num_micro_batches=2)
    assert exact.peak_bytes == 980 + 120 < bound.peak_bytes == 1220
    assert exact.parts["accumulated gradients"] == 40 + 80  # m2's are sent


def test_more_samples_save_more(three):
    # 1000 samples: the loss in forward 480 + 65 * 1000 and all of DP; its own 5 * 1000 are gone by bwd(2)
    assert seen(peak(three(), "ZZZ", samples=1000)) == (65480, "forward", "")
    assert seen(peak(three(), "DDD", samples=1000)) == (65480 + 240, "forward", "")


def test_one_rank_copies_what_it_has_and_sends_nothing(three):
    # base 240 + 480 = 720, s = S; fwd(2) 720+240 +120 +120 = 1200, loss 720+240 +130, and 240 where it is kept
    # reduce(2) 720 +120 (as one tensor) +120 (scattered, which is a copy) +120 = 1080
    exact, bound = both(three(), "ZZZ", world_size=1)
    assert seen(exact) == (1200, "forward", "m2")
    # bwd(1) 720+120 +120 (sent) +80 +80 +60, and P_0: where units are kept, what is prefetched would be there whole
    assert seen(bound) == (1180 + 40, "backward", "m1")
    assert seen(peak(three(), "DDD", world_size=1)) == (1330, "forward", "")


def test_the_optimizer_takes_temporaries_of_one_tensor_or_of_all(three):
    # 360+120 + 20 * 60 for the largest shard, 20 * 120 for all
    one = peak(three(optimizer=OptimizerProfile(temporaries=((0.0, 20.0),))), "DDD")
    assert seen(one) == (480 + 1200, "optimizer step", "")
    assert one.parts == {"parameter shards": 120, "optimizer state": 240, "reduced gradients": 120, "workspace": 1200}
    every = peak(three(optimizer=OptimizerProfile(is_foreach=True, foreach_temporaries=20.0)), "ZZZ")
    assert seen(every) == (480 + 2400, "optimizer step", "")


def test_the_loss_has_its_own_workspaces(three):
    # fwd: 610 + 2 * 500; bwd: the last step's 120 are gone, and m2 is prefetched where it is not kept
    assert seen(peak(three(loss_forward_workspace_bytes_per_sample=500), "ZZZ")) == (1610, "forward", "")
    waiting = three(loss_backward_workspace_bytes_per_sample=500)
    assert seen(peak(waiting, "ZZZ")) == (360 + 130 + 1000 + 120, "backward", "")
    assert seen(peak(waiting, "ZZZ", backward_prefetch="none")) == (360 + 130 + 1000, "backward", "")
    assert peak(waiting, "DDD").peak_bytes == 1490 + 240


def test_backward_workspaces_buffers_and_the_batch_count(three):
    # bwd(0) 720 and a workspace of 2 * 300
    profile = three(
        fields={0: {"backward_workspace_bytes_per_sample": 300}}, buffer_bytes=7, batch_bytes_per_sample=3.5
    )
    found = peak(profile, "ZZZ")
    assert seen(found) == (720 + 600 + 7 + 7, "backward", "m0")
    assert (found.parts["buffers"], found.parts["batch"]) == (7, 7)


@pytest.mark.parametrize("modes", ["ZZZ", "DZD"])
def test_what_libraries_keep_is_there_all_the_time(three, modes):
    step = step_of(three(), micro_batch_size=2)
    kept = replace(step, cluster=replace(step.cluster, library_workspace_bytes=1000))
    chosen = [DP, *(LETTERS[letter] for letter in modes)]
    for peak_of in (exact_peak, lambda step, modes: step_memory(step).peak(modes)):
        bare, found = peak_of(step, chosen), peak_of(kept, chosen)
        assert (found.peak_bytes, found.phase) == (bare.peak_bytes + 1000, bare.phase)
        assert found.parts == {**bare.parts, "workspaces of libraries": 1000}


def test_frozen_units_have_no_gradient(three):
    # m1 frozen: base 120 + (80 + 240) / 2 = 280; rs(2) 280 +80 +420 +120
    assert seen(peak(three(fields={1: FROZEN}), "ZZZ")) == (900, "reduce-scatter", "m2")
    # m2 frozen: base 120 + 120 = 240; copy(2) in backward 240 +2*120 +120 = 600, rs(1) 240 +40 +280 +60 = 620
    assert seen(peak(three(fields={2: FROZEN}), "ZZZ")) == (620, "reduce-scatter", "m1")


def test_resident_units_are_gathered_before_the_step_the_largest_first(three):
    # base 120 + 4 of Adam + 2 reduced; m2 is copied out: +2 * 120; then it has no shard, and m1 is: -60 +120 +2 * 80
    least = {"activation_bytes_per_sample": 0, "trainable_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8}
    profile = three(fields={0: least, 1: QUIET, 2: QUIET}, loss_activation_bytes_per_sample=0)
    found = exact_peak(step_of(profile, micro_batch_size=2), [DP, ZDP, RESIDENT, RESIDENT])
    assert seen(found) == (126 + 2 * 120, "forward", "m2")


def test_parameters_of_a_resident_unit_are_gathered_one_after_the_other(model, operator):
    # base 172 + 4 of Adam + 2 reduced; 160, and then 144 beside that, less its shard: each beside its buffer
    alone = {"position": 0, "itemsize": 4, "gathered_itemsize": 4, "is_trainable": False}
    parameters = tuple(ParameterProfile(num_elements=number, **alone) for number in (36, 40))
    least = {"activation_bytes_per_sample": 0, "trainable_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8}
    profile = model(operator("m0", 304, parameters=parameters, **QUIET), operator("m1", 40, **least))
    found = exact_peak(step_of(profile), [DP, RESIDENT, ZDP])
    assert seen(found) == (178 + 160 - 80 + 2 * 144, "forward", "m0")


def test_backward_neither_comes_to_nor_prefetches_what_is_frozen_from_the_beginning(three):
    # base 120 + 200 = 320; bwd(1) 320+60 +240 +80 +80 +60 and a workspace of 2 * 500, without P_0
    fields = {0: FROZEN, 1: {"backward_workspace_bytes_per_sample": 500}}
    assert seen(peak(three(fields=fields), "ZZZ")) == (840 + 1000, "backward", "m1")


def test_a_partly_frozen_unit_reduces_the_gradients_that_there_are(model, operator):
    # base 50 + 20 = 70, s = 10; rs 70 +20 (sent) +20 (last) +10 +20; forward 70+10 +2*100
    partly = {"trainable_bytes": 20, "gradient_bytes": 20, "optimizer_bytes": 40}
    assert seen(peak(model(operator("m", 100, **partly)), "Z", samples=1)) == (280, "forward", "m")
    # backward with a workspace: 70 +100 +20
    waiting = model(operator("m", 100, backward_workspace_bytes_per_sample=500, **partly))
    assert seen(peak(waiting, "Z", samples=1)) == (190 + 500, "backward", "m")


def test_the_root_is_always_gathered(model, operator):
    # P = 40 in the root. rs(2) = 360 +40 +80 +420, where m1 is kept or prefetched
    profile = model(operator("", 40), operator("m1", 80), operator("m2", 120))
    assert seen(peak(profile, "ZZ", samples=1)) == (900, "reduce-scatter", "m2")
    assert seen(peak(profile, "DD", samples=1)) == (900, "reduce-scatter", "m2")
    waiting = model(*profile.operators, loss_backward_workspace_bytes_per_sample=500)
    assert peak(waiting, "ZZ", samples=1).peak_bytes == 360 + 40 + 120 + 500
    assert peak(waiting, "ZZ", samples=1, backward_prefetch="none").peak_bytes == 360 + 40 + 500
    assert peak(waiting, "DZ", samples=1).peak_bytes == 360 + 40 + 120 + 500 + 80


def test_gradients_of_the_root_stay_unsharded_to_the_end(model, operator):
    # an operator of the root unit comes last: its 40 bytes of gradient live at rs(m1) = 900 + 40
    profile = model(operator("m0", 80), operator("m1", 120), operator("norm", 40, enclosing=("",)))
    assert seen(peak(profile, "ZZ", samples=1)) == (940, "reduce-scatter", "m1")


def test_a_container_is_gathered_around_what_runs_inside_it(model, operator):
    # P = 40 in a, 80 in a.x, 120 in a.y, 20 in z: base 390; s = 20, 40, 60, 10
    # copy(a.y) in forward = 390+130 +40 +2*120 = 800
    # rs(z)   = 390 +40 (a, prefetched) +70 = 500
    # rs(a.y) = 390+10 +40 (a) +80 (a.x, prefetched) +420 = 940
    # rs(a.x) = 390+70 +40 (a) +280 = 780
    profile = model(operator("a", 40), operator("a.x", 80), operator("a.y", 120), operator("z", 20))
    assert seen(peak(profile, "ZZZZ", samples=1)) == (940, "reduce-scatter", "a.y")
    # bwd(z) = 390 +20+40 +20, at which a.x and a.y are freed; at bwd(a.y) none of them
    waiting = model(*profile.operators[:3], operator("z", 20, backward_workspace_bytes_per_sample=900))
    assert peak(waiting, "ZZZZ", samples=1).peak_bytes == 470 + 900
    assert peak(waiting, "DZZZ", samples=1).peak_bytes == 470 + 900  # a is prefetched
    assert peak(waiting, "ZDDZ", samples=1).peak_bytes == 470 + 900 + 200
    units = partition(profile, min_unit_bytes=0)
    assert [units[unit].name for unit in leaving_order(units)] == ["a.x", "a.y", "a", "z"]


def test_half_precision_gathers_and_makes_gradients_of_half_the_bytes(three):
    # rs(2) 360 +40 +60 (sent) +60 (last) +30, what gloo receives, 60, and what is to come back at rest, 60; +120
    halves = {i: {"gathered_bytes": size // 2, "gradient_bytes": size // 2} for i, size in enumerate((40, 80, 120))}
    assert seen(peak(three(fields=halves), "ZZZ")) == (790, "backward", "m2")
    assert seen(peak(three(fields=halves), "ZZZ", copies=False)) == (730, "backward", "m2")


def test_a_model_without_operators_is_its_batch(model):
    profile = model(batch_bytes_per_sample=10.0, buffer_bytes=3, loss_activation_bytes_per_sample=1.0)
    assert seen(peak(profile, "", samples=2)) == (25, "forward", "")


def test_a_fraction_of_a_byte_is_rounded_up(model, operator):
    profile = model(operator("m", 0), batch_bytes_per_sample=0.25)
    assert [peak(profile, "Z", samples=samples).peak_bytes for samples in (1, 3, 4, 5)] == [1, 1, 1, 2]


def test_rooms_are_what_the_first_units_may_keep(three):
    # the largest moments at which k units are freed: bwd(1) and rs(1), rs(2), copy(2) in forward, and the loss
    memory = step_memory(step_of(three(), micro_batch_size=2))
    assert [memory.largest_bytes[k] for k in range(4)] == [920, 980, 780, 610]
    # at a limit of 1000: 80, 20, 220, 390 bytes, and no first units may keep more than the first k > them
    assert [round(room) for room in memory.room_bytes(1000)] == [20, 20, 220, 390]
    assert memory.kept_bytes([DP, DP, ZDP, DP]) == [0, 40, 40, 160]
