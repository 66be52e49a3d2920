"""Fits the coefficients of src/quire/codegen/llvm/coefficients.py and prints that file.

    python benchmarks/_fit_vecmath.py > src/quire/codegen/llvm/coefficients.py

Each fit minimises the largest weighted error over an interval, in 50 digits (mpmath). It uses
Lawson's algorithm: solve a least squares problem, multiply the share of every point by its error,
and repeat. A rational function P/Q for f is fitted as P - f Q, which is linear in the coefficients;
its weight 1/Q is taken from the round before. `weight` turns the error of the fit into the relative
error of the function that a kernel computes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpmath import mp, mpf

mp.dps = 50
Real = Callable[[mpf], mpf]


def chebyshev(low: float, high: float, count: int) -> list[mpf]:
    """Return `count` Chebyshev points, which are dense at both ends of the interval."""
    middle, half = (mpf(low) + mpf(high)) / 2, (mpf(high) - mpf(low)) / 2
    return [middle - half * mp.cos(mp.pi * (2 * k + 1) / (2 * count)) for k in range(count)]


def fit(
    grid: Sequence[mpf], rows: Sequence[Sequence[mpf]], goal: Sequence[mpf], rounds: int
) -> tuple[list[mpf], mpf]:
    """Return c, which minimises max_i |sum_k c_k rows[i][k] - goal[i]|, and that maximum."""
    size = len(rows[0])
    shares = [mpf(1) / len(grid)] * len(grid)
    best: tuple[list[mpf], mpf] = ([], mp.inf)
    for _ in range(rounds):
        normal, right = mp.matrix(size, size), mp.matrix(size, 1)
        for row, y, share in zip(rows, goal, shares, strict=True):
            for i in range(size):
                scaled = share * row[i]
                right[i] += scaled * y
                for k in range(i, size):
                    normal[i, k] += scaled * row[k]
        for i in range(size):
            for k in range(i):
                normal[i, k] = normal[k, i]
        solution = list(mp.lu_solve(normal, right))
        errors = [
            abs(sum((c * x for c, x in zip(solution, row, strict=True)), -y))
            for row, y in zip(rows, goal, strict=True)
        ]
        if max(errors) < best[1]:
            best = (solution, max(errors))
        shares = [share * error for share, error in zip(shares, errors, strict=True)]
        shares = [share / sum(shares) for share in shares]
    return best


def polynomial(
    target: Real, degree: int, weight: Real, low: float, high: float
) -> tuple[list[mpf], mpf]:
    """Return the polynomial nearest to `target`, lowest power first, and its largest error."""
    grid = chebyshev(low, high, 8 * (degree + 1))
    rows = [[weight(x) * x**k for k in range(degree + 1)] for x in grid]
    return fit(grid, rows, [weight(x) * target(x) for x in grid], rounds=30)


def rational(
    target: Real, top: int, bottom: int, *, low: float, high: float, weight: Real
) -> tuple[list[mpf], list[mpf], mpf]:
    """Return P of degree `top`, Q of degree `bottom` with Q(0) = 1, and the error of P / Q."""
    grid = chebyshev(low, high, 6 * (top + bottom + 2))
    values = [(x, target(x), weight(x)) for x in grid]
    denominator = [mpf(1)]
    numerator: list[mpf] = []
    for _ in range(8):
        scales = [w / abs(mp.polyval(denominator[::-1], x)) for x, _, w in values]
        rows = [
            [s * x**k for k in range(top + 1)] + [-s * y * x**k for k in range(1, bottom + 1)]
            for (x, y, _), s in zip(values, scales, strict=True)
        ]
        goal = [s * y for (_, y, _), s in zip(values, scales, strict=True)]
        solution, _ = fit(grid, rows, goal, rounds=12)
        numerator, denominator = solution[: top + 1], [mpf(1), *solution[top + 1 :]]
    error = max(
        abs(w * (mp.polyval(numerator[::-1], x) / mp.polyval(denominator[::-1], x) - y))
        for x, y, w in values
    )
    return numerator, denominator, error


def exp2_rest(x: mpf) -> mpf:
    """2**x = 1 + x exp2_rest(x)."""
    return (mpf(2) ** x - 1) / x


def log2_ratio(f: mpf) -> mpf:
    """log2(1 + f) = f log2_ratio(f)."""
    return mp.log(1 + f, 2) / f


def log_rest(f: mpf) -> mpf:
    """log(1 + f) = f + f**2 log_rest(f)."""
    return (mp.log(1 + f) - f) / f**2


def log_series(z: mpf) -> mpf:
    """log((1 + s) / (1 - s)) = 2 s + s z log_series(z), z = s**2."""
    s = mp.sqrt(z)
    return (2 * mp.atanh(s) - 2 * s) / (s * z)


def over_x(function: Real) -> Real:
    """function(x) = x over_x(function)(x**2), for odd functions."""
    return lambda z: function(mp.sqrt(z)) / mp.sqrt(z)


def erfc_scaled(t: mpf) -> mpf:
    """erfc(x) exp(x**2) where t = (x - 2) / (x + 2)."""
    x = 2 * (1 + t) / (1 - t)
    return mp.erfc(x) * mp.exp(x * x)


def sin_rest(z: mpf) -> mpf:
    """sin(x) = x + x z sin_rest(z), z = x**2."""
    x = mp.sqrt(z)
    return (mp.sin(x) - x) / (x * z)


def cos_rest(z: mpf) -> mpf:
    """cos(x) = 1 - z / 2 + z**2 cos_rest(z), z = x**2."""
    return (mp.cos(mp.sqrt(z)) - 1 + z / 2) / z**2


def show(name: str, meaning: str, coefficients: Sequence[mpf], error: mpf | None = None) -> None:
    """Print one tuple of coefficients as Python, lowest power first."""
    numbers = [repr(float(coefficient)) for coefficient in coefficients]
    print(f'\n{name} = _numbers("""')
    for first in range(0, len(numbers), 4):
        print("    " + " ".join(numbers[first : first + 4]))
    print('""")')
    reach = "" if error is None else f"; relative error {mp.nstr(error, 2)}"
    print(f'"""{meaning}{reach}."""')


def show_rational(name: str, meaning: str, found: tuple[list[mpf], list[mpf], mpf]) -> None:
    """Print the numerator and the denominator of a rational function."""
    show(f"{name}_TOP", f"{meaning}, the numerator", found[0], found[2])
    show(f"{name}_BOTTOM", f"{meaning}, the denominator", found[1])


def main() -> None:
    """Print the whole file."""
    low, high = float(mp.sqrt(0.5) - 1), float(mp.sqrt(2) - 1)
    quarter = float((mp.pi / 4 * mpf("1.01")) ** 2)
    tiny = 1e-9
    print('"""Coefficients of vecmath.py, lowest power first; from benchmarks/_fit_vecmath.py."""')
    print("\n\ndef _numbers(text: str) -> tuple[float, ...]:")
    print("    return tuple(map(float, text.split()))\n")
    for bits, degree in ((32, 6), (64, 11)):
        found = polynomial(exp2_rest, degree - 1, lambda x: x / mpf(2) ** x, -0.5, 0.5)
        show(f"EXP2_F{bits}", "2**x = 1 + x P(x), |x| <= 1/2", *found)
    found = polynomial(log2_ratio, 9, lambda f: 1 / log2_ratio(f), low, high)
    show("LOG2_F32", "log2(1 + f) = f P(f), 1 + f from sqrt(1/2) to sqrt(2)", *found)
    found = polynomial(log_rest, 8, lambda f: f**2 / mp.log(1 + f), low, high)
    show("LOG_F32", "log(1 + f) = f + f**2 P(f), 1 + f from sqrt(1/2) to sqrt(2)", *found)
    found = polynomial(log_series, 6, lambda z: z / 2, tiny, 0.02945)
    show("LOG_F64", "log((1 + s) / (1 - s)) = 2 s + s z P(z), z = s**2 <= 0.02945", *found)
    tanh, erf = over_x(mp.tanh), over_x(mp.erf)
    show_rational(
        "TANH_F32",
        "tanh(x) = x P(z) / Q(z), z = x**2, |x| <= 9.02",
        rational(tanh, 5, 4, low=tiny, high=9.02**2, weight=lambda z: 1 / tanh(z)),
    )
    show_rational(
        "TANH_F64",
        "tanh(x) = x P(z) / Q(z), z = x**2, |x| <= 5/8",
        rational(tanh, 3, 3, low=tiny, high=0.39063, weight=lambda z: 1 / tanh(z)),
    )
    show_rational(
        "ERF_F32",
        "erf(x) = x P(z) / Q(z), z = x**2, |x| <= 3.93",
        rational(erf, 6, 5, low=tiny, high=3.93**2, weight=lambda z: 1 / erf(z)),
    )
    show_rational(
        "ERF_F64",
        "erf(x) = x P(z) / Q(z), z = x**2, |x| <= 1",
        rational(erf, 5, 5, low=tiny, high=1.0, weight=lambda z: 1 / erf(z)),
    )
    found = polynomial(erfc_scaled, 17, lambda t: 1 / erfc_scaled(t), -1 / 3, 0.5)
    show("ERFC_F64", "erfc(x) exp(x**2) = P(t), t = (x - 2) / (x + 2), x from 1 to 6", *found)
    for bits, degree in ((32, 3), (64, 6)):
        found = polynomial(
            sin_rest, degree - 1, lambda z: z**1.5 / mp.sin(mp.sqrt(z)), tiny, quarter
        )
        show(f"SIN_F{bits}", "sin(x) = x + x z P(z), z = x**2, |x| <= pi / 4", *found)
        found = polynomial(cos_rest, degree - 1, lambda z: z**2 / mp.cos(mp.sqrt(z)), tiny, quarter)
        show(f"COS_F{bits}", "cos(x) = 1 - z / 2 + z**2 P(z), z = x**2, |x| <= pi / 4", *found)


if __name__ == "__main__":
    main()
