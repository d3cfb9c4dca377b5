"""How busy a GPU is, as NVML tells."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator
from statistics import mean
from typing import Any


@contextlib.contextmanager
def watched(device: str, period: float = 0.02) -> Iterator[dict[str, float]]:
    """Fills what it yields with shares, when it ends: ``kernels`` of the time in which any kernel ran, by samples, and
    ``sm`` of the multiprocessors that worked, from the counters of GPUs that have them (Hopper and later). What cannot be
    read is left out.
    """
    found: dict[str, float] = {}
    try:
        nvml = importlib.import_module("pynvml") if device == "cuda" else None
    except ImportError:
        nvml = None
    if nvml is None:
        yield found
        return
    nvml.nvmlInit()
    handle, done, seen = nvml.nvmlDeviceGetHandleByIndex(0), threading.Event(), []

    def watch() -> None:
        while not done.wait(period):
            seen.append(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)

    thread = threading.Thread(target=watch)
    try:
        with _multiprocessors(nvml, handle, found):
            thread.start()
            try:
                yield found
            finally:
                done.set()
                thread.join()
        if seen:
            found["kernels"] = mean(seen)
    finally:
        nvml.nvmlShutdown()


@contextlib.contextmanager
def _multiprocessors(nvml: Any, handle: Any, found: dict[str, float]) -> Iterator[None]:
    try:
        supported = nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice
    except (nvml.NVMLError, AttributeError):
        supported = False
    if not supported:
        yield
        return
    counters = [nvml.nvmlGpmSampleAlloc() for _ in range(2)]
    try:
        nvml.nvmlGpmSampleGet(handle, counters[0])
        yield
        nvml.nvmlGpmSampleGet(handle, counters[1])
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version, query.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
        query.sample1, query.sample2 = counters
        query.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        nvml.nvmlGpmMetricsGet(query)
        if query.metrics[0].nvmlReturn == nvml.NVML_SUCCESS:
            found["sm"] = query.metrics[0].value / 100
    finally:
        for counter in counters:
            nvml.nvmlGpmSampleFree(counter)
