// The explorer: pick a mask, move its numbers, see its blocks and what bounds say about them.
"use strict";

const EMPTY = 0, PARTIAL = 1, FULL = 2, UNSURE = 3;
const COLOURS = { [EMPTY]: "#eef0f3", [PARTIAL]: "#f0a63c", [FULL]: "#205493" }; // those of quire.draw
const HIDDEN = "#fbe4c4"; // elements of a partial block that are hidden
const SIDE = 512;

// Classifies all blocks: bounds first, elements only where bounds are unsure.
const classify = (mask, { length, block, head, numbers }) => {
  const captures = mask.captures.map((each) =>
    "slider" in each ? { shape: [], data: [numbers[each.slider]] } : each
  );
  const kindOf = Quire.compile(mask.kind), holds = Quire.compile(mask.mask);
  const count = Math.ceil(length / block);
  const kinds = [], verdicts = [];
  let evaluated = 0, seen = 0;
  for (let row = 0; row < count; row++) {
    for (let column = 0; column < count; column++) {
      const q = row * block, k = column * block;
      const lastQ = Math.min(q + block, length) - 1, lastK = Math.min(k + block, length) - 1;
      const size = (lastQ - q + 1) * (lastK - k + 1);
      const box = { b: 0, h: head, q_low: q, q_high: lastQ, kv_low: k, kv_high: lastK };
      const verdict = Number(kindOf(box, captures));
      let here = verdict === FULL ? size : 0;
      if (verdict === UNSURE) {
        for (let i = q; i <= lastQ; i++) {
          for (let j = k; j <= lastK; j++) {
            here += holds({ b: 0, h: head, q_idx: i, kv_idx: j }, captures) ? 1 : 0;
          }
        }
        evaluated += size;
      }
      seen += here;
      verdicts.push(verdict);
      kinds.push(here === 0 ? EMPTY : here === size ? FULL : PARTIAL);
    }
  }
  const total = count * count, number = (list, kind) => list.filter((each) => each === kind).length;
  return {
    count, kinds, verdicts, evaluated, seen, captures, holds,
    empty: number(kinds, EMPTY), partial: number(kinds, PARTIAL), full: number(kinds, FULL),
    decided: total - number(verdicts, UNSURE),
    sparsity: (100 * number(kinds, EMPTY)) / total,
  };
};

const paint = (canvas, found, { length, block, head }) => {
  const pen = canvas.getContext("2d"), scale = SIDE / length;
  pen.clearRect(0, 0, SIDE, SIDE);
  found.kinds.forEach((kind, place) => {
    const row = Math.floor(place / found.count), column = place % found.count;
    const x = column * block * scale, y = row * block * scale, side = block * scale;
    const elements = kind === PARTIAL && scale >= 0.5;
    pen.fillStyle = elements ? HIDDEN : COLOURS[kind];
    pen.fillRect(x, y, side, side);
    if (elements) {
      pen.fillStyle = COLOURS[PARTIAL];
      const step = Math.max(1, Math.floor(1 / scale));
      for (let i = row * block; i < Math.min((row + 1) * block, length); i += step) {
        for (let j = column * block; j < Math.min((column + 1) * block, length); j += step) {
          if (found.holds({ b: 0, h: head, q_idx: i, kv_idx: j }, found.captures)) {
            pen.fillRect(j * scale, i * scale, step * scale, step * scale);
          }
        }
      }
    }
    pen.strokeStyle = "#ffffff";
    pen.lineWidth = 1;
    pen.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
    if (found.verdicts[place] === UNSURE && kind !== PARTIAL) {
      pen.fillStyle = "#c2185b"; // bounds did not decide what elements did
      pen.beginPath();
      pen.arc(x + side / 2, y + side / 2, Math.min(4, side / 4), 0, 7);
      pen.fill();
    }
  });
};

const explorer = (root) => {
  const find = (name) => root.querySelector(`[data-${name}]`);
  const canvas = find("canvas"), picker = find("masks"), sliders = find("sliders");
  const state = { mask: MASKS[1], length: 512, block: 64, head: 0, numbers: {} };
  MASKS.forEach((mask, place) => picker.add(new Option(mask.title, place)));
  picker.value = 1;

  const slider = (name, { least, most, start }, change, step = 1) => {
    const label = document.createElement("label"), input = document.createElement("input");
    const value = document.createElement("output");
    Object.assign(input, { type: "range", min: least, max: most, step, name });
    input.value = start;
    value.textContent = start;
    input.addEventListener("input", () => {
      value.textContent = input.value;
      change(Number(input.value));
      show();
    });
    label.append(`${name} `, input, " ", value);
    sliders.append(label);
  };

  const choose = () => {
    state.mask = MASKS[picker.value];
    state.numbers = {};
    sliders.replaceChildren();
    for (const [name, range] of Object.entries(state.mask.sliders)) {
      state.numbers[name] = range.start;
      slider(name, range, (value) => (state.numbers[name] = value));
    }
    slider("tokens", { least: 64, most: 1024, start: state.length }, (v) => (state.length = v), 64);
    slider("block size", { least: 16, most: 256, start: state.block }, (v) => (state.block = v), 16);
    slider("head", { least: 0, most: 7, start: state.head }, (v) => (state.head = v));
    show();
  };

  const show = () => {
    const found = classify(state.mask, state);
    paint(canvas, found, state);
    state.found = found;
    const total = found.count * found.count;
    const code = state.mask.code.replace(/\{(\w+)\}/g, (_, name) => state.numbers[name]);
    find("code").textContent = code;
    find("note").textContent = state.mask.note;
    const facts = {
      sparsity: `${found.sparsity.toFixed(1)} % of blocks are empty and never computed`,
      blocks: `${found.full} full, ${found.partial} partial, ${found.empty} empty`,
      bounds: `decide ${found.decided} of ${total} blocks without looking at an element`,
      elements: `${found.evaluated.toLocaleString("en")} of ${(state.length ** 2).toLocaleString("en")} were evaluated`,
      seen: `${((100 * found.seen) / state.length ** 2).toFixed(1)} % of all pairs`,
    };
    find("facts").replaceChildren(
      ...Object.entries(facts).map(([name, text]) => {
        const line = document.createElement("div"), term = document.createElement("b");
        term.textContent = `${name}: `;
        line.dataset.fact = name;
        line.append(term, text);
        return line;
      })
    );
  };

  const ask = (event) => {
    const box = canvas.getBoundingClientRect();
    const at = (value, side) => Math.min(state.length - 1, Math.max(0, Math.floor((value / side) * state.length)));
    const kv_idx = at(event.clientX - box.left, box.width), q_idx = at(event.clientY - box.top, box.height);
    const holds = state.found.holds({ b: 0, h: state.head, q_idx, kv_idx }, state.found.captures);
    const place = Math.floor(q_idx / state.block) * state.found.count + Math.floor(kv_idx / state.block);
    const verdict = { [EMPTY]: "empty", [FULL]: "full", [UNSURE]: "unsure" }[state.found.verdicts[place]];
    find("point").textContent =
      `query ${q_idx}, key ${kv_idx}: ${holds ? "seen" : "hidden"}; bounds of its block: ${verdict}`;
  };
  for (const kind of ["pointermove", "pointerdown"]) canvas.addEventListener(kind, ask);
  picker.addEventListener("change", choose);
  choose();
};

if (typeof document !== "undefined") {
  document.addEventListener("DOMContentLoaded", () => {
    const root = document.querySelector("[data-explorer]");
    if (root) explorer(root);
  });
}
