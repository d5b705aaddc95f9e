"use strict";
// Names cut to a width: first the ends that all names of a list share, never a number. The rule of
// statecli/core/short_names.py.
const Names = (() => {
  const WEIGHT = ".weight"; // end of most names
  const countCommon = (first, second) => {
    let at = 0;
    while (at < first.length && first[at] === second[at]) at += 1;
    return first.slice(0, at).lastIndexOf(".") + 1;
  };
  const reverse = (name) => [...name].reverse().join("");
  const ends = (names) => {
    let [low, high, lowEnd, highEnd, shortest] = [names[0], names[0], null, null, Infinity];
    for (const name of names) {
      const backward = reverse(name);
      if (name < low) low = name;
      if (name > high) high = name;
      if (lowEnd === null || backward < lowEnd) lowEnd = backward;
      if (highEnd === null || backward > highEnd) highEnd = backward;
      shortest = Math.min(shortest, name.length);
    }
    return [low, high, lowEnd, highEnd, shortest];
  };
  // Characters that all names begin with, and end with: whole parts; none for a single name.
  const findCommonEnds = (names) => {
    if (names.length < 2) return { start: 0, end: 0 };
    const [low, high, lowEnd, highEnd, shortest] = ends(names);
    const start = countCommon(low, high);
    const end = countCommon(lowEnd, highEnd);
    return { start, end: end < shortest - start ? end : 0 };
  };

  const measure = (keeps) => keeps.reduce((sum, keep, at) => sum + (keep || at === 0 || keeps[at - 1] ? 1 : 0), 0);
  const listCuts = (name, { start, end }) => {
    const stop = name.length - end;
    const cuts = [];
    if (start) cuts.push([0, start]);
    if (end) cuts.push([stop, name.length]);
    const parts = [];
    let at = start;
    for (const part of name.slice(start, stop).match(/[^.]*\./g) || []) {
      parts.push([at, at + part.length, /[0-9]/.test(part)]);
      at += part.length;
    }
    const firstNumber = (parts.find(([, , hasNumber]) => hasNumber) || [stop])[0];
    const words = parts.filter(([, , hasNumber]) => !hasNumber);
    if (firstNumber < stop) cuts.push(...words.filter(([first]) => first < firstNumber));
    if (!end && name.endsWith(WEIGHT)) cuts.push([name.length - WEIGHT.length, name.length]);
    cuts.push(...words);
    return cuts;
  };
  const findLongestText = (name, keeps) => {
    let [best, from] = [[0, 0], 0];
    for (let at = 0; at <= name.length; at += 1) {
      if (at < name.length && keeps[at] && !/[0-9]/.test(name[at])) continue;
      if (at - from > best[1] - best[0]) best = [from, at];
      from = at + 1;
    }
    return best[1] - best[0] > 2 ? best : null;
  };

  // Pieces [text, isCut] of a name; a list shows … in place of one that is cut.
  const cut = (name, common, width) => {
    if (name.length <= width) return [[name, false]];
    const keeps = Array(name.length).fill(1);
    for (const [start, end] of listCuts(name, common)) {
      if (measure(keeps) <= width) break;
      keeps.fill(0, start, end);
    }
    for (;;) {
      const excess = measure(keeps) - width;
      const text = excess > 0 ? findLongestText(name, keeps) : null;
      if (!text) break;
      keeps.fill(0, text[0], Math.min(text[1] - 1, text[0] + excess + 1));
    }
    if (measure(keeps) > width) keeps.fill(0, 0, name.length - Math.max(1, width - 1)).fill(1, name.length - Math.max(1, width - 1));
    const pieces = [];
    for (let at = 0; at < name.length; at += 1) {
      if (at && keeps[at] === keeps[at - 1]) pieces[pieces.length - 1][0] += name[at];
      else pieces.push([name[at], !keeps[at]]);
    }
    return pieces;
  };
  return { findCommonEnds, cut };
})();
