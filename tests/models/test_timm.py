"""Image models of timm, unmodified and small: members of an array are what PyTorch trains and evaluates one by one.

timm needs torchvision, which is published for CUDA only: tried where that is installed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ways import InFloat64, assert_as_alone

timm = pytest.importorskip("timm", reason="needs timm and torchvision", exc_type=ImportError)

pytestmark = [pytest.mark.usefixtures("one_thread", "double"), pytest.mark.exhaustive]
_TRANSFORMER: dict[str, Any] = {"embed_dim": 16, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 16}
_STAGES: dict[str, Any] = {"depths": (1, 1), "img_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": _TRANSFORMER,
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (4, 8, 8, 8)},
    "deit_tiny_distilled_patch16_224": _TRANSFORMER,
    "efficientnet_b0": {},
    "levit_128s": {"img_size": 32, "embed_dim": (16, 16, 16), "num_heads": (2, 2, 2), "depth": (1, 1, 1), "key_dim": 4},
    "mixer_s32_224": {"img_size": 32},
    "mobilenetv3_small_050": {},
    "repvgg_a0": {},
    "resnet10t": {},
    "resnext50_32x4d": {"layers": (1, 1, 1, 1)},
    "seresnet18": {},
    "swin_tiny_patch4_window7_224": _STAGES
    | {"embed_dim": 8, "num_heads": (2, 2), "window_size": 4, "drop_path_rate": 0.0},
    "vit_tiny_patch16_224": _TRANSFORMER,
}
_AMPLIFYING = {"efficientnet_b0", "mobilenetv3_small_050"}
"""Batch norms over few pixels, whose gradients are in the hundreds, amplify rounding: larger images, and a tolerance."""


@pytest.mark.parametrize("way", ["together", "in pairs", "evaluated"])
@pytest.mark.parametrize("name", MODELS)
def test_image_models(name: str, way: str) -> None:
    def make() -> torch.nn.Module:
        return timm.create_model(name, num_classes=5, **MODELS[name])

    size, tolerance = (64, 1e-7) if name in _AMPLIFYING else (32, 1e-10)
    inputs = torch.randn(3, 4, 3, size, size, generator=torch.Generator().manual_seed(1))
    with InFloat64():
        assert_as_alone(make, inputs, way, tolerance=tolerance)
