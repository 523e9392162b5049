"""Table of contests: who trains what, where, in how much memory, and what is to be reached. A new one is a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from benchmarks.testbed.beside_fsdp.contest import WITHOUT_RACE, Division
from benchmarks.testbed.beside_fsdp.lightning_fsdp import PARALLELIZED, SPARSE, Way
from lightning_osdp.core.axes import MODES, NAMED_MODES

_NUM_QUICK_RIVALS = 4
_LEAST_QUICK_LIMIT = 0.95
"""Least limit of a tiny model: the peak of one sample is hardly activations, and less would not fit."""
Spaces: TypeAlias = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Samples/s that are to be reached, as a ratio, over all models and limits on some links."""

    over: str
    who: str = "OSDP"
    at_mbit: float | None = 200.0
    """Rate of the links in 10^6 bit/s; None: any rate."""
    limits: tuple[float | None, ...] | None = None
    """Limits that the goal is for; None: any limit."""
    mean: float | None = None
    best: float | None = None
    least: float | None = None
    least_gain: float | None = None
    """Least fraction of the seconds by which the other's steps would be shorter if they ran nothing again."""


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Section of a contest: every model on links of every rate, and all that take part under every limit."""

    models: tuple[str, ...]
    """Names for `benchmarks.families.build`."""
    num_ranks: int = 4
    node_size: int | None = None
    """Ranks of a node, which share a link; None: each has its own."""
    rates_mbit: tuple[float | None, ...] = (200.0, 1000.0)
    """Rates of links in 10^6 bit/s; None: not shaped. Without any, peaks are counted, and nobody trains."""
    limits: tuple[float | None, ...] = (None,)
    """Factors of the counted peak of `BASE` with these micro-batches; None: unlimited."""
    rivals: tuple[Way, ...]
    """Ways to train that OSDP is compared with; ratios are over the first."""
    spaces: Spaces
    """OSDP's plans by name, each with the fields of its search space; ``recomputes``: whether all blocks do."""
    division: Division = "held"
    micro_batch_size: int = 1
    num_micro_batches: int = 1
    goals: tuple[Goal, ...] = ()
    median: float | None = None
    """Samples/s of OSDP over the best other that are to be reached on the median of all cells; None: nothing is."""
    misjudged: tuple[float, float] | None = None
    """Factors of the seconds of computing and of collectives that OSDP, which has one space then, is told instead of
    what was measured. It races from there, and others are all plans of its units. Factors of 1: it races from what was
    measured, beside the plan that it begins with. None: it is told the truth, and there is no race."""
    drawn: tuple[str, ...] = ()
    """Names that are in the picture; none: there is no picture."""

    @property
    def base(self) -> str:
        """Name of the rival that ratios are over."""
        return self.rivals[0].name

    @property
    def quick(self) -> Contest:
        """Section with tiny models on links that are not shaped, which takes a minute or two."""
        return replace(
            self,
            models=tuple(dict.fromkeys(_tiny(model) for model in self.models)),
            num_ranks=2 * (self.node_size or 1),
            rates_mbit=(None,) if self.rates_mbit else (),
            limits=tuple(dict.fromkeys(limit and max(limit, _LEAST_QUICK_LIMIT) for limit in self.limits)),
            rivals=self.rivals[:_NUM_QUICK_RIVALS],
            micro_batch_size=1,
            num_micro_batches=min(2, self.num_micro_batches),
            goals=(),
        )


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Section on batches of many lengths: a plan that changes for long ones, beside the plan for the longest.

    Ranks are processes of this machine, and links are not shaped.
    """

    lengths: tuple[int, ...] = (64, 128, 256, 512)
    num_layers: int = 6
    num_steps: int = 200
    num_ranks: int = 2
    room: float = 1.05
    """Memory limit over the peak of all units sharded, of which no block recomputes, for the longest batches."""

    @property
    def quick(self) -> Lengths:
        """Section with a tiny model and few steps."""
        return replace(self, lengths=(8, 128), num_layers=2, num_steps=12)


@dataclass(frozen=True, kw_only=True)
class ChangedLinks:
    """Section on links whose rate changes while a model trains: steps until a plan that is better then is in use."""

    model: str = "8 x 64"
    num_ranks: int = 4
    rates_mbit: tuple[float, float] | None = (1000.0, 100.0)
    """Rates before and after, in 10^6 bit/s; None: links are not shaped, and all-gathers come to wait."""
    room: float = 0.8
    """Memory limit over the peak of the fastest plan without one."""
    changed_at: int = 510
    """Optimizer step before which they change."""
    num_steps: int = 1200
    """Steps of the fit: races that are a tenth of what is left at most are had by default."""

    @property
    def quick(self) -> ChangedLinks:
        """Section with a tiny model on links that are not shaped."""
        return replace(self, model="tiny", num_ranks=2, rates_mbit=None)


@dataclass(frozen=True, kw_only=True)
class Host:
    """Section on one emulated device that has no room for its model, beside a host that updates.

    Rates and tokens are those of what is emulated, see `benchmarks.testbed.beside_fsdp.host`.
    """

    num_layers: int = 4
    width: int = 384
    tokens: tuple[int, ...] = (256, 2048, 8192)
    """Tokens of a step."""
    rates_gb_s: tuple[float, ...] = (2.0, 12.0)
    """Rates of the link between device and host, in 10^9 bytes/s."""
    needs: tuple[float, ...] = (1.2, 2.0, 4.0)
    """Bytes that the model needs where all of it is on the device, over those of the device."""
    computes: bool = False
    """True where this machine computes, beside the host's updates."""

    @property
    def quick(self) -> Host:
        """Section with a tiny model, one number of tokens and one link."""
        return replace(self, num_layers=2, width=64, tokens=self.tokens[-2:-1], rates_gb_s=self.rates_gb_s[-1:])


Asked: TypeAlias = Contest | Lengths | ChangedLinks | Host


def _tiny(model: str) -> str:
    """Name of the smallest model of a kind."""
    return f"tiny{' like Llama' * ('Llama' in model)}{', LoRA' * ('LoRA' in model)}"


BASE = Way(sharding="FULL_SHARD", is_fully_shard=True)
"""Way to train whose peak limits refer to."""
KEPT = Way(sharding="SHARD_GRAD_OP", is_fully_shard=True)
AHEAD = tuple(replace(way, is_ahead=True) for way in (BASE, KEPT))
"""Ways to train of users who tell each unit which one to gather ahead."""
CHECKPOINTING = Way(sharding="FULL_SHARD", is_fully_shard=True, recomputes=True)
FULL_SHARD, SHARD_GRAD_OP = Way(sharding="FULL_SHARD"), Way(sharding="SHARD_GRAD_OP")
HYBRID, HYBRID_ZERO2, HPZ = Way(sharding="HYBRID_SHARD"), Way(sharding="HYBRID_SHARD_ZERO2"), Way(sharding="hpZ")
HYBRID_CHECKPOINTING = replace(HYBRID, recomputes=True)
DDP, TENSOR_PARALLEL = Way(sharding="DDP"), Way(sharding=PARALLELIZED)
RESIDENT = Way(sharding="resident", by_operator=True)
"""Way with all that is frozen gathered once, by hand: every Linear a unit, adapters kept to their backward."""
_BY_LINEAR = Way(sharding="FULL_SHARD", is_fully_shard=True, by_operator=True, recomputes=True)
"""The paper's order: a unit for each Linear, inside of blocks that are checkpointed."""

_MODES_ONLY = {"slices": [1], "sync": ["every"], "activations": ["keep"]}
SPLIT = "OSDP, modes + splitting"
_EVERY: Spaces = {"OSDP, modes": _MODES_ONLY, SPLIT: {"sync": ["every"], "activations": ["keep"]}}
_ONE: Spaces = {**_EVERY, "OSDP": {}}
"""Plans that may decide one thing more at a time; with one micro-batch a step there is nothing to accumulate."""
_GLOBAL: Spaces = {**_EVERY, "OSDP, modes + splitting + accumulation": {"activations": ["keep"]}, "OSDP": {}}
OVER_ALL = "OSDP, sharded over all ranks"

_HEADLINE = Contest(
    # the paper's three families, in 1/256 of its parameters where it says how many
    models=("24 x 128", "2 x 768", "128 to 512"),
    limits=(1.15, 1.5),
    rivals=(
        BASE,
        CHECKPOINTING,
        FULL_SHARD,
        DDP,
        KEPT,
        *AHEAD,
        replace(KEPT, recomputes=True),
        *(replace(way, recomputes=True) for way in AHEAD),
        SHARD_GRAD_OP,
        replace(SHARD_GRAD_OP, by_operator=True),
        replace(FULL_SHARD, recomputes=True),
        replace(FULL_SHARD, by_operator=True, recomputes=True),
        replace(SHARD_GRAD_OP, recomputes=True),
    ),
    division="scale",
    spaces=_ONE,
    median=1.05,
    goals=(
        Goal(over=BASE.name, who=SPLIT, mean=1.3, best=1.92),
        Goal(over=CHECKPOINTING.name, mean=1.5, best=2.08),
    ),
    drawn=(BASE.name, CHECKPOINTING.name, KEPT.name, FULL_SHARD.name, *_GLOBAL),
)
_NODES = Contest(
    models=_HEADLINE.models,
    node_size=2,
    limits=(1.15, 1.5, 2.0),
    rivals=(
        BASE,
        HYBRID,
        HPZ,
        DDP,
        CHECKPOINTING,
        HYBRID_ZERO2,
        *(each for way in (FULL_SHARD, SHARD_GRAD_OP) for each in (way, replace(way, recomputes=True))),
        HYBRID_CHECKPOINTING,
        *(replace(way, recomputes=True) for way in (HYBRID_ZERO2, HPZ)),
    ),
    division="scale",
    spaces={OVER_ALL: {"modes": [*MODES, HPZ.sharding]}, "OSDP": {}},
    drawn=(
        *(way.name for way in (BASE, CHECKPOINTING, SHARD_GRAD_OP, HPZ, HYBRID, HYBRID_CHECKPOINTING, HYBRID_ZERO2)),
        OVER_ALL,
        "OSDP",
    ),
)
_ACCUMULATION = Contest(
    models=("6 x 512",),
    limits=(1.0, 1.15, None),
    rivals=(BASE, KEPT, *AHEAD, FULL_SHARD, SHARD_GRAD_OP),
    micro_batch_size=2,
    num_micro_batches=4,
    spaces={"OSDP": {"activations": ["keep"]}},
)
_LORA = Contest(
    models=("6 x 512, LoRA", "6 x 512 like Llama, LoRA"),
    # DDP takes 1.4 times the peak of BASE, so that it trains without a limit only
    limits=(1.15, 1.3, None),
    rivals=(BASE, KEPT, *AHEAD, DDP, RESIDENT),
    spaces={"OSDP": {"activations": ["keep"]}},
    goals=(
        Goal(over=BASE.name, least=1.5),
        Goal(over=RESIDENT.name, limits=(None,), least=0.97),
        Goal(over=DDP.name, at_mbit=None, limits=(None,), least=0.97),
    ),
)
_BY_WEIGHTS = "OSDP, weights move"
_STATIONARY = Contest(
    models=("200,000 rows", "2 x 768, 32 tokens", "2 x 768"),
    rates_mbit=(200.0,),
    rivals=(BASE, *AHEAD, DDP, TENSOR_PARALLEL),
    spaces={_BY_WEIGHTS: {"modes": ["ZDP", "DP"]}, "OSDP": {"modes": [*NAMED_MODES]}},
)
_RACE = replace(
    _HEADLINE,
    models=("24 x 128", "2 x 768"),
    rates_mbit=(1000.0,),
    limits=(1.5,),
    rivals=(BASE,),
    division="held",
    spaces={"OSDP": {}},
    goals=(),
    median=None,
    drawn=(),
)
_EVERYWHERE = "OSDP, all blocks recompute"
_WHOLE = "OSDP, whole blocks"
_SLICES = tuple(
    Way(sharding=" ".join([mode] * number), by_operator=True) for mode in ("ZDP", "DP") for number in (1, 2, 4, 8, 16)
)
_LINEARS = Contest(models=("2 Linears of 1024",), rates_mbit=(), rivals=_SLICES, spaces={})

CONTESTS: Mapping[str, Mapping[str, Asked]] = {
    "headline": {
        # the paper's figure 5: one micro-batch a step, of any size
        "one": _HEADLINE,
        # a global batch that is fixed, however it is divided
        "global": replace(
            _HEADLINE,
            division="auto",
            num_micro_batches=4,
            spaces=_GLOBAL,
            goals=(Goal(over=BASE.name, mean=1.3),),
            median=1.02,
        ),
    },
    "nodes": {
        # bytes that nodes send each other, beside closed forms: the same at any rate
        "bytes": replace(
            _NODES,
            models=_NODES.models[:1],
            rates_mbit=(1000.0,),
            limits=(None,),
            division="held",
            num_micro_batches=4,
            spaces={},
            drawn=(),
        ),
        "global": replace(_NODES, division="auto", num_micro_batches=4),
        "one": _NODES,
    },
    "race": {
        # the headline's cells with a race, and without
        "raced": replace(
            _RACE,
            models=("24 x 128", "128 to 512"),
            limits=(1.15, 1.5),
            rivals=(BASE, CHECKPOINTING, KEPT, *AHEAD),
            misjudged=(1.0, 1.0),
            goals=(Goal(over=WITHOUT_RACE, at_mbit=None, least=0.99),),
        ),
        # computing is taken for slow, and links for fast, then the reverse
        "hidden": replace(_RACE, misjudged=(2.0, 1 / 3)),
        "waiting": replace(_RACE, misjudged=(1 / 2, 3.0)),
        "changed links": ChangedLinks(),
        "lengths": Lengths(),
    },
    "host": {
        # computing is a sleep of stated seconds, copies take those of their bytes, and updates are computed
        "emulated": Host(),
        # everything but the link is this machine's: two cores share its memory
        "computed": Host(tokens=(1024, 2048), rates_gb_s=(12.0,), needs=(2.0,), computes=True),
    },
    "accumulation": {
        # the user's micro-batches
        "held": replace(
            _ACCUMULATION,
            goals=tuple(
                Goal(over=BASE.name, limits=(limit,), least=least)
                for limit, least in ((1.0, 1.15), (1.15, 1.6), (None, 2.9))
            ),
        ),
        # the samples of a step divided anew
        "auto": replace(_ACCUMULATION, division="auto"),
    },
    "lora": {
        # adapters of rank 8 on a frozen GPT, and on one like Llama: 32 tokens a rank, then more
        "32 tokens": _LORA,
        "128 tokens": replace(_LORA, micro_batch_size=4),
        "four micro-batches": replace(_LORA, num_micro_batches=4, rates_mbit=(200.0,)),
        "512 tokens": replace(_LORA, micro_batch_size=16),
    },
    "stationary": {
        # three wide Linears, which have nearly all parameters
        "head": replace(
            _STATIONARY,
            models=("3 wide Linears",),
            rates_mbit=(200.0, 1000.0),
            rivals=(*(replace(way, by_operator=True) for way in (BASE, *AHEAD)), DDP, TENSOR_PARALLEL),
            micro_batch_size=8,
            goals=(Goal(over=DDP.name, least=5.0),),
        ),
        # convolutions, whose weights move, and such Linears, which have two thirds and 57% of all parameters
        "VGG": replace(
            _STATIONARY,
            models=("VGG-11", "VGG-16"),
            rivals=(*(replace(way, by_operator=True) for way in (BASE, *AHEAD)), DDP, TENSOR_PARALLEL),
            micro_batch_size=8,
            goals=(Goal(over=_BY_WEIGHTS, least=1.3),),
        ),
        # an embedding, and a GPT: 128, 32 and 128 tokens a rank
        "few tokens": replace(
            _STATIONARY,
            limits=(1.0, None),
            goals=(Goal(over=_BY_WEIGHTS, least=1.3), Goal(over=DDP.name, limits=(None,), best=10.0)),
        ),
        # an embedding of which users may have sparse gradients under DDP: 128 indices a rank
        "sparse": replace(
            _STATIONARY,
            models=("1,000,000 rows",),
            limits=(None,),
            rivals=(BASE, DDP, Way(sharding=SPARSE), TENSOR_PARALLEL),
            goals=(Goal(over=DDP.name, limits=(None,), least=10.0),),
        ),
        # other transformers, and more tokens: 32 to 256 a rank
        "transformers": replace(
            _STATIONARY,
            models=(
                "2 x 768 like Llama, 32 tokens",
                "2 x 768 like Llama, 128 tokens",
                "2 x 768 like Llama 2, 32 tokens",
                "2 x 768 like Llama 2, 128 tokens",
                "2 x 768 of a ViT, 64 tokens",
                "2 x 768, 256 tokens",
            ),
            goals=(Goal(over=_BY_WEIGHTS, mean=1.3, least=0.97),),
        ),
        # two nodes of two ranks, which share a link: 32 and 128 tokens a rank
        "nodes": replace(
            _STATIONARY,
            models=("2 x 768 like Llama, 32 tokens", "2 x 768"),
            node_size=2,
            rivals=(BASE, *AHEAD, HYBRID, HYBRID_ZERO2, DDP),
            spaces={**_STATIONARY.spaces, _BY_WEIGHTS: {"modes": ["ZDP", "DP", "hpZ", "HSDP", "HDP"]}},
            goals=(Goal(over=_BY_WEIGHTS, least=0.97),),
        ),
        **{
            f"{number} tokens": replace(
                _STATIONARY,
                models=(f"2 x 768, {number} tokens",),
                goals=(Goal(over=_BY_WEIGHTS, at_mbit=None, least=0.97),),
            )
            for number in (512, 1024)
        },
    },
    "activations": {
        # where memory is too short for fully_shard without checkpointing
        "recompute": Contest(
            models=("12 x 256", "3 x 1024", "256 to 768"),
            limits=(0.95,),
            rivals=(CHECKPOINTING, _BY_LINEAR),
            micro_batch_size=2,
            spaces={_EVERYWHERE: {"recomputes": True}, "OSDP": {"activations": ["keep", "recompute"]}},
            goals=(
                Goal(over=CHECKPOINTING.name, least=1.25),
                Goal(over=_BY_LINEAR.name, least=1.5),
                Goal(over=_EVERYWHERE, at_mbit=None, least=0.97),
            ),
        ),
        # the same with results of heavy operations kept, where most blocks have to recompute; each rank has a core,
        # because what is to be told apart are a few percent of computing
        "levels": Contest(
            models=("12 x 256", "12 x 256 like Llama", "hierarchical_vit"),
            num_ranks=2,
            rates_mbit=(None, 1000.0),
            limits=(0.6, 0.8),
            rivals=(CHECKPOINTING,),
            micro_batch_size=8,
            spaces={
                _WHOLE: {"activations": ["keep", "recompute"]},
                "OSDP": {"activations": ["keep", "recompute", "selective"]},
            },
            goals=(
                Goal(over=_WHOLE, at_mbit=None, least=0.99, least_gain=0.6),
                Goal(over=CHECKPOINTING.name, at_mbit=None, least=0.99),
            ),
        ),
    },
    "splitting": {
        # two layers in slices: peaks on rank 0 of eight
        "peaks": replace(
            _LINEARS,
            models=tuple(f"2 Linears of {size}" for size in (1024, 2048, 4096, 8192, 12288)),
            num_ranks=8,
            micro_batch_size=16,
        ),
        "time": replace(
            _LINEARS,
            models=tuple(f"2 Linears of {size}" for size in (1024, 2048, 4096)),
            num_ranks=2,
            rates_mbit=(None,),
            micro_batch_size=64,
        ),
        # so many of four slices ZDP and the rest DP, all other Linears whole and ZDP
        "decisions": Contest(
            models=("mingpt",),
            rates_mbit=(200.0,),
            rivals=tuple(
                Way(sharding=" ".join(["ZDP"] * number + ["DP"] * (4 - number)), by_operator=True, inside=inside)
                for inside in ("attention", "mlp")
                for number in range(5)
            ),
            spaces={},
            micro_batch_size=2,
        ),
    },
}
"""Contest -> section -> what is measured in it; a file in ``results`` for each contest."""


def quick_sections(contests: Mapping[str, Asked]) -> dict[str, Asked]:
    """Sections of a contest in quick form, each once: they may differ in nothing but how large they are."""
    found: dict[str, Asked] = {}
    for name, contest in contests.items():
        if contest.quick not in found.values():
            found[name] = contest.quick
    return found
