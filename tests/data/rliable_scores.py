"""Print what rliable computes of fixed scores, for ``rliable.json``: ``pip install rliable "pandas<3"``, then run this file.

rliable takes arch, statsmodels and seaborn along, which no test needs.
"""

import json

import numpy as np
from rliable import library, metrics


def scores() -> dict[str, np.ndarray]:
    """Rounded, so that some are equal, of other numbers of seeds."""
    random = np.random.default_rng(0)
    plain = np.round(random.beta(2.0, 3.0, (9, 5)) * [1.0, 0.8, 1.4, 1.0, 0.6], 1)
    tuned = np.round(random.beta(3.0, 2.0, (12, 5)) * [1.0, 0.8, 1.4, 1.2, 0.5], 1)
    return {"plain": plain, "tuned": tuned}


def main() -> None:
    """Print."""
    own, thresholds = scores(), np.linspace(0.0, 1.4, 8)
    functions = {
        "iqm": metrics.aggregate_iqm,
        "median": metrics.aggregate_median,
        "mean": metrics.aggregate_mean,
        "optimality gap": lambda values: metrics.aggregate_optimality_gap(values, 0.9),
    }
    found: dict[str, dict] = {"scores": {name: each.tolist() for name, each in own.items()}, "estimates": {}}
    for name, function in functions.items():
        values, ends = library.get_interval_estimates(
            own,
            lambda each, function=function: np.array([function(each)]),
            reps=20_000,
            random_state=np.random.RandomState(0),
        )
        found["estimates"][name] = {key: [float(values[key][0]), *map(float, ends[key][:, 0])] for key in own}
    pair = {"tuned,plain": (own["tuned"], own["plain"])}
    values, ends = library.get_interval_estimates(
        pair, metrics.probability_of_improvement, reps=5_000, random_state=np.random.RandomState(0)
    )
    (key,) = pair
    found["improvement"] = [float(np.ravel(values[key])[0]), *map(float, np.ravel(ends[key]))]
    shares, bands = library.create_performance_profile(own, thresholds, reps=5_000)
    found["thresholds"] = thresholds.tolist()
    found["profiles"] = {name: [shares[name].tolist(), *bands[name].tolist()] for name in own}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
