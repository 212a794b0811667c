"""Stop conditions: callables on the train statistics that decide when a run ends, composed with `&`, `|` and `~`.

    learned = Plateau("episodes/returns/mean", patience=20) & HitsUpperBound("env/steps", 1_000_000)
    trainer.run(stop_conditions=[learned, WallTime("2h")])

The run stops when one condition of the list is met. Each condition sees every row, even if another one is met.
"""

from rl8x.conditions.base import And as And
from rl8x.conditions.base import Condition as Condition
from rl8x.conditions.base import Not as Not
from rl8x.conditions.base import Or as Or
from rl8x.conditions.base import as_condition as as_condition
from rl8x.conditions.kinds import Confirmed as Confirmed
from rl8x.conditions.kinds import HitsLowerBound as HitsLowerBound
from rl8x.conditions.kinds import HitsUpperBound as HitsUpperBound
from rl8x.conditions.kinds import NonFinite as NonFinite
from rl8x.conditions.kinds import Plateau as Plateau
from rl8x.conditions.kinds import StopsDecreasing as StopsDecreasing
from rl8x.conditions.kinds import StopsIncreasing as StopsIncreasing
from rl8x.conditions.kinds import WallTime as WallTime
from rl8x.conditions.spec import from_spec as from_spec
from rl8x.conditions.spec import to_spec as to_spec
