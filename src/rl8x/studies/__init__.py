"""Studies: trainings under several configurations and seeds, evaluated over a space of environments."""

from rl8x.studies.definition import StudyConfig as StudyConfig
from rl8x.studies.study import Study as Study
from rl8x.studies.study import StudyError as StudyError
