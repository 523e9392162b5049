import copy
import dataclasses
import functools
import itertools
from operator import attrgetter
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.cluster import DeviceRates
from lightning_osdp.errors import ProfileError, RanksApartError
from lightning_osdp.profiler import ComputePrecision, TrainingStep, profile_model, replica_of
from lightning_osdp.profiler.model import configured_optimizers, note_on_device


class Net(nn.Module):
    def __init__(self, step=None, *, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6, bias=False)
        if tied:
            self.b.weight = self.a.weight
        self.step = step

    def forward(self, x):
        return self.b(F.gelu(self.norm(self.a(x))))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch), batch) if self.step is None else self.step(self, batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


BATCH = torch.ones(4, 6)


def bytes_of(profile):
    """The profile without times."""
    return dataclasses.replace(
        profile,
        segments=tuple(dataclasses.replace(s, forward_s=Affine(), backward_s=Affine()) for s in profile.segments),
        optimizer=dataclasses.replace(profile.optimizer, s_per_element=0.0, fixed_s=0.0),
    )


def segment_of(profile, name):
    """The segment of an operator that is called once."""
    (segment,) = (segment for segment in profile.segments if segment.operator == name)
    return segment


def test_a_plain_module_with_a_training_step():
    profile = profile_model(Net(), BATCH)
    assert [(o.name, o.kind, o.dtype) for o in profile] == [
        ("a", "Linear", "float32"),
        ("norm", "LayerNorm", "float32"),
        ("b", "Linear", "float32"),
    ]
    assert [segment.operator for segment in profile.segments] == ["a", "norm", "b", ""]
    assert profile.spans == {"a": ((0, 0),), "norm": ((1, 1),), "b": ((2, 2),)}
    a, _, b = profile
    assert (a.parameter_bytes, a.num_trainable) == (4 * 42, 42)
    assert a.gathered_bytes == a.trainable_bytes == a.gradient_bytes == 4 * 42
    assert a.optimizer_bytes == 2 * 4 * 42
    assert b.parameter_bytes == 4 * 36
    assert profile.profiled_batch_size == 4
    assert profile.batch_bytes == Affine(per_sample=4 * 6)
    assert profile.buffer_bytes == 0
    assert all(segment.forward_s.at(4) > 0 and segment.backward_s.at(4) > 0 for segment in profile.segments)
    assert profile.optimizer.fixed_s > 0
    assert profile.optimizer.temporaries == ((1, 2),)


def test_parameters_are_laid_out_as_named_parameters_has_them():
    model = Net(lambda m, x: m.a(m.norm(m.b(x))).sum())
    model.norm.bias.requires_grad_(False)
    profile = profile_model(model, BATCH, TrainingStep(precision=ComputePrecision(torch.bfloat16)))
    found = {operator.name: operator.parameters for operator in profile}
    assert [p.position for p in found["b"] + found["norm"] + found["a"]] == [4, 2, 3, 0, 1]
    weight, bias = found["norm"]
    assert (weight.num_elements, weight.itemsize, weight.gathered_itemsize, weight.is_trainable) == (6, 4, 2, True)
    assert weight.num_rows == 6
    assert (weight.state_bytes_per_element, bias.state_bytes_per_element) == (8, 0)
    assert not bias.is_trainable
    # all in AdamW's one group
    assert [(p.group, p.place) for p in found["a"] + found["norm"] + found["b"]] == [(0, i) for i in range(5)]


def test_operators_tell_the_dtypes_of_their_parameters():
    model = Net(lambda m, x: m.b(m.norm(m.a(x.bfloat16()).float())).sum())
    model.a.bfloat16()
    model.norm.register_parameter("extra", nn.Parameter(torch.ones(1, dtype=torch.float64)))
    dtypes = {operator.name: operator.dtype for operator in profile_model(model, BATCH)}
    assert dtypes == {"a": "bfloat16", "norm": "float32, float64", "b": "float32"}


def test_bytes_do_not_depend_on_the_batch():
    few, many = (profile_model(Net(), torch.ones(size, 6)) for size in (2, 8))
    for one, other in zip(few.segments, many.segments, strict=True):
        assert (one.operator, one.saved_bytes) == (other.operator, other.saved_bytes)
        for name in ("forward_workspace_bytes", "backward_workspace_bytes"):
            assert getattr(one, name).at(5) == pytest.approx(getattr(other, name).at(5), abs=4.0), (one.operator, name)
    assert few.batch_bytes == many.batch_bytes


class Blocks(Net):
    """Equal blocks, each of which attends to all places of a sequence."""

    num_samples: ClassVar[list[int]] = []  # of each call

    def __init__(self):
        super().__init__(lambda m, x: m.attended(x).square().mean())
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6)) for _ in range(3)])
        self.register_buffer("scale", torch.ones(6))

    def attended(self, x):
        Blocks.num_samples.append(len(x))
        for block in self.blocks:
            x = x + F.dropout(torch.softmax(x @ x.transpose(-1, -2), dim=-1), 0.1) @ block(x) * self.scale
        return x


def at(found, num_samples):
    """Numbers of a profile's parts for so many samples."""
    if isinstance(found, Affine):
        return float(f"{found.at(num_samples):.9g}")  # rounded alike
    if dataclasses.is_dataclass(found):
        return {field.name: at(getattr(found, field.name), num_samples) for field in dataclasses.fields(found)}
    return [at(each, num_samples) for each in found] if isinstance(found, (list, tuple)) else found


def test_a_replica_without_values_has_the_bytes_of_the_module_on_another_batch():
    module, rates = Blocks(), DeviceRates(flops_per_s={"float32": 1e9}, bytes_per_s=1e9)
    activations = ("keep", "recompute", "selective")
    short, long = (torch.ones(4, length, 6) for length in (5, 40))
    known = profile_model(module, short, rates=rates, activations=activations)
    expected = profile_model(module, long, rates=rates, activations=activations)
    replica = replica_of(module)
    Blocks.num_samples.clear()
    found = profile_model(replica, long, rates=rates, activations=activations, known=known)
    assert {*Blocks.num_samples} == {4}  # such batches are asked about with no other number
    for of_profile in (attrgetter("segments"), lambda each: [block.segments["recompute"] for block in each.blocks]):
        assert at(of_profile(found), 4) == at(of_profile(expected), 4) != at(of_profile(known), 4)
    levels = [{value: level.kept for value, level in block.levels.items()} for block in known.blocks]
    assert [{value: level.kept for value, level in block.levels.items()} for block in found.blocks] == levels
    assert any(levels)
    assert found.optimizer == known.optimizer
    assert all(parameter.is_meta for parameter in replica.parameters())


def test_a_batch_may_be_a_dict_with_more_than_tensors():
    def step(model, batch):
        return {"loss": F.mse_loss(model(batch["x"]), batch["nested"][0]["y"]), "logits": batch["x"]}

    batch = {"id": ["a", "b"], "x": torch.ones(2, 6), "nested": [{"y": torch.ones(2, 6, dtype=torch.float64).float()}]}
    profile = profile_model(Net(step), batch)
    assert profile.profiled_batch_size == 2
    assert profile.batch_bytes.per_sample == 2 * 4 * 6


def test_a_batch_may_be_an_object():
    @dataclasses.dataclass
    class Pair:
        x: torch.Tensor
        name: str = "pair"

    class Graph:
        def __init__(self):
            self.x = torch.ones(3, 6)

        def to(self, device):
            return self

    for batch, size in ((Pair(torch.ones(2, 6)), 2), (Graph(), 3)):
        profile = profile_model(Net(lambda m, b: m(b.x).sum()), batch)
        assert (profile.profiled_batch_size, profile.batch_bytes.per_sample) == (size, 24)


def test_training_step_and_optimizers_may_be_given():
    model = nn.Linear(6, 6)
    step = TrainingStep(
        lambda batch: model(batch[0]).sum(),
        lambda replica: [torch.optim.SGD(replica.parameters(), lr=0.1)],
        batch_size=2,
    )
    profile = profile_model(model, [BATCH], step)
    assert [o.name for o in profile] == [""]
    assert profile.profiled_batch_size == 2
    assert profile.batch_bytes.per_sample == 4 * 6 * 4 / 2
    assert [segment.operator for segment in profile.segments] == [""]  # nothing is called but the root


def test_nothing_is_changed_and_a_second_profile_is_equal():
    model = Net()
    model.a.bias.grad = torch.ones(6)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    first, second = profile_model(model, BATCH), profile_model(model, BATCH)
    assert bytes_of(first) == bytes_of(second)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(model.a.bias.grad, torch.ones(6))
    assert model.a.weight.grad is None


def test_modules_stay_in_the_mode_they_are_in():
    modes = []
    model = Net(lambda m, x: modes.append([m.training, m.norm.training]) or m(x).sum())
    model.norm.eval()
    profile_model(model, BATCH)
    assert set(map(tuple, modes)) == {(True, False)}


def test_configure_optimizers_draws_no_random_numbers_of_ours():
    model = Net()
    model.configure_optimizers = lambda: torch.rand(1) and torch.optim.SGD(model.parameters(), lr=0.1)
    rng = torch.get_rng_state()
    profile_model(model, BATCH)
    assert torch.equal(torch.get_rng_state(), rng)


def test_mixed_precision_gathers_and_reduces_half():
    full = profile_model(Net(), BATCH)
    half = profile_model(Net(), BATCH, TrainingStep(precision=ComputePrecision(torch.bfloat16)))
    for one, other in zip(full, half, strict=True):
        assert other.gathered_bytes == one.gathered_bytes // 2
        assert other.gradient_bytes == one.gradient_bytes // 2
        assert other.parameter_bytes == one.parameter_bytes
        assert other.trainable_bytes == one.trainable_bytes
        assert other.optimizer_bytes == one.optimizer_bytes


def test_forward_may_run_under_autocast():
    dtypes = []
    model = Net(lambda m, x: dtypes.append(m.a(x).dtype) or m(x).float().sum())

    def run(batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model.training_step(batch, 0)

    profile_model(model, BATCH, TrainingStep(run))
    assert set(dtypes) == {torch.bfloat16}


def test_tied_weights_count_once():
    model = Net(tied=True)
    profile = profile_model(model, BATCH)
    assert sum(o.parameter_bytes for o in profile) == sum(4 * p.numel() for p in model.parameters())
    assert {o.name: o.parameter_bytes for o in profile} == {"a": 4 * 42, "norm": 4 * 12, "b": 0}
    # backward makes the gradient first where forward used the weight last
    assert {o.name: o.gradient_bytes for o in profile} == {"a": 4 * 6, "norm": 4 * 12, "b": 4 * 36}
    assert profile.fingerprint["b.weight"] == "float32[6, 6] tied to a.weight"


def test_frozen_parameters_have_neither_gradient_nor_state():
    model = Net()
    model.a.requires_grad_(False)
    a = next(iter(profile_model(model, BATCH)))
    assert a.parameter_bytes == a.gathered_bytes == 4 * 42
    assert a.num_trainable == a.trainable_bytes == a.gradient_bytes == a.optimizer_bytes == 0


def test_a_module_called_twice_has_two_segments():
    profile = profile_model(Net(lambda m, x: m.a(m.b(m.a(x))).sum()), BATCH)
    assert [operator.name for operator in profile] == ["norm", "a", "b"]  # what never runs stands with the root
    assert [segment.operator for segment in profile.segments] == ["a", "b", "a", ""]
    assert profile.spans == {"a": ((0, 0), (2, 2)), "b": ((1, 1),)}
    # the batch does not count; the loss itself does
    assert [segment.saved_bytes.at(4) for segment in profile.segments] == [0, 4 * 4 * 6, 4 * 4 * 6, 4]
    assert all(segment.backward_s.at(4) > 0 for segment in profile.segments)


def test_blocks_span_their_operators():
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)) for _ in range(2))
    model = Net(lambda m, x: m.blocks[1](m.blocks[0](m.a(x))).sum())
    model.blocks = blocks
    profile = profile_model(model, BATCH)
    assert {name: span for name, span in profile.spans.items() if name.count(".") == 1} == {
        "blocks.0": ((1, 2),),
        "blocks.1": ((3, 4),),
    }
    assert "blocks.0.1" not in profile.spans  # no unit can be there
    # equal segments are taken to cost the same
    first, second = segment_of(profile, "blocks.0.0"), segment_of(profile, "blocks.1.0")
    assert (first.forward_s, first.backward_s) == (second.forward_s, second.backward_s)


def test_buffers_count():
    model = Net()
    model.register_buffer("table", torch.zeros(10))
    model.register_buffer("cache", torch.zeros(10, dtype=torch.float16), persistent=False)
    assert profile_model(model, BATCH).buffer_bytes == 60


def test_buffers_keep_their_dtype_under_mixed_precision():
    dtypes = set()
    model = Net(lambda m, x: dtypes.add(m.table.dtype) or m(x).float().sum())
    model.register_buffer("table", torch.zeros(10))
    assert profile_model(model, BATCH, TrainingStep(precision=ComputePrecision(torch.bfloat16))).buffer_bytes == 40
    assert dtypes == {torch.float32}


RETURN = r" Return the loss, a scalar tensor, or a dict with it under 'loss', from training_step\.$"


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda m, x: None, r"^Expected training_step to return a loss on the profiling batch, got None\." + RETURN),
        (lambda m, x: {"loss": None}, r"^Expected training_step to return a loss .*, got None\." + RETURN),
        (lambda m, x: {"a": 1, "b": 2}, r"^Expected .* a dict with 'loss', got the keys \['a', 'b'\]\." + RETURN),
        (lambda m, x: m(x), r"^Expected the loss to be a scalar .* got shape \[4, 6\], requires_grad=True\." + RETURN),
        (
            lambda m, x: m(x).sum().detach(),
            r"^Expected the loss to be a scalar that depends on trainable parameters, got shape \[\],"
            r" requires_grad=False\." + RETURN,
        ),
        (
            lambda m, x: m(x).sum() * float("nan"),
            r"^Expected a finite loss on the profiling batch, got nan\. Look for NaN in the first training batch",
        ),
        (lambda m, x: m(x).sum() * float("inf"), r"^Expected a finite loss on the profiling batch, got -?inf\."),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused(step, text):
    model = Net(step)
    with pytest.raises(ProfileError, match=text):
        profile_model(model, BATCH)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_model_without_parameters_is_refused_before_it_runs():
    model = nn.Identity()
    with pytest.raises(ProfileError, match=r"^Expected Identity to have parameters to shard"):
        profile_model(model, BATCH, TrainingStep(lambda batch: pytest.fail("ran")))


@pytest.mark.parametrize("batch", [["text"], torch.tensor(1.0), {}])
def test_a_batch_of_unknown_size_is_refused(batch):
    text = (
        r"^Cannot tell how many samples the batch holds: found no tensor in \w+\."
        r" Pass TrainingStep\(batch_size=\.\.\.\) to profile_model\.$"
    )
    with pytest.raises(ProfileError, match=text):
        profile_model(Net(), batch)


def test_what_configure_optimizers_returns_is_checked():
    model = Net()
    model.configure_optimizers = lambda: {"optimizer": None}
    with pytest.raises(ProfileError, match=r"^Expected configure_optimizers to return optimizers, alone or with"):
        profile_model(model, BATCH)


@pytest.mark.parametrize(
    "form",
    [
        lambda one, other: one,
        lambda one, other: [one, other],
        lambda one, other: {"optimizer": one, "lr_scheduler": "a schedule"},
        lambda one, other: [{"optimizer": one}, {"optimizer": other, "lr_scheduler": {"scheduler": "a schedule"}}],
        lambda one, other: ([one, other], ["a schedule"]),
        lambda one, other: ([one], []),
    ],
)
def test_optimizers_are_found_in_each_form_that_lightning_takes(form):
    model = Net()
    one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    model.configure_optimizers = lambda: form(one, other)
    found = configured_optimizers(model)
    assert found[0] is one
    assert found[1:] in ([], [other])


class FixedSize(nn.Module):
    """Runs on four samples only."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).view(4, 2).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_model_of_one_size_is_timed_at_that_size_and_says_so(caplog):
    profile = profile_model(FixedSize(), torch.ones(4, 3))
    for segment in profile.segments:
        assert segment.forward_s.fixed == segment.backward_s.fixed == segment.saved_bytes.fixed == 0.0
    assert profile.segments[0].forward_s.per_sample > 0
    assert "the model does not run on 2 samples (shape '[4, 2]' is invalid" in caplog.text
    assert "bytes and time are taken as proportional" in caplog.text


def test_a_batch_that_cannot_be_resized_is_profiled_as_it_is_and_says_so(caplog):
    profile = profile_model(Net(), BATCH, TrainingStep(batch_size=3))
    assert profile.segments[0].forward_s.fixed == 0.0
    assert "the model does not run on 1 samples (no tensor or list of the batch has 3 samples first)" in caplog.text


def test_ranks_that_part_while_they_are_timed_are_not_passed_over():
    def together(work, *, stage):
        if stage == "timing 2 samples":
            raise RanksApartError("Rank 1 failed, so every rank stops: ValueError: lost")
        return [work()]

    with pytest.raises(RanksApartError, match="Rank 1 failed"):
        profile_model(Net(), BATCH, together=together)


def test_a_step_that_does_not_fit_unsharded_is_timed_operation_by_operation(caplog):
    class TooLarge(Net):
        def training_step(self, batch, batch_idx):
            if not isinstance(next(self.parameters()), FakeTensor):
                raise torch.OutOfMemoryError("no room")
            return super().training_step(batch, batch_idx)

    with caplog.at_level("INFO"):
        profile = profile_model(TooLarge(), BATCH)
    assert sum(segment.forward_s.at(4) for segment in profile.segments) > 0
    assert "4 samples do not fit on a device unsharded, so operations are timed alone" in caplog.text


class Contrasting(Net):
    """Net whose training step moves an average of its weights, as contrastive methods do, and counts in an object."""

    def __init__(self):
        super().__init__()
        self.average = copy.deepcopy(self.a).requires_grad_(False)
        self.assigned = copy.deepcopy(self.a).requires_grad_(False)
        self.meter, self.numbers = SimpleNamespace(losses=[], steps=0), itertools.count()
        with torch.no_grad():
            for parameter in (*self.average.parameters(), *self.assigned.parameters()):
                parameter.add_(1)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.average.weight.lerp_(self.a.weight, 0.5)
            self.average.bias.data.mul_(0.5)
        self.assigned.weight.data = 0.5 * self.assigned.weight.data
        loss = super().training_step(batch, batch_idx) + F.mse_loss(self.average(batch), self.assigned(batch))
        self.meter.losses.append(loss)
        self.meter.steps += 1
        return loss


def test_averages_and_counters_that_the_step_moves_are_where_they_were(caplog):
    model, expected = Contrasting(), Contrasting().state_dict()
    profile_model(model, BATCH)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert model.meter == SimpleNamespace(losses=[], steps=0)
    assert "'numbers' is an iterator" in caplog.text


@functools.lru_cache(maxsize=8)
def bounded(size):
    return torch.ones(size), torch.zeros(size)


@functools.cache
def unbounded(size):
    return {"mask": torch.ones(size)}


MASKS, KEPT, LAST = {}, [], None


def in_dict(size):
    if size not in MASKS:
        MASKS[size] = torch.ones(size), torch.zeros(size)
    return MASKS[size][0]


class Masked:
    masks = {}  # noqa: RUF012

    @classmethod
    def in_class(cls, size):
        return cls.masks.setdefault(size, torch.ones(size))


def in_list(size):
    if not KEPT:
        KEPT.append(torch.ones(size))
    return KEPT[0]


def in_variable(size):
    global LAST  # noqa: PLW0603
    LAST = torch.ones(size) if LAST is None else LAST
    return LAST


@pytest.fixture
def empty_caches(monkeypatch):
    """Makes caches anew: what was imported when tests were collected is frozen, and not among all objects."""
    monkeypatch.setitem(globals(), "bounded", functools.lru_cache(maxsize=8)(bounded.__wrapped__))
    monkeypatch.setitem(globals(), "unbounded", functools.cache(unbounded.__wrapped__))
    monkeypatch.setitem(globals(), "Masked", type("Masked", (), {**vars(Masked), "masks": {}}))
    MASKS.clear()
    KEPT.clear()


CACHES = {
    "bounded": lambda size: bounded(size)[0],
    "unbounded": lambda size: unbounded(size)["mask"],
    "dict": in_dict,
    "dict of a class": lambda size: Masked.in_class(size),  # noqa: PLW0108 - the class of that moment
    "list": in_list,
}


@pytest.mark.usefixtures("empty_caches")
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", CACHES)
def test_caches_outside_of_the_model_get_no_tensors_without_values(name, device):
    mask = CACHES[name]
    with torch.device(device):
        model = Net(lambda m, x: (m(x) * mask(6)).sum())
    profile_model(model, BATCH)
    assert type(mask(6)) is torch.Tensor
    assert mask(6).tolist() == [1.0] * 6


@pytest.mark.usefixtures("empty_caches")
def test_caches_that_have_got_no_such_tensors_stay_as_they_are():
    before, other = bounded(3)[0], unbounded(3)["mask"]
    MASKS["other"] = other
    profile_model(Net(lambda m, x: m(x).sum() * bounded(3)[0].sum()), BATCH)
    assert bounded(3)[0] is before
    assert unbounded(3)["mask"] is MASKS["other"] is other


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, hidden otherwise
def test_what_a_variable_outside_of_the_model_keeps_is_told(monkeypatch):
    monkeypatch.setitem(globals(), "LAST", None)
    text = r"^Expected training_step to compute from its batch and its module, but a global variable .* pass plan=\.$"
    with pytest.raises(ProfileError, match=text):
        profile_model(Net(lambda m, x: (m(x) * in_variable(6)).sum()), BATCH)


def test_a_plan_says_that_what_is_measured_on_cuda_is_unvalidated():
    assert "unvalidated on CUDA" in note_on_device(torch.device("cuda", 0))
    assert note_on_device(torch.device("cpu")) is None
    assert profile_model(Net(), BATCH).notes == ()
    rates = DeviceRates(flops_per_s={"float32": 1e12}, bytes_per_s=1e11)
    assert profile_model(Net(), BATCH, rates=rates).notes == ()
    (note,) = profile_model(Net(), BATCH, rates=dataclasses.replace(rates, is_cuda=True)).notes
    assert "unvalidated on CUDA" in note
