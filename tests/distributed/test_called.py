"""Users' code that calls, copies, loads and generates with a model that trains: as under DDP, or told what to do."""

from importlib.util import find_spec

import called_cases as cases
import pytest
from ranks import RankPool
from test_user_code import check

pytestmark = pytest.mark.distributed


def test_a_model_is_called_in_hooks(ranks):
    check(ranks(2).run(cases.calls_in_hooks)[0])


@pytest.mark.slow
def test_weights_are_loaded_and_copied_in_hooks(ranks):
    check(ranks(2).run(cases.loads_and_copies)[0])


def test_a_copy_of_shards_is_refused_with_what_to_do(ranks):
    for told in ranks(2).run(cases.copies_of_shards)[0]:
        assert told.startswith("ConfigurationError: Expected whole parameters to copy")
        assert "trainer.strategy.gathered()" in told


def test_wrap_of_torch_leaves_it_to_the_plan_what_a_unit_is(ranks):
    check(ranks(2).run(cases.wraps)[0])


@pytest.mark.slow
def test_profilers_of_lightning_write_their_traces(ranks):
    found = ranks(2).run(cases.profiles)[0]
    assert [".trace", ".json"] not in found["simple"] + found["advanced"]
    assert [".trace", ".json"] in [suffixes[-2:] for suffixes in found["pytorch"]]


@pytest.mark.slow
def test_what_is_generated_in_validation(ranks):
    check(ranks(2).run(cases.generates)[0])


@pytest.mark.parametrize("kind", ["zdp", "mixed"])
def test_ranks_that_generate_for_different_lengths_end_with_what_to_do(ranks, kind):
    for told in ranks(2).run(cases.generates_apart, kind=kind):
        assert told.startswith("RanksApartError: Expected every rank to run the same modules in the same order")
        assert "trainer.strategy.gathered()" in told


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the optional dependency transformers")
def test_transformers_generate_on_all_ranks_and_on_one(ranks):
    check(ranks(2).run(cases.transformers_generate)[0], tolerance=1e-5)


def test_an_exception_on_all_ranks_is_saved_and_reaches_the_user(ranks):
    for told, saved, has_last in ranks(2).run(cases.fails, on_ranks=(0, 1)):
        assert told == "of the user"
        assert saved == ["on_exception.ckpt"]
        assert has_last


def test_an_exception_before_there_is_a_model_to_save_reaches_the_user(ranks):
    assert ranks(2).run(cases.fails_in_setup) == ["of the user"] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_on_one_rank_is_not_saved_and_reaches_the_user(rank):
    pool = RankPool(2)  # the other rank is ended in its collective
    try:
        with pytest.raises(AssertionError, match=rf"(?s)Rank {1 - rank} died.*\('of the user', \[\], True\)"):
            pool.run(cases.fails, on_ranks=(rank,))
    finally:
        pool.close()
