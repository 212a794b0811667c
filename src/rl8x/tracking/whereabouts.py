"""The last lines on a run for its user: where it is, what of it has not arrived, and how to send that."""

from __future__ import annotations

import contextlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from rl8x.output import counted
from rl8x.tracking.address import beside
from rl8x.tracking.location import Location, is_default, mlruns_dir
from rl8x.tracking.runs import HANDLE_PREFIX
from rl8x.tracking.spool_files import REJECTED, Ack, Unsent


@dataclass(frozen=True)
class Whereabouts:
    """Where a run is.

    Attributes:
        location: The store.
        ack: What the store has of it.
        unsent: What the store does not have of it.
        spool: The folder that has the rest.
        reason: Why the store does not take it; empty where that is not known.
    """

    location: Location
    ack: Ack
    unsent: Unsent
    spool: Path
    reason: str = ""

    @property
    def resume_word(self) -> str | None:
        """What `rl8x resume` finds the run by, started in this folder: its name, or its ID where the name will not do.

        None where neither would: the store is not the default one, or does not have all of the run.
        """
        ack = self.ack
        if ack.run_id is None or not is_default(self.location) or self.unsent != Unsent():
            return None
        name = ack.run_name or ""
        plain = re.fullmatch(r"\w[\w .-]*", name) is not None and not Path(name).exists()
        return shlex.quote(name) if plain and ack.name_is_free else ack.run_id

    def lines(self) -> list[str]:
        """Write it in words, a fact a line."""
        unsent, store = self.unsent, self.location.shown
        name = f"run {self.ack.run_name or self.ack.run_id or HANDLE_PREFIX + self.spool.name}"
        lines = []
        if unsent.lost:
            lines.append(f"{name} has lost {unsent.lost}: neither the disk nor {store} took them")
        if unsent.num_rows or unsent.num_others:
            what = counted(unsent.num_rows, "row", "rows") if unsent.num_rows else "the last entry"
            why = f" ({self.reason})" if self.reason else ""
            lines.append(f"{what} of {name} did not reach {store}{why}")
            lines.append(f"to send what waits in {shown_path(self.spool)}: {self.sync_command}")
        if unsent.num_rejected:
            what = counted(unsent.num_rejected, "entry", "entries")
            where = shown_path(self.spool / REJECTED)
            lines.append(f"{what} of {name} could not be logged; to try again what is in {where}: {self.sync_command}")
        if not (unsent.num_rows or unsent.num_others) and self.ack.run_id is not None:
            look = "" if self.location.remote else f"; to look at it: {self._ui_command()}"
            lines.append(f"{name} is in {store}{look}")
        return lines

    @property
    def sync_command(self) -> str:
        """Write the command that sends what waits, started in this folder, without asking anything."""
        location, folder = self.location, shlex.quote(shown_path(self.spool))
        if not self.is_found_by(self.spool):
            uri = shlex.quote(location.uri) if location.shown == location.uri else "URI"
            return f"rl8x sync {folder} --to {uri}"
        return "rl8x sync" if self.spool.parent == mlruns_dir() / "spool" else f"rl8x sync {folder}"

    def is_found_by(self, folder: Path) -> bool:
        """Return whether a command that is started here on a folder of the run may use the store without asking."""
        return beside(folder.absolute(), self.location.database) is not None or is_default(self.location)

    def _ui_command(self) -> str:
        uri = "" if is_default(self.location) else f" --tracking-uri {shlex.quote(self.location.shown)}"
        return f"rl8x ui{uri}"


def shown_path(path: Path) -> str:
    """Write a path as short as it can be in the working directory."""
    with contextlib.suppress(ValueError, FileNotFoundError):  # it lies elsewhere, or the directory was removed
        return str(path.relative_to(Path.cwd()))
    return str(path)
