"""Makes a shared library of Inductor's C++: its kernels and calls, with `host.h` in place of its runtime."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from rl8x.execution import private
from rl8x.execution.traces import ProgramDescription

# -O2 builds in five seconds where -O3 takes six. The programs are as fast, since Inductor emits explicit vector code.
_OPTIONS: Final = ("-fvisibility=hidden", "-O2", "-g0", "-w")
_SHIMS: Final = ("c/shim", "c/shim_cpu", "generated/c_shim_aten", "generated/c_shim_cpu")
_HEADERS: Final = ("cpp_prefix", *(f"aoti_torch/{name}" for name in _SHIMS))
_HOST: Final = Path(__file__).parent / "host.h"
# In Inductor's generated code: the calls of kernels and operators, kernels' headers, and the lines among the calls that
# only its own runtime needs.
_CALLS: Final = re.compile(r"void AOTInductorModel::run_impl\(.*?\) \{\n(.*?)\n\} // AOTInductorModel::run_impl", re.S)
_INCLUDES: Final = re.compile(r"^#include .*\n", re.M)
_OF_ITS_RUNTIME: Final = re.compile(
    r"^ *(__check_inputs_outputs|\[\[maybe_unused\]\] auto& kernels|if \(_check_aoti_runtime).*\n", re.M
)
# Operators of torch that return new memory, or write to outputs that they are given.
_OWN_RESULTS: Final = re.compile(r"aoti_torch_\w*(_out|linear_pointwise)\(|aoti_torch_(empty_strided|item_\w+)\(")
# Age in seconds after which what a build left counts as abandoned.
_LONG_AGO_S: Final = 600.0


def source_of(wrapper: str, kernels: str, description: ProgramDescription, results: Sequence[Tensor]) -> str:
    """Return a program's source, made of what Inductor generated, with results like `results` `[*]`."""
    found = _CALLS.search(wrapper)
    if found is None:
        raise RuntimeError(f"torch {torch.__version__} generates C++ in a form that rl8x does not know")
    calls = _OF_ITS_RUNTIME.sub("", found[1].replace("this->device_idx_", "0"))
    if re.search(r"^ *(const )?int64_t int_array", calls, re.M):
        raise RuntimeError("it has shapes that depend on values")
    keeps = not all(_OWN_RESULTS.fullmatch(name) for name in re.findall(r"aoti_torch_\w+\(", calls))
    return "\n".join(
        [
            *(f"#include <torch/csrc/inductor/{name}.h>" for name in _HEADERS),
            _INCLUDES.sub("", kernels),
            f"constexpr bool KEEPS_MEMORY = {str(keeps).lower()};",
            f"constexpr int THREADS = {description.threads};",
            _HOST.read_text(),
            *sorted(set(re.findall(r"^CACHE_TORCH_\w+\(\w+\);$", wrapper, re.M))),
            "static void body(AtenTensorHandle* input_handles, AtenTensorHandle* output_handles) {",
            calls,
            "}",
            _entry(description, results),
        ]
    )


def _entry(description: ProgramDescription, results: Sequence[Tensor]) -> str:
    """Return the source of the library's entry points, with the layouts of inputs and results."""
    items = range(*description.items)
    inputs = ",\n    ".join(_layout(i in items, *each) for i, each in enumerate(description.inputs))
    sizes = [str(math.prod(each.shape) * each.dtype.itemsize) for each in results]
    shapes = [([*each.shape], str(each.dtype).removeprefix("torch.")) for each in results]
    return f"""
extern "C" __attribute__((visibility("default"))) const char* rl8x_run(char** given, char** results, int64_t count) {{
  static const host::Layout inputs[] = {{
    {inputs}}};
  static const int64_t sizes[] = {{{", ".join(sizes) or "0"}}};
  try {{
    host::run(body, inputs, {len(description.inputs)}, sizes, {len(results)}, given, results, count,
              {str(description.ends).lower()});
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


def build(source: str, library: Path) -> None:
    """Compile C++ to a shared library, with the compiler and the options that torch chooses.

    Raises:
        RuntimeError: If that fails; it begins with the compiler's first error.
    """
    with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as name:
        written = Path(name, "program.cpp")
        written.write_text(source)
        inductor = private.inductor()
        settings = inductor.CppTorchDeviceOptions(
            device_type="cpu", aot_mode=True, vec_isa=inductor.pick_vec_isa(), extra_flags=_OPTIONS
        )
        builder = inductor.CppBuilder("program", [str(written)], settings, name)
        done = subprocess.run(
            shlex.split(builder.get_command_line()),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=name,  # where it looks for headers and libraries too, for an empty entry of CPATH or LIBRARY_PATH
        )
        if done.returncode:
            errors = [line for line in done.stdout.splitlines() if "error:" in line]  # after where it was included
            raise RuntimeError("\n".join([*errors[:1], done.stdout]))
        Path(builder.get_target_file_path()).replace(library)


def remove_unfinished(folder: Path) -> None:
    """Remove what builds left in the cache folder that were killed, as when a run ends during a build."""
    since = time.time() - _LONG_AGO_S
    for left in folder.glob(".*"):
        with contextlib.suppress(OSError):  # another process has removed it, or another user owns it
            if left.stat().st_mtime < since:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
