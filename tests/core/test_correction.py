"""Corrections of profiles and clusters: what has seconds takes others, and nothing else changes."""

import dataclasses
import random
import re

import pytest

from lightning_osdp.core.correction import Correction
from lightning_osdp.errors import ConfigurationError
from tests.support import corpus


@pytest.mark.parametrize("fields", [{"computing": 0.0}, {"links": {"all": -1.0}}, {"links": {"rack": 2.0}}])
def test_what_is_no_correction_is_refused(fields):
    with pytest.raises(ConfigurationError, match=r"Expected factors above 0, and those of links by \('all', 'node'\)"):
        Correction(**fields)


def test_a_correction_of_what_is_corrected_already_is_one():
    draw, first, second = random.Random(5), Correction(computing=2.0, links={"all": 0.5}), Correction(computing=3.0)
    profile, cluster = corpus.draw_profile(draw), corpus.draw_cluster(draw)
    for earlier, later in ((first, second), (second, first), (first, Correction(links={"all": 4.0, "node": 2.0}))):
        both = later.after(earlier)
        assert both.of_profile(profile) == later.of_profile(earlier.of_profile(profile))
        assert both.of_cluster(cluster) == later.of_cluster(earlier.of_cluster(cluster))
    assert Correction().of_profile(profile) == profile
    assert Correction().of_cluster(cluster) == cluster


def numbers(value):
    """All numbers of nested dataclasses, by path."""
    if dataclasses.is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {(name, *path): number for name, of in value.items() for path, number in numbers(of).items()}
    if isinstance(value, tuple):
        return numbers(dict(enumerate(value)))
    return {(): value}


@pytest.mark.parametrize("seed", range(6))
def test_seconds_alone_change(seed):
    draw, wrong = random.Random(seed), Correction(computing=2.0, links={"all": 4.0, "node": 8.0})
    profile, cluster = corpus.draw_profile(draw), corpus.draw_cluster(draw)
    factors = {"profile": set(), "links": set(), "runtime": set()}
    for before, after in ((profile, wrong.of_profile(profile)), (cluster, wrong.of_cluster(cluster))):
        was, now = numbers(before), numbers(after)
        assert was.keys() == now.keys()
        for path in was:
            is_time = re.search(r"(\b|_)s(\b|_per_)|seconds", " ".join(map(str, path)))
            if not is_time:
                assert was[path] == now[path]
            elif was[path]:
                of_runtime = path[0].endswith(("overhead", "_s", "byte"))
                part = "profile" if before is profile else "runtime" if of_runtime else "links"
                factors[part].add(now[path] / was[path])
    assert factors["profile"] == {2.0}
    assert factors["runtime"] == {2.0}
    assert factors["links"] == ({4.0, 8.0} if cluster.within_node else {4.0})
