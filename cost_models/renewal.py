"""The renewal factor G: the share of wall clock that becomes kept progress, given failures, saves and restarts.

    run:   work tau | save s | work tau | save s | ...      a save is durable L seconds after its stall ends
    fail:  everything since the last durable save is lost; D seconds pass before work resumes; a failure within
           these D seconds starts them anew

    G = lambda tau phi exp(-lambda (tau + s + L)) / (1 - exp(-lambda (tau + s))),    phi = E[exp(-lambda D)]
        lambda failures per second, tau seconds of work between saves, s stall, L lag until durable,
        D detection + restart + load (one value per failure class)

Derivation.  Uptime T is exponential.  Save k is kept when k (tau + s) + L <= T, so the expected kept work of one
uptime is tau * sum_k exp(-lambda (k (tau + s) + L)).  A try of length D succeeds with probability phi and lasts
(1 - phi) / lambda on average, so the mean downtime is (1 - phi) / (lambda phi) and a whole renewal lasts
1 / (lambda phi).  G is the quotient.  With D fixed phi = exp(-lambda D).
Leaves out: failures that come in clusters, a rate that depends on being up, a save cut short by its own length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def renewal_factor(
    *, rate_per_second: float, work_seconds: float, stall_seconds: float, lag_seconds: float, restart_laplace: float
) -> float:
    """G in [0, 1] for `work_seconds` of work between saves; `restart_laplace` is phi, see `restart_laplace`."""
    cycle = work_seconds + stall_seconds
    if rate_per_second == 0.0:
        return work_seconds / cycle
    per_cycle = rate_per_second * cycle
    if per_cycle + rate_per_second * lag_seconds > 700.0:
        return 0.0
    kept = rate_per_second * work_seconds / math.expm1(per_cycle)
    return kept * math.exp(-rate_per_second * lag_seconds) * restart_laplace


def restart_laplace(rates_per_second: Sequence[float], restart_seconds: Sequence[float]) -> float:
    """phi = E[exp(-lambda D)] with D drawn by the class of the failure; 1 without failures."""
    total = sum(rates_per_second)
    if total == 0.0:
        return 1.0
    weighted = (
        rate * math.exp(-total * seconds) for rate, seconds in zip(rates_per_second, restart_seconds, strict=True)
    )
    return sum(weighted) / total


def renewal_factor_with_rejoins(
    *,
    rate_per_second: float,
    rejoins_per_second: float,
    work_seconds: float,
    stall_seconds: float,
    lag_seconds: float,
    restart_laplace: float,
    rejoin_seconds: float,
) -> float:
    """G when training also stops on purpose, to take repaired devices back, `rejoins_per_second` times.

    A planned stop saves first (stall and lag are waited for), loses nothing, and takes `rejoin_seconds` more.  A
    failure during the planned save falls back to what was durable when it began.

    # G = lambda phi Lambda (A + B) / (lambda + nu (1 - psi)),   Lambda = lambda + nu,  c = tau + s
    #   A = lambda/Lambda * d,                    d = tau exp(-Lambda (c + L)) / (1 - exp(-Lambda c))  durable work
    #   B = nu/Lambda * (q w + (1 - q) d),        w = (1 - exp(-Lambda tau)) / (Lambda (1 - exp(-Lambda c)))  work done
    #   q = exp(-lambda (s + L)) the planned save succeeds,  psi = q exp(-lambda R) and so does the restart of R s
    #   an uptime lasts 1 / Lambda; the mean time from its start to the next is (lambda + nu (1 - psi)) /
    #   (lambda phi Lambda); rejoins during downtime cost nothing.  nu = 0 gives `renewal_factor`.
    """
    rate, rejoins = rate_per_second, rejoins_per_second
    if rate == 0.0 or rejoins == 0.0:
        return renewal_factor(
            rate_per_second=rate,
            work_seconds=work_seconds,
            stall_seconds=stall_seconds,
            lag_seconds=lag_seconds,
            restart_laplace=restart_laplace,
        )
    both = rate + rejoins
    per_cycle = -math.expm1(-both * (work_seconds + stall_seconds))
    done = -math.expm1(-both * work_seconds) / (both * per_cycle)
    durable = work_seconds * math.exp(-both * (work_seconds + stall_seconds + lag_seconds)) / per_cycle
    saved = math.exp(-rate * (stall_seconds + lag_seconds))
    interrupted = -math.expm1(-rate * (stall_seconds + lag_seconds + rejoin_seconds))
    kept = (rate * durable + rejoins * (saved * done + (1.0 - saved) * durable)) / both
    return rate * restart_laplace * both * kept / (rate + rejoins * interrupted)


def exact_interval(rate_per_second: float, stall_seconds: float) -> float:
    """Work between saves that maximises G; infinite without failures, 0 without a stall.

    # best interval: tau* = (1 + W0(-exp(-1 - lambda s))) / lambda
    #   W0 principal branch of Lambert's W; from d/dtau [tau / (exp(lambda (tau + s)) - 1)] = 0, that is
    #   1 - x = exp(-(x + u)) with x = lambda tau, u = lambda s.  L and D shift G but not its maximum.

    Newton from sqrt(2 u), which lies right of the root of a concave falling function: it converges monotonically.
    """
    if rate_per_second == 0.0:
        return math.inf
    u = rate_per_second * stall_seconds
    x = min(math.sqrt(2.0 * u), 1.0)
    if x == 0.0:
        return 0.0
    for _ in range(60):
        step = (math.expm1(-(x + u)) + x) / (1.0 - math.exp(-(x + u)))
        x -= step
        if abs(step) <= 1e-14 * x:
            break
    return x / rate_per_second


def young_interval(rate_per_second: float, stall_seconds: float) -> float:
    """# Young (1974): tau = sqrt(2 s / lambda); leaves out terms of order lambda s."""
    return math.sqrt(2.0 * stall_seconds / rate_per_second) if rate_per_second else math.inf


def daly_interval(rate_per_second: float, stall_seconds: float) -> float:
    """Daly's higher-order interval.

    # tau = sqrt(2 s M) (1 + sqrt(s / 2M) / 3 + (s / 2M) / 9) - s  for s < 2M, else M;  M = 1 / lambda
    #   J. T. Daly, Future Generation Computer Systems 22 (2006), equation 37
    """
    if rate_per_second == 0.0:
        return math.inf
    mean = 1.0 / rate_per_second
    if stall_seconds >= 2.0 * mean:
        return mean
    ratio = stall_seconds / (2.0 * mean)
    return math.sqrt(2.0 * stall_seconds * mean) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - stall_seconds


def whole_step_interval(
    *,
    rate_per_second: float,
    stall_seconds: float,
    lag_seconds: float,
    step_seconds: float,
    longest_seconds: float,
) -> float:
    """The best interval a trainer can use: whole steps, no save before the last one is durable, at most `longest`.

    Between saves G rises to tau* and falls after it, so only the neighbours of the clamped tau* compete.
    """
    shortest = max(lag_seconds - stall_seconds, step_seconds)
    wanted = min(max(exact_interval(rate_per_second, stall_seconds), shortest), max(longest_seconds, shortest))
    first = max(int(wanted / step_seconds), math.ceil(shortest / step_seconds - 1e-9), 1)

    def factor(steps: int) -> float:
        return renewal_factor(
            rate_per_second=rate_per_second,
            work_seconds=steps * step_seconds,
            stall_seconds=stall_seconds,
            lag_seconds=lag_seconds,
            restart_laplace=1.0,
        )

    steps = max((first, first + 1), key=factor) if wanted < longest_seconds else first
    return steps * step_seconds
