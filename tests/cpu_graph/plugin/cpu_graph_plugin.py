"""SGLang plugin for tests: the real DecodeCudaGraphRunner on a CPU, over a graph that runs the captured closure again.

A CUDA graph reads the addresses that it was captured with, whatever Python holds by then. Running the closure again
reads what Python holds now, so every tensor that the closure reads from outside is noted at capture and compared at
replay: another address or shape is what a real graph would have read stale. Findings go to the file named by
``CPU_GRAPH_REPORT``, a JSON object a line.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import traceback
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch
from packaging.version import Version
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = (torch.Tensor.tolist, torch.Tensor.numpy)


def note(**event: Any) -> None:
    """Append one finding to the report."""
    with open(os.environ["CPU_GRAPH_REPORT"], "a") as report:
        report.write(json.dumps({"pid": os.getpid(), **event}) + "\n")


class ReadsFromOutside(TorchDispatchMode):
    """Collects the tensors that a closure reads and did not make itself; ``ignored`` are storages of no interest."""

    def __init__(self, ignored: set[int]) -> None:
        super().__init__()
        self.reads: dict[tuple[Any, ...], tuple[torch.Tensor, str]] = {}
        self._made_or_ignored = set(ignored)

    def note(self, func: Any, tensor: torch.Tensor) -> None:
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in self._made_or_ignored:
            key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), str(tensor.dtype))
            self.reads.setdefault(key, (tensor, describe(func, tensor)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...) in the closure
            self._made_or_ignored |= known
        for tensor in inputs:
            self.note(func, tensor)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in known:
                self._made_or_ignored.add(leaf.untyped_storage().data_ptr())
        return result


class HostReads(TorchFunctionMode):
    """Adds what ``tolist`` and ``numpy`` read, which reach no dispatcher; a kernel for CPUs may well use them."""

    def __init__(self, reads: ReadsFromOutside) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_READS:
            self._reads.note(func.__name__, args[0])
        return func(*args, **(kwargs or {}))


def describe(func: Any, tensor: torch.Tensor) -> str:
    """Return what was read, by which operation, and the innermost line of ours or SGLang's that asked for it."""
    frames = [f for f in traceback.extract_stack(limit=40) if "atom_plugin/" in f.filename or "/sglang/" in f.filename]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
    return f"{func} of {tensor.dtype}{list(tensor.shape)} at {tensor.data_ptr():#x}, from {where}"


class EagerGraph:
    """SGLang's graph backend interface over closures. What one read at capture is kept, so that it stays in place."""

    def __init__(self, runner: Any) -> None:
        model = runner.model_runner.model
        self._weights = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
        self._closures: dict[Any, Callable[[], Any]] = {}
        self._captured: dict[Any, ReadsFromOutside] = {}

    @contextlib.contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    def capture_one(
        self,
        key: Any,
        closure: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        for _ in range(2):
            closure()
            if post_warmup_hook is not None:
                post_warmup_hook()
        _, self._captured[key] = self._watched(closure)
        self._closures[key] = closure
        note(event="capture", graph=str(key))

    def can_run(self, forward_batch: Any, key: Any) -> bool:
        return key in self._closures

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def replay(self, key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        output, now = self._watched(self._closures[key])
        captured = self._captured[key]
        addresses = {read[0] for read in captured.reads}
        moved = [what for read, (_, what) in now.reads.items() if read[0] not in addresses]
        resized = [what for read, (_, what) in now.reads.items() if read[0] in addresses and read not in captured.reads]
        note(event="replay", graph=str(key), moved=moved, resized=resized)
        return output

    def cleanup(self) -> None:
        self._closures.clear()
        self._captured.clear()

    def _watched(self, closure: Callable[[], Any]) -> tuple[Any, ReadsFromOutside]:
        reads = ReadsFromOutside(self._weights)
        with HostReads(reads), reads:
            return closure(), reads


def _capture_decode_graph(original: Callable[..., Any], *, model_runner: Any) -> Any:
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    runner = DecodeCudaGraphRunner(model_runner)
    return GraphCapture(runner=runner, memory_phase="decode", memory_usage_gb=0.0, capture_time=0.0)


@contextlib.contextmanager
def _graph_capture(stream: Any = None) -> Iterator[Any]:
    yield types.SimpleNamespace(stream=None)


def register() -> None:
    """SGLang's entry point: name the planted backends everywhere, put the graph into the scheduler processes.

    Without CPU_GRAPH_REPORT there is no graph.
    """
    import planted_backends

    planted_backends.register()
    if multiprocessing.parent_process() is None or "CPU_GRAPH_REPORT" not in os.environ:
        return
    from sglang.srt.platforms import current_platform
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    version = Version(metadata.version("sglang"))
    if version >= Version("0.5.23"):
        from sglang.srt.platforms.interface import PlatformCapabilities

        type(current_platform).capabilities = PlatformCapabilities(graph_capture=True)
    torch.cpu.is_current_stream_capturing = lambda: False  # type: ignore[attr-defined]
    executor = "sglang.srt.model_executor"
    replaced = {
        "sglang.srt.distributed.parallel_state.graph_capture": _graph_capture,
        f"{executor}.runner_backend.utils.resolve_decode_backend": lambda runner: EagerGraph(runner),
    }
    if version >= Version("0.5.21"):
        replaced[f"{executor}.runner_utils.pool.get_or_create_global_graph_capture_stream"] = lambda: None
    for target, stand_in in replaced.items():
        HookRegistry.register(target, stand_in, HookType.REPLACE)
    capture = f"{executor}.model_runner_components.cuda_graph_setup.capture_decode_graph"
    HookRegistry.register(capture, _capture_decode_graph, HookType.AROUND)
    HookRegistry.apply_hooks()
    missing = {*replaced, capture} - HookRegistry._patched
    if missing:
        raise SystemExit(f"the CPU graph of the tests does not fit this SGLang: {sorted(missing)}")
