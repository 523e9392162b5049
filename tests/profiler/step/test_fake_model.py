import copy
import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_osdp.errors import ProfileError, UntraceableError
from lightning_osdp.profiler import LiveBytes, without_values
from lightning_osdp.profiler.step import fake_model
from lightning_osdp.profiler.step.fake_model import faked
from lightning_osdp.profiler.timing.operation_time import OperationRecorder
from tests.profiler.entangled_models import MODELS
from tests.profiler.ordinary_models import Model
from tests.profiler.traced import CPU, PRECISIONS, module_step, real_and_fake
from tests.support.tiers import in_turn

READS_VALUES = {"SkipsLayers"}
FIXED_SIZE = {"Recurrent", "OneSample"}  # one reshapes to its batch size, the other has one sample


@pytest.mark.parametrize(("name", "precision"), in_turn(sorted(MODELS.keys() - READS_VALUES), PRECISIONS))
def test_a_step_on_fakes_takes_the_same_bytes(name, precision):
    for size in (None,) if name in FIXED_SIZE else (None, 7):
        model = MODELS[name]()
        real, fake = real_and_fake(model, model.batch(), size, module_step, precision)
        # EmbeddingBag on CPU keeps one offset more than it returns.
        assert real == fake if name != "Bags" else all(0 <= r - f <= 8 for r, f in zip(real, fake, strict=True))


class Attention(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.qkv, self.options = nn.Linear(16, 48), options

    def training_step(self, x, batch_idx):
        q, k, v = self.qkv(x).view(-1, 5, 2, 3, 8).permute(3, 0, 2, 1, 4)
        options = {name: o.to(q.dtype) if isinstance(o, torch.Tensor) else o for name, o in self.options.items()}
        return F.scaled_dot_product_attention(q, k, v, **options).mean()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.1}, {"attn_mask": torch.zeros(5, 5)}])
def test_attention_chooses_the_same_kernel(options, precision):
    real, fake = real_and_fake(Attention(options), torch.randn(4, 5, 16), 3, module_step, precision)
    assert real == fake
    assert real.saved > 0


LOSSES = {
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x)),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, torch.ones_like(x), reduction="sum"),
    "each": lambda x: F.mse_loss(x, torch.zeros_like(x), reduction="none").mean(),
    "broadcast": lambda x: F.mse_loss(x, x.detach()[:1, None]),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.long), label_smoothing=0.1),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", LOSSES)
def test_losses_keep_what_the_kernels_keep(name):
    real, fake = real_and_fake(nn.Linear(8, 6), torch.randn(4, 8), 7, lambda m, x: LOSSES[name](m(x)))
    assert real == fake


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # RMSNorm under autocast
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.LayerNorm(6),
        lambda: nn.LayerNorm(6, elementwise_affine=False),
        lambda: nn.GroupNorm(2, 6),
        lambda: nn.BatchNorm1d(6),
        lambda: nn.RMSNorm(6),
    ],
    ids=["layer", "layer without weight", "group", "batch", "root mean square"],
)
def test_normalisations_keep_what_the_kernels_keep(norm, precision, dtype):
    model = nn.Sequential(nn.Linear(8, 6), norm()).to(dtype)
    batch = torch.randn(4, 8, dtype=dtype)
    real, fake = real_and_fake(model, batch, 7, lambda m, x: m(x).square().mean(), precision)
    assert real == fake


def test_nothing_is_allocated_for_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**20, 2**20), nn.BatchNorm1d(2**20))  # 4 TiB
    with faked(model, torch.empty(2**10, 2**20, device="meta"), CPU) as batch:
        assert {t.device for t in (*model.parameters(), *model.buffers(), batch)} == {CPU}
        with LiveBytes("cpu") as live:
            model(batch).sum().backward()
        assert model[0].weight.grad.shape == (2**20, 2**20)
    assert live.peak_bytes > 2**42
    assert all(p.is_meta and p.grad is None for p in model.parameters())


class Aliases(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.body = nn.LSTM(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.kept = [self.frozen.weight, {"rows": (self.embedding.weight, "text")}]
        self.mask = torch.ones(4)
        self.half = self.mask[:2]
        self.register_buffer("scale", torch.ones(4), persistent=False)
        self.also = self.scale
        self.error = torchmetrics.MeanSquaredError()
        self.placed = torch.device("meta")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ties_and_aliases_are_kept(device):
    with torch.device(device):
        model = Aliases()
    names = [name for name, _ in model.named_parameters()]
    with faked(model, None, CPU):
        weight = model.embedding.weight
        assert [name for name, _ in model.named_parameters()] == names
        assert all(isinstance(p, FakeTensor) and isinstance(p, nn.Parameter) for p in model.parameters())
        assert model.head.weight is weight
        assert {id(p) for p in model.body._flat_weights} == {id(p) for p in model.body.parameters()}
        assert [p.requires_grad for p in model.frozen.parameters()] == [False, False]
        assert weight.requires_grad
        assert model.half.untyped_storage()._cdata == model.mask.untyped_storage()._cdata
        assert model.kept[0] is model.frozen.weight
        assert model.kept[1]["rows"][0] is weight
        assert model.also is model.scale
        assert isinstance(model.error.sum_squared_error, FakeTensor)
        assert model.placed == CPU
        model.error.update(model.body(model.embedding(torch.zeros(1, 2, dtype=torch.long)))[0], torch.zeros(1, 2, 4))
    assert model.error.update_count == 0
    assert model.placed == torch.device("meta")


def everything(module):
    state = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    identities = {name: id(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    return state, identities, torch.get_rng_state(), random.getstate(), [dict(vars(m)) for m in module.modules()]


@pytest.mark.parametrize(("name", "fails"), in_turn(MODELS, [False, True]))
def test_everything_is_as_before_also_after_an_error(name, fails):
    model, batch = MODELS[name](), MODELS[name].batch()
    model.list_in_tuple = ([torch.ones(2)],)
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    state, identities, *others = everything(model)
    given = dict(batch)
    try:
        with faked(model, batch, CPU) as fake_batch:
            assert isinstance(model.list_in_tuple[0][0], FakeTensor)
            module_step(model, fake_batch)
            if fails:
                raise ValueError
    except UntraceableError:
        assert fails or name in READS_VALUES
    state_after, identities_after, *others_after = everything(model)
    assert state.keys() == state_after.keys()
    assert all(torch.equal(state[key], value) for key, value in state_after.items())
    assert identities == identities_after
    assert torch.equal(others[0], others_after[0])
    assert others[1:] == others_after[1:]
    assert type(model.list_in_tuple[0][0]) is torch.Tensor
    assert torch.equal(first.grad, torch.ones_like(first))
    assert all(batch[key] is value for key, value in given.items())
    assert all(type(tensor) is torch.Tensor for tensor in model.buffers())


class Reads(Model):
    """Needs a value in its step."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def layers(self):
        self.lin = nn.Linear(8, 6)

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.lin(batch["x"]), batch["y"])
        self.read(loss.detach())
        return loss


@pytest.mark.parametrize(
    "read",
    [
        lambda loss: loss.item(),
        lambda loss: loss.tolist(),
        lambda loss: loss.numpy(),
        lambda loss: loss > 0 or None,
        lambda loss: loss.expand(3).nonzero(),
        lambda loss: {}["missing"],
    ],
    ids=["item", "tolist", "numpy", "bool", "nonzero", "its own mistake"],
)
def test_a_step_that_reads_values_is_refused_with_the_cause(read):
    model = Reads(read)
    expected = pytest.raises(UntraceableError, match="training step of Reads to run on fake tensors")
    with expected as refused, faked(model, model.batch(), CPU) as batch:
        module_step(model, batch)
    assert refused.value.__cause__ is not None
    assert repr(refused.value.__cause__) in str(refused.value)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_no_kernel_gets_the_address_of_a_fake():
    model = Reads(torch.Tensor.data_ptr)
    with pytest.raises(UntraceableError, match="Cannot access data pointer"), faked(model, model.batch(), CPU) as batch:
        module_step(model, batch)


def test_recurrent_layers_may_be_told_to_flatten_their_parameters(monkeypatch):
    monkeypatch.setattr(FakeTensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda _: True)
    layer = nn.LSTM(3, 2)
    with faked(layer, None, CPU):
        layer.flatten_parameters()


def test_what_torch_has_no_rule_for_is_told_by_the_error_alone(caplog, capfd):
    layer = nn.Linear(4, 4)
    with (
        pytest.raises(UntraceableError, match=r"Expected (inputs of BF16 type|mat_a to be BFloat16)"),
        faked(layer, torch.ones(4, 4), torch.device("cpu")) as batch,
    ):
        torch._grouped_mm(batch, layer.weight.expand(2, 4, 4), offs=torch.tensor([2, 4], dtype=torch.int32))
    assert caplog.records == []
    assert capfd.readouterr().err == ""


def test_errors_of_the_package_pass_through():
    with pytest.raises(ProfileError, match=r"^no loss$"), faked(nn.Linear(2, 2), None, CPU):
        raise ProfileError("no loss")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused():
    with (
        pytest.raises(UntraceableError, match="Expected cuda to be there"),
        faked(nn.Linear(2, 2), None, torch.device("cuda")),
    ):
        pass


@dataclass
class Pair:
    x: torch.Tensor
    label: str


def test_a_batch_is_copied_with_fakes_for_its_tensors():
    batch = {"pair": Pair(torch.ones(4, 2), "text"), "list": [torch.ones(4), 3]}
    with faked(nn.Linear(2, 2), batch, CPU) as fake_batch:
        assert isinstance(fake_batch["pair"].x, FakeTensor)
        assert isinstance(fake_batch["list"][0], FakeTensor)
        assert (fake_batch["pair"].label, fake_batch["list"][1]) == ("text", 3)
    assert type(batch["pair"].x) is torch.Tensor


def test_gradients_are_on_inside():
    layer = nn.Linear(2, 2)
    with torch.no_grad(), faked(layer, torch.ones(1, 2), CPU) as batch:
        assert layer(batch).requires_grad


@pytest.fixture
def tied():
    found = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    found[2].weight = found[0].weight
    found[0].bias.requires_grad_(False)
    found[0].weight.no_decay = True
    return found


def test_shapes_ties_and_marks_stand_for_the_values(tied):
    expected = [(name, p.shape, p.dtype, p.requires_grad) for name, p in tied.named_parameters(remove_duplicate=False)]
    with without_values(tied):
        found = list(tied.named_parameters(remove_duplicate=False))
        assert [(name, p.shape, p.dtype, p.requires_grad) for name, p in found] == expected
        assert all(tensor.is_meta for tensor in (*tied.parameters(), *tied.buffers()))
        assert tied[2].weight is tied[0].weight
        assert tied[0].weight.no_decay


def test_the_values_are_the_same_objects_afterwards_even_after_an_error(tied):
    before, values = dict(tied.state_dict(keep_vars=True)), copy.deepcopy(tied.state_dict())
    with pytest.raises(ZeroDivisionError), without_values(tied):
        raise ZeroDivisionError
    after = tied.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in before.items())
    assert all(torch.equal(after[name], value) for name, value in values.items())


RESERVE, BUFFER = 4096, 777


def recurrent_layer(function, *, train=True):
    """The call of a recurrent layer of 5 features and 3 hidden ones on 7 tokens of 2 samples, on fakes on CUDA."""
    x, h = torch.empty(7, 2, 5, device="cuda"), torch.empty(1, 2, 3, device="cuda")
    weights = [torch.empty(size, device="cuda") for size in ((12, 5), (12, 3), (12,), (12,))]
    buffer = torch.empty(12 * 10, device="cuda")
    if function is torch.ops.aten._cudnn_rnn.default:
        return function(x, weights, 4, buffer, h, h, 2, 3, 0, 1, False, 0.0, train, False, [], None)
    return function(x, weights, 4, h, h, 2, 3, 1, False, 0.0, train, False, [], None)


RECURRENT = [torch.ops.aten._cudnn_rnn.default, torch.ops.aten.miopen_rnn.default]


@pytest.mark.parametrize("function", RECURRENT, ids=str)
def test_no_reserve_of_a_recurrent_layer_is_empty(function, monkeypatch):
    asked = []

    def called(function, args):
        asked.append((function, args))
        return (*[None] * 3, torch.zeros(RESERVE, dtype=torch.uint8), torch.zeros(BUFFER))

    monkeypatch.setattr(fake_model, "_called", called)
    monkeypatch.setattr(fake_model, "_workspace_bytes", lambda *_: 0)  # there is no device
    with FakeTensorMode(), torch.no_grad():
        assert recurrent_layer(function)[3].numel() == 0  # what torch says
        with fake_model._AsAllocated(), LiveBytes("cpu") as live:
            output, _, _, reserve, buffer = recurrent_layer(function)
            # made where the call made them
            assert live.current_bytes == RESERVE + 4 * BUFFER
    assert (output.shape, reserve.shape, buffer.shape) == ((7, 2, 3), (RESERVE,), (BUFFER,))
    ((of, args),) = asked
    assert of is function
    # parameters that were all-gathered are in no buffer
    assert (args[3] is None) == (function is torch.ops.aten._cudnn_rnn.default)


@pytest.mark.parametrize("function", RECURRENT, ids=str)
def test_a_reserve_that_stays_empty_is_refused(function, monkeypatch):
    empty = torch.zeros(0, dtype=torch.uint8)
    monkeypatch.setattr(fake_model, "_called", lambda *_: (None, None, None, empty, empty))
    monkeypatch.setattr(fake_model, "_workspace_bytes", lambda *_: 0)  # there is no device
    with FakeTensorMode(), torch.no_grad(), fake_model._AsAllocated():
        recurrent_layer(function, train=False)
        with pytest.raises(UntraceableError, match=f"{function} to say how much it keeps for backward"):
            recurrent_layer(function)


def test_the_workspace_of_a_kernel_counts_while_it_runs(monkeypatch):
    monkeypatch.setattr(fake_model, "_workspace_bytes", lambda *_: 1000)
    with FakeTensorMode(), torch.no_grad(), fake_model._AsAllocated(), LiveBytes("cuda") as live:
        image = torch.empty(1, 2, 8, 8, device="cuda")
        weight = torch.empty(3, 2, 3, 3, device="cuda")
        live.track([image, weight])
        before = live.current_bytes
        result = torch.ops.aten.convolution(image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        assert live.current_bytes - before == result.nbytes
        assert live.peak_bytes - before == result.nbytes + 1000
        torch.ops.aten.convolution(image.cpu(), weight.cpu(), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        assert live.peak_bytes - before == result.nbytes + 1000


def test_a_call_is_of_real_zeros_of_the_same_shapes_where_the_fakes_are():
    with FakeTensorMode(), fake_model._AsAllocated():
        made = fake_model._called(lambda x, pair, n: [type(x), x, *pair, n], (torch.ones(2, 3), [torch.ones(4)], 5))
    kind, x, y, n = made
    assert (kind, x.shape, y.shape, n) == (torch.Tensor, (2, 3), (4,), 5)
    assert not x.any()


def test_what_attention_drew_is_where_its_backward_reads_it():
    aten = torch.ops.aten
    with FakeTensorMode(), torch.no_grad(), fake_model._AsAllocated(), OperationRecorder() as recorder:
        x = torch.empty(2, 4, 8, 16, device="cuda")  # samples, heads, length, features
        output, logsumexp, *drawn = aten._scaled_dot_product_efficient_attention(x, x, x, None, True, 0.1)
        assert [(each.device, each.dtype, each.shape) for each in drawn] == [(CPU, torch.int64, ())] * 2
        assert {output.device.type, logsumexp.device.type} == {"cuda"}
        needed = [True, True, True, False]
        aten._scaled_dot_product_efficient_attention_backward(x, x, x, x, None, output, logsumexp, *drawn, 0.1, needed)
        rows = x.transpose(1, 2)
        *_, seed, offset, _, _ = aten._efficient_attention_forward(
            rows, rows, rows, None, None, None, None, None, 0.1, 0, True
        )
        assert seed.device == offset.device == CPU
    (backward,) = (each for each in recorder.operations[0] if "backward" in str(each.function))
    assert [operand.device.type for operand in backward.operands] == ["cuda"] * 6 + ["cpu"] * 2
