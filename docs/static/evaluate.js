// Evaluates the graph of a mod, as quire.ir.portable writes it: rows of [op, operands, dtype, payload].
//
//   const mask = compile(rows);
//   mask({b: 0, h: 0, q_idx: 5, kv_idx: 3}, captures)      // true, false or a number
//
// Captured tensors are {shape, data}. An int64 is a Number while that is exact, and a BigInt beyond
// 2**53; it wraps around as in torch. float32 is rounded after every op. tests/site compares
// every op with quire's own interpreter.
"use strict";

const Quire = (() => {
  const BITS = { uint8: 8, int8: 8, int16: 16, int32: 32, int64: 64 };
  const isInteger = (dtype) => dtype in BITS;

  // --- whole numbers

  const small = (big) => {
    const number = Number(big);
    return Number.isSafeInteger(number) ? number : big;
  };
  const wrap = (value, dtype) => {
    if (typeof value === "number" && Number.isSafeInteger(value)) {
      if (dtype === "int64") return value;
      if (dtype === "int32") return value | 0;
    }
    const big = BigInt(value);
    return small(dtype === "uint8" ? BigInt.asUintN(8, big) : BigInt.asIntN(BITS[dtype], big));
  };
  const bigs = (f) => (dtype, ...args) => wrap(f(...args.map(BigInt)), dtype);
  const quick = (f, exact) => (dtype, a, b) => {
    if (typeof a === "number" && typeof b === "number") {
      const found = f(a, b);
      if (Number.isSafeInteger(found)) return wrap(found, dtype);
    }
    return bigs(exact)(dtype, a, b);
  };
  const floorDivide = (a, b) => {
    const quotient = a / b;
    return a % b !== 0n && a < 0n !== b < 0n ? quotient - 1n : quotient;
  };
  const nonzero = (b) => {
    if (Number(b) === 0) throw new Error("an integer is divided by 0");
    return b;
  };
  const power = (a, b) => {
    if (b >= 0n) return BigInt.asIntN(64, a ** b);
    return a === 1n ? 1n : a === -1n ? (b % 2n ? -1n : 1n) : 0n;
  };
  const shifted = (left) => (dtype, a, b) => {
    const by = Number(b), bits = BITS[dtype];
    if (by < 0 || by >= bits) return left || Number(a) >= 0 ? 0 : -1;
    return bigs(left ? (x, y) => x << y : (x, y) => x >> y)(dtype, a, by);
  };
  const length = (x) => (Number(x) < 1 ? 0 : BigInt(x).toString(2).length);

  // --- floating-point numbers

  const view = new DataView(new ArrayBuffer(8));
  const bfloat = (value) => {
    if (Number.isNaN(value)) return value;
    view.setFloat32(0, value);
    const bits = view.getUint32(0);
    view.setUint32(0, ((bits + 0x7fff + ((bits >>> 16) & 1)) & 0xffff0000) >>> 0);
    return view.getFloat32(0);
  };
  const half = (value) => {
    const single = Math.fround(value), size = Math.abs(single);
    if (!(size > 0) || size === Infinity) return single;
    if (size >= 65520) return Math.sign(single) * Infinity;
    const step = 2 ** Math.max(Math.floor(Math.log2(size)) - 10, -24);
    return Math.sign(single) * nearestEven(size / step) * step;
  };
  const ROUND = { float64: (x) => x, float32: Math.fround, bfloat16: bfloat, float16: half };
  const nearestEven = (x) => {
    const low = Math.floor(x), rest = x - low;
    if (rest < 0.5) return low;
    if (rest > 0.5) return low + 1;
    return low % 2 === 0 ? low : low + 1;
  };
  const sinceEven = (x) => (x < 0 ? -nearestEven(-x) : Object.is(x, -0) ? x : nearestEven(x));
  const remainder = (a, b) => {
    const rest = a % b;
    return rest !== 0 && rest < 0 !== b < 0 ? rest + b : rest;
  };
  const floorOfQuotient = (a, b) => {
    if (b === 0) return a / b;
    const rest = a % b;
    let quotient = (a - rest) / b;
    if (rest !== 0 && b < 0 !== rest < 0) quotient -= 1;
    if (quotient === 0) return a / b < 0 ? -0 : 0;
    const floor = Math.floor(quotient);
    return quotient - floor > 0.5 ? floor + 1 : floor;
  };
  const raised = (a, b) => (a === 1 || (a === -1 && Math.abs(b) === Infinity) ? 1 : a ** b);
  const nanWins = (f) => (a, b) => (Number.isNaN(a) || Number.isNaN(b) ? NaN : f(a, b));
  const errorFunction = (x) => {
    if (Number.isNaN(x)) return x;
    const size = Math.abs(x);
    if (size > 6) return Math.sign(x);
    if (size < 3) {
      let term = size, sum = size;
      for (let n = 1; Math.abs(term) > 1e-18 * Math.abs(sum) && n < 200; n++) {
        term *= (-size * size) / n;
        sum += term / (2 * n + 1);
      }
      return Math.sign(x) * sum * 1.1283791670955126;
    }
    let fraction = 0;
    for (let n = 60; n > 0; n--) fraction = (n / 2) / (size + fraction);
    return Math.sign(x) * (1 - Math.exp(-size * size) / ((size + fraction) * Math.sqrt(Math.PI)));
  };

  // --- what each op means, for whole numbers and for floating-point numbers

  const WHOLE = {
    add: quick((a, b) => a + b, (a, b) => a + b),
    sub: quick((a, b) => a - b, (a, b) => a - b),
    mul: quick((a, b) => a * b, (a, b) => a * b),
    floordiv: (dtype, a, b) =>
      quick((x, y) => Math.floor(x / y), floorDivide)(dtype, a, nonzero(b)),
    mod: (dtype, a, b) => bigs((x, y) => x - floorDivide(x, y) * y)(dtype, a, nonzero(b)),
    pow: bigs(power),
    min: (dtype, a, b) => (a <= b ? a : b),
    max: (dtype, a, b) => (a >= b ? a : b),
    neg: bigs((x) => -x),
    abs: bigs((x) => (x < 0n ? -x : x)),
    sign: (dtype, x) => Math.sign(Number(x)),
    floor: (dtype, x) => x,
    ceil: (dtype, x) => x,
    round: (dtype, x) => x,
    trunc: (dtype, x) => x,
    and: bigs((a, b) => a & b),
    or: bigs((a, b) => a | b),
    xor: bigs((a, b) => a ^ b),
    not: bigs((x) => ~x),
    shl: shifted(true),
    shr: shifted(false),
    bits: (dtype, x) => length(x),
  };
  const FLOAT = {
    add: (a, b) => a + b,
    sub: (a, b) => a - b,
    mul: (a, b) => a * b,
    div: (a, b) => a / b,
    floordiv: floorOfQuotient,
    mod: remainder,
    pow: raised,
    min: nanWins(Math.min),
    max: nanWins(Math.max),
    neg: (x) => -x,
    abs: Math.abs,
    sign: (x) => (Number.isNaN(x) ? 0 : Math.sign(x)),
    floor: Math.floor,
    ceil: Math.ceil,
    round: sinceEven,
    trunc: Math.trunc,
    exp: Math.exp,
    exp2: (x) => 2 ** x,
    log: Math.log,
    log2: Math.log2,
    sqrt: Math.sqrt,
    tanh: Math.tanh,
    sigmoid: (x) => 1 / (1 + Math.exp(-x)),
    erf: errorFunction,
    sin: Math.sin,
    cos: Math.cos,
  };
  const BOOL = {
    add: (a, b) => a || b,
    mul: (a, b) => a && b,
    min: (a, b) => a && b,
    max: (a, b) => a || b,
    sign: (x) => x,
    and: (a, b) => a && b,
    or: (a, b) => a || b,
    xor: (a, b) => a !== b,
    not: (x) => !x,
  };
  const COMPARE = {
    lt: (a, b) => a < b,
    le: (a, b) => a <= b,
    eq: (a, b) => a == b, // a BigInt equals a Number of the same value
  };

  const convert = (value, to) => {
    if (to === "bool") return typeof value === "boolean" ? value : value != 0;
    const number = typeof value === "boolean" ? Number(value) : value;
    if (!isInteger(to)) return ROUND[to](Number(number));
    return wrap(typeof number === "bigint" ? number : Math.trunc(number), to);
  };

  // --- payloads

  const fromHex = (text) => {
    const found = /^(-?)0x([01])\.?([0-9a-f]*)p([+-]?\d+)$/.exec(text);
    if (!found) return text === "nan" ? NaN : text.startsWith("-") ? -Infinity : Infinity;
    const [, minus, whole, digits, exponent] = found;
    let value = Number(whole);
    for (let i = 0; i < digits.length; i++) value += parseInt(digits[i], 16) * 16 ** -(i + 1);
    const power = Number(exponent), step = Math.max(power, -1000);
    return (minus ? -1 : 1) * value * 2 ** step * 2 ** (power - step);
  };
  const constant = (payload, dtype) => {
    if (dtype === "bool") return payload;
    return isInteger(dtype) ? wrap(payload, dtype) : fromHex(payload);
  };
  const loaded = (tensor, indices) => {
    let place = 0;
    tensor.shape.forEach((size, dim) => {
      let index = Number(indices[dim]);
      if (index < 0) index += size;
      if (!(index >= 0 && index < size)) throw new Error(`index ${index} of ${size} is out of range`);
      place = place * size + index;
    });
    return tensor.data[place];
  };

  // --- a graph

  const step = ([op, args, dtype, payload], dtypes) => {
    const [i, j, k] = args;
    if (op === "input") return (env) => env[payload];
    if (op === "const") {
      const value = constant(payload, dtype);
      return () => value;
    }
    if (op === "load") {
      return (env, captures, values) => loaded(captures[payload], args.map((arg) => values[arg]));
    }
    if (op === "cast") return (env, captures, values) => convert(values[i], dtype);
    if (op === "where") return (env, captures, values) => (values[i] ? values[j] : values[k]);
    if (op in COMPARE) {
      const f = COMPARE[op];
      return (env, captures, values) => f(values[i], values[j]);
    }
    if (dtype === "bool") {
      const f = BOOL[op];
      return (env, captures, values) => f(values[i], values[j]);
    }
    if (isInteger(dtype)) {
      const f = WHOLE[op];
      if (args.length === 1) return (env, captures, values) => f(dtype, values[i]);
      return (env, captures, values) => f(dtype, values[i], values[j]);
    }
    const f = FLOAT[op], round = ROUND[dtype];
    return (env, captures, values) => round(f(values[i], values[j]));
  };

  const compile = (rows) => {
    const dtypes = rows.map((row) => row[2]);
    const steps = rows.map((row) => step(row, dtypes));
    const values = new Array(rows.length);
    return (env, captures) => {
      for (let n = 0; n < steps.length; n++) values[n] = steps[n](env, captures, values);
      return values[steps.length - 1];
    };
  };

  const OPS = [
    ...new Set([
      "input", "const", "load", "cast", "where",
      ...Object.keys(WHOLE), ...Object.keys(FLOAT), ...Object.keys(BOOL), ...Object.keys(COMPARE),
    ]),
  ];
  return { compile, OPS, fromHex };
})();

if (typeof module !== "undefined") module.exports = Quire;
