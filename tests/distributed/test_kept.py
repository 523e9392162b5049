"""`ModelCheckpoint` keeps and removes whole checkpoints, and fit, validate and test find the best and the last."""

import kept_cases as cases
import pytest
from tiers import slow

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("options", "kept", "removed", "last"),
    [
        slow({"save_top_k": 0, "save_last": True}, ["last"], [], 3),
        ({"save_top_k": 1, "save_last": "link"}, ["1", "last"], [("0", ["0", "1", "last"])], 1),
        slow({"save_top_k": 2, "save_last": True}, ["1", "2", "last"], [("0", ["0", "1", "2", "last"])], 2),
        slow({"save_top_k": -1, "save_last": "link"}, ["0", "1", "2", "3", "last"], [], 3),
    ],
    ids=["none", "best", "two", "all"],
)
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_the_best_and_the_last_are_kept_whole(ranks, kind, options, kept, removed, last):
    found = ranks(2).run(cases.keeps, kind=kind, **options)
    assert found[0].pop("removed") == removed
    best = {"best": [1]} if options["save_top_k"] else {}
    links = ["last"] if options["save_last"] == "link" else []
    del found[1]["removed"]
    for one in found:
        assert one == {
            "kept": kept,
            "incomplete": [],
            "links": links,
            **best,
            "last": [last],
            "resumed": list(range(last + 1, 5)),
        }


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_weights_alone_are_evaluated_and_not_resumed_from(ranks, kind):
    for text, same in ranks(2).run(cases.weights_alone, kind=kind):
        assert "checkpoint contains only the model. This is probably due to `ModelCheckpoint.save_weights_only`" in text
        assert same
