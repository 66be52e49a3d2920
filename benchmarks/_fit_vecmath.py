"""Fits the coefficients of src/quire/codegen/vecmath.py and prints them.

    python benchmarks/_fit_vecmath.py

Each fit minimises the largest weighted error over an interval by Lawson's algorithm in 50
digits (mpmath). Rational functions P/Q are fitted as P - f Q, which is linear in the
coefficients, with the weight 1/Q of the round before. Coefficients are rounded to the type last;
tests/codegen/test_vecmath.py measures what remains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpmath import mp, mpf

mp.dps = 50
Real = Callable[[mpf], mpf]


def chebyshev(low: mpf, high: mpf, count: int) -> list[mpf]:
    """Points that are dense at both ends of the interval."""
    middle, half = (low + high) / 2, (high - low) / 2
    return [middle - half * mp.cos(mp.pi * (2 * k + 1) / (2 * count)) for k in range(count)]


def fit(
    target: Real, basis: Sequence[Real], weight: Real, low: float, high: float, rounds: int = 40
) -> tuple[list[mpf], mpf]:
    """Coefficients c minimising max |weight * (sum c_k basis_k - target)|, and that maximum.

    Lawson's algorithm: least squares again and again, each point's share multiplied by its error.
    """
    grid = chebyshev(mpf(low), mpf(high), 10 * len(basis))
    scaled = mp.matrix([[phi(x) * weight(x) for phi in basis] for x in grid])
    goal = mp.matrix([target(x) * weight(x) for x in grid])
    shares = [mpf(1)] * len(grid)
    best: tuple[list[mpf], mpf] = ([], mp.inf)
    for _ in range(rounds):
        weighted = mp.diag(shares) * scaled
        normal, right = weighted.T * scaled, weighted.T * goal
        solution = mp.lu_solve(normal, right)
        errors = [abs(e) for e in scaled * solution - goal]
        if max(errors) < best[1]:
            best = (list(solution), max(errors))
        shares = [s * e for s, e in zip(shares, errors, strict=True)]
        shares = [s / sum(shares) for s in shares]
    return best


def power(k: int) -> Real:
    """x -> x**k."""
    return lambda x: x**k


def rational(
    target: Real, top: int, bottom: int, weight: Real, low: float, high: float
) -> tuple[list[mpf], list[mpf], mpf]:
    """P of degree `top` over Q of degree `bottom`, Q(0) = 1, and the largest error."""
    denominator: list[mpf] = [mpf(1)] + [mpf(0)] * bottom
    numerator: list[mpf] = []
    for _ in range(12):
        previous = list(denominator)
        basis = [power(k) for k in range(top + 1)]
        basis += [lambda x, k=k: -target(x) * x**k for k in range(1, bottom + 1)]  # type: ignore[misc]
        scaled: Real = lambda x: weight(x) / abs(mp.polyval(previous[::-1], x))  # noqa: E731, B023
        solution, _ = fit(target, basis, scaled, low, high)
        numerator, denominator = solution[: top + 1], [mpf(1), *solution[top + 1 :]]
    worst = max(
        abs(weight(x) * (mp.polyval(numerator[::-1], x) / mp.polyval(denominator[::-1], x) - target(x)))
        for x in chebyshev(mpf(low), mpf(high), 2000)
    )
    return numerator, denominator, worst


def show(name: str, coefficients: Sequence[mpf], error: mpf) -> None:
    """One table as Python, lowest power first."""
    print(f"{name} = (  # largest error {mp.nstr(error, 3)}")
    for c in coefficients:
        print(f"    {mp.nstr(c, 20)},")
    print(")")


def fit_exp2(degree: int) -> tuple[list[mpf], mpf]:
    """2**x = 1 + x P(x) for |x| <= 1/2, relative error."""
    target: Real = lambda x: mp.log(2) if x == 0 else (mpf(2) ** x - 1) / x  # noqa: E731
    weight: Real = lambda x: abs(x) / mpf(2) ** x  # noqa: E731
    basis = [power(k) for k in range(degree)]
    return fit(target, basis, weight, -0.5, 0.5)


if __name__ == "__main__":
    show("EXP2_F32", *fit_exp2(6))
    show("EXP2_F64", *fit_exp2(11))
