"""Keep runs: in MLflow (durably, also while its server is away), in memory, or not at all.

Importing this package does not import mlflow; `MLflowTracker` does, in a process of its own. Each file imports only
files that stand after it here:

    mlflow_tracker, shipping    the training's side: it appends to a journal
    shipper, sender             the side that sends: from the journal to the store
    ui, runs                    runs as a user looks for them
    appending, store            a run on the disk, as the training has it; MLflow
    artifacts, journal          a run on the disk, as all have it
    location, pages             where runs are kept; what of a run a store's pages show
    locks, protocol             what the others share
    private, repeats, secrets
"""

from rl8x.tracking.mlflow_tracker import MLflowTracker as MLflowTracker
from rl8x.tracking.pages import Thinning as Thinning
from rl8x.tracking.protocol import MemoryTracker as MemoryTracker
from rl8x.tracking.protocol import NullTracker as NullTracker
from rl8x.tracking.protocol import Row as Row
from rl8x.tracking.protocol import Status as Status
from rl8x.tracking.protocol import Tracker as Tracker
from rl8x.tracking.protocol import TrackingError as TrackingError
from rl8x.tracking.protocol import log_table as log_table
from rl8x.tracking.protocol import parent_tag as parent_tag
from rl8x.tracking.runs import find_run as find_run
from rl8x.tracking.shipper import SpoolReport as SpoolReport
from rl8x.tracking.shipper import SyncReport as SyncReport
from rl8x.tracking.shipper import sync as sync
from rl8x.tracking.ui import open_browser as open_browser
from rl8x.tracking.ui import runs_link as runs_link
from rl8x.tracking.ui import serve_ui as serve_ui
from rl8x.tracking.ui import ui_command as ui_command
from rl8x.tracking.ui import ui_environment as ui_environment
