"""Where costs come from: shipped device data, or a profile."""

from __future__ import annotations

from cost_models.between_degrees import BetweenDegrees
from cost_models.device import DeviceCosts
from cost_models.interface import CostModel
from cost_models.measured import MeasuredCosts
from specs.cluster import ClusterSpec
from specs.plan import TrainingSpec
from specs.profile import Profile


def device_costs(cluster: ClusterSpec, training: TrainingSpec, *, stack: str = "plait") -> CostModel:
    """Costs from datasheets and published curves; every number is an estimate.

    Raises `BadInputError` for a device or precision without shipped data and for an unknown software stack.
    """
    return DeviceCosts(cluster, training, stack)


def measured_costs(profile: Profile, training: TrainingSpec, cluster: ClusterSpec) -> CostModel:
    """Costs as measured; what was not measured is an error that says what to run.

    Raises `BadInputError` when the profile is of other devices than the cluster's.
    """
    return MeasuredCosts(profile, training, cluster)


def survivors_costs(profile: Profile | None, training: TrainingSpec, cluster: ClusterSpec) -> CostModel:
    """Costs for what is left after a loss: degrees that a profile of the whole cluster cannot have are estimated
    between those that it has.  Without a profile, shipped device data.

    Raises `BadInputError` as the other two.
    """
    if profile is None:
        return device_costs(cluster, training)
    return BetweenDegrees(profile, training, cluster)
