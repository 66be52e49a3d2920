// The order of what a search finds: pages of public names and lessons come before lists and logs.
"use strict";

const FIRST = /^(reference\/quire|learn\/)/, LAST = /^(figures|project\/|reference\/modules\/index)/;

var Scorer = {
  score: ([page, , , , score]) => score + (FIRST.test(page) ? 4 : LAST.test(page) ? -4 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
