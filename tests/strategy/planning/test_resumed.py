"""A run that is resumed goes on in the micro-batches of its checkpoint, under a plan for them that keeps its limit.

It is the checkpoint's own, as long as it is what would be planned for.
"""

import dataclasses
import json
import re

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_osdp import ConfigurationError, InfeasibleError, OSDPStrategy, SearchSpace
from lightning_osdp.core.plans.plan import Plan, workload_of
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.planner import scheduler
from lightning_osdp.strategy.checkpointing import entries
from lightning_osdp.strategy.options import Options
from lightning_osdp.strategy.planning import plan_fit, plan_request
from tests.strategy.quiet import quiet_trainer

pytestmark = pytest.mark.usefixtures("one_rank")


class Wide(L.LightningModule):
    """Takes most of its memory for what it saves; `seen` has the sizes of its micro-batches."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4096), nn.Tanh(), nn.Linear(4096, 4))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(len(batch))
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Deep(Wide):
    """Model of blocks, which may recompute."""

    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 4)) for _ in range(3))
        self.layers = nn.Sequential(*blocks)


class Stateful(Wide):
    """Model of several units, whose optimizer keeps more than anything else takes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch.repeat(1, 64)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


@pytest.fixture
def fit(tmp_path, stated_links):
    """Fits a model; links are stated."""

    def run(folder, *, module=None, loader_size=64, ckpt_path=None, max_epochs=1, precision="32-true", **options):
        module = module or Wide()
        trainer = quiet_trainer(
            OSDPStrategy(**{"batch_size": "divide", **options}),
            precision=precision,
            max_epochs=max_epochs,
            default_root_dir=tmp_path / folder,
        )
        trainer.fit(module, DataLoader(torch.ones(128, 4), batch_size=loader_size), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / folder / "end.ckpt")
        return trainer, module, tmp_path / folder / "end.ckpt"

    return run


def told(trainer, checkpoint):
    """The micro-batches that the strategy, the Trainer, the plan file and the checkpoint say."""
    plan = trainer.strategy.plan
    written = Plan.load(checkpoint.with_name("osdp_plan.json"))
    saved = entries.stored_division(torch.load(checkpoint, weights_only=True))
    found = [workload_of(plan), workload_of(written), workload_of(entries.read_plan(checkpoint)), saved]
    return {(each.micro_batch_size, each.num_micro_batches) for each in found}, trainer.accumulate_grad_batches


@pytest.mark.filterwarnings("ignore:OSDP. the micro-batch of 128 is all")
def test_a_resumed_run_keeps_its_limit_in_the_micro_batches_of_its_checkpoint(fit):
    first, _, path = fit("first")
    assert told(first, path) == ({(64, 1)}, 1)
    peak_bytes = first.strategy.plan.peak_bytes

    # smaller micro-batches would fit otherwise, as a new run has them
    less = f"{round(0.7 * peak_bytes)}B"
    anew, module, in_32 = fit("anew", memory_limit=less)
    assert told(anew, in_32) == ({(32, 2)}, 2)
    assert set(module.seen) == {32}
    text = (
        r"^No plan fits: .* Nearest remedy: micro-batches of 32 fit: OSDPStrategy\(batch_size=32\) with"
        r" Trainer\(accumulate_grad_batches=2\) keeps the global batch\..* The run goes on from '.*end.ckpt', which"
        r" counts in 64 samples x 1 micro-batches: in others"
    )
    with pytest.raises(InfeasibleError, match=text):
        fit("refused", memory_limit=less, ckpt_path=path, max_epochs=2)

    enough = f"{round(1.1 * peak_bytes)}B"
    for folder, before, sizes in (("resumed", path, (64, 1)), ("resumed_32", in_32, (32, 2))):
        trainer, module, after = fit(folder, memory_limit=enough, ckpt_path=before, max_epochs=2)
        assert told(trainer, after) == ({sizes}, sizes[1])
        assert module.seen[-1] == sizes[0]
        assert trainer.global_step == 4
        assert 0 < trainer.strategy.plan.peak_bytes <= trainer.strategy.plan.memory_limit_bytes

    # a plan says nothing of larger micro-batches than its own
    plan = anew.strategy.plan
    with pytest.raises(ConfigurationError, match=r"^Expected a plan for 64 samples x 1 micro-batches, in which the ch"):
        fit("given", plan=plan, ckpt_path=path, max_epochs=2)
    trainer, module, after = fit("smaller", plan=first.strategy.plan, ckpt_path=in_32, max_epochs=2)
    assert told(trainer, after) == ({(32, 2)}, 2)
    assert module.seen[-1] == 32
    assert trainer.strategy.plan.peak_bytes == 0  # nobody has predicted it


@pytest.mark.filterwarnings("ignore:OSDP. step .* over memory_limit")  # a few KiB, of so small a model
def test_a_scaled_run_goes_on_with_as_many_samples_as_it_has_memory_for(fit):
    peak_bytes = fit("probe")[0].strategy.plan.peak_bytes
    scaled = {"batch_size": "scale"}
    small, large = ({**scaled, "memory_limit": f"{round(share * peak_bytes)}B"} for share in (0.6, 1.3))
    sizes, paths = [], []
    for folder, options in (("small", small), ("large", large)):
        trainer, _, path = fit(folder, loader_size=8, **options)
        sizes.append(trainer.strategy.plan.micro_batch_size)
        paths.append(path)
    assert sizes[0] < sizes[1]
    trainer, _, path = fit("more", loader_size=8, ckpt_path=paths[0], max_epochs=2, **large)
    assert told(trainer, path) == ({(sizes[0], 1)}, 1)
    with pytest.warns(UserWarning, match="an optimizer step has fewer samples than before: micro-batches of"):
        trainer, _, path = fit("less", loader_size=8, ckpt_path=paths[1], max_epochs=2, **small)
    assert told(trainer, path) == ({(sizes[0], 1)}, 1)


def test_a_checkpoint_that_cannot_be_read_is_refused_before_anything_is_profiled(fit, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_fit, "FitProfiler", None)
    path = tmp_path / "damaged.ckpt"
    torch.save({"state_dict": {}}, path)
    path.write_bytes(path.read_bytes().replace(b"data.pkl", b"atad.pkl"))
    with pytest.raises(ConfigurationError, match=r"^Expected a checkpoint at '.*damaged.ckpt', but it cannot be read"):
        fit("damaged", ckpt_path=path)


@pytest.fixture
def requests(monkeypatch):
    """Requests for plans, each with what it is asked for: a profile, micro-batches and what shows progress."""
    found, plan = [], plan_request.PlanRequest.plan

    def noted(request, *given):
        found.append((request, given))
        return plan(request, *given)

    monkeypatch.setattr(plan_request.PlanRequest, "plan", noted)
    return found


@pytest.fixture
def resumed(fit, monkeypatch):
    """Goes on from a checkpoint of `Deep`: its plan, what is said of that, and whether it was searched."""
    texts, searched = [], []

    def make_plan(*args, **options):
        searched.append(True)
        return scheduler.make_plan(*args, **options)

    monkeypatch.setattr(plan_fit, "rank_zero_info", texts.append)
    monkeypatch.setattr(plan_request, "make_plan", make_plan)

    def run(path, **options):
        del texts[:], searched[:]
        trainer, _, _ = fit("resumed", module=Deep(), batch_size="keep", ckpt_path=path, max_epochs=2, **options)
        assert trainer.global_step == 4
        (text,) = (each for each in texts if "checkpoint" in each)
        return trainer.strategy.plan, text, bool(searched)

    return run


def changed(plan, **fields):
    """JSON of a plan, given as JSON, with other fields."""
    return json.dumps({**json.loads(plan), **fields})


def as_decided(plan):
    return [(unit.name, unit.treatments) for unit in plan.units], [(each.name, each.treatment) for each in plan.blocks]


def test_a_resumed_run_keeps_its_plan_where_that_is_what_it_would_be_made_for(fit, resumed):
    most_bytes = fit("unlimited", module=Deep(), batch_size="keep")[0].strategy.plan.peak_bytes
    limit_bytes = round(0.9 * most_bytes)
    first, _, path = fit("first", module=Deep(), batch_size="keep", memory_limit=f"{limit_bytes}B")
    before = first.strategy.plan
    assert 0 < len(before.blocks) < 3

    # its predictions are made anew, whatever the file says
    checkpoint = torch.load(path, weights_only=True)
    wrong = path.with_name("wrong.ckpt")
    torch.save({**checkpoint, "osdp_plan": changed(checkpoint["osdp_plan"], peak_bytes=2**40)}, wrong)
    for given, now_bytes in ((path, limit_bytes), (wrong, before.peak_bytes)):
        plan, text, is_searched = resumed(given, memory_limit=f"{now_bytes}B")
        assert not is_searched
        assert as_decided(plan) == as_decided(before)
        assert (plan.peak_bytes, plan.memory_limit_bytes) == (before.peak_bytes, now_bytes)
        told = f"{format_bytes(plan.peak_bytes)} of {format_bytes(now_bytes)} here."
        assert text == f"OSDP: training goes on under the checkpoint's plan, which is predicted to take {told}"
        assert plan.step_time_s > 0

    def anew(memory_limit=limit_bytes, **options):
        plan, text, is_searched = resumed(path, memory_limit=f"{memory_limit}B", **options)
        assert is_searched
        assert 0 < plan.peak_bytes <= plan.memory_limit_bytes == memory_limit
        start = "OSDP: planned anew, not as in the checkpoint: "
        assert text.startswith(start)
        return plan, text.removeprefix(start)

    less, text = anew(memory_limit=before.peak_bytes - 1)
    assert as_decided(less) != as_decided(before)
    assert re.match(r"it is predicted to take .*, more than memory_limit ", text)
    more, text = anew(memory_limit=most_bytes)
    assert more.blocks == ()
    assert re.match(r"memory_limit .* is larger than .*, which it was made for\.$", text)
    _, text = anew(precision="bf16-mixed")
    assert text == "its units gather parameters in another precision."


def test_a_plan_that_was_made_for_something_else_is_not_kept(fit, resumed, requests):
    _, _, path = fit("first", module=Deep(), batch_size="keep")
    assert not resumed(path)[2]
    request, given = requests[-1]

    def why(*, space=request.search_space, ahead=request.engine, **fields):
        saved = changed(request.saved_plan, **fields)
        asked = dataclasses.replace(request, saved_plan=saved, search_space=space, engine=ahead)
        return asked.plan(*given)[1]

    assert why() == ""
    another = "search_space is another one than it was made with"
    assert why(space=SearchSpace(slices=(1,))) == another
    space, offered = request.search_space, request.search_space.offered_modes
    assert why(space=dataclasses.replace(space, modes=offered)) == another
    older = {**json.loads(request.saved_plan)["search_space"], "modes": [*offered]}  # as of 0.1
    assert why(search_space=older) == ""
    assert why(search_space={**older, "modes": ["DP"]}) == another
    ahead = dataclasses.replace(request.engine, forward_prefetch=True)
    assert why(ahead=ahead) == "forward_prefetch is another one than it was made with"
    assert why(world_size=2) == "the plan is for 2 ranks, this run has 1"
    text = "it is for 32 samples x 1 micro-batches, and training goes on in others"
    assert why(micro_batch_size=32) == text
    assert re.match(
        r"Expected the plan in .* to have schema_version \d, got 99\. .* wrote the plan$", why(schema_version=99)
    )


def test_memory_that_happens_to_be_free_is_no_larger_limit(fit, resumed, monkeypatch):
    first, _, path = fit("first", module=Deep(), batch_size="keep")
    stated = first.strategy.cluster
    for share, is_anew in ((1.05, False), (2.0, True)):
        free = dataclasses.replace(stated, memory_bytes=round(share * stated.memory_bytes))
        monkeypatch.setattr(plan_fit, "measure_cluster", lambda *_, free=free, **__: free)
        plan, _, is_searched = resumed(path)
        assert is_searched == is_anew
        assert plan.memory_limit_bytes == free.memory_bytes


def test_where_nothing_else_fits_a_gpus_host_has_states_also_after_resuming(fit, monkeypatch):
    _, _, checkpoint = fit("whole", module=Stateful(), batch_size="keep")
    peak_bytes = Plan.load(checkpoint.with_name("osdp_plan.json")).peak_bytes
    states_bytes = 4 * 2 * 4 * 257 * 256
    limited = {"memory_limit": peak_bytes - states_bytes // 2, "batch_size": "keep"}
    with pytest.raises(InfeasibleError):  # a CPU has no memory beside its own
        fit("refused", module=Stateful(), **limited)
    # as on a GPU
    monkeypatch.setattr(Options, "offers_host_last", lambda *_: True)
    searches = []

    def searched(*args, **kwargs):
        searches.append(kwargs["search_space"].states)
        return scheduler.make_plan(*args, **kwargs)

    monkeypatch.setattr(plan_request, "make_plan", searched)
    trainer, _, checkpoint = fit("hosted", module=Stateful(), **limited)
    assert searches == [("device",), ("device", "host")]
    places = {unit.treatments[0]["states"] for unit in trainer.strategy.plan.units}
    assert "host" in places
    assert trainer.strategy.plan.peak_bytes <= limited["memory_limit"]
    fit("resumed", module=Stateful(), ckpt_path=checkpoint, max_epochs=2, **limited)
    assert len(searches) == 2  # the checkpoint's plan is what would be planned for
