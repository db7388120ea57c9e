from coordinator.api.members import Coordinator as Coordinator
from coordinator.api.members import connect as connect
from coordinator.api.plan import plan as plan
from coordinator.api.run import Run as Run
from coordinator.api.run import evaluate as evaluate
from coordinator.api.train import measure as measure
from coordinator.api.train import train as train
from coordinator.api.what_if import simulate as simulate
from coordinator.api.what_if import what_if as what_if

__all__: list[str]
__version__: str

def targets_of(group: str) -> dict[str, str]: ...
