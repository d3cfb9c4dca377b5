"""Clouds of points on surfaces, ``[N, 3, P]``, with the class of each cloud ``[N]`` and the part of each point ``[N, P]``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Sample = Callable[[Tensor], Tensor]
"""From uniform numbers ``[4, ...]`` on [0, 1) to points ``[3, ...]``, uniform by area."""


class Surface(NamedTuple):
    """A surface that can be sampled, and its area."""

    sample: Sample
    area: float


Labelled = tuple[Tensor, Tensor, Tensor]
"""Points, the class of each cloud, and the part of each point."""


class Clouds(NamedTuple):
    """Training and test clouds, the number of classes, and the number of parts."""

    train: Labelled
    test: Labelled
    classes: int
    parts: int


def zone(low: float = -1.0, high: float = 1.0, radius: float = 1.0) -> Surface:
    """The part of a sphere between two heights, in radii. Area goes with height, as Archimedes found."""

    def sample(u: Tensor) -> Tensor:
        z = low + (high - low) * u[0]
        around, across = 2 * math.pi * u[1], (1 - z * z).clamp(min=0).sqrt()
        return radius * torch.stack([across * around.cos(), across * around.sin(), z])

    return Surface(sample, 2 * math.pi * radius**2 * (high - low))


def frustum(below: float, above: float, low: float, high: float) -> Surface:
    """The side of a cone between two radii and heights; a cylinder if radii agree, a disk or ring if heights do."""

    def sample(u: Tensor) -> Tensor:
        radius = (below**2 + u[0] * (above**2 - below**2)).sqrt()
        along = u[0] if below == above else (radius - below) / (above - below)
        around = 2 * math.pi * u[1]
        return torch.stack([radius * around.cos(), radius * around.sin(), low + (high - low) * along])

    return Surface(sample, math.pi * (below + above) * math.hypot(above - below, high - low))


def torus(ring: float, tube: float) -> Surface:
    """A ring around the third axis."""
    k = tube / ring

    def sample(u: Tensor) -> Tensor:
        angle = 2 * math.pi * u[0]
        for _ in range(6):  # Newton's method; area up to an angle goes with angle + k sin(angle).
            angle = angle - (angle + k * angle.sin() - 2 * math.pi * u[0]) / (1 + k * angle.cos())
        around, across = 2 * math.pi * u[1], ring + tube * angle.cos()
        return torch.stack([across * around.cos(), across * around.sin(), tube * angle.sin()])

    return Surface(sample, 4 * math.pi**2 * ring * tube)


def box(width: float, depth: float, height: float) -> Surface:
    """All six sides of a box."""
    size = torch.tensor([width, depth, height])
    areas = (size.prod() / size).repeat_interleave(2)
    edges = (areas / areas.sum()).cumsum(0)[:-1]

    def sample(u: Tensor) -> Tensor:
        side = torch.bucketize(u[3], edges, right=True)
        axes = torch.arange(3).view(3, *[1] * side.dim())
        return torch.where(axes == side // 2, side % 2 - 0.5, u[:3] - 0.5) * size.view(axes.shape)

    return Surface(sample, float(areas.sum()))


def at(surface: Surface, x: float = 0.0, y: float = 0.0, z: float = 0.0) -> Surface:
    """The surface elsewhere."""

    def sample(u: Tensor) -> Tensor:
        return surface.sample(u) + torch.tensor([x, y, z]).view(3, *[1] * (u.dim() - 1))

    return Surface(sample, surface.area)


def upright(surface: Surface) -> Surface:
    """The surface with its third axis turned to the second."""
    return Surface(lambda u: surface.sample(u)[[0, 2, 1]], surface.area)


def _legs(radius: float, reach: float, low: float, high: float) -> list[Surface]:
    return [at(frustum(radius, radius, low, high), x, y) for x in (-reach, reach) for y in (-reach, reach)]


SURFACES: dict[str, list[list[Surface]]] = {
    "ball": [[zone(-1, 0)], [zone(0, 1)]],
    "can": [[frustum(0.5, 0.5, -0.8, 0.8)], [frustum(0.5, 0, 0.8, 0.8), frustum(0.5, 0, -0.8, -0.8)]],
    "cone": [[frustum(0.7, 0, -0.7, 0.9)], [frustum(0.7, 0, -0.7, -0.7)]],
    "box": [[box(1.2, 0.9, 0.9)]],
    "ring": [[torus(0.7, 0.25)]],
    "capsule": [[frustum(0.35, 0.35, -0.6, 0.6)], [at(zone(0, 1, 0.35), z=0.6), at(zone(-1, 0, 0.35), z=-0.6)]],
    "mug": [
        [frustum(0.5, 0.5, -0.6, 0.6), frustum(0.5, 0, -0.6, -0.6)],
        [at(upright(torus(0.35, 0.07)), x=0.55)],
    ],
    "table": [[at(box(1.6, 1.6, 0.1), z=0.5)], _legs(0.06, 0.7, -0.7, 0.45)],
    "chair": [[at(box(0.9, 0.9, 0.1), z=0)], [at(box(0.9, 0.1, 0.9), y=0.4, z=0.5)], _legs(0.06, 0.4, -0.8, 0)],
    "lamp": [
        [frustum(0.4, 0, -0.9, -0.9), frustum(0.4, 0.4, -0.9, -0.8)],
        [frustum(0.05, 0.05, -0.8, 0.3)],
        [frustum(0.6, 0.3, 0.3, 0.9)],
    ],
    "dumbbell": [[at(zone(radius=0.4), z=0.6), at(zone(radius=0.4), z=-0.6)], [frustum(0.1, 0.1, -0.25, 0.25)]],
    "mushroom": [[zone(0, 1, 0.8), frustum(0.8, 0, 0, 0)], [frustum(0.2, 0.25, -0.9, 0)]],
    "bottle": [
        [frustum(0.4, 0.4, -0.9, 0.2), frustum(0.4, 0, -0.9, -0.9)],
        [frustum(0.4, 0.12, 0.2, 0.5)],
        [frustum(0.12, 0.12, 0.5, 0.9)],
    ],
}
"""The parts of every class, each made of surfaces."""


def surfaces(points: int, train: int, test: int, noise: float = 0.01) -> Clouds:
    """Clouds of all classes: stretched, turned around the vertical axis, with noise, within the unit ball.

    Args:
        points: P.
        train: Clouds for training, the classes in turn.
        test: Clouds for testing.
        noise: Standard deviation of every coordinate.
    """
    generator = torch.Generator().manual_seed(0)
    train, test = (_clouds(count, points, noise, generator) for count in (train, test))
    return Clouds(train, test, len(SURFACES), sum(map(len, SURFACES.values())))


def _clouds(count: int, points: int, noise: float, generator: torch.Generator) -> Labelled:
    clouds, classes = torch.empty(count, 3, points), torch.arange(count) % len(SURFACES)
    parts, first = torch.empty(count, points, dtype=torch.int64), 0
    for label, groups in enumerate(SURFACES.values()):
        chosen_rows = classes == label
        shape = int(chosen_rows.sum()), points
        pieces = [(surface, first + part) for part, group in enumerate(groups) for surface in group]
        first += len(groups)
        if shape[0]:
            areas = torch.tensor([surface.area for surface, _ in pieces])
            which = torch.multinomial(areas.expand(shape[0], -1), points, replacement=True, generator=generator)
            u = torch.rand(4, *shape, generator=generator)
            samples = torch.stack([surface.sample(u) for surface, _ in pieces])
            chosen = samples.gather(0, which.expand(1, 3, -1, -1))[0].movedim(0, 1)
            stretch = 0.7 + 0.6 * torch.rand(shape[0], 3, 1, generator=generator)
            clouds[chosen_rows], parts[chosen_rows] = (
                chosen * stretch,
                torch.tensor([part for _, part in pieces])[which],
            )
    angle = 2 * math.pi * torch.rand(count, 1, generator=generator)
    x, y, z = clouds.unbind(1)
    clouds = torch.stack([angle.cos() * x - angle.sin() * y, angle.sin() * x + angle.cos() * y, z], 1)
    clouds = clouds + noise * torch.randn(clouds.shape, generator=generator)
    return unit_ball(clouds), classes, parts


def unit_ball(clouds: Tensor) -> Tensor:
    """Clouds ``[..., 3, P]`` moved and scaled into the unit ball."""
    clouds = clouds - clouds.mean(-1, keepdim=True)
    return clouds / clouds.norm(dim=-2).amax(-1)[..., None, None].clamp(min=1e-12)
