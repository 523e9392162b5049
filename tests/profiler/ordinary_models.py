"""Models as people write them, each with a batch of four; every one has a training_step and an optimizer."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

BATCH = 4


class Model(nn.Module):
    """Regression of (BATCH, 8) onto (BATCH, 6) unless a subclass says otherwise."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers()

    def layers(self):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch["x"]), batch["y"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @staticmethod
    def batch():
        generator = torch.Generator().manual_seed(1)
        return {"x": torch.randn(BATCH, 8, generator=generator), "y": torch.randn(BATCH, 6, generator=generator)}


class ManyCallingStyles(Model):
    """Arguments by keyword, a ModuleDict, dropout, tuples, a residual written in place, two losses, a counter."""

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({"first": nn.Linear(8, 16), "second": nn.Linear(16, 8)})
            self.gain = nn.Parameter(torch.ones(8))

        def forward(self, *, inputs, scale=1):
            hidden = F.relu_(self.parts["first"](inputs))
            out = self.parts["second"](hidden) * self.gain * scale
            out += inputs
            return out, {"hidden": hidden}

    def layers(self):
        self.body = self.Body()
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8, 6)
        self.steps, self.seen = 0, []

    def training_step(self, batch, batch_idx):
        out, extra = self.body(inputs=batch["x"], scale=2)
        logits = self.head(self.dropout(out))
        self.steps += 1
        self.seen.append(logits.detach().mean())
        loss = F.mse_loss(logits, batch["y"])
        return {"loss": loss + 0.1 * extra["hidden"].pow(2).mean(), "logits": logits}


class Convolutions(Model):
    def layers(self):
        self.body = nn.Sequential(
            nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.Conv2d(5, 6, 3), nn.Flatten()
        )
        self.head = nn.Linear(6 * 4 * 4, 6)

    def forward(self, x):
        return self.head(self.body(x))

    @staticmethod
    def batch():
        generator = torch.Generator().manual_seed(1)
        return {"x": torch.randn(BATCH, 3, 8, 8, generator=generator), "y": torch.randn(BATCH, 6, generator=generator)}


class OneSample(Convolutions):
    """A batch of one: BatchNorm2d has pixels to average over."""

    @staticmethod
    def batch():
        return {name: tensor[:1] for name, tensor in Convolutions.batch().items()}


class FrozenUnderNoGrad(Model):
    """A frozen extractor in evaluation mode, run without gradients."""

    def layers(self):
        self.extractor = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)).requires_grad_(False)
        self.extractor.eval()
        self.adapter, self.head = nn.Linear(8, 4), nn.Linear(4, 6)

    def forward(self, x):
        with torch.no_grad():
            x = self.extractor(x)
        return self.head(self.adapter(x))


class Checkpointed(Model):
    use_reentrant = False

    def layers(self):
        self.enter = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, 6)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True


class Recurrent(Model):
    """Flat weights of LSTM and GRU, a cell called once per time step, a state kept between steps."""

    def layers(self):
        self.lstm = nn.LSTM(2, 6, num_layers=2, batch_first=True, dropout=0.1)
        self.gru = nn.GRU(6, 5, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(10, 6)
        self.state = None

    def forward(self, x):
        x, state = self.lstm(x.view(BATCH, 4, 2), self.state)
        self.state = tuple(s.detach() for s in state)
        x, _ = self.gru(x)
        hidden = None
        for step in range(x.shape[1]):
            hidden = self.cell(x[:, step], hidden)
        return hidden


class Transformer(Model):
    """torch's own encoder (deep copies of one layer), and attention whose out_proj is never called."""

    def layers(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.query = nn.Parameter(torch.randn(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 6)

    def forward(self, x):
        x = self.encoder(x.unsqueeze(1) * torch.ones(1, 5, 1))
        pooled, _ = self.attention(self.query.expand(x.shape[0], -1, -1), x, x, need_weights=False)
        return self.head(pooled.squeeze(1))


class Parametrized(Model):
    def layers(self):
        self.weighted = parametrizations.weight_norm(nn.Linear(8, 16))
        self.spectral = parametrizations.spectral_norm(nn.Linear(16, 16, bias=False))
        self.head = nn.Linear(16, 6)

    def forward(self, x):
        return self.head(self.spectral(torch.tanh(self.weighted(x))))


class Bags(Model):
    """Integer inputs and EmbeddingBag."""

    def layers(self):
        self.bag = nn.EmbeddingBag(20, 8, mode="mean")
        self.head = nn.Linear(8, 6)

    def forward(self, x):
        return self.head(self.bag(x))

    @staticmethod
    def batch():
        return {"x": torch.arange(BATCH * 3).view(BATCH, 3), "y": Model.batch()["y"]}


class Double(Model):
    def layers(self):
        self.body = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 6)).double()

    def forward(self, x):
        return self.body(x.double()).float()


ORDINARY = (
    ManyCallingStyles, Convolutions, OneSample, FrozenUnderNoGrad, Checkpointed, CheckpointedReentrant, Recurrent,
    Transformer, Parametrized, Bags, Double,
)  # fmt: skip
