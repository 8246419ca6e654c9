"""An SGLang plugin for tests: EAGLE on our CPU platform, on SGLang's own Triton kernels, interpreted.

SGLang has kernels in Triton for building and verifying chains, which it takes on an XPU alone; the draft's own graphs
it has for no CPU. Ours is the target, and the graph in which it verifies (``tests/cpu_graph``).
"""

from __future__ import annotations

import multiprocessing
from typing import Any


def register() -> None:
    """Let a launch through, and in its schedulers put the Triton kernels in the place of sgl_kernel's."""
    from sglang.srt.platforms import current_platform

    from atom_plugin import speculation

    speculation.machine_problems = lambda arch: []
    type(current_platform).supports_speculative_algorithm = lambda platform, algorithm: True  # asked from 0.5.23 on
    if multiprocessing.parent_process() is None:
        return
    from sglang.kernels.ops.speculative import cache_locs, spec_tree
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative import eagle_utils
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    for module in (cache_locs, eagle_utils, spec_tree):  # one of the last two, by version
        if "_is_xpu" in vars(module):
            module._is_xpu = True
    EagleDraftWorker._capture_cuda_graphs = capture_nothing
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph  # on a CPU SGLang would capture verifying and not replay it


def capture_nothing(worker: Any) -> None:
    """Leave the draft without graphs."""
    worker.cuda_graph_runner = worker.cuda_graph_runner_for_draft_extend = None
