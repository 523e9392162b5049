import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from examples.vision import train
from examples.vision.data import SHAPES, ShapesDataModule, draw
from examples.vision.model import (
    HierarchicalViT,
    HierarchicalViTConfig,
    WindowAttention,
    from_windows,
    relative_positions,
    to_windows,
)

CONFIG = Path(train.__file__).parent / "configs" / "osdp_cpu.yaml"
SMALL_RUN = [
    f"--config={CONFIG}",
    "--trainer.fast_dev_run=true",
    "--trainer.enable_model_summary=false",
    "--trainer.strategy.init_args.memory_limit=1GiB",
    "--model.depths=[1,1]",
    "--model.hidden_size=16",
    "--data.num_train=64",
    "--data.num_validation=64",
    "--data.batch_size=4",
]


def grid(size=500):
    """Coordinates of points of [-1.5, 1.5] x [-1.5, 1.5], (size, size) each, and the area that each stands for."""
    axis = torch.linspace(-1.5, 1.5, size)
    return axis[None, :].expand(size, size), axis[:, None].expand(size, size), (axis[1] - axis[0]) ** 2


@pytest.mark.parametrize(
    ("shape", "area"),
    [
        ("disc", math.pi),
        ("ring", math.pi * (1.0 - 0.6**2)),
        ("square", 1.7**2),
        ("triangle", 3 * math.sqrt(3) * 0.55**2),
        ("cross", 2 * 2.0 * 0.6 - 0.6**2),
    ],
)
def test_a_shape_has_the_area_by_hand(shape, area):
    x, y, cell = grid()
    assert float((SHAPES[shape](x, y) < 0).sum() * cell) == pytest.approx(area, rel=0.02)


def test_a_crescent_is_a_disc_without_a_disc():
    x, y, _ = grid()
    inside = SHAPES["crescent"](x, y) < 0
    assert torch.equal(inside, (torch.hypot(x, y) < 1.0) & (torch.hypot(x - 0.55, y) > 0.8))


def test_one_seed_draws_one_set_of_images():
    images, labels = draw(40, size=16, noise=0.1, generator=torch.Generator().manual_seed(5))
    again = draw(40, size=16, noise=0.1, generator=torch.Generator().manual_seed(5))
    other = draw(40, size=16, noise=0.1, generator=torch.Generator().manual_seed(6))
    assert images.shape == (40, 1, 16, 16)
    assert images.dtype == torch.float32
    assert set(labels.tolist()) == set(range(6))
    assert torch.equal(images, again[0])
    assert torch.equal(labels, again[1])
    assert not torch.equal(images, other[0])


def test_shapes_lie_inside_the_image():
    images, _ = draw(500, size=32, noise=0.0, generator=torch.Generator().manual_seed(0))
    border = torch.cat((images[..., 0], images[..., -1], images[..., 0, :], images[..., -1, :]), dim=-1)
    # the corners of the largest squares may touch it
    assert (border != 0).float().mean() < 0.001
    assert (images != 0).flatten(1).any(dim=1).all()


def test_training_and_validation_are_different_images():
    data = ShapesDataModule(num_train=20, num_validation=10, image_size=16, batch_size=8)
    data.setup("fit")
    assert not torch.equal(data.train_shapes.images[:10], data.validation_shapes.images)
    assert [labels.shape for _, labels in data.train_dataloader()] == [(8,), (8,)]  # an incomplete batch is dropped
    assert [images.shape for images, _ in data.val_dataloader()] == [(8, 1, 16, 16), (2, 1, 16, 16)]


@pytest.mark.parametrize("name", ["num_train", "num_validation", "image_size", "batch_size"])
def test_a_size_below_one_is_refused(name):
    with pytest.raises(ValueError, match=f"^Expected {name} of at least 1, got 0. Raise {name}.$"):
        ShapesDataModule(**{name: 0})


def test_negative_noise_is_refused():
    message = "Expected noise of at least 0, got -0.5. Use 0.0 for clean images."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ShapesDataModule(noise=-0.5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"patch_size": 0}, "Expected patch_size of at least 1, got 0. Raise patch_size."),
        ({"depths": ()}, "Expected depths of at least 1, one a stage, got (). Try (2, 2, 2)."),
        (
            {"hidden_size": 40},
            (
                "Expected hidden_size to be a multiple of head_size, got hidden_size=40 and head_size=16. "
                "Change either one."
            ),
        ),
        (
            {"image_size": 24},
            (
                "Expected image_size to be a multiple of 16, which is patch_size doubled once a merging, got 24. "
                "Change image_size or patch_size, or use fewer stages."
            ),
        ),
        (
            {"window_size": 3},
            (
                "Expected windows to tile the tokens of every stage, (8, 4, 2) a side, got window_size=3. "
                "Use a divisor of 8."
            ),
        ),
    ],
)
def test_sizes_that_do_not_match_are_refused(sizes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        HierarchicalViTConfig(**sizes)


def test_each_stage_is_twice_as_wide():
    model = HierarchicalViT(HierarchicalViTConfig(depths=(1, 1, 1), hidden_size=16))
    widths = [layer.attention.proj.in_features for layer in model.layers if hasattr(layer, "attention")]
    assert widths == [16, 32, 64]
    assert model.head.in_features == 64


def test_every_other_block_of_a_stage_with_several_windows_is_shifted():
    model = HierarchicalViT(HierarchicalViTConfig(depths=(4, 2), hidden_size=16))
    assert [layer.shift for layer in model.layers if hasattr(layer, "shift")] == [0, 2, 0, 2, 0, 0]


def test_windows_are_cut_and_joined():
    tokens = torch.arange(2 * 4 * 4).view(2, 4, 4, 1)
    windows = to_windows(tokens, 2)
    assert windows[:2, :, 0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert torch.equal(from_windows(windows, 2, grid_size=4), tokens)


def test_equal_relative_positions_share_their_number():
    positions = relative_positions(3)
    assert positions.min() == 0
    assert positions.max() == 24
    assert positions[0, 1] == positions[4, 5] == positions[7, 8]  # of a token to its right neighbour
    assert len(positions.unique()) == 25


def test_attention_equals_its_formula():
    attention = WindowAttention(8, head_size=4, window_size=2)
    x = torch.randn(3, 4, 8)
    query, key, value = (part.view(3, 4, 2, 4) for part in attention.qkv(x).chunk(3, dim=-1))
    scores = torch.einsum("wthd,wshd->whts", query, key) / 2
    scores = scores + attention.position_bias.weight[relative_positions(2)].permute(2, 0, 1)
    mixed = torch.einsum("whts,wshd->wthd", scores.softmax(dim=-1), value).reshape(3, 4, 8)
    torch.testing.assert_close(attention(x), attention.proj(mixed))


def test_every_parameter_gets_a_gradient():
    model = HierarchicalViT(HierarchicalViTConfig(depths=(2, 1), hidden_size=16))
    model(torch.randn(2, 1, 32, 32)).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_the_report_names_accuracy_chance_and_checkpoint():
    trainer = SimpleNamespace(callback_metrics={"val_accuracy": torch.tensor(0.875)}, checkpoint_callback=None)
    assert train.report(trainer) == (
        "Validation accuracy: 87.50%; of guessing one of 6 shapes (disc, ring, square, triangle, cross, crescent):"
        " 16.67%\nCheckpoint: none was written (fast_dev_run writes none)"
    )


@pytest.mark.distributed
@pytest.mark.slow
def test_the_script_trains_on_two_ranks_under_lightnings_launcher(tmp_path):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, train.__file__, "fit", *SMALL_RUN],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("OSDP plan") == 1
    assert run.stdout.count("Validation accuracy: ") == 1
