"""Compiles a traced graph to a shared library: decompose, lower with Inductor, build the C++ that Inductor generates.

It runs in the compiler's processes, and is the only module that depends on internals of AOTInductor.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rl8x.execution import adam, matmul, private
from rl8x.execution.building import HOST, build
from rl8x.execution.hoisting import hoist_scalars, keep_copies
from rl8x.execution.traces import ProgramDescription

# `vec_isa_ok`: as in `private.trust_processor_flags`.
_SETTINGS: Final = {"cpp.vec_isa_ok": True, "fx_graph_cache": False}
# In Inductor's generated code: the calls of kernels and operators, kernels' headers, and the lines among the calls that
# only its own runtime needs.
_CALLS: Final = re.compile(r"void AOTInductorModel::run_impl\(.*?\) \{\n(.*?)\n\} // AOTInductorModel::run_impl", re.S)
_INCLUDES: Final = re.compile(r"^#include .*\n", re.M)
_OF_ITS_RUNTIME: Final = re.compile(
    r"^ *(__check_inputs_outputs|\[\[maybe_unused\]\] auto& kernels|if \(_check_aoti_runtime).*\n", re.M
)
# Operators of torch that return new memory, or write to outputs that they are given.
_OWN_RESULTS: Final = re.compile(r"aoti_torch_\w*(_out|linear_pointwise)\(|aoti_torch_(empty_strided|item_\w+)\(")

# Loaded once, before processes are forked. If a name is missing, each of those reports it.
with contextlib.suppress(RuntimeError):
    private.inductor()


def lower(description: ProgramDescription, library: Path) -> None:
    """Compile a described program.

    Args:
        description: The program.
        library: Path of the shared library to write.

    Raises:
        Exception: Whatever the compilers raise.
    """
    inductor = private.inductor()
    with torch.no_grad():
        graph, examples = fused(description)
        link = functools.partial(_build, description=description, results=_results(graph), library=library)
        options = {"cpp.threads": description.threads, **_SETTINGS}
        with mock.patch.object(inductor.AotCodeCompiler, "compile", link):
            inductor.aot_compile(graph, tuple(examples), options=options)


def compiled_here(graph: torch.fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile a traced graph for an accelerator, in this process.

    Args:
        graph: The graph.
        examples: Its arguments, `[*]` each.
    """
    # Traced again, since the compiler needs the metadata that tracing records for every argument.
    traced = make_fx(graph, decomposition_table=adam.DECOMPOSITIONS)(*[tensor.detach().clone() for tensor in examples])
    keep_copies(traced)
    with torch.no_grad():
        compiled: Callable[..., Sequence[Tensor]] = private.inductor().standalone_compile(
            traced, list(examples), dynamic_shapes="from_example_inputs", options={}
        )
    return compiled


def fused(description: ProgramDescription) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """Return the graph to compile, with matmuls decomposed, and example inputs, `[*]` each."""
    # Probed before tracing, since traced tensors have no values to compare.
    _ = matmul.has_fast_linear() and matmul.lower_linear()
    inputs = [
        torch.empty_strided(shape, stride, dtype=getattr(torch, dtype)).zero_()
        for shape, stride, dtype in description.inputs
    ]
    if description.loop is not None:
        inputs = description.loop.first(inputs)
    table = matmul.DECOMPOSITIONS | adam.DECOMPOSITIONS
    graph = make_fx(_read(description.code), decomposition_table=table, **private.FAKE_TRACING)(*inputs)
    hoist_scalars(graph)
    keep_copies(graph)
    return graph, inputs


def _read(code: str) -> Callable[..., Sequence[Tensor]]:
    """Return the function whose source torch.fx generated."""
    names: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan")}
    exec(code, names)  # the source comes from the parent process
    return functools.partial(names["forward"], None)


def _results(graph: torch.fx.GraphModule) -> list[Tensor]:
    """Return fake tensors with the shapes and dtypes of a graph's results, `[*]` each."""
    [output] = graph.graph.find_nodes(op="output")
    return [node.meta["val"] for node in output.args[0]]


def _build(
    graph: Any,
    wrapper_code: str,
    kernel_code: str,
    operators: str | None,
    *,
    description: ProgramDescription,
    results: Sequence[Tensor],
    library: Path,
    **_: Any,
) -> str:
    """Build the C++ that Inductor generated; replaces Inductor's own builder."""
    if operators or graph.constants:
        raise RuntimeError("one of its operators has no C++ function")
    build(_source(wrapper_code, kernel_code, description, results), library)
    return str(library)


def _source(wrapper_code: str, kernel_code: str, description: ProgramDescription, results: Sequence[Tensor]) -> str:
    """Return the program's source: Inductor's kernels and calls, with `host.h` in place of Inductor's runtime."""
    calls_match = _CALLS.search(wrapper_code)
    if calls_match is None:
        raise RuntimeError(f"torch {torch.__version__} generates C++ in a form that rl8x does not know")
    calls = _OF_ITS_RUNTIME.sub("", calls_match[1].replace("this->device_idx_", "0"))
    if re.search(r"^ *(const )?int64_t int_array", calls, re.M):
        raise RuntimeError("it has shapes that depend on values")
    operators = re.findall(r"aoti_torch_\w+\(", calls)
    keeps = not all(_OWN_RESULTS.fullmatch(name) for name in operators)
    return "\n".join(
        [
            _INCLUDES.sub("", kernel_code),
            f"constexpr bool KEEPS_MEMORY = {str(keeps).lower()};",
            f"constexpr int THREADS = {description.threads};",
            HOST.read_text(),
            *sorted(set(re.findall(r"^CACHE_TORCH_\w+\(\w+\);$", wrapper_code, re.M))),
            "static void body(AtenTensorHandle* input_handles, AtenTensorHandle* output_handles) {",
            calls,
            "}",
            _entry(description, results),
        ]
    )


def _entry(description: ProgramDescription, results: Sequence[Tensor]) -> str:
    """Return the source of the library's entry points, with the layouts of inputs and results."""
    loop = description.loop
    items = range(0) if loop is None else range(loop.num_given, loop.num_given + loop.num_items)
    inputs = ",\n    ".join(_layout(i in items, *each) for i, each in enumerate(description.inputs))
    sizes = (
        ", ".join(str(math.prod(each.shape) * each.dtype.itemsize) for each in results) or "0"
    )  # C++ has no empty one
    ends = str(loop is not None and loop.ends).lower()
    shapes = [([*each.shape], _name(each.dtype)) for each in results]
    return f"""
extern "C" __attribute__((visibility("default"))) const char* rl8x_run(char** given, char** results, int64_t count) {{
  static const host::Layout inputs[] = {{
    {inputs}}};
  static const int64_t sizes[] = {{{sizes}}};
  try {{
    host::run(body, inputs, {len(description.inputs)}, sizes, {len(results)}, given, results, count, {ends});
    return nullptr;
  }} catch (const char* message) {{
    return message;
  }} catch (const std::exception& caught) {{
    static thread_local char message[1000];
    return std::strncpy(message, caught.what(), sizeof(message) - 1);
  }}
}}

extern "C" __attribute__((visibility("default"))) const char* rl8x_results() {{ return R"({json.dumps(shapes)})"; }}

extern "C" __attribute__((visibility("default"))) void rl8x_free() {{ host::Call::free_idle(); }}
"""


def _layout(is_item: bool, shape: Sequence[int], stride: Sequence[int], dtype: str) -> str:
    """Return the C++ initializer of the layout of an input, or of one slice of an items tensor."""
    step = stride[0] * getattr(torch, dtype).itemsize if is_item else 0
    sizes, strides = (", ".join(map(str, numbers[is_item:])) for numbers in (shape, stride))
    return f"{{{{{sizes}}}, {{{strides}}}, {len(shape) - is_item}, aoti_torch_dtype_{dtype}(), {step}}}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
