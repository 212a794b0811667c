"""Track runs in MLflow (durably, even while its server is down), in memory, or not at all.

Importing this package does not import mlflow; `MLflowTracker` imports it in a separate process. Each file imports only
files that are listed after it here:

    mlflow_tracker, shipping    the training process: appends to a journal
    shipper, sender             the sending process: from the journal to the store
    ui, runs                    finding and viewing runs
    appending, store            writing a journal; calls to MLflow
    artifacts, journal          artifacts; the journal's format, and reading it
    location, pages             the store's address; content of the store's pages
    locks, protocol             shared by all the files above
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
from rl8x.tracking.shipper import JournalReport as JournalReport
from rl8x.tracking.shipper import SyncReport as SyncReport
from rl8x.tracking.shipper import sync as sync
from rl8x.tracking.ui import open_browser as open_browser
from rl8x.tracking.ui import runs_link as runs_link
from rl8x.tracking.ui import serve_ui as serve_ui
from rl8x.tracking.ui import ui_command as ui_command
from rl8x.tracking.ui import ui_environment as ui_environment
