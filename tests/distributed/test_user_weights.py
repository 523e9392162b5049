"""User code that reaches for whole weights, gradients and optimizers: as under DDP, or one clear error."""

import pytest
import user_weight_cases as cases
from test_user_code import check
from tiers import slow

pytestmark = pytest.mark.distributed


def test_hooks_of_gradients_see_what_they_see_under_ddp(ranks):
    found, refused = ranks(2).run(cases.hooked)[0]
    check(found)
    assert refused.startswith("ConfigurationError: Expected no register_post_accumulate_grad_hook")


@pytest.mark.slow
def test_losses_over_parameters_equal_ddp_or_are_refused(ranks):
    found, notes = ranks(2).run(cases.penalised)[0]
    assert max(found.values()) < 1e-10, found
    for name, note in notes.items():
        assert "can only be in the root unit, which stays gathered" in note, name
    for name, outcome in ranks(2).run(cases.penalised_in_units)[0].items():
        if isinstance(outcome, str):
            assert "\nOSDP: outside the forward of its own module a parameter may be a DTensor" in outcome, name
        else:
            assert outcome < 1e-10, name


@pytest.mark.slow
def test_backbones_are_unfrozen_and_resumed(ranks):
    for found, sizes in ranks(2).run(cases.unfrozen):
        assert max(found["dp"], found["zdp"]) < 1e-10, found
        assert found["full", "moments"] == found["sharded", "moments"] == sum(sizes[0])
        assert sizes == [sizes[0]] * 5
        assert len(sizes[0]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_whole_weights_can_be_run_copied_and_changed(ranks, world_size):
    for rank, (found, refused, same, alone) in enumerate(ranks(world_size).run(cases.exported)):
        if rank == 0:
            check({"exporting": found})
        for name in ("layer", "norm", "root"):
            assert "with trainer.strategy.gathered()" in refused[name], name
        assert "got another one. Pass self" in refused["other"]
        assert "setup has not been yet" in refused["early"]
        assert same == {"weight": True, "bias": True}
        assert alone == 0.0


def test_profiling_leaves_no_trace_and_groups_are_compared(ranks):
    for off, is_counted_alike, (kind, told) in ranks(2).run(cases.profiled):
        assert off < 1e-10
        assert is_counted_alike
        assert kind == "ConfigurationError"
        assert "group 0 has 'first.bias', 'first.weight', 'last.bias' and 5 more of the whole one only" in told


def test_steps_may_ask_for_optimizers_and_take_their_batch_apart(ranks):
    for off, (kind, told) in ranks(2).run(cases.asked):
        assert off < 1e-10
        assert kind == "ProfileError"
        assert "training_step reads self.outs" in told
        assert "on_train_epoch_start sets it later" in told
