"""The paper's figure 5, measured: what takes part, and what OSDP's plans are to reach over FSDP at its best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks.measures.beside_fsdp import baselines
from benchmarks.measures.beside_fsdp.contest import BEYOND_LIMIT, Case, Spaces, named, of_best_other, over_limit, ratio
from benchmarks.measures.links import rate_of
from benchmarks.measures.section import Results, Row, Target
from benchmarks.testbed.beside_fsdp.lightning_fsdp import Baseline, Way

MODELS = {"24 x 128": "narrow and deep", "2 x 768": "wide and shallow", "128 to 512": "of changing width"}
"""The paper's three families, in 1/256 of its parameters where it says how many."""
LIMITS = (1.15, 1.5)
"""Factors of the counted peak of `baselines.BASE` with micro-batches of one sample."""
LOOSE_LIMITS = (2.0,)
"""Measured, too, without a target."""

CHECKPOINTING = Way(sharding="FULL_SHARD", is_fully_shard=True, recomputes=True)
DDP = Way(sharding="DDP")
WAYS = (
    baselines.BASE,
    baselines.KEPT,
    CHECKPOINTING,
    Way(sharding="SHARD_GRAD_OP", is_fully_shard=True, recomputes=True),
    baselines.FULL_SHARD,
    baselines.SHARD_GRAD_OP,
    Way(sharding="FULL_SHARD", by_operator=True),
    Way(sharding="SHARD_GRAD_OP", by_operator=True),
    Way(sharding="FULL_SHARD", recomputes=True),
    Way(sharding="FULL_SHARD", by_operator=True, recomputes=True),
    Way(sharding="SHARD_GRAD_OP", recomputes=True),
    DDP,
)
"""Whom OSDP is compared with."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is trained, and where."""

    models: tuple[str, ...] = tuple(MODELS)
    ways: tuple[Way, ...] = WAYS
    num_ranks: int = 4
    node_size: int | None = None
    """Ranks of a node, which share a link; None: each has its own."""
    rates_mbit: tuple[float | None, ...] = (200.0, 1000.0)
    """10^6 bit/s; None: not shaped."""
    samples_per_step: int = 4
    """Of a rank, where the global batch is fixed."""

    def known(self, results: Results, *, limits: Sequence[float], is_fresh: bool) -> dict[str, list[Baseline]]:
        """See `baselines.known`."""
        return baselines.known(
            self.models,
            results,
            is_fresh=is_fresh,
            num_ranks=self.num_ranks,
            node_size=self.node_size,
            ways=self.ways,
            limits=limits,
            samples_per_step=self.samples_per_step,
        )

    def cases(
        self, *, is_global: bool, limits: tuple[float, ...], num_rounds: int, limited_at_mbit: float | None = None
    ) -> list[Case]:
        """Each model at each rate, with a global batch that is fixed, or with one micro-batch a step of any size.

        Args:
            is_global: which of the two.
            limits: factors of the counted peak of `baselines.BASE` with micro-batches of one sample.
            num_rounds: timed steps of each that takes part.
            limited_at_mbit: at which rate OSDP's plan for the first limit also has to live under a hard one.
        """
        return [
            Case(
                model=model,
                num_ranks=self.num_ranks,
                node_size=self.node_size,
                rate_mbit=rate_mbit,
                division="auto" if is_global else "scale",
                limits=limits,
                micro_batch_size=1,
                num_micro_batches=self.samples_per_step if is_global else 1,
                num_rounds=num_rounds,
                is_limited=rate_mbit is not None and rate_mbit == limited_at_mbit,
            )
            for rate_mbit in self.rates_mbit
            for model in self.models
        ]


_MODES_ONLY = {"slices": [1], "sync": ["every"], "activations": ["keep"]}
SPLIT = "OSDP, modes + splitting"
ONE_SPACES: Spaces = {
    "OSDP, modes": _MODES_ONLY,
    SPLIT: {"sync": ["every"], "activations": ["keep"]},
    "OSDP": {},
}
"""One decision more at a time; with one micro-batch a step there is nothing to accumulate."""
GLOBAL_SPACES: Spaces = {**ONE_SPACES, "OSDP, modes + splitting + accumulation": {"activations": ["keep"]}, "OSDP": {}}

AT_MBIT = 200.0
"""Rate of the links for which something is to be reached, on the mean of models and limits, or on the best of them."""
MEAN, BEST = 1.3, 1.92
CHECKPOINTING_MEAN, CHECKPOINTING_BEST = 1.5, 2.08
GLOBAL_MEAN = 1.3
OF_BEST_OTHER = 0.97
PREDICTED = 0.1
"""How far a predicted ratio to `baselines.BASE` may be off."""


def targets_of_one(rows: Sequence[Row]) -> list[Target]:
    """Of one micro-batch a step, any size: the paper's table."""
    split = _ratios(rows, SPLIT, baselines.BASE.name)
    checkpointing = _ratios(rows, "OSDP", CHECKPOINTING.name)
    found = []
    for what, ratios, least_mean, least_best in (
        ("with splitting over fully_shard FULL_SHARD", split, MEAN, BEST),
        ("over fully_shard FULL_SHARD with checkpointing", checkpointing, CHECKPOINTING_MEAN, CHECKPOINTING_BEST),
    ):
        if ratios:
            found += [
                Target(name=f"{what}: mean", limit=least_mean, measured=mean(ratios), is_least=True),
                Target(name=f"{what}: best", limit=least_best, measured=max(ratios), is_least=True),
            ]
    return found + of_each(rows)


def targets_of_global(rows: Sequence[Row]) -> list[Target]:
    """Of a global batch that is fixed."""
    ratios = _ratios(rows, "OSDP", baselines.BASE.name)
    found = []
    if ratios:
        found.append(
            Target(name="over fully_shard FULL_SHARD: mean", limit=GLOBAL_MEAN, measured=mean(ratios), is_least=True)
        )
    return found + of_each(rows)


def _ratios(rows: Sequence[Row], name: str, over: str) -> list[float]:
    """Of all models and limits of which something is to be reached."""
    found = []
    for row in rows:
        for limit in row["case"]["limits"]:
            entrant = named(row, name, limit)
            if row["case"]["rate_mbit"] == AT_MBIT and limit in LIMITS and entrant is not None:
                found.append(ratio(row, entrant, over=over))
    return [each for each in found if each is not None]


def of_each(rows: Sequence[Row]) -> list[Target]:
    """What holds in every cell: memory, the best of the others, and the prediction."""
    found = []
    for row in rows:
        for name, lived in row.get("hard", {}).items():
            expected = name == "lives above the limit"
            found.append(Target(name=f"{row['case']['model']}: {name}: wrong", limit=1, measured=lived != expected))
        for osdp in (each for each in row["entrants"] if each["name"].startswith("OSDP")):
            where = f"{row['case']['model']}, {rate_of(row)}, {osdp['limit']:g}x, {osdp['name']}"
            found.append(
                Target(name=f"{where}: bytes of the limit", limit=BEYOND_LIMIT, measured=over_limit(row, osdp))
            )
            if row["case"]["rate_mbit"] is None:
                continue
            measured, predicted = ratio(row, osdp), ratio(row, osdp, "predicted_s")
            assert measured is not None
            assert predicted is not None
            off = abs(predicted / measured - 1)
            found.append(Target(name=f"{where}: predicted ratio is off by", limit=PREDICTED, measured=off))
            if osdp["name"] == "OSDP":
                of_best = of_best_other(row, osdp)
                name = f"{where}: over the best other"
                found.append(Target(name=name, limit=OF_BEST_OTHER, measured=of_best, is_least=True))
    return found
