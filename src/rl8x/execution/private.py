"""All private names of torch that rl8x uses, in one file, since any version of torch may change them.

torch 2.13.0, with which the tests are run, has all of them, and so have 2.14.1 and 2.15.0. Each entry says what happens
if a name is missing. If the behaviour behind a name changes, `verification` refuses the wrong programs, such as those
of torch 2.10.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

# A mode in which a trace sees every operator. Without this name rl8x cannot be imported.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Flattening of trees of tensors, with the node types that tensordict registers. Without them rl8x cannot be imported.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten

# Fused in-place kernels of a step of Adam (False) and of AdamW (True, with decoupled weight decay), whose learning rate
# is a 0-d tensor. Without them rl8x cannot be imported.
FUSED_ADAM: Final = {False: torch.ops.aten._fused_adam_.tensor_lr, True: torch.ops.aten._fused_adamw_.tensor_lr}

# Options of make_fx to trace, with fake tensors, a function that also holds real ones. Without the private option
# make_fx raises, and nothing can be compiled.
FAKE_TRACING: Final[Mapping[str, Any]] = {"tracing_mode": "fake", "_allow_non_fake_inputs": True}

# Inductor's names and their modules. Without any of them nothing can be compiled.
_INDUCTOR: Final = {
    "aot_compile": "torch._inductor",  # generates C++ from a graph, and builds it with AotCodeCompiler
    "standalone_compile": "torch._inductor",  # compiles a graph for an accelerator
    "AotCodeCompiler": "torch._inductor.codecache",  # its `compile` is replaced by our builder
    "CppBuilder": "torch._inductor.cpp_builder",  # knows the command line of the C++ compiler
    "CppTorchDeviceOptions": "torch._inductor.cpp_builder",
    "pick_vec_isa": "torch._inductor.cpu_vec_isa",  # the vector instructions of the processor
    "register_lowering": "torch._inductor.lowering",  # for our own operators
    "clone": "torch._inductor.lowering",
    "FixedLayout": "torch._inductor.ir",  # with the names below, calls oneDNN's matmul kernels
    "LinearUnary": "torch._inductor.mkldnn_ir",
    "_create_output_node": "torch._inductor.mkldnn_ir",
}


def inductor() -> SimpleNamespace:
    """Import Inductor, which takes a second or more, and return its names.

    Raises a `RuntimeError` if this torch lacks one: mode `compile` fails with it; `auto` warns once and stays eager.
    """
    try:
        found = {name.lstrip("_"): getattr(importlib.import_module(of), name) for name, of in _INDUCTOR.items()}
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"rl8x compiles with torch 2.13 to 2.15, not {torch.__version__}: {error}") from error
    return SimpleNamespace(**found)


def load_inductor() -> None:
    """Import Inductor, and make it trust the processor's vector instructions for the rest of this process.

    Otherwise it builds and loads a program for each kind, to test the compiler, which takes a second or two. Builds
    fail clearly if the compiler lacks them. If the name is missing, Inductor does test; programs report other errors.
    """
    with contextlib.suppress(ImportError, AttributeError, RuntimeError):
        isa = importlib.import_module("torch._inductor.cpu_vec_isa").VecISA
        isa.check_build = lambda *_: True
        inductor().pick_vec_isa()


def is_traced() -> bool:
    """Return whether operators are traced or transformed; if no name tells, True: perceptrons run layer by layer."""
    if torch.compiler.is_compiling():  # first, since torch.compile cannot trace what follows
        return True
    transformed: bool = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)()
    modes: int = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)()
    return transformed or modes > 0


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `x weight^T + bias` with oneDNN in full float32; `x` is contiguous. See `kernels.has_fast_linear`."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


Places: TypeAlias = list[tuple[dict[str, Any], str, Any]]
"""The dicts in which PyTorch looks up tensors of a module, their keys there, and the tensors or their numbers."""


def places(module: nn.Module, weights: Sequence[Tensor]) -> tuple[Places, Places]:
    """Return the places of a module's weights `[*]`, with their numbers (shared ones have several), and its buffers."""
    order, found, buffers = {id(weight): i for i, weight in enumerate(weights)}, [], []
    for part in module.modules():
        own: Any = part._parameters
        found += [(own, name, order[id(value)]) for name, value in own.items() if id(value) in order]
        own = part._buffers
        buffers += [(own, name, value) for name, value in own.items() if value is not None]
    return found, buffers
