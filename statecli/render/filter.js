"use strict";
// The filter of the list of tensors: words that must all be true of a tensor, as statecli/browse/filter.py reads them.
// The fields and the answers are data of the page (statecli/core/filter_language.py).
const Filters = (() => {
  const FIELD = /^([A-Za-z_]+)(<=|>=|<|>|=|:(?:<=|>=|<|>|=)?)(.*)$/s;
  const NUMBER = /^([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)([a-z]*)$/i;
  const TOKEN = /\{([^{}]*)\}|([*?])|\[(!?)(\]?[^\]]*)\]|([^])/gu;
  const RANGE = /^(\d{1,6})\.\.(\d{1,6})$/;
  const MAX_VALUES = 12; // of a field in an answer
  const COMPARISONS = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b, "=": (a, b) => a === b };

  // A glob with braces. A number in braces is a whole number: {3} is not in 30.
  const escapeText = (text) => text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
  const translateItem = (item) => {
    const range = RANGE.exec(item);
    if (!range) return /^[0-9]+$/.test(item) ? `(?<![0-9])${item}(?![0-9])` : translate(item);
    return `(?<![0-9])(?:${listBlocks(Number(range[1]), Number(range[2])).join("|") || "(?!)"})(?![0-9])`;
  };
  // Expressions for the numbers from first to last, ten, a hundred and so on at once: 8, 9, 1[0-9].
  const listBlocks = (first, last) => {
    const blocks = first === 0 ? ["0"] : [];
    for (let start = Math.max(first, 1), size = 1; start <= last; start += size) {
      size = 1;
      let digits = "";
      for (; start % (10 * size) === 0 && start + 10 * size <= last + 1; size *= 10) digits += "[0-9]";
      blocks.push(start / size + digits);
    }
    return blocks;
  };
  const translate = (pattern) => pattern.replace(TOKEN, (token, items, wildcard, negation, set) => {
    if (items !== undefined) return `(?:${items.split(",").map(translateItem).join("|")})`;
    if (wildcard !== undefined) return wildcard === "*" ? ".*" : ".";
    if (set) return `[${negation ? "^" : ""}${set.replace(/[\\[\]^]/g, "\\$&")}]`;
    return escapeText(token);
  });
  const hasBraces = (pattern) => /\{[^]*\}/.test(pattern);
  const isGlob = (pattern) => /[*?[]/.test(pattern);
  const compile = (pattern, isWhole, flags = "") => {
    try {
      return new RegExp(isWhole ? `^(?:${translate(pattern)})$` : translate(pattern), `su${flags}`);
    } catch {
      return /(?!)/; // such as a range of characters from z to a
    }
  };
  const matchGlob = (pattern, flags = "") => {
    const tests = [compile(pattern, true, flags)];
    if (pattern.includes("[")) tests.push(compile(pattern.replaceAll("[", "[[]"), true, flags)); // brackets of names
    return (value) => tests.some((test) => test.test(value));
  };

  // Fields of a page: its columns, and numbers of which null is not known.
  const create = (data) => {
    const { language } = data;
    const answer = (key, values) => language.answers[key].replace(/\{\{|\}\}|\{(\w+)\}/g, (token, name) => (name ? values[name] : token[0]));
    const spectrum = (pick) => data.spectra?.map((own) => (own && !own.reason ? pick(own) ?? null : null)) || [];
    const numbers = { size: data.row_bytes, elements: data.row_elements, ...data.stats, rank: spectrum((s) => s.rank), stable_rank: spectrum((s) => s.stable_rank), sigma: spectrum((s) => s.values[0]) };
    const columns = { dtype: data.dtypes, kind: data.kinds, shape: data.shapes, section: data.sections, device: data.devices, remark: data.remarks };
    const hasSections = data.sections.values.length > 1;
    const sectionOf = (row) => data.sections.values[data.sections.indices[row]];
    const wholeNames = data.names.map((name, row) => (hasSections && sectionOf(row) !== "(top level)" ? `${sectionOf(row)}.${name}` : name));
    const aliases = new Map((data.aliases || []).map(([row, names]) => [row, names])); // tied names without a row
    const lowerNames = wholeNames.map((name, row) => [name, ...(aliases.get(row) || [])].join("\n").toLowerCase());
    const plain = (value) => value.replace(/\?$/, ""); // an assumed kind

    // Checks each value of a column once, not each tensor.
    const matchColumn = (column, match) => {
      const matches = column.values.map(match);
      return (row) => matches[column.indices[row]];
    };
    const matchDtype = (word) => {
      const short = word.replace(/^torch\./, "").toLowerCase();
      const match = matchGlob(language.dtype_spellings[short] || short, "");
      return matchColumn(data.dtypes, (value) => match(value.toLowerCase()));
    };
    const splitSizes = (word) => {
      const bare = /^(\[.*\]|\(.*\))$/s.test(word) ? word.slice(1, -1).replace(/,$/, "") : word;
      return bare || !word ? bare.split(/[,x]/) : [];
    };
    const isShape = (word) => (/^(\[.*\]|\(.*\))$/s.test(word) || /[x,]/.test(word)) && splitSizes(word).every((size) => /^(\*|\d{1,19})$/.test(size));
    const matchShape = (word) => {
      const sizes = splitSizes(word);
      return matchColumn(data.shapes, (value) => {
        if (value === "?") return false;
        const own = value === "[]" ? [] : value.slice(1, -1).split(",");
        return own.length === sizes.length && sizes.every((size, axis) => size === "*" || size === own[axis]);
      });
    };
    const matchKind = (match) => matchColumn(data.kinds, (value) => match(plain(value)));
    const matchName = (word) => {
      const lower = word.toLowerCase();
      if (!isGlob(word)) {
        const search = hasBraces(word) ? compile(lower, false) : null;
        return (row) => lowerNames[row].includes(lower) || Boolean(search && search.test(lowerNames[row]));
      }
      const match = matchGlob(word);
      return (row) => match(data.names[row]) || match(wholeNames[row]) || lowerNames[row].includes(lower) || (aliases.get(row) || []).some(match);
    };
    const matchAny = (word) => {
      const lower = word.toLowerCase();
      const tests = [matchName(word), matchDtype(word), matchKind((kind) => kind === lower)];
      if (isShape(word)) tests.push(matchShape(word));
      if (lower === "problem") tests.push(matchColumn(data.problems, Boolean));
      else if (data.problem_words.some((own) => own.toLowerCase() === lower)) tests.push(matchColumn(data.problems, (value) => value.toLowerCase().split(", ").includes(lower)));
      return (row) => tests.some((test) => test(row));
    };
    const matchField = (field, value) => {
      if (field === "name") return matchName(value);
      if (field === "dtype") return matchDtype(value);
      if (field === "shape") return matchShape(value);
      if (field === "kind") return matchKind((kind) => kind.startsWith(value.toLowerCase()));
      const pattern = compile(value, isGlob(value), "i");
      return matchColumn(columns[field], (own) => pattern.test(own));
    };
    const matchNumber = (word, field, sign, value) => {
      const number = NUMBER.exec(value);
      const bare = sign[0] === ":" ? sign.slice(1) : sign;
      if (!number || !(number[2].toLowerCase() in language.units)) throw new Error(answer("number", { word, sign: bare || ">", field, example: field === "size" ? "1MB" : field === "nan" || field === "inf" ? "0" : "1000" }));
      const limit = Number(number[1]) * language.units[number[2].toLowerCase()];
      const compare = COMPARISONS[bare || (language.at_least.includes(field) ? ">=" : "=")];
      const own = numbers[field] || [];
      return (row) => own[row] !== null && own[row] !== undefined && compare(own[row], limit);
    };
    const findField = (entered) => {
      const field = entered.toLowerCase();
      return Object.hasOwn(language.field_spellings, field) ? language.field_spellings[field] : field;
    };

    const parseWord = (word) => {
      if (/^[-!]./s.test(word)) {
        const test = parseWord(word.slice(1));
        return (row) => !test(row);
      }
      const parts = FIELD.exec(word);
      if (!parts) return matchAny(word);
      const [field, sign, value] = [findField(parts[1]), parts[2], parts[3]];
      if (language.numbers.includes(field)) return matchNumber(word, field, sign, value);
      const isText = language.texts.includes(field);
      if (isText && (sign === ":" || sign === "=")) {
        if (!value) throw new Error(answer("value", { word, sign }));
        return matchField(field, value);
      }
      const lower = word.toLowerCase();
      if (lowerNames.some((name) => name.includes(lower))) return matchAny(word);
      throw new Error(answer(isText ? "text" : "field", { word, field, fields: [...language.texts, ...language.numbers].join(", ") }));
    };

    const explainWord = (word) => {
      const bare = word.replace(/^[-!]+/, "");
      const parts = FIELD.exec(bare);
      const field = parts ? findField(parts[1]) : "";
      if (language.spectra.includes(field) && !data.spectra?.length) return `${word}: the report has no singular values; run statecli report --spectra`;
      const byValues = language.statistics.includes(field) || ["problem", "nan", "inf", "outlier"].includes(bare.toLowerCase());
      if (byValues && !("min" in data.stats)) return `${word}: the report has no statistics; run statecli report --stats`;
      if (language.choices.includes(field)) {
        const values = [...new Set(columns[field].values.map(plain))].sort();
        const rest = values.length - MAX_VALUES;
        return answer("choice", { word, field, values: values.slice(0, MAX_VALUES).join(", ") + (rest > 0 ? ` and ${rest.toLocaleString("en")} more` : "") });
      }
      return answer(/[|,]|\[\d+-\d+\]/.test(bare) ? "alternatives" : "word", { word });
    };

    const every = data.names.map((_, row) => row);
    // Returns the rows that match all words. A wrong word is ignored, and is the problem; so is why no row matches.
    const find = (entered) => {
      const problems = [];
      const tests = [];
      for (const word of entered.split(/\s+/).filter(Boolean)) {
        try {
          tests.push([word, parseWord(word)]);
        } catch (error) {
          problems.push(error.message);
        }
      }
      const rows = every.filter((row) => tests.every(([, test]) => test(row)));
      if (!rows.length && !problems.length && every.length) {
        const failing = tests.find(([, test]) => !every.some(test));
        problems.push(failing ? explainWord(failing[0]) : language.answers.all);
      }
      return { rows, problem: problems[0] || "" };
    };
    return { find, wholeNames };
  };
  return { create, compile, hasBraces };
})();
