"""Names, folded and expanded again."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_osdp.core.text.names import fold_names


def expand(pattern: str) -> list[str]:
    """Oracle: the names that a pattern stands for."""
    choices = []
    for text in re.split(r"({[^}]*})", pattern):
        if not text.startswith("{"):
            choices.append([text])
            continue
        parts = []
        for part in text[1:-1].split(","):
            run = re.fullmatch(r"(\d+)-(\d+)", part)
            parts += [str(i) for i in range(int(run[1]), int(run[2]) + 1)] if run else [part]
        choices.append(parts)
    return ["".join(chosen) for chosen in itertools.product(*choices)]


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        ([], []),
        ([""], [""]),
        (["head"], ["head"]),
        ([f"transformer.h.{i}.mlp.fc" for i in range(6)], ["transformer.h.{0-5}.mlp.fc"]),
        (["h.0.fc", "h.2.fc", "h.3.fc", "h.7.fc"], ["h.{0,2-3,7}.fc"]),
        (["h.10.fc", "h.9.fc", "h.11.fc"], ["h.{9-11}.fc"]),
        ([f"h.{i}.attn.{name}" for i in range(3) for name in "qkv"], ["h.{0-2}.attn.{q,k,v}"]),
        (["h.0.ln_1", "h.0.ln_2"], ["h.0.{ln_1,ln_2}"]),
        (["enc.0.fc", "enc.1.fc", "dec.0.fc", "dec.1.fc"], ["{enc,dec}.{0-1}.fc"]),
        (["h.0.q", "h.0.k", "h.1.q"], ["h.{0-1}.q", "h.0.k"]),
        (["wte", "wpe", "ln_f"], ["wte", "wpe", "ln_f"]),  # whole names are shown as they are
        (["0", "1", "2"], ["{0-2}"]),
        (["h.0", "h.1", "h.last"], ["h.{0-1,last}"]),
        (["h.0", "h.0.fc", "h.1.fc"], ["h.0", "h.{0-1}.fc"]),
        (["h.01.fc", "h.1.fc"], ["h.{1,01}.fc"]),  # 01 is a word, not an index
        (["a.b", "a.b"], ["a.b"]),
    ],
)
def test_names_are_folded_where_they_differ(names, patterns):
    assert fold_names(names) == patterns


PART = st.sampled_from(["0", "1", "2", "3", "10", "fc", "proj", "h"])


@settings(deadline=None)
@given(st.lists(st.lists(PART, min_size=1, max_size=4).map(".".join), max_size=30))
def test_patterns_stand_for_exactly_the_names_each_once(names):
    assert sorted(itertools.chain.from_iterable(map(expand, fold_names(names)))) == sorted(set(names))
