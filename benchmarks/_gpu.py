"""How busy a GPU is, as NVML tells."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator
from statistics import mean
from typing import Any

import torch


@contextlib.contextmanager
def watched(device: str, period: float = 0.02) -> Iterator[dict[str, float]]:
    """Fills what it yields with shares, when it ends: ``kernels`` of the time in which any kernel ran, by samples, and
    ``sm`` of the multiprocessors that worked, from the counters of GPUs that have them (Hopper and later). What cannot be
    read is left out. NVML's samples are means over up to a second, so the work inside should take longer.
    """
    found: dict[str, float] = {}
    try:
        nvml = importlib.import_module("pynvml") if device == "cuda" else None
    except ImportError:
        nvml = None
    if nvml is None:
        yield found
        return
    with contextlib.ExitStack() as stack:
        # Containers, MIG and other users may keep us from it.
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlInit()
            stack.callback(nvml.nvmlShutdown)
            # Its own numbers know nothing of CUDA_VISIBLE_DEVICES.
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
            # What is entered last is left first: nothing else reads while the counters do.
            for readers in (_multiprocessors, _kernels):
                with contextlib.suppress(nvml.NVMLError, AttributeError):
                    stack.enter_context(readers(nvml, handle, found, period))
        yield found


@contextlib.contextmanager
def _kernels(nvml: Any, handle: Any, found: dict[str, float], period: float) -> Iterator[None]:
    nvml.nvmlDeviceGetUtilizationRates(handle)
    done, seen = threading.Event(), []

    def watch() -> None:
        with contextlib.suppress(nvml.NVMLError):
            while not done.wait(period):
                seen.append(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if seen:
            found["kernels"] = mean(seen)


@contextlib.contextmanager
def _multiprocessors(nvml: Any, handle: Any, found: dict[str, float], period: float) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        counters = []
        if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            for _ in range(2):
                counters.append(nvml.nvmlGpmSampleAlloc())
                stack.callback(nvml.nvmlGpmSampleFree, counters[-1])
            nvml.nvmlGpmSampleGet(handle, counters[0])
        yield
        with contextlib.suppress(nvml.NVMLError):
            if counters:
                nvml.nvmlGpmSampleGet(handle, counters[1])
                query = nvml.c_nvmlGpmMetricsGet_t()
                query.version, query.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
                query.sample1, query.sample2 = counters
                query.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
                nvml.nvmlGpmMetricsGet(query)
                if query.metrics[0].nvmlReturn == nvml.NVML_SUCCESS:
                    found["sm"] = query.metrics[0].value / 100
