"""The only place that asks what machine this is."""

from __future__ import annotations

import functools
import os

import torch


@functools.cache
def arch() -> str:
    """Return the architecture that kernels are chosen for: ``cpu``, ``sm90``, ``gfx942``, ...

    The first visible accelerator speaks for all: a server never mixes them.
    """
    if not torch.cuda.is_available():
        return "cpu"
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(0).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(0)
    return f"sm{major}{minor}"


def is_accelerator(name: str) -> bool:
    """Return whether ``name`` (an ``arch()`` value) is a GPU."""
    return name != "cpu"


def triton_interprets() -> bool:
    """Return whether Triton kernels run interpreted in this process, which they do on CPUs: Triton's own switch."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def fp8_is_fnuz() -> bool:
    """Return whether FP8 e4m3 here is the fnuz variant (largest value 240) of MI300X."""
    return arch() == "gfx942"


def multiplies_into_fp32() -> bool:
    """Return whether torch.mm takes ``out_dtype``, which keeps the fp32 sums of 16-bit products: on NVIDIA alone."""
    return arch().startswith("sm")


@functools.cache
def num_multiprocessors() -> int:
    """Return how many programs run side by side: multiprocessors (compute units) of the first GPU, cores of a CPU."""
    if not torch.cuda.is_available():
        return os.cpu_count() or 1
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def overlaps_in_graph() -> bool:
    """Return whether what is launched now goes into a graph in which a second stream is to run beside the first.

    On NVIDIA alone: SGLang takes a second stream in HIP graphs only when it is asked to, and ours has run in none.
    """
    return arch().startswith("sm") and torch.cuda.is_current_stream_capturing()


@functools.cache
def side_stream() -> torch.cuda.Stream:
    """Return the stream for work that a graph runs beside the main one's: one, so that it can grow no others."""
    return torch.cuda.Stream()


def torch_device() -> torch.device:
    """Return the device that this process computes on."""
    return torch.device("cpu") if arch() == "cpu" else torch.device("cuda", torch.cuda.current_device())
