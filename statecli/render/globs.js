"use strict";
// Tensors as few globs for `-i`, which select exactly these tensors: the rule of statecli/browse/globs.py. Names are
// escaped here, so that a glob has `*` in place of a character that a terminal acts on.
const Globs = (() => {
  const NUMBER = /(?<=^|[.[])(?:0|[1-9][0-9]{0,8})(?=[.\]:]|$)/g;
  const SPECIAL = /[*?[{]/g;
  const ESCAPED = /\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|.)/g;
  const MAX_TESTS = 2e7; // of a name by a glob: about a second

  const escapeGlob = (name) => name.replace(SPECIAL, "[$&]").replace(ESCAPED, "*");

  // The globs for a name: all names, its modules, and the name with any number in place of its own.
  const listWiderGlobs = (name) => {
    const globs = ["*"];
    const escaped = escapeGlob(name);
    const wider = escaped.replace(NUMBER, "*");
    if (wider !== escaped) globs.push(wider);
    for (let end = name.indexOf("."); end !== -1; end = name.indexOf(".", end + 1)) globs.push(`${escapeGlob(name.slice(0, end))}.*`);
    return globs;
  };

  // The modules and repeated layers that are marked whole, largest first, then single names.
  const cover = (names, marked) => {
    const total = new Map();
    for (const name of names) for (const glob of listWiderGlobs(name)) total.set(glob, (total.get(glob) || 0) + 1);
    const within = new Map();
    for (const row of marked) {
      for (const glob of listWiderGlobs(names[row])) {
        if (within.has(glob)) within.get(glob).push(row);
        else within.set(glob, [row]);
      }
    }
    const whole = [...within].filter(([glob, rows]) => rows.length === total.get(glob));
    whole.sort(([a, rowsOfA], [b, rowsOfB]) => rowsOfB.length - rowsOfA.length || a.length - b.length || rowsOfA[0] - rowsOfB[0]);
    const globs = [];
    const missing = new Set(marked);
    for (const [glob, rows] of whole) {
      if (rows.filter((row) => missing.has(row)).length < 2) continue;
      globs.push([rows[0], glob]);
      for (const row of rows) missing.delete(row);
    }
    for (const row of missing) globs.push([row, escapeGlob(names[row])]);
    return globs.sort(([a], [b]) => a - b);
  };

  // Ascending numbers as texts of their runs: 0..3, 5.
  const listRuns = (numbers) => {
    const runs = [];
    for (const number of numbers) {
      const last = runs[runs.length - 1];
      if (last && last[1] === number - 1) last[1] = number;
      else runs.push([number, number]);
    }
    return runs.map(([a, b]) => (b > a + 1 ? `${a}..${b}` : b > a ? `${a},${b}` : `${a}`));
  };
  // Globs that differ in one number are one glob with braces: layers.{3..5}.*
  const replaceNumber = (glob, axis, text) => {
    let at = -1;
    return glob.replace(NUMBER, (number) => ((at += 1) === axis ? text : number));
  };
  const joinNumbers = (globs) => {
    const numbersOf = (glob) => glob.match(NUMBER) || [];
    const most = globs.reduce((largest, [, glob]) => Math.max(largest, numbersOf(glob).length), 0);
    let joined = globs;
    for (let axis = most - 1; axis >= 0; axis -= 1) {
      const groups = new Map();
      for (const [row, glob] of joined) {
        const numbers = numbersOf(glob);
        const key = axis < numbers.length ? `#${replaceNumber(glob, axis, "#")}` : ` ${glob}`;
        groups.set(key, [...(groups.get(key) || []), [row, Number(numbers[axis]), glob]]);
      }
      joined = [...groups.values()].map((group) => {
        const [row, , glob] = group.reduce((a, b) => (b[0] < a[0] ? b : a));
        return [row, group.length === 1 ? glob : replaceNumber(glob, axis, `{${listRuns(group.map(([, number]) => number).sort((a, b) => a - b)).join()}}`)];
      }).sort(([a], [b]) => a - b);
    }
    return joined.map(([, glob]) => glob);
  };

  // As Python's fnmatch; a bracket also matches itself, because names contain brackets.
  const translate = (glob, token) => new RegExp(`^${glob.replace(token, (part) => (part === "*" ? ".*" : part === "?" ? "." : part.replace(/^\[(.)\]$/, "$1").replace(/[\\^$.*+?()[\]{}|/-]/g, "\\$&")))}$`, "su");
  const listTests = (glob) => [translate(glob, /\[[*?[{]\]|[^]/gu), ...(glob.includes("[") ? [translate(glob, /[^]/gu)] : [])];

  const select = (names, others, globs) => {
    const exact = new Set(globs.filter((glob) => !/[*?[]/.test(glob)));
    const tests = globs.filter((glob) => /[*?[]/.test(glob)).flatMap(listTests);
    for (const glob of globs.filter(Filters.hasBraces)) {
      tests.push(Filters.compile(glob, true));
      if (glob.includes("[")) tests.push(Filters.compile(glob.replaceAll("[", "[[]"), true));
    }
    if (tests.length * names.length > MAX_TESTS) return null;
    const matches = (name) => exact.has(name) || tests.some((test) => test.test(name));
    return names.flatMap((name, row) => (matches(name) || (others.get(row) || []).some(matches) ? [row] : []));
  };

  // Returns the globs for the rows `marked`, in ascending order; null if no globs select exactly these rows.
  // `others` are further names by which a glob selects a row.
  const write = (names, others, marked) => {
    if (marked.length === names.length) return ["*"];
    const covering = cover(names, marked);
    for (const globs of [joinNumbers(covering), covering.map(([, glob]) => glob), marked.map((row) => escapeGlob(names[row]))]) {
      const selected = select(names, others, globs);
      if (selected && selected.length === marked.length && selected.every((row, at) => row === marked[at])) return globs;
    }
    return null;
  };

  const quote = (glob) => (/^[\w@%+=:,./-]+$/.test(glob) ? glob : `'${glob.replaceAll("'", `'"'"'`)}'`);
  const format = (globs) => globs.map((glob) => `-i ${quote(glob)}`).join(" ");
  return { write, format, listRuns };
})();
