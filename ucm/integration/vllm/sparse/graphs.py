"""Lower an engine's full CUDA graphs to piecewise ones, because a replayed full graph calls no hook.

Every release from 0.10.1 on has ``cudagraph_mode``, and its model runner lowers the mode itself after it has loaded the
model, if an attention backend does not support the mode. Until then vLLM reads from it only whether there are graphs at
all: the model is compiled, wrapped and captured by the mode that the worker finds then. So each worker lowers
its own copy before it loads the model, by a rule that is the same in all of them, so all agree. What comes too late is
refused: up to 0.10.0 there is a flag, ``full_cuda_graph``, which is off by default, and from it vLLM decides before a
worker exists how the model is split; and the V2 runner of 0.16.0 to 0.19.1, which is not the default, takes the mode
over when it is created.
"""

from __future__ import annotations

import sys
from typing import Any

from ucm.logger import get_logger

#: The value of ``CompilationConfig.mode``, up to 0.11.0 ``level``, with which vLLM splits a model at its attention.
SPLITS = 3
#: vLLM's variable for graphs that are interrupted at each attention, without compilation.
BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"

#: The V2 runner's attribute with its captured graphs, which knows the mode once it exists.
MANAGER = "cudagraph_manager"


def lower_graphs(vllm_config: Any, runner: Any) -> None:
    """Lower ``cudagraph_mode`` to one without full graphs, and say so once per engine; before the model is loaded.

    Attention stays outside of the remaining graphs. If no such graphs are possible, because the model is not split at
    its attention, the engine runs without graphs. Graphs for which it is too late are left as they are, also those of
    vLLM Ascend, whose platform decides from the mode how the model is split.

    Args:
        vllm_config: vLLM's ``VllmConfig``, as the worker got it.
        runner: Its model runner, which has no model yet.
    """
    compilation = vllm_config.compilation_config
    mode = getattr(compilation, "cudagraph_mode", None)
    if vllm_config.model_config.enforce_eager or mode is None or mode == type(mode).NONE:
        return
    if "vllm_ascend" in sys.modules or getattr(runner, MANAGER, None) is not None:
        return
    splits = getattr(compilation, "mode", getattr(compilation, "level", None)) == SPLITS
    if splits:
        outside = compilation.splitting_ops_contain_attention()
    else:
        outside = getattr(sys.modules.get("vllm.envs"), BREAKABLE, False)
    if not mode.has_full_cudagraphs() and (outside or not splits):
        return
    lowered = type(mode).PIECEWISE if outside else type(mode).NONE
    compilation.cudagraph_mode = lowered
    if getattr(vllm_config.parallel_config, "rank", 0) == 0:
        get_logger(__name__).warning(
            "[UCM.Sparse] cudagraph_mode is %s instead of %s, because the replay of a graph with attention in it calls "
            "no hook of a sparse method. The cost: %s. Set it yourself to avoid this warning: "
            '--compilation-config \'{"cudagraph_mode": "%s"}\'',
            *(lowered.name, mode.name, COSTS[lowered.name], lowered.name),
        )


#: What each lowered mode costs, for the warning.
COSTS = {
    "PIECEWISE": "each step launches the attention of every layer and the graphs between them one by one, where a full "
    "graph is a single launch; this takes the more of a step the smaller the model and the batch are",
    "NONE": "each step launches every operation one by one, because the model is not split at its attention; for "
    "piecewise graphs keep vLLM's splitting_ops and compilation mode, and do not fuse attention with quantisation",
}
