"""Builds C++ source into shared libraries, with the headers, the compiler and the options that torch chooses."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

from rl8x.execution import private

HOST: Final = Path(__file__).parent / "host.h"

# -O2 builds in five seconds where -O3 takes six. The programs are as fast, since Inductor emits explicit vector code.
# Without `-w` a tenth of a second goes to warnings that nobody sees, and with its usual limit GCC spends 4% of a first
# iteration on collecting garbage; in kB.
_OPTIONS: Final = ("-fvisibility=hidden", "-O2", "-g0", "-w", "--param=ggc-min-heapsize=1000000")
_SHIMS: Final = ("c/shim", "c/shim_cpu", "generated/c_shim_aten", "generated/c_shim_cpu")
_HEADERS: Final = "".join(
    f"#include <torch/csrc/inductor/{name}.h>\n" for name in ("cpp_prefix", *(f"aoti_torch/{each}" for each in _SHIMS))
)
# Prefix of the temporary folders of builds, and the age in seconds after which they count as abandoned.
_BUILD: Final = "rl8x-compile-"
_LONG_AGO_S: Final = 600.0


def build(source: str, library: Path) -> None:
    """Compile C++ to a shared library; raise a `RuntimeError` that begins with the compiler's first error."""
    with tempfile.TemporaryDirectory(prefix=_BUILD) as name:
        built = _run(_HEADERS + source, Path(name))
        # The library appears in one rename, even if the temporary folder is on another disk.
        beside = library.with_name(f"{library.name}.part")
        shutil.move(built, beside)
        beside.replace(library)


def remove_unfinished(folder: Path) -> None:
    """Remove what builds left in the cache folder and elsewhere that were killed, as when a run ends during a build."""
    since = time.time() - _LONG_AGO_S
    for left in (*folder.glob(".*"), *Path(tempfile.gettempdir()).glob(f"{_BUILD}*")):
        with contextlib.suppress(OSError):  # another process has removed it, or another user owns it
            if left.stat().st_mtime < since:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def _run(source: str, folder: Path) -> Path:
    """Run the C++ compiler in a folder and return the library's path; raise its first error if it fails."""
    written = folder / "program.cpp"
    written.write_text(source)
    inductor = private.inductor()
    settings = inductor.CppTorchDeviceOptions(
        device_type="cpu", aot_mode=True, vec_isa=inductor.pick_vec_isa(), extra_flags=_OPTIONS
    )
    builder = inductor.CppBuilder("program", [str(written)], settings, str(folder))
    done = subprocess.run(
        shlex.split(builder.get_command_line()),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,  # where it looks for headers and libraries too, for an empty entry of CPATH or LIBRARY_PATH
    )
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if "error" in line]  # after where it was included
        raise RuntimeError("\n".join([*errors[:1], done.stdout]))
    return Path(builder.get_target_file_path())
