"""Loaders of every kind: trained on as DDP would, rebuilt with another size, or kept with the reason."""

import loader_cases as cases
import pytest
from tiers import slow

pytestmark = pytest.mark.distributed


def check(found, *, planned):
    for one in found:
        assert one["difference"] < 1e-6
        assert one["planned"] == planned
        assert one["sizes"][0] == one["sizes"][1]
        assert one["val_sizes"] == {7}


@pytest.mark.parametrize(
    "kind",
    ["uneven", "generator", *(slow(each) for each in ("seeded", "positional", "list", "spent", "batch_sampler"))],
)
def test_loaders_asked_of_the_module_are_left_as_they_are(ranks, kind):
    found = ranks(2).run(cases.equals_ddp, kind=kind)
    check(found, planned=4)
    assert not found[0]["warnings"]


REBUILT = set(cases.LOADERS) - {"uneven", "generator", "seeded"}
SLOW = REBUILT - {"shuffled", "workers", "batch_sampler"}
ON_FOUR = ["batch_sampler", "counted", "max_size", "shuffled", "workers"]
"""One for each way to divide samples among ranks: Lightning's sampler, alone and inside of others, and one's own."""


@pytest.mark.parametrize(
    ("world_size", "kind"),
    [*(slow(2, kind) if kind in SLOW else (2, kind) for kind in sorted(REBUILT)), *(slow(4, kind) for kind in ON_FOUR)],
)
def test_loaders_rebuilt_with_another_size_equal_ddp_at_that_size(ranks, kind, world_size):
    found = ranks(world_size).run(cases.equals_ddp, kind=kind, asked=6)
    check(found, planned=6)
    assert not found[0]["warnings"]


@pytest.mark.parametrize(
    ("world_size", "kind", "asked"),
    [
        slow(2, "seeded", None),
        (2, "seeded", 6),
        (2, "generator", None),
        slow(2, "spent", 6),
        slow(2, "workers", 6),
        slow(4, "seeded", 6),
        slow(4, "generator", None),
    ],
)
def test_loaders_given_to_fit_are_as_profiling_found_them(ranks, kind, asked, world_size):
    found = ranks(world_size).run(cases.equals_ddp, kind=kind, asked=asked, by_hand=True)
    check(found, planned=asked or 4)


@pytest.mark.parametrize(
    ("world_size", "kind", "reason"),
    [
        (2, "uneven", "there are 2 with different batch sizes, 4, 5"),
        (2, "generator", "list_iterator is not a torch DataLoader"),
        slow(4, "uneven", "there are 2 with different batch sizes, 4, 5"),
    ],
)
def test_loaders_that_cannot_be_rebuilt_are_kept_with_the_reason(ranks, kind, reason, world_size):
    found = ranks(world_size).run(cases.equals_ddp, kind=kind, asked=6)[0]
    assert found["planned"] == 4
    assert {size[0] for size in found["sizes"][0]} == {4}
    assert found["warnings"] == [f"OSDP: batch_size=6 is ignored, the loader keeps 4: {reason}."]


RELOAD = {"reload_dataloaders_every_n_epochs": 1, "limit_train_batches": 2}


@pytest.mark.parametrize(
    ("world_size", "options", "asked"),
    [
        slow(2, RELOAD, None),
        (2, RELOAD, 6),
        slow(2, {"overfit_batches": 2}, 6),
        slow(2, {"limit_train_batches": 0.2}, 6),
        slow(4, RELOAD, 6),
        slow(4, {"limit_train_batches": 0.2}, 6),  # of an epoch that is as long as there are ranks
    ],
    ids=["reload", "reload and rebuild", "overfit", "limit", "reload and rebuild on four", "limit on four"],
)
def test_the_trainers_own_options_hold(ranks, options, asked, world_size):
    found = ranks(world_size).run(cases.equals_ddp, kind="shuffled", asked=asked, **options)
    check(found, planned=asked or 4)
    ours, ddps = found[0]["requests"]
    assert ours == ddps + 1  # for the batch that is profiled


def test_no_attribute_of_the_users_loaders_is_written(ranks):
    sizes, unchanged = ranks(2).run(cases.attribute_writes)[0]
    assert set(sizes) == {(10,)}
    assert unchanged == [True, True, True]


@pytest.mark.parametrize("kind", sorted(cases.LIGHTNING_CANNOT))
def test_what_lightning_cannot_give_its_sampler_fails_as_under_ddp(ranks, kind):
    ours, ddps = ranks(2).run(cases.lightning_refuses, kind=kind)[0]
    assert ours == ddps


@pytest.mark.slow
def test_a_given_plan_sets_the_size_of_one_loader_but_not_of_different_ones(ranks):
    planned, uneven, said, other, kept = ranks(2).run(cases.one_plan_for_different_loaders)[0]
    assert planned == 4
    assert uneven == (4, 5)
    assert said == [
        "OSDP: the plan's micro-batch is 4, but loaders keep theirs: there are 2 with different batch sizes, 4, 5."
    ]
    assert other == (4,)
    assert kept == (10,)
