"""Builds C++ source into shared libraries, with the compiler and the options that torch chooses.

Parsing the headers that all programs include takes half of a build. They are therefore precompiled, once for each
version of torch, into the cache folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from rl8x.execution import private
from rl8x.execution.artifacts import Artifacts, key_of

HOST: Final = Path(__file__).parent / "host.h"
PRODUCTS: Final = Path(__file__).parent / "products.h"

# -O2 builds in five seconds where -O3 takes six. The programs are as fast, since Inductor emits explicit vector code.
# Without `-w` a tenth of a second goes to warnings that nobody sees, and with its usual limit GCC spends 4% of a first
# iteration on collecting garbage; in kB.
_OPTIONS: Final = ("-fvisibility=hidden", "-O2", "-g0", "-w", "--param=ggc-min-heapsize=1000000")
# The header that Inductor's kernels include.
_PREFIX: Final = "#include <torch/csrc/inductor/cpp_prefix.h>"
# Size of the precompiled headers in MB; they are not kept in a cache whose limit they would fill.
_HEADERS_MB: Final = 150
# Prefixes of the temporary folders of builds and of precompilation, and the age in seconds after which they count as
# abandoned.
_BUILD: Final = "rl8x-compile-"
_PRECOMPILATION: Final = ".headers-"
_LONG_AGO_S: Final = 600.0


def build(source: str, library: Path) -> None:
    """Compile C++ source that uses torch's headers to a shared library.

    Args:
        source: The source.
        library: Path of the library to write; its folder may contain precompiled headers.

    Raises:
        RuntimeError: If compilation fails; the message begins with the compiler's first error.
    """
    headers = Headers(library.parent)
    with tempfile.TemporaryDirectory(prefix=_BUILD) as name:
        written = Path(name) / "program.cpp"
        written.write_text(source)
        precompiled = headers.find()
        errors, built = _run(written, Path(name), precompiled)
        if errors and precompiled is not None:
            errors, built = _run(written, Path(name), None)
            if not errors:
                headers.remove()  # they are damaged
        if errors:
            raise RuntimeError(errors)
        # The library appears in one rename, even if the temporary folder is on another disk.
        beside = library.with_name(f"{library.name}.part")
        shutil.move(built, beside)
        beside.replace(library)


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files of builds that were killed, as happens when a run ends during a build.

    Args:
        folder: The cache folder; names of unfinished files in it begin with a dot.
    """
    since = time.time() - _LONG_AGO_S
    for left in (*folder.glob(".*"), *Path(tempfile.gettempdir()).glob(f"{_BUILD}*")):
        with contextlib.suppress(OSError):  # another process has removed it, or another user owns it
            if left.stat().st_mtime >= since:
                continue
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()


class Headers:
    """The headers that all programs include, precompiled.

    Args:
        folder: The cache folder.
    """

    def __init__(self, folder: Path) -> None:
        includes = re.findall(r"^#include .*", HOST.read_text(), re.M)
        self.text = "\n".join([_PREFIX, *includes, ""])
        self.key = key_of("headers", self.text)
        self._artifacts = Artifacts(folder)

    def find(self) -> Path | None:
        """Return the path that a source includes to use them; None if they are not precompiled."""
        precompiled = self._artifacts.headers(self.key)
        if precompiled is None:
            return None
        with contextlib.suppress(OSError):  # another process has just removed it
            os.utime(precompiled)  # the least recently used artifacts are removed first
        return precompiled.with_suffix("")

    def precompile(self) -> None:
        """Precompile them unless they exist or would take more than half of the cache's limit."""
        folder = self._artifacts.folder
        if self._artifacts.find(self.key) is not None or self._artifacts.limit_mb < 2 * _HEADERS_MB:
            return
        with tempfile.TemporaryDirectory(prefix=_PRECOMPILATION, dir=folder) as name:
            beside = Path(name) / f"{self.key}.h"
            beside.write_text(self.text)
            errors, built = _run(beside, Path(name), None, precompiling=True)
            if not errors:
                self._artifacts.put_headers(beside, built)

    def remove(self) -> None:
        """Remove them."""
        self._artifacts.remove(self.key)


def _run(source: Path, folder: Path, headers: Path | None, **options: Any) -> tuple[str, Path]:
    """Run the C++ compiler; return its output if it failed, beginning with the first error, and the result's path."""
    inductor = private.inductor()
    settings = inductor.CppTorchDeviceOptions(
        device_type="cpu", aot_mode=True, vec_isa=inductor.pick_vec_isa(), extra_flags=_OPTIONS, **options
    )
    settings.precompiled_header = headers
    builder = inductor.CppBuilder(source.name if options else "program", [str(source)], settings, str(folder))
    command = shlex.split(builder.get_command_line())
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if not done.returncode:
        return "", Path(builder.get_target_file_path())
    errors = [line for line in done.stdout.splitlines() if "error" in line]  # after where it was included
    return "\n".join([*errors[:1], done.stdout]), source
